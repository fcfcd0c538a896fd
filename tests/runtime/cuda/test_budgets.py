"""Bytes on the GPU are those that were planned, and a budget gets the best stored plan that fits."""

from pathlib import Path

import numpy as np
import pytest
from support.gpu_running import (
    ALL_ON_GPU,
    CONTEXT,
    EXPERTS,
    LAYERS,
    NEURONS,
    ROOM,
    SPLIT,
    allocated_bytes,
    model,
    of_size,
    plan_of,
    running,
    weight_bytes,
)
from support.placeable import MUCH, machine, workload
from support.synthetic import random_artifact, small_decoder, stored_plan

from pi_compile.cost_model.processors import GPU
from pi_compile.placement import formulation
from pi_compile.placement.formulation import Problem
from pi_compile.placement.stage import place
from pi_compile.results.activation_profile import LayerWork
from pi_runtime import load
from pi_runtime.artifact.buffers import kv_bytes, table_bytes
from pi_runtime.artifact.gpu_buffers import (
    BATCH_TOKENS,
    PROMPT_TOKENS,
    gpu_products,
    gpu_prompt_block,
    gpu_workspace,
    gpu_workspace_bytes,
    weight_padding,
)
from pi_runtime.artifact.reader import Artifact
from pi_runtime.cuda import executor as cuda_executor
from pi_runtime.cuda.executor import CudaExecutor
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.cuda.prefill.prefill import crossover_tokens
from pi_runtime.errors import DoesNotFitError
from pi_runtime.execution import devices
from pi_runtime.execution.plan_choice import allocation, choose_plan, needed_bytes


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


@pytest.mark.parametrize("fmt", ["f16", "q4"])
@pytest.mark.parametrize("family", ["llama", "opt", "mixtral"])
def test_a_run_allocates_what_was_planned(family: str, fmt: str, tmp_path: Path, gpu: Device) -> None:
    """Everything but what dense products take while they run, which torch hands out; from the smallest budget on."""
    experts = EXPERTS if family == "mixtral" else {}
    plan = SPLIT if not experts else plan_of(["gpu", "cpu", "gpu"], (NEURONS, 0, 64) * LAYERS, "cpu-gpu")
    path = model(tmp_path / "a.pi", "llama" if experts else family, fmt, plans=(plan,), **experts)
    with Artifact.open(path) as artifact:
        rng = np.random.default_rng(0)
        for context, more in ((CONTEXT, 1), *rng.integers(2, 60, (2, 2)).tolist(), (CONTEXT, ROOM)):
            budget = more * needed_bytes(artifact.manifest, plan, context)
            taken = choose_plan(artifact, context, budget)
            executor = CudaExecutor(Artifact.open(path), "auto", 1, taken, gpu, stream_from=1)
            assert allocated_bytes(executor) == taken.total - taken.products
            assert taken.total <= budget
            assert executor.block_tokens == taken.block_tokens
            executor.close()
    assert taken.streamed
    assert taken.block_tokens == PROMPT_TOKENS[0]


def test_tokens_are_decoded_together_as_memory_allows(tmp_path: Path) -> None:
    """What is left behind the largest block of a prompt goes to them."""
    with Artifact.open(model(tmp_path / "a.pi")) as artifact:
        m = artifact.manifest
    tables = [gpu_workspace(m.decoder, 9, CONTEXT, batch) for batch in (1, *BATCH_TOKENS)]
    one, *every = map(table_bytes, tables)
    least = allocation(m, SPLIT, CONTEXT, 0).total
    for batch, nbytes in zip(BATCH_TOKENS, every, strict=True):
        assert allocation(m, SPLIT, CONTEXT, least + nbytes - one).batch_tokens == batch


def test_prompts_are_read_in_blocks_that_fit(tmp_path: Path) -> None:
    with Artifact.open(model(tmp_path / "a.pi")) as artifact:
        m = artifact.manifest
    one = allocation(m, SPLIT, CONTEXT, 0)
    least = one.total - one.block - one.products
    least += table_bytes(gpu_prompt_block(m.decoder, 16), gpu_products(m.decoder, 16))
    for budget, tokens in ((1 << 40, 512), (least, 16), (least - 1, 1), (0, 1)):
        assert allocation(m, SPLIT, CONTEXT, budget).block_tokens == tokens


@pytest.mark.parametrize("share", [1, 64])
def test_a_placement_leaves_room_for_prompts(share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A placement counts enough for a run's weights, its cache and the buffers of prompts' blocks."""
    monkeypatch.setattr(formulation, "PROMPT_SHARE", share)
    layers = (LayerWork(rung="predicted", rank=7), LayerWork(rung="gate"))
    work = workload(np.arange(4000).reshape(2, 2000), layers, context=CONTEXT, d_model=128)
    sizes = formulation.Sizes.of(work)
    path = random_artifact(tmp_path / "a.pi", work.decoder, format="f16", ranks=[7, None])
    one = gpu_workspace_bytes(work.decoder, 7, CONTEXT, 1, 1)
    for part in (3, 2, 1):
        room = (sizes.all_on_gpu - sizes.workspace[GPU]) // part
        plan = place(Problem.of(work, machine()), sizes.workspace[GPU] + room, MUCH).plan
        with Artifact.open(path) as artifact:
            manifest = artifact.manifest
        assert any(plan.cuts)
        padding = weight_padding(manifest.arrays)
        assert needed_bytes(manifest, plan, CONTEXT) - one - padding == plan.used_bytes - sizes.workspace[GPU]
        taken = allocation(manifest, plan, CONTEXT, plan.used_bytes)
        assert taken.total <= plan.used_bytes
        assert taken.block_tokens > 1 or share == 64
        assert taken.streamed or share == 64 or part == 1


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch, gpu: Device) -> None:
    """A machine with one GPU, of 1 MiB."""
    monkeypatch.setattr(devices, "_gpus", lambda: 1)
    monkeypatch.setattr(devices, "gpu_driver", lambda: True)
    monkeypatch.setattr(cuda_executor, "Cuda", lambda _index: of_size(gpu, 1 << 20))


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
