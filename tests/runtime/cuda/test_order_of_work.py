"""Whole steps do not depend on when the GPU does its work, and every wait among them is needed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from support.gpu_ordering import POLICIES, out_of_order
from support.gpu_running import ALL_ON_GPU, EXPERTS, LAYERS, NEURONS, SPLIT, decoded, model, plan_of, read, running
from support.long_form import marked_long

from pi_runtime.cuda.executor import CudaExecutor, Decoding
from pi_runtime.cuda.memory.devices import Cuda, Device, Op

PROMPT, GOING_ON = (3, 1, 4), (1, 5)
PLANS = {
    "all on the GPU": (ALL_ON_GPU, {}),
    "cold neurons on the CPU": (SPLIT, {}),
    "attention on either side": (plan_of(["gpu", "cpu", "gpu"], (128, 0, NEURONS), "cpu-gpu"), {}),
    "attention on the CPU": (plan_of(["cpu"] * LAYERS, (128, 64, 70), "gpu-cpu"), {}),
    "experts": (plan_of(["gpu", "cpu", "gpu"], (NEURONS, 0, 64) * LAYERS), EXPERTS),
}


@pytest.fixture(autouse=True)
def not_on_a_gpu(gpu: Device) -> None:
    if isinstance(gpu, Cuda):
        pytest.skip("a GPU has its own order")


def answers(executor: CudaExecutor, runs: Sequence[Op] | None = None) -> np.ndarray:
    """Logits after a prompt and after each token, and how many rows the GPU read; `runs` are the last tokens' calls."""
    executor.device.synchronize()
    cache, (first, *others) = executor.new_cache(), GOING_ON
    found = [read(executor, cache, PROMPT), decoded(executor, cache, [first])[0][0]]
    decoding = executor._schedules[1]
    executor._schedules[1] = Decoding(decoding.host_ops, tuple(decoding.runs if runs is None else runs))
    logits, rows = decoded(executor, cache, others)
    executor._schedules[1] = decoding
    return np.concatenate([np.concatenate([*found, *logits]), rows.ravel()])


@pytest.mark.parametrize("name", marked_long(PLANS, ("all on the GPU", "attention on either side")))
def test_any_order_gives_the_same_bits(gpu: Device, name: str, tmp_path: Path, long: bool) -> None:
    plan, shape = PLANS[name]
    path, device = model(tmp_path / "m.pi", **shape), out_of_order(gpu)
    with running(path, plan, gpu) as executor:
        wanted = answers(executor)
    with running(path, plan, device) as executor:
        for policy in POLICIES if long else POLICIES[:3:2]:
            device.order.follow(policy)
            np.testing.assert_array_equal(answers(executor), wanted, str(policy))


@pytest.mark.parametrize("name", marked_long(PLANS, PLANS.keys() - {"attention on the CPU"}))
def test_every_wait_is_needed(gpu: Device, name: str, tmp_path: Path) -> None:
    """Without a wait, or the event that it waits for, the host goes on with what it had before."""
    plan, shape = PLANS[name]
    with running(model(tmp_path / "m.pi", **shape), plan, out_of_order(gpu)) as executor:
        wanted, runs = answers(executor), [call.run for call in executor.calls]
        waits = [n for n, call in enumerate(executor.calls) if call.kind in ("record", "wait")]
        assert waits
        for n in waits:
            assert (answers(executor, runs[:n] + runs[n + 1 :]) != wanted).any(), f"call {n} can be left out"


def test_a_wait_behind_what_it_is_for_is_found(gpu: Device, tmp_path: Path) -> None:
    """The CPU's neurons before the wait for their inputs."""
    with running(model(tmp_path / "m.pi"), SPLIT, out_of_order(gpu)) as executor:
        wanted, runs = answers(executor), [call.run for call in executor.calls]
        n = [call.kind for call in executor.calls].index("cold")
        assert executor.calls[n - 1].kind == "wait"
        runs[n - 1], runs[n] = runs[n], runs[n - 1]
        assert (answers(executor, runs) != wanted).any()


def changes(executor: CudaExecutor) -> bool:
    """Whether a prompt's answer is another one than it was, when another prompt has left its numbers everywhere."""
    order, prompt = executor.device.order, range(1, 7)  # type: ignore[attr-defined]
    order.waits_for_copies = True
    wanted = read(executor, executor.new_cache(), prompt)
    read(executor, executor.new_cache(), range(7, 13))
    order.waits_for_copies = False
    found = read(executor, executor.new_cache(), prompt)
    order.finish()
    return bool((found != wanted).any())


@pytest.mark.parametrize("name", ["cold neurons on the CPU", "attention on the CPU"])
def test_the_host_waits_for_the_copies_of_a_prompt(gpu: Device, name: str, tmp_path: Path) -> None:
    plan, shape = PLANS[name]
    with running(model(tmp_path / "m.pi", **shape), plan, out_of_order(gpu)) as executor:
        assert changes(executor)


def test_a_prompt_ends_with_a_wait(gpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(model(tmp_path / "m.pi"), ALL_ON_GPU, out_of_order(gpu)) as executor:
        prompt, other = range(1, 7), range(7, 13)
        wanted = read(executor, executor.new_cache(), prompt)
        read(executor, executor.new_cache(), other)
        monkeypatch.setattr(type(executor.device), "synchronize", lambda _: None)
        assert (read(executor, executor.new_cache(), prompt) != wanted).any()
        monkeypatch.undo()


def test_a_chunk_in_use_is_not_filled_again(gpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi_runtime.cuda.memory.weights.GEMM_NEURONS", 32)
    path, prompt = model(tmp_path / "m.pi"), range(1, 7)
    with running(path, SPLIT, gpu, stream_from=2) as executor:
        wanted = read(executor, executor.new_cache(), prompt)
    with running(path, SPLIT, out_of_order(gpu), stream_from=2) as executor:
        np.testing.assert_array_equal(read(executor, executor.new_cache(), prompt), wanted)
        for buffer in executor._prefill._streamer._buffers:
            monkeypatch.setattr(buffer.used, "wait", lambda: None)
        assert (read(executor, executor.new_cache(), prompt) != wanted).any()


def test_streamed_weights_arrive_before_they_are_used(gpu: Device, tmp_path: Path, long: bool) -> None:
    path, device = model(tmp_path / "m.pi"), out_of_order(gpu)
    prompt = list(range(1, 7))
    with running(path, SPLIT, gpu, stream_from=2) as executor:
        wanted = read(executor, executor.new_cache(), prompt)
    with running(path, SPLIT, device, stream_from=2) as executor:
        for policy in POLICIES if long else POLICIES[:3]:
            device.order.follow(policy)
            np.testing.assert_array_equal(read(executor, executor.new_cache(), prompt), wanted, str(policy))


def test_a_missing_wait_for_streamed_weights_is_found(
    gpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, device = model(tmp_path / "m.pi"), out_of_order(gpu)
    with running(path, SPLIT, device, stream_from=2) as executor:
        wanted = read(executor, executor.new_cache(), [1, 2, 3])
        for buffer in executor._prefill._streamer._buffers:
            for array in buffer.arrays.values():
                array.view(torch.uint8).fill_(0)
            monkeypatch.setattr(buffer.filled, "wait", lambda: None)
        assert (read(executor, executor.new_cache(), [1, 2, 3]) != wanted).any()
