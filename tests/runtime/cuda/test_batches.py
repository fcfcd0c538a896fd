"""Sequences that decode together on a GPU get the same bits as alone, whatever their company."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu_running import (
    ALL_ON_GPU,
    EXPERTS,
    LAYERS,
    NEURONS,
    OTHERS,
    SPLIT,
    assert_same,
    decoded,
    model,
    plan_of,
    read,
    running,
)
from support.long_form import marked_long

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Plan
from pi_runtime.cuda.executor import CudaExecutor
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.execution.host_executor import in_memory
from pi_runtime.execution.kv_cache import KVCache

PROMPTS = ([5, 9, 250], [7], [3, 3], [8, 1, 200, 4])
GOING_ON = ([7, 11], [1, 2], [9, 8], [250, 6])
COMPANIES = ((0, 1), (2, 1, 0, 3), (0, 1, 2, 3), (3, 2))
"""The sequences that take part in each step; they come and go, and each brings its prompt first."""
MIXED = plan_of(["gpu", "cpu", "gpu"], (128, 0, NEURONS), "cpu-gpu")
ON_CPU = plan_of(["cpu"] * LAYERS, (128, 64, 70), "gpu-cpu")
IN_EXPERTS = plan_of(["gpu", "cpu", "gpu"], (NEURONS, 0, 64) * LAYERS)


def step_of(cache: KVCache, tokens: Sequence[int], select: bool) -> SequenceStep:
    return SequenceStep(cache=cache, tokens=np.array(tokens, np.int64), select=select)


def assert_as_alone(executor: CudaExecutor) -> list[list[np.ndarray]]:
    """Run all sequences alone, then in changing company; returns the logits of each of their steps."""
    alone: list[list[tuple[np.ndarray, Any]]] = []
    for prompt, going_on in zip(PROMPTS, GOING_ON, strict=True):
        cache = executor.new_cache()
        first = read(executor, cache, prompt)
        alone.append([(first, None), *zip(*decoded(executor, cache, going_on), strict=True)])
    caches = [executor.new_cache() for _ in PROMPTS]
    done, logits = [0] * len(PROMPTS), [[found for found, _ in steps] for steps in alone]
    for company in COMPANIES:
        work = [PROMPTS[n] if done[n] == 0 else [GOING_ON[n][done[n] - 1]] for n in company]
        steps = [step_of(caches[n], tokens, done[n] > 0) for n, tokens in zip(company, work, strict=True)]
        for n, found in zip(company, executor.step(steps), strict=True):
            wanted, rows = alone[n][done[n]]
            np.testing.assert_array_equal(found.logits_TV[0], wanted)
            if done[n] > 0:
                np.testing.assert_array_equal(found.rows_L2, rows)
            done[n] += 1
    assert done == [3] * 4
    return logits


FEW_HEADS = {"n_heads": 2}
CASES: dict[str, tuple[Plan, dict[str, Any]]] = {
    "cold neurons on the CPU": (SPLIT, FEW_HEADS),
    "attention on the CPU": (ON_CPU, FEW_HEADS),
    "experts": (IN_EXPERTS, FEW_HEADS | EXPERTS),
    "whole layers on either side": (MIXED, FEW_HEADS | {"fmt": "f16"}),
    "all on the GPU, OPT": (ALL_ON_GPU, FEW_HEADS | {"family": "opt"}),
    "q4": (SPLIT, FEW_HEADS | {"fmt": "q4"}),
    "predicted, a threshold and dense": (SPLIT, FEW_HEADS | {"layers": OTHERS}),
}
FURTHER = ("cold neurons on the CPU", "whole layers on either side", "all on the GPU, OPT", "q4")


@pytest.mark.parametrize("name", marked_long(CASES, FURTHER))
def test_a_sequence_gets_the_same_bits_in_any_company(name: str, tmp_path: Path, gpu: Device) -> None:
    plan, shape = CASES[name]
    path = model(tmp_path / "a.pi", **shape)
    with running(path, plan, gpu, context=128) as executor:
        logits = assert_as_alone(executor)
        assert sorted(executor._schedules) == [1, 2, 4], "all of a step that decode together are one batch"
    if shape.get("fmt", "f32") == "f32":
        one = in_memory(Artifact.open(path), "auto", 128, 1)
        cache = one.new_cache()
        assert_same(logits[1][0], read(one, cache, PROMPTS[1]))
        assert_same(np.stack(logits[1][1:]), decoded(one, cache, GOING_ON[1])[0])
        one.close()


@pytest.mark.parametrize("name", marked_long(["cold neurons on the CPU", "attention on the CPU", "experts"], FURTHER))
def test_guesses_are_checked_together(name: str, tmp_path: Path, gpu: Device) -> None:
    """Tokens of a sequence get the bits that they get one by one, across two pages, and after some were wrong."""
    plan, shape = CASES[name]
    prompt, going_on, wrong = [5, *range(29)], [7, 11, 3, 8, 9], [7, 11, 2, 2]
    with running(model(tmp_path / "a.pi", **shape), plan, gpu, context=128) as executor:
        alone, together = executor.new_cache(), executor.new_cache()
        for cache in (alone, together):
            read(executor, cache, prompt)
        wanted, _ = decoded(executor, alone, going_on)

        def checked(tokens: Sequence[int]) -> np.ndarray:
            work = SequenceStep(cache=together, tokens=np.array(tokens), select=True, logits="all")
            return executor.step([work])[0].logits_TV

        np.testing.assert_array_equal(checked(wrong)[:2], wanted[:2])
        together.truncate(len(prompt) + 2)
        np.testing.assert_array_equal(checked(going_on[2:]), wanted[2:])
        assert sorted(executor._schedules) == [1, 3, 4]
        assert executor.draft_tokens == executor.allocation.batch_tokens == 8


@pytest.mark.parametrize("name", marked_long(["cold neurons on the CPU", "whole layers on either side"], FURTHER[:1]))
def test_sequences_whose_caches_do_not_fit_together_take_turns(name: str, tmp_path: Path, gpu: Device) -> None:
    """The GPU has two pages; the sequences need four."""
    with running(model(tmp_path / "a.pi", **FEW_HEADS), CASES[name][0], gpu, context=64) as executor:
        assert_as_alone(executor)
        assert max(executor._schedules) == 2


def test_a_batch_is_as_large_as_its_memory(tmp_path: Path, gpu: Device) -> None:
    path = model(tmp_path / "a.pi")
    with running(path, ALL_ON_GPU, gpu, context=64, budget=0) as executor:
        assert executor.allocation.batch_tokens == 1
        caches = [executor.new_cache() for _ in range(2)]
        found = executor.step([step_of(cache, [5], True) for cache in caches])
        np.testing.assert_array_equal(found[0].logits_TV, found[1].logits_TV)
        assert list(executor._schedules) == [1]


def test_caches_that_go_leave_their_pages_to_others(tmp_path: Path, gpu: Device) -> None:
    """Closed, truncated, forked and collected caches, in a GPU of three pages."""
    with running(model(tmp_path / "a.pi", **FEW_HEADS), ALL_ON_GPU, gpu, context=96) as executor:

        def of(tokens: Sequence[int]) -> KVCache:
            cache = executor.new_cache()
            read(executor, cache, tokens)
            return cache

        def following(*caches: KVCache) -> list[np.ndarray]:
            found = executor.step([step_of(cache, [5], True) for cache in caches])
            for cache in caches:
                cache.truncate(cache.length - 1)
            return [f.logits_TV[0] for f in found]

        long, short = list(range(1, 41)), [4, 4, 2]
        first, second = of(long), of(short)
        wanted = [following(first)[0], following(second)[0]]
        np.testing.assert_array_equal(following(second, first), wanted[::-1])
        fork = first.fork()
        first.truncate(20)
        np.testing.assert_array_equal(following(fork, second), wanted)
        np.testing.assert_array_equal(following(first), following(of(long[:20])))
        first.close()
        fork.close()
        del fork
        np.testing.assert_array_equal(following(second, of(long)), wanted[::-1])
