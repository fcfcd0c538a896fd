"""The choice of rungs against all possible choices, on layers whose divergence is known."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from pi_compile.cost_model.processors import Reads
from pi_compile.training.candidates import Candidate
from pi_compile.training.rung_choice import PASSES, choose_rungs, not_met
from pi_runtime.artifact.schema import Layer

EXACT = Candidate(layer=Layer(rung="gate"), reads=Reads(first=100, rest=0), error=0.0)


def predicted(time: float, error: float, fmt: str = "f16", rank: int = 32) -> Candidate:
    return Candidate(
        layer=Layer(rung="predicted", rank=rank), format=fmt, error=error,
        reads=Reads(first=time, rest=0),
    )  # fmt: skip


def time(c: Candidate) -> float:
    return c.reads.total


def divergence(chosen: Sequence[Candidate]) -> float:
    """The divergence of a choice, as if errors added up."""
    return sum(c.error for c in chosen)


def choice(options: Any, most: float, formats: Sequence[str] = ("f16",), measured: list[Any] | None = None) -> Any:
    def measure(chosen: Sequence[Candidate]) -> Any:
        if measured is not None:
            measured.append(list(chosen))
        return divergence(chosen), SimpleNamespace()

    return choose_rungs(options, most, formats=formats, time=time, measure=measure, on_pass=lambda: None)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("most", [1e-6, 1e-4, 1e-2])
def test_it_keeps_the_budget_and_wastes_little(seed: int, most: float) -> None:
    rng = np.random.default_rng(seed)
    options = [
        [EXACT, *(predicted(t, e) for t, e in zip(rng.uniform(20, 99, 4), 10 ** rng.uniform(-8, -2, 4), strict=True))]
        for _ in range(4)
    ]
    found = choice(options, most)
    assert divergence(found.candidates) <= most
    best = min(sum(map(time, c)) for c in itertools.product(*options) if divergence(c) <= most)
    spent = sum(map(time, found.candidates))
    # One multiplier misses what lies inside the hull of each layer's choices: at most the largest step of one layer.
    assert best <= spent <= best + 80
    # No layer could be quicker by itself at no more error.
    for layer, c in zip(options, found.candidates, strict=True):
        assert not any(time(o) < time(c) and o.error <= c.error for o in layer)


def test_with_nothing_to_spend_it_errs_least() -> None:
    measured: list[Any] = []
    found = choice([[EXACT, predicted(10, 1e-9)], [predicted(20, 1e-3), predicted(30, 1e-5)]], 0.0, measured=measured)
    assert found.candidates == (EXACT, predicted(30, 1e-5))
    assert len(measured) == 1  # no multiplier is searched


def test_a_choice_is_not_measured_twice_in_a_row() -> None:
    measured: list[Any] = []
    choice([[EXACT, predicted(10, 1e-5)]], 1e-3, measured=measured)
    assert len(measured) < PASSES
    assert all(a != b for a, b in itertools.pairwise(measured))


@pytest.mark.parametrize("slope", [1e-3, 0.3, 1.0, 7.0, 1e4])
@pytest.mark.parametrize("bend", [0.8, 1.0, 1.3])
def test_few_passes_find_how_far_the_budget_reaches(slope: float, bend: float) -> None:
    """Whatever a layer's error is to the divergence, and if it is not quite in proportion."""
    rng = np.random.default_rng(3)
    options = [
        [EXACT, *(predicted(t, e) for t, e in zip(rng.uniform(20, 99, 9), 10 ** rng.uniform(-7, -2, 9), strict=True))]
        for _ in range(12)
    ]
    measured: list[Any] = []

    def measure(chosen: Sequence[Candidate]) -> Any:
        measured.append(chosen)
        return slope * (divergence(chosen) / 1e-3) ** bend * 1e-3, SimpleNamespace()

    most = slope * 1e-3
    found = choose_rungs(options, most, formats=["f16"], time=time, measure=measure, on_pass=lambda: None)
    assert len(measured) <= PASSES
    assert found.cost <= most
    known = choice(options, 1e-3)
    assert sum(map(time, found.candidates)) <= 1.1 * sum(map(time, known.candidates))


def test_of_formats_the_quickest_that_keeps_the_budget() -> None:
    options = [[EXACT, predicted(50, 1e-5, "f16"), predicted(30, 1e-4, "q8"), predicted(20, 1e-1, "q4")]] * 2
    assert choice(options, 1e-3, ["f16", "q8", "q4"]).predictor_format == "q8"
    assert choice(options, 1.0, ["f16", "q8", "q4"]).predictor_format == "q4"
    assert choice(options, 5e-5, ["f16", "q8", "q4"]).predictor_format == "f16"
    mixed = choice(options, 1e-3, ["f16", "q8", "q4"]).candidates
    assert {c.format for c in mixed} == {"q8"}  # one format for all layers


def test_where_none_keeps_it_the_least_divergence() -> None:
    options = [[predicted(50, 1e-2, "f16"), predicted(30, 1e-3, "q8")]]
    found = choice(options, 1e-6, ["f16", "q8"])
    assert (found.predictor_format, found.candidates[0].error) == ("q8", 1e-3)


def test_the_error_names_the_layers_that_lose_most() -> None:
    found = SimpleNamespace(candidates=[predicted(1, e) for e in (1e-3, 5e-2, 1e-5, 2e-2, 1e-4)])
    message = str(not_met(found, 0.0123, 0.001))
    assert "found: 1.23e-02" in message
    assert "layers 1 (predicted, error 5.0e-02), 3 (predicted, error 2.0e-02), 0 (predicted, error 1.0e-03)" in message
