"""One byte count: what placing reckons with is what a packed file holds and what a run allocates."""

from pathlib import Path

import numpy as np
import pytest
from support.placeable import machine, workload
from support.synthetic import random_artifact, small_decoder, stored_plan

from pi_compile.cost_model import costs_of
from pi_compile.cost_model.processors import CPU, GPU
from pi_compile.placement import formulation
from pi_compile.placement.formulation import Sizes, all_cpu
from pi_compile.results.activation_profile import LayerWork
from pi_runtime.artifact.gpu_buffers import (
    PROMPT_TOKENS,
    gpu_workspace_bytes,
    prompt_block,
    streamed_bytes,
    weight_padding,
)
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import array_specs
from pi_runtime.execution.host_executor import HostExecutor, in_memory
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import PagePool
from pi_runtime.execution.plan_choice import choose_plan

PART = {"positions": "embedding", "final_norm": "head"}


def in_file(artifact: Artifact) -> dict[str, int]:
    """Bytes of an artifact's arrays by the parts of a placement; neuron order and counts are not read."""
    totals = dict.fromkeys(("embedding", "attention", "predictor", "ffn", "head"), 0)
    for name, entry in artifact.manifest.arrays.items():
        if name.endswith(("ffn/order", "ffn/counts")):
            continue
        local = name.split("/", 2)[2] if name.startswith("layers/") else name
        part = local.split("/")[0].removesuffix("_scales")
        if local.startswith(("ffn/norm", "ffn/down_bias")):
            part = "attention"
        totals[PART.get(part, part)] += entry.nbytes
    return totals


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_parts_are_the_bytes_of_the_file(family: str, tmp_path: Path) -> None:
    ranks = (3, None)
    decoder = small_decoder(family, d_model=40, n_heads=5, n_kv_heads=1)
    path = random_artifact(tmp_path / "a.pi", decoder, format="f16", ranks=list(ranks), profiled=True)
    layers = tuple(LayerWork(rung="predicted" if rank else "gate", rank=rank) for rank in ranks)
    changes = {"family": family, "d_model": 40, "n_heads": 5, "n_kv_heads": 1}
    work = workload(np.ones((2, decoder.d_ff)), layers, **changes)
    with Artifact.open(path) as artifact:
        found = in_file(artifact)
    ram, gpu = Sizes.of(work).used(all_cpu(2))
    assert {name: ram[name] for name in found} == found
    assert sum(gpu.values()) == 0


def allocated(executor: HostExecutor) -> int:
    """Bytes of everything an executor allocates beside the weights."""
    model = executor.host
    arrays = [*model.workspace, model.cos_SJ, model.sin_SJ]
    return sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_buffers_and_cache_are_what_a_run_allocates(family: str, tmp_path: Path) -> None:
    decoder = small_decoder(family, d_ff=200, context_length=128)
    plan = stored_plan((64, 128), 1 << 20, 1 << 19)
    path = random_artifact(tmp_path / "a.pi", decoder, format="f16", ranks=[7, 5], plans=(plan,))
    layers = tuple(LayerWork(rung="predicted", rank=rank) for rank in (7, 5))
    sizes = Sizes.of(workload(np.ones((2, 200)), layers, context=96, family=family, context_length=128))
    with Artifact.open(path) as artifact:
        executor = in_memory(artifact, "auto", 96, 1, taken=choose_plan(artifact, 96, 1 << 40))
        assert allocated(executor) == sizes.workspace[CPU]
        executor.close()
        cache = KVCache(PagePool(artifact.manifest), 96)
        cache.reserve(96)
        assert cache.pool.in_use * cache.pool.page_nbytes == sum(sizes.cache)


def test_layers_with_a_window_count_what_they_see() -> None:
    """Bytes of a whole context, of the steps of prompts in memory; and the time of what a token reads."""
    shape = {"context_length": 4096, "window": 100, "windowed_layers": (1,)}
    work = workload(np.ones((2, 200)), context=4096, **shape)
    every, windowed = Sizes.of(work).cache
    assert windowed == 8 * every // 128, "pages"
    whole = Sizes.of(workload(np.ones((2, 200)), context=4096, context_length=4096))
    assert whole.cache == (every, every)
    assert whole.everything - Sizes.of(work).everything == every - windowed
    first, second = costs_of(work, machine(gpu=None, link=None)).layers
    assert first.attention[CPU] > second.attention[CPU]


@pytest.mark.parametrize("share", [1, 64])
def test_the_gpu_has_room_for_prompts(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of a token, and at most a `share`-th of the model more for prompts and for further tokens."""
    monkeypatch.setattr(formulation, "PROMPT_SHARE", share)
    work = workload(np.ones((2, 2000)), (LayerWork(rung="predicted", rank=9),) * 2, context=100, d_model=128)
    sizes = Sizes.of(work)
    model = sizes.all_on_gpu - sizes.workspace[GPU] - sum(sizes.cache)
    specs = array_specs(work.decoder, work.formats, [9, 9], profiled=False)
    one = weight_padding(specs) + gpu_workspace_bytes(work.decoder, 9, 100, 1, 1)
    assert 0 <= sizes.workspace[GPU] - one <= model // share
    batch, tokens, streamed = (1, 1, 0) if share == 64 else (2, 64, streamed_bytes(specs, work.decoder))
    assert streamed_bytes(specs, work.decoder) == 2 * 1024 * sizes.parts.neuron
    buffers = gpu_workspace_bytes(work.decoder, 9, 100, batch, tokens)
    assert sizes.workspace[GPU] == weight_padding(specs) + buffers + streamed


def test_blocks_of_prompts() -> None:
    """The largest with the pieces; without them where they leave too little; never none."""
    needs = {tokens: 10 * tokens for tokens in PROMPT_TOKENS}.__getitem__
    found = [prompt_block(needs, 100, room) for room in (5220, 5219, 740, 739, 160, 159, 0)]
    assert found == [(512, 100), (256, 100), (64, 100), (64, 0), (16, 0), (1, 0), (1, 0)]
    assert prompt_block(needs, 0, 5120) == (512, 0)
