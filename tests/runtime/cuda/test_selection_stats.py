"""Logits at every position on a GPU and the CPU, and counts of what selection reads and leaves out."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu_running import (
    ALL_ON_GPU,
    CONTEXT,
    LAYERS,
    NEURONS,
    OTHERS,
    PREDICTED,
    SPLIT,
    assert_same,
    decoded,
    model,
    plan_of,
    running,
)
from support.steps import examined, step

from pi_compile.evaluation.fidelity import LoadOptions, evaluate
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer, Plan
from pi_runtime.cuda import executor as cuda_executor
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.execution import devices
from pi_runtime.execution.executor import Executor
from pi_runtime.execution.host_executor import in_memory
from pi_runtime.execution.kv_cache import KVCache

IDS = [5, 9, 250]
MIXED = plan_of(["gpu", "cpu", "gpu"], (0, NEURONS, 64), "cpu-cpu")


def all_logits(executor: Executor, ids: Sequence[int], cache: KVCache, *, select: bool) -> np.ndarray:
    return step(executor, ids, cache, select=select, logits="all").logits_TV


@pytest.mark.parametrize(
    ("plan", "layers", "mode"),
    [
        pytest.param(SPLIT, PREDICTED, "auto", id="split"),
        pytest.param(MIXED, OTHERS, "auto", id="mixed"),
        pytest.param(ALL_ON_GPU, OTHERS, "auto", id="all on the GPU", marks=pytest.mark.long),
        pytest.param(SPLIT, OTHERS, "dense", id="dense", marks=pytest.mark.long),
    ],
)
def test_what_decoding_computes_and_what_fires(
    plan: Plan, layers: tuple[Layer, ...], mode: str, tmp_path: Path, gpu: Device
) -> None:
    path = model(tmp_path / "a.pi", layers=layers)
    one = in_memory(Artifact.open(path), mode, CONTEXT, 1)
    with running(path, plan, gpu, mode) as two:
        caches = [two.new_cache() for _ in range(2)]
        for ids in (IDS, [7]):  # a block, and one that goes on from it
            (found, found_L3), (wanted, wanted_L3) = (
                examined(e, path, mode, ids, c) for e, c in zip((two, one), caches, strict=True)
            )
            assert_same(found, wanted)
            np.testing.assert_array_equal(found_L3, wanted_L3)
        assert caches[0].tokens == (*IDS, 7)
    one.close()


def test_bits_are_those_of_decoding(tmp_path: Path, gpu: Device) -> None:
    with running(model(tmp_path / "a.pi"), MIXED, gpu) as executor:
        caches = [executor.new_cache() for _ in range(2)]
        wanted, rows = decoded(executor, caches[0], IDS)
        np.testing.assert_array_equal(all_logits(executor, IDS, caches[1], select=True), wanted)
        assert rows.shape == (len(IDS), LAYERS, 2)


@pytest.mark.parametrize(
    ("plan", "family", "more"),
    [(SPLIT, "llama", {"head_bias": True, "fmt": "f16"}), (MIXED, "opt", {"d_embedding": 24})],
    ids=["split", "mixed"],
)
def test_dense_blocks(plan: Plan, family: str, more: dict[str, Any], tmp_path: Path, gpu: Device) -> None:
    """Also in blocks of one token, where the budget is tight."""
    path = model(tmp_path / "a.pi", family, **more)
    one = in_memory(Artifact.open(path), "auto", CONTEXT, 1)
    with running(path, plan, gpu, budget=1) as two:
        assert two.block_tokens == 1
        found, wanted = (all_logits(e, IDS, two.new_cache(), select=False) for e in (two, one))
    one.close()
    assert np.abs(found - wanted).max() <= (0.02 if "fmt" in more else 1e-4) * np.abs(wanted).max()
    assert (found.astype(np.float16) != found).mean() > 0.9, "the head's products are not rounded to 16 bits"


def test_eval_on_a_gpu(tmp_path: Path, gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """`eval` on a GPU finds what it finds on the CPU, and says which placement it took."""
    monkeypatch.setattr(devices, "_gpus", lambda: 1)
    monkeypatch.setattr(cuda_executor, "Cuda", lambda _index: gpu)
    plan = replace(plan_of(["cpu", "cpu", "gpu"], (0, 0, 64), "cpu-cpu"), vram_bytes=1 << 30)
    path, text = model(tmp_path / "a.pi", plans=(plan,)), tmp_path / "text.txt"
    text.write_text("Once")
    told: list[str] = []
    all_options = LoadOptions(), LoadOptions(device="cuda:0", context=16, tell=told.append)
    on_cpu, on_gpu = (
        evaluate(path, [text], None, tokens=4, window=2, progress=lambda *_: None, options=options)
        for options in all_options
    )
    assert set(told) == {f"{gpu.name}: by the placement for 1.0 GiB of GPU memory"}
    assert on_gpu["device"] == gpu.name
    for mode in ("dense", "gate", "predicted"):
        assert on_gpu["perplexity"][mode] == pytest.approx(on_cpu["perplexity"][mode], rel=1e-4)
    assert on_gpu["layers"] == on_cpu["layers"]
    assert on_gpu["ffn_bytes_per_token"] == on_cpu["ffn_bytes_per_token"]
