"""GPU, RAM and disk in one run: the bits of the same plan with all cold rows in memory, within both budgets."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from support.gpu_running import (
    CONTEXT,
    EXPERTS,
    NEURONS,
    OTHERS,
    ROOM,
    allocated_bytes,
    decoded,
    model,
    of_size,
    plan_of,
    read,
    running,
)
from support.long_form import marked_long
from support.steps import examined

from pi_runtime import load
from pi_runtime.artifact.buffers import table_bytes
from pi_runtime.artifact.gpu_buffers import host_bytes, pinned_buffers, pinned_prompt_block
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import all_rows, least_row_buffers, slot_nbytes
from pi_runtime.artifact.schema import Plan
from pi_runtime.cuda import executor as cuda_executor
from pi_runtime.cuda.executor import CudaExecutor
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.cuda.memory.weights import STAGING_NBYTES
from pi_runtime.disk.arena import PAGE
from pi_runtime.disk.ram_plan import fixed_bytes, resident_nbytes
from pi_runtime.errors import ArtifactError, DoesNotFitError
from pi_runtime.execution import devices
from pi_runtime.execution.disk_rows import DiskRows
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.execution.plan_choice import Allocation, allocation

ONE = plan_of(["gpu", "cpu", "gpu"], (128, 64, 0), "cpu-gpu")
SOME = plan_of(["gpu", "cpu", "gpu"], (NEURONS, 0, 64, 0, 0, 0, 7, NEURONS, 0), "gpu-cpu")
CPU_FIRST = plan_of(["cpu", "gpu", "cpu"], (0, 70, 128), "cpu-cpu")
CASES: dict[str, tuple[Plan, dict[str, Any]]] = {
    "predicted and gate, experts, biases": (SOME, {"family": "opt", **EXPERTS}),
    "predicted and gate, experts, q4": (SOME, {"fmt": "q4", **EXPERTS}),
    "predicted, threshold and dense, biases": (CPU_FIRST, {"family": "opt", "layers": OTHERS}),
    "predicted and gate, q8, biases": (ONE, {"family": "opt", "fmt": "q8"}),
}
KV = 1 << 20
"""Bytes for the keys and values of two sequences."""
PROMPT = [3 + 7 * n % 200 for n in range(40)]


def taken_of(artifact: Artifact, plan: Plan) -> Allocation:
    return replace(allocation(artifact.manifest, plan, CONTEXT, ROOM), streamed=0)


@contextmanager
def within(path: Path, plan: Plan, gpu: Device, share: float, mode: str = "auto") -> Iterator[CudaExecutor]:
    """A run with RAM for this share of all rows, and none to spare."""
    with Artifact.open(path) as artifact:
        taken, m = taken_of(artifact, plan), artifact.manifest
        both = sum(slot_nbytes(m.decoder, m.formats["ffn"]).values())
        with pytest.raises(DoesNotFitError) as error:
            cuda_executor.cold_rows(artifact, mode, 1, taken, 0, KV)
    least = int(str(error.value.expected).split()[2])
    budget = least + int(share * all_rows(m.decoder, both))
    assert least > least_row_buffers(m.decoder, both)
    artifact = Artifact.open(path)
    rows = cuda_executor.cold_rows(artifact, mode, 1, taken, budget, KV)
    executor = CudaExecutor(artifact, mode, 1, taken, gpu, rows=rows)
    try:
        yield executor
    finally:
        executor.close()


def answers(executor: CudaExecutor, path: Path) -> list[np.ndarray]:
    """Logits of a prompt, of tokens alone and together, and at every position; rows, and what selection counted."""
    one, two = executor.new_cache(), executor.new_cache()
    found = [read(executor, one, PROMPT), *decoded(executor, one, [7, 11])]
    found.append(read(executor, two, PROMPT[:3]))
    steps = [SequenceStep(cache=cache, tokens=np.array([9 + n]), select=True) for n, cache in enumerate((one, two))]
    found += [result.logits_TV for result in executor.step(steps)]
    return [*found, *examined(executor, path, "auto", [5, 6], two)]


def same(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "name", marked_long(CASES, ("predicted and gate, experts, q4", "predicted and gate, q8, biases"))
)
def test_three_tiers_give_the_bits_of_two(name: str, tmp_path: Path, gpu: Device, long: bool) -> None:
    plan, shape = CASES[name]
    path = model(tmp_path / "a.pi", **shape)
    with running(path, plan, gpu) as executor:
        wanted = answers(executor, path)
    for share in (0.2, 1.1) if long else (0.2,):
        with within(path, plan, gpu, share) as executor:
            same(answers(executor, path), wanted)
            assert executor.disk is not None
            assert (executor.disk.tokens, executor.disk.misses > 0, executor.disk.hits > 0) == (4, share < 1, True)


def held_bytes(executor: CudaExecutor) -> tuple[int, int, int]:
    """Bytes in RAM of resident arrays, of slots, and of pinned buffers, from what is allocated."""
    cold: Any = executor.rows
    pinned = executor._pinned
    words = [pinned.token_words.words, pinned.handover_to_host.words, pinned.handover_to_device.words]
    sums = [pinned.sum_to_host, pinned.sum_to_device, pinned.x_to_host, pinned.x_to_device]
    buffers = executor._prefill._on_device._buffers
    block = [buffers.host_x_TD, buffers.host_normed_TD, buffers.host_y_TD]
    tensors = [*words, *sums, pinned.logits_MV, pinned.rows_ML2, *block]
    slots = sum(len(arena.memory) - PAGE for arena in cold.store.arenas.values())
    return sum(cold.host.artifact._nbytes.values()), slots, sum(t.nbytes for t in tensors)


def test_both_budgets_are_kept_to_the_byte(tmp_path: Path, gpu: Device) -> None:
    """What is allocated is what was counted; RAM has nothing of what is on the GPU."""
    path = model(tmp_path / "a.pi", fmt="q4", **EXPERTS)
    with within(path, SOME, gpu, 0.3) as executor:
        taken, cold = executor.allocation, cast("DiskRows", executor.rows)
        m, plan = cold.host.manifest, cold.plan
        assert allocated_bytes(executor) == taken.total - taken.products
        resident, slots, pinned = held_bytes(executor)
        row_slots = sum(plan.slots(n) * each for n, each in slot_nbytes(m.decoder, m.formats["ffn"]).items())
        assert slots <= row_slots
        assert pinned == table_bytes(
            pinned_buffers(m.decoder, CONTEXT, taken.batch_tokens), pinned_prompt_block(m.decoder, taken.block_tokens)
        )
        own = host_bytes(m.decoder, CONTEXT, taken.batch_tokens, taken.block_tokens) + STAGING_NBYTES
        alone = fixed_bytes(m, CONTEXT, "auto", KV) - sum(resident_nbytes(m, whole_embedding=False).values())
        assert plan.fixed == alone + resident + own
        assert plan.fixed + row_slots <= plan.budget


def test_a_read_that_fails_is_one_clear_error_and_the_next_token_is_right(tmp_path: Path, gpu: Device) -> None:
    path = model(tmp_path / "a.pi")
    with within(path, ONE, gpu, 0) as executor:
        wanted = decoded(executor, executor.new_cache(), [5])[0]
        reader = cast("DiskRows", executor.rows).reader
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader, "wait", fail)
            with pytest.raises(ArtifactError, match="the disk broke"):
                decoded(executor, executor.new_cache(), [5])
        np.testing.assert_array_equal(decoded(executor, executor.new_cache(), [5])[0], wanted)


def fail(*_: object) -> None:
    raise ArtifactError("the disk broke")


def test_a_model_is_opened_within_both_budgets(tmp_path: Path, gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_gpus", lambda: 1)
    monkeypatch.setattr(devices, "gpu_driver", lambda: True)
    monkeypatch.setattr(cuda_executor, "Cuda", lambda _index: of_size(gpu, 1 << 30))
    path = model(tmp_path / "a.pi", plans=(ONE,))
    texts = []
    for limits in ({}, {"ram_budget": 1 << 29, "vram_budget": 1 << 26}):
        with load(path, device="cuda:0", context=CONTEXT, threads=1, **limits) as found:
            texts.append("".join(found.generate([65, 66, 67], max_tokens=4)))
            assert (found.executor.disk is None) == (limits == {})
    assert texts[0] == texts[1]
    with pytest.raises(DoesNotFitError, match="too small"):
        load(path, device="cuda:0", context=CONTEXT, ram_budget=1 << 20)
