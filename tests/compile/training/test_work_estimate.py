"""Estimates of a training, against the work that it does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

from support.synthetic import small_decoder

from pi_compile.calibration import profiling, quantising
from pi_compile.training import work_estimate
from pi_compile.training.candidates import TrainSpec, initial_ranks
from pi_compile.training.rung_choice import PASSES
from pi_compile.training.work_estimate import ProgressMeter, TrainingWork

SPEC = TrainSpec(rungs=("gate", "predicted"), steps=300)
LLAMA_7B = small_decoder(
    d_model=4096, d_ff=11008, n_layers=32, n_heads=32, n_kv_heads=32, head_dim=128, ffn="gated", vocab_size=32000
)


def work(d: Any = LLAMA_7B, spec: TrainSpec = SPEC, fit: int = 400_000) -> TrainingWork:
    return TrainingWork.of(d, spec, 0.1, fit, 16_384, 16_384)


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_estimate, "flops_per_s", lambda *_: 1e12)
    monkeypatch.setattr(work_estimate, "values_per_s", lambda *_: 1e10)


def test_a_step_is_its_products() -> None:
    found = work()
    assert found.ranks == tuple(initial_ranks(LLAMA_7B, ["f16"], 0.1, 0.5))
    labels = 2 * 512 * 4096 * 11008 * 2
    scores = [2 * 512 * r * (4096 + 11008) for r in found.ranks]
    assert found.per_step().products == labels + 3 * sum(scores)  # forward, and twice that backward


def test_a_7b_is_estimated() -> None:
    e = work().estimate("cpu")
    # Text through 7 · 10⁹ weights, two operations each, is the least there is; the rest is not many times that.
    through = 2 * 202e6 * 32 * 416_384 / 1e12
    assert through < e.seconds < 6 * through
    # Inputs, and the states before and after; no inputs of the report text.
    assert e.disk_bytes == 4 * 4096 * (3 * 416_384 + 2 * 16_384)
    assert 2e9 < e.memory_bytes < 12e9  # one layer of the model, whatever the text
    assert work(fit=800_000).estimate("cpu").memory_bytes == e.memory_bytes


def test_a_long_search_is_split_and_its_tasks_are_all_of_it() -> None:
    assert not work().splits
    assert not work(spec=replace(SPEC, steps=1000, device="cuda")).splits
    long = work(spec=replace(SPEC, steps=1000))
    assert long.splits
    labels = (len(long.ranks) - 1) * (1000 * 512 + long.tune) * 2 * 4096 * 11008 * 2  # made anew for each rank
    tasks = [long.begun(), *(long.of_ranks([rank]) for rank in (*long.ranks, *long.further()))]
    assert sum(task.products for task in tasks) == pytest.approx(long.search().products + labels)
    assert long.memory_bytes < work(spec=replace(SPEC, steps=1000, device="cuda")).memory_bytes


LAYERWISE = profiling.ProfileSpec(layers_at_once=1)
TAKEN: dict[str, Callable[[Any, int], int]] = {
    "training": lambda d, window: work(d, replace(SPEC, window=window)).memory_bytes,
    "profiling": lambda d, window: profiling.memory_bytes(d, replace(LAYERWISE, window=window)),
    "states of profiling": lambda d, window: profiling.estimate(d, 4096, replace(LAYERWISE, window=window)).disk_bytes,
    "rounding": lambda d, window: quantising.memory_bytes(d, quantising.QuantiseSpec(window=window, formats={})),
}


@pytest.mark.parametrize("stage", TAKEN)
def test_a_window_is_no_longer_than_the_context(stage: str) -> None:
    d = small_decoder(n_layers=3, d_model=64, d_ff=192, context_length=128, vocab_size=500_000)
    assert TAKEN[stage](d, 64) < TAKEN[stage](d, 128) == TAKEN[stage](d, 2048)


def test_more_to_try_takes_longer() -> None:
    base = work().estimate("cpu").seconds
    assert work(spec=replace(SPEC, predictor_formats=("f16", "q8", "q4"))).estimate("cpu").seconds > base
    assert work(spec=replace(SPEC, steps=600)).estimate("cpu").seconds > base
    assert work(spec=replace(SPEC, rungs=("gate", "threshold"))).estimate("cpu").seconds < base


@pytest.mark.parametrize("rungs", [("gate",), ("gate", "threshold"), ("gate", "predicted")])
def test_progress_rises_to_its_end(rungs: tuple[str, ...]) -> None:
    told: list[tuple[int, int]] = []
    d = small_decoder(n_layers=3, d_model=64, d_ff=192)
    meter = ProgressMeter(work(d, replace(SPEC, rungs=rungs, steps=5), fit=4096), lambda *a: told.append(a))
    for n in range(3):
        for _ in range(9):  # more than was thought
            meter.step_done()
        meter.layers_done(n + 1)
    for _ in range(PASSES + 50):
        meter.pass_done()
    meter.end()
    done = [n for n, _ in told]
    assert len({total for _, total in told}) == 1
    assert done[-1] == told[-1][1]
    assert max(done) <= told[-1][1]
    assert done == sorted(done)
