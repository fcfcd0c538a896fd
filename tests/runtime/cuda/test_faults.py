"""A GPU's own errors in words of a user, and memory that comes back from a model that could not be opened."""

import weakref
from pathlib import Path
from typing import Any

import pytest
from support.gpu_running import CONTEXT, NEURONS, of_size
from support.synthetic import random_artifact, small_decoder, stored_plan

from pi_runtime.artifact.reader import Artifact
from pi_runtime.cuda import executor, opening
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.cuda.memory.driver_errors import in_words_of_a_user, no_device
from pi_runtime.errors import DoesNotFitError, PiError


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2 GiB.\nmore",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_out_of_memory_says_what_to_lower(text: str) -> None:
    with pytest.raises(DoesNotFitError, match=r"--vram-budget.*--ctx-size") as caught, in_words_of_a_user():
        raise RuntimeError(text)
    assert "more" not in str(caught.value)


@pytest.mark.parametrize("text", ["CUDA error: unspecified launch failure", "Triton Error [CUDA]: invalid argument"])
def test_a_fault_says_which(text: str) -> None:
    with pytest.raises(PiError, match="the GPU failed") as caught, in_words_of_a_user():
        raise RuntimeError(text)
    assert caught.value.exit_code == 1
    assert text in str(caught.value)


def test_what_is_not_the_gpus_passes() -> None:
    with pytest.raises(RuntimeError, match=r"^ours$"), in_words_of_a_user():
        raise RuntimeError("ours")


def test_a_gpu_that_cannot_be_used_says_what_is_missing() -> None:
    assert "gcc" in str(no_device(0, RuntimeError("Failed to find C compiler. Please specify via CC …")))
    assert "gcc" in str(no_device(0, FileNotFoundError("gcc")))
    assert "nvidia-smi" in str(no_device(0, RuntimeError("The NVIDIA driver on your system is too old")))


def test_memory_comes_back_from_a_model_that_could_not_be_opened(
    tmp_path: Path, there: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    seen: list[bool] = []

    def limit(_self: Device, nbytes: int | None) -> None:
        if nbytes is None:
            seen.append(held[0]() is None)

    def fail(_plan: object, side: Any, *_rest: object) -> None:
        held.append(weakref.ref(side.weights))
        raise RuntimeError("CUDA out of memory.")

    monkeypatch.setattr(opening, "Cuda", lambda _index: of_size(there, 1 << 30, limit=limit))
    monkeypatch.setattr(opening, "_stay_awake", lambda: None)
    monkeypatch.setattr(executor, "program_of", fail)
    plan = stored_plan((64, 64), 1 << 19, 1 << 18, attention=("gpu", "gpu"), embedding="gpu", head="gpu")
    path = random_artifact(tmp_path / "a.pi", small_decoder(d_ff=NEURONS), plans=(plan,))
    with Artifact.open(path) as artifact, pytest.raises(DoesNotFitError, match="ran out"):
        opening.open_on_gpu(artifact, "auto", CONTEXT, 1, index=0, vram_budget=None)
    assert seen == [True]
