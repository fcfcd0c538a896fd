"""One byte count: what placing reckons with is what a packed file holds and what a run allocates."""

from pathlib import Path

import numpy as np
import pytest
from placeable import workload
from synthetic import random_artifact, small_decoder, stored_plan

from pi_compile.program import PREFILL_TOKENS, Sizes, all_cpu
from pi_compile.units import CPU, GPU
from pi_compile.workload import LayerWork
from pi_runtime.artifact.footprint import scratch_bytes
from pi_runtime.artifact.reader import Artifact
from pi_runtime.cache import KVCache
from pi_runtime.executor import CpuExecutor
from pi_runtime.hybrid import HybridExecutor
from pi_runtime.kernels.buffers import BLOCK_TOKENS

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
    shape = {"family": family, "d_model": 40, "n_heads": 5, "n_kv_heads": 1}
    work = workload(np.ones((2, decoder.d_ff)), layers, **shape)
    with Artifact.open(path) as artifact:
        found = in_file(artifact)
    ram, gpu = Sizes.of(work).used(all_cpu(2))
    assert {name: ram[name] for name in found} == found
    assert sum(gpu.values()) == 0


def allocated(executor: CpuExecutor) -> int:
    """Bytes of everything an executor allocates beside the weights."""
    arrays = [*executor._buffers, executor._cos_SJ, executor._sin_SJ]
    return sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_buffers_and_cache_are_what_a_run_allocates(family: str, tmp_path: Path) -> None:
    decoder = small_decoder(family, d_ff=200, context_length=128)
    plan = stored_plan((64, 128), 1 << 20, 1 << 19)
    path = random_artifact(tmp_path / "a.pi", decoder, ranks=[7, 5], plans=(plan,))
    layers = tuple(LayerWork(rung="predicted", rank=rank) for rank in (7, 5))
    sizes = Sizes.of(workload(np.ones((2, 200)), layers, context=100, family=family, context_length=128))
    assert PREFILL_TOKENS == BLOCK_TOKENS
    with Artifact.open(path) as artifact:
        executor = HybridExecutor(artifact, "auto", 100, 1, plan)
        assert allocated(executor) == pytest.approx(sizes.scratch[CPU], rel=0.01)
        hot = sum(array.nbytes for array in executor.hot.buffers)
        # The stand-in shares the CPU's table of angles.
        angles = executor._cos_SJ.nbytes + executor._sin_SJ.nbytes
        assert hot + angles == pytest.approx(sizes.scratch[GPU], rel=0.01)
        executor.close()
    assert KVCache(decoder, 100).values.nbytes == 2 * sizes.cache
    assert sizes.scratch[GPU] == scratch_bytes(decoder, 7, 1, 100)
