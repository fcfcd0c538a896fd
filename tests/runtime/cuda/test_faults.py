"""A GPU's own errors in a user's words, and memory that is freed when a model could not be opened."""

import weakref
from pathlib import Path
from typing import Any

import pytest
from support.gpu_running import CONTEXT, NEURONS, of_size
from support.synthetic import random_artifact, small_decoder, stored_plan

from pi_runtime.artifact.reader import Artifact
from pi_runtime.cuda import executor
from pi_runtime.cuda.memory.devices import Device, device_error, translated_errors
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
    with pytest.raises(DoesNotFitError, match=r"vram_budget.*context") as caught, translated_errors():
        raise RuntimeError(text)
    assert "more" not in str(caught.value)


@pytest.mark.parametrize("text", ["CUDA error: unspecified launch failure", "Triton Error [CUDA]: invalid argument"])
def test_a_fault_says_which(text: str) -> None:
    with pytest.raises(PiError, match="the GPU failed") as caught, translated_errors():
        raise RuntimeError(text)
    assert caught.value.exit_code == 1
    assert text in str(caught.value)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match=r"^ours$"), translated_errors():
        raise RuntimeError("ours")


def test_a_gpu_that_cannot_be_used_says_what_is_missing() -> None:
    assert "gcc" in str(device_error(0, RuntimeError("Failed to find C compiler. Please specify via CC …")))
    assert "gcc" in str(device_error(0, FileNotFoundError("gcc")))
    assert "nvidia-smi" in str(device_error(0, RuntimeError("The NVIDIA driver on your system is too old")))


def test_memory_comes_back_from_a_model_that_could_not_be_opened(
    tmp_path: Path, gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    seen: list[bool] = []

    def limit(_self: Device, nbytes: int | None) -> None:
        if nbytes is None:
            seen.append(held[0]() is None)

    def fail(_plan: object, device_ops: Any, *_rest: object) -> None:
        held.append(weakref.ref(device_ops.weights))
        raise RuntimeError("CUDA out of memory.")

    monkeypatch.setattr(executor, "Cuda", lambda _index: of_size(gpu, 1 << 30, limit=limit))
    monkeypatch.setattr(executor, "build_schedule", fail)
    plan = stored_plan((64, 64), 1 << 19, 1 << 18, attention=("gpu", "gpu"), embedding="gpu", head="gpu")
    path = random_artifact(tmp_path / "a.pi", small_decoder(d_ff=NEURONS), plans=(plan,))
    with Artifact.open(path) as artifact, pytest.raises(DoesNotFitError, match="ran out"):
        executor.open_on_gpu(artifact, "auto", CONTEXT, 1, index=0, vram_budget=None)
    assert seen == [True]
