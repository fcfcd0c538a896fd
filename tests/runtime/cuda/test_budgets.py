"""Bytes on the GPU are those that were planned, and a budget gets the best stored plan that fits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.gpu_running import ALL_ON_GPU, CONTEXT, EXPERTS, LAYERS, NEURONS, SPLIT, model, of_size, plan_of, running
from support.placeable import MUCH, machine, workload
from support.synthetic import random_artifact, small_decoder, stored_plan

from pi_compile.cost_model.processors import GPU
from pi_compile.placement import formulation
from pi_compile.placement.formulation import Problem
from pi_compile.placement.stage import place
from pi_compile.results.activation_profile import LayerWork
from pi_runtime import load
from pi_runtime.artifact.footprint import PartBytes, gpu_workspace_bytes, kv_bytes, streamed_bytes
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import array_specs
from pi_runtime.cuda import opening
from pi_runtime.cuda.executor import prompt_room
from pi_runtime.cuda.kernels.tiling import Tiling
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.cuda.memory.weight_streaming import streaming_bytes
from pi_runtime.cuda.memory.workspace import Workspace
from pi_runtime.cuda.opening import fitting_plan
from pi_runtime.cuda.plan_layout import needed_bytes, weight_bytes
from pi_runtime.cuda.prefill.crossover import crossover_tokens
from pi_runtime.errors import DoesNotFitError
from pi_runtime.execution import devices


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("fmt", ["f16", "q4"])
def test_weights_and_cache_are_what_was_counted(family: str, fmt: str, tmp_path: Path, gpu: Device) -> None:
    path = model(tmp_path / "a.pi", family, fmt)
    with Artifact.open(path) as artifact:
        manifest = artifact.manifest
        every = sum(e.nbytes for name, e in manifest.arrays.items() if not name.endswith(("order", "counts")))
        assert weight_bytes(manifest, ALL_ON_GPU) == every
        nothing = plan_of(["cpu"] * LAYERS, (0,) * LAYERS, "cpu-cpu")
        assert weight_bytes(manifest, nothing) == 0
    seen = []
    with running(path, SPLIT, gpu, progress=lambda done, total: seen.append((done, total))) as executor:
        assert executor.device_ops.weights.nbytes == weight_bytes(manifest, SPLIT)
        assert seen[-1] == (weight_bytes(manifest, SPLIT),) * 2
        assert sum(t.nbytes for t in executor.device_ops.cache.values()) == LAYERS * kv_bytes(
            manifest.decoder, fmt, CONTEXT
        )


@pytest.mark.parametrize("family", ["llama", "opt", "mixtral"])
def test_the_workspace_is_within_what_was_counted(family: str, gpu: Device) -> None:
    """The workspace with the tiles of a GPU."""
    experts = EXPERTS if family == "mixtral" else {}
    shape = {"d_model": 256, "d_ff": 700, "n_heads": 8, "head_dim": 32, **experts}
    decoder = small_decoder("llama" if experts else family, **shape)
    workspace = Workspace.allocate(decoder, 40, 100, of_size(gpu, 0, tiling=Tiling()))
    counted = gpu_workspace_bytes(decoder, 40, 100, 0)
    assert counted * 0.5 <= workspace.nbytes <= counted


@pytest.mark.parametrize("fmt", ["f16", "q4"])
@pytest.mark.parametrize("family", ["llama", "opt", "mixtral"])
def test_streamed_weights_are_within_what_was_counted(family: str, fmt: str, tmp_path: Path) -> None:
    """A chunk is of one expert where there are experts."""
    experts = EXPERTS if family == "mixtral" else {}
    with Artifact.open(model(tmp_path / "a.pi", "llama" if experts else family, fmt, **experts)) as artifact:
        manifest, d = artifact.manifest, artifact.manifest.decoder
    specs = array_specs(d, manifest.formats, [None] * d.n_layers, profiled=False)
    counted = streamed_bytes(d, PartBytes.of(specs, d.vocab_size, d.neurons).neuron)
    assert counted * 0.9 <= streaming_bytes(manifest) <= counted


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


def test_prompts_are_read_in_blocks_that_fit(tmp_path: Path, gpu: Device) -> None:
    path = model(tmp_path / "a.pi")
    with Artifact.open(path) as artifact:
        least = needed_bytes(artifact.manifest, SPLIT, CONTEXT, 16)
    for budget, tokens in ((1 << 40, 512), (least, 16), (least - 1, 1)):
        with running(path, SPLIT, gpu, budget=budget) as executor:
            assert executor.block_tokens == tokens


@pytest.mark.parametrize("share", [1, 64])
def test_a_placement_leaves_room_for_prompts(share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A placement counts enough for a run's weights, its cache and the buffers of prompts' blocks."""
    monkeypatch.setattr(formulation, "PROMPT_SHARE", share)
    layers = (LayerWork(rung="predicted", rank=7), LayerWork(rung="gate"))
    work = workload(np.arange(4000).reshape(2, 2000), layers, context=CONTEXT, d_model=128)
    sizes = formulation.Sizes.of(work)
    path = random_artifact(tmp_path / "a.pi", work.decoder, format="f16", ranks=[7, None])
    one = gpu_workspace_bytes(work.decoder, 7, CONTEXT, 1)
    for part in (3, 2, 1):
        room = (sizes.all_on_gpu - sizes.workspace[GPU]) // part
        plan = place(Problem.of(work, machine()), sizes.workspace[GPU] + room, MUCH).plan
        with Artifact.open(path) as artifact:
            manifest = artifact.manifest
        assert any(plan.cuts)
        assert needed_bytes(manifest, plan, CONTEXT, 1) - one == plan.used_bytes - sizes.workspace[GPU]
        tokens, streamed = prompt_room(manifest, plan, CONTEXT, plan.used_bytes)
        assert tokens > 1 or share == 64
        assert streamed or share == 64 or part == 1


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch, gpu: Device) -> None:
    """A machine with one GPU, of 1 MiB."""
    monkeypatch.setattr(devices, "_gpus", lambda: 1)
    monkeypatch.setattr(devices, "gpu_driver", lambda: True)
    monkeypatch.setattr(opening, "Cuda", lambda _index: of_size(gpu, 1 << 20))


@pytest.mark.parametrize("shape", [{}, EXPERTS], ids=["plain", "experts"])
def test_a_model_on_a_gpu(shape: dict[str, int], tmp_path: Path, one_gpu: None) -> None:
    cuts = (64, 0, NEURONS)[: shape.get("n_experts", 1)]
    plan = stored_plan(cuts * 2, 1 << 19, 1 << 18, attention=("gpu", "gpu"), embedding="gpu", head="gpu")
    path = random_artifact(tmp_path / "a.pi", small_decoder(d_ff=NEURONS, **shape), plans=(plan,))
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


def test_crossover() -> None:
    """16-bit weights over 25 GB/s beside 10¹² operations a second: 40 tokens."""
    assert crossover_tokens(2, 25e9, 1e12) == 40
    assert crossover_tokens(0.5, 25e9, 1e9) == 1
