"""What is planned is what is taken: bytes on the GPU, and which stored plan a budget gets."""

from dataclasses import replace
from pathlib import Path

import pytest
from gpu_running import ALL_THERE, CONTEXT, LAYERS, NEURONS, SPLIT, model, plan_of, running
from synthetic import random_artifact, small_decoder, stored_plan

from pi_runtime import devices, load
from pi_runtime.artifact.footprint import gpu_scratch_bytes, kv_bytes, scratch_bytes
from pi_runtime.artifact.reader import Artifact
from pi_runtime.cuda import buffers, opening
from pi_runtime.cuda.crossover import crossover_tokens
from pi_runtime.cuda.devices import Device, Interpreted, out_of_memory
from pi_runtime.cuda.opening import fitting_plan
from pi_runtime.cuda.placed import needed_bytes, weight_bytes
from pi_runtime.cuda.tiling import Tiling
from pi_runtime.errors import DoesNotFitError


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("fmt", ["f16", "q4"])
def test_weights_and_cache_are_what_was_counted(family: str, fmt: str, tmp_path: Path, there: Device) -> None:
    path = model(tmp_path / "a.pi", family, fmt)
    with Artifact.open(path) as artifact:
        manifest = artifact.manifest
        every = sum(e.nbytes for name, e in manifest.arrays.items() if not name.endswith(("order", "counts")))
        assert weight_bytes(manifest, ALL_THERE) == every
        nothing = plan_of(["cpu"] * LAYERS, (0,) * LAYERS, "cpu-cpu")
        assert weight_bytes(manifest, nothing) == 0
    seen = []
    with running(path, SPLIT, there, progress=lambda done, total: seen.append((done, total))) as executor:
        assert executor.side.weights.nbytes == weight_bytes(manifest, SPLIT)
        assert seen[-1] == (weight_bytes(manifest, SPLIT),) * 2
        assert sum(t.nbytes for t in executor.side.cache.values()) == LAYERS * kv_bytes(manifest.decoder, CONTEXT)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_buffers_are_within_what_was_counted(family: str) -> None:
    """On the tiles of a GPU; decoding alone is within what placing counts."""

    class There(Interpreted):
        tiling = Tiling()

    decoder = small_decoder(family, d_model=256, d_ff=700, n_heads=8, head_dim=32)
    b = buffers.buffers(decoder, 40, 100, There())
    counted = gpu_scratch_bytes(decoder, 40, 100, 0)
    assert counted * 0.5 <= buffers.nbytes(b) <= counted
    assert buffers.nbytes(b) <= scratch_bytes(decoder, 40, 1, 100)


def test_the_best_plan_that_fits(tmp_path: Path) -> None:
    sides = ["gpu"] * 2
    plans = tuple(replace(plan_of(sides, (c, c)), vram_bytes=1 << 40, used_bytes=1) for c in (0, 64, NEURONS))
    path = random_artifact(tmp_path / "a.pi", small_decoder(d_ff=NEURONS), plans=plans)
    with Artifact.open(path) as artifact:
        needs = [needed_bytes(artifact.manifest, plan, CONTEXT, 1) for plan in plans]
        for budget, n in ((needs[0], 0), (needs[1] - 1, 0), (needs[1], 1), (needs[2], 2), (1 << 40, 2)):
            assert fitting_plan(artifact, CONTEXT, budget, 1 << 40) == plans[n]
        with pytest.raises(DoesNotFitError, match=f"--vram-budget {needs[0]}") as caught:
            fitting_plan(artifact, CONTEXT, needs[0] - 1, 1 << 40)
        assert caught.value.exit_code == 4
        with pytest.raises(DoesNotFitError, match="the card has 5 free"):
            fitting_plan(artifact, CONTEXT, 5, 5)
    with (
        Artifact.open(model(tmp_path / "b.pi")) as artifact,
        pytest.raises(DoesNotFitError, match="holds no placement"),
    ):
        fitting_plan(artifact, CONTEXT, 1 << 40, 1 << 40)


def test_prompts_are_read_in_blocks_that_fit(tmp_path: Path, there: Device) -> None:
    path = model(tmp_path / "a.pi")
    with Artifact.open(path) as artifact:
        least = needed_bytes(artifact.manifest, SPLIT, CONTEXT, 16)
    for budget, tokens in ((1 << 40, 512), (least, 16), (least - 1, 1)):
        with running(path, SPLIT, there, budget=budget) as executor:
            assert executor.block_tokens == tokens


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one GPU, of 1 MiB."""
    monkeypatch.setattr(devices, "_gpus", lambda: 1)
    monkeypatch.setattr(devices, "gpu_driver", lambda: True)
    monkeypatch.setattr(opening, "_stay_awake", lambda: None)
    monkeypatch.setattr(opening, "Cuda", lambda _index: Interpreted(1 << 20))


def test_a_model_on_a_gpu(tmp_path: Path, one_gpu: None) -> None:
    plan = stored_plan((64, 64), 1 << 19, 1 << 18, attention=("gpu", "gpu"), embedding="gpu", head="gpu")
    path = random_artifact(tmp_path / "a.pi", small_decoder(d_ff=NEURONS), plans=(plan,))
    texts = []
    for device in ("cpu", "cuda:0", "auto"):
        with load(path, device=device, context=CONTEXT) as found:
            texts.append("".join(found.generate([65, 66, 67], max_tokens=4)))
            assert (found.plan is None) == (device == "cpu")
    assert texts[0] == texts[1] == texts[2] != ""
    with pytest.raises(DoesNotFitError, match="no stored placement fits"):
        load(path, device="cuda", vram_budget=1000)


def test_automatic_falls_back_and_says_so(tmp_path: Path, one_gpu: None) -> None:
    with load(random_artifact(tmp_path / "a.pi", small_decoder())) as found:
        assert found.device == "cpu"
        assert found.notice is not None
        assert "holds no placement" in found.notice


def test_out_of_memory_says_what_to_lower() -> None:
    error = out_of_memory("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
    assert error.exit_code == 4
    assert "--vram-budget" in str(error)
    assert "--ctx-size" in str(error)


def test_crossover() -> None:
    """16-bit weights over 25 GB/s beside 10¹² operations a second: 40 tokens."""
    assert crossover_tokens(2, 25e9, 1e12) == 40
    assert crossover_tokens(0.5, 25e9, 1e9) == 1
