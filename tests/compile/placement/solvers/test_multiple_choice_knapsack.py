"""The exact knapsack against brute force, against HiGHS's branch and bound, and with other multipliers."""

import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi_compile.placement.solvers import multiple_choice_knapsack
from pi_compile.placement.solvers.mixed_integer_program import MixedIntegerProgram
from pi_compile.placement.solvers.multiple_choice_knapsack import ItemClass, Selection, solve


def brute(classes: Sequence[ItemClass], capacity: int) -> tuple[int, ...]:
    """Greatest value, then least weight, then the largest items of the first classes."""
    items_of = [range(len(c.weights)) for c in classes]
    fitting = []
    for items in itertools.product(*items_of):
        weight = sum(int(c.weights[j]) for c, j in zip(classes, items, strict=True))
        if weight <= capacity:
            fitting.append((sum(int(c.values[j]) for c, j in zip(classes, items, strict=True)), -weight, items))
    return max(fitting)[2]


def item_class(weights: Sequence[int], values: Sequence[int]) -> ItemClass:
    return ItemClass(np.array([0, *weights], np.int64), np.array([0, *values], np.int64))


def drawn(rng: np.random.Generator, classes: int, options: int, most: int) -> list[ItemClass]:
    """Classes as layers make them: values rise with weights, by falling steps or any."""
    found = []
    for _ in range(classes):
        steps = rng.integers(0, most, int(rng.integers(0, options + 1)))
        values = np.cumsum(-np.sort(-steps) if rng.random() < 0.7 else steps)
        weight = int(rng.integers(1, 40))
        first = int(rng.integers(0, len(steps) + 1))
        weights = weight * np.arange(1, len(steps) + 1)
        found.append(item_class(weights[first:].tolist(), values[first:].tolist()))
    return found


def capacity_of(rng: np.random.Generator, classes: Sequence[ItemClass]) -> int:
    return int(rng.integers(0, sum(int(c.weights[-1]) for c in classes) + 3))


@pytest.mark.parametrize("most", [2, 5, 1000, 10**12])
def test_equals_brute_force_ties_included(most: int) -> None:
    rng = np.random.default_rng(most)
    for case in range(400):
        classes = drawn(rng, 3, 5, most)
        capacity = capacity_of(rng, classes)
        assert solve(classes, capacity).items == brute(classes, capacity), (case, classes, capacity)


classes = st.lists(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=4), min_size=1, max_size=4)


@given(classes, st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_equals_brute_force_for_any_options(drawn_classes: list[list[tuple[int, int]]], capacity: int) -> None:
    classes = [item_class(np.cumsum([w for w, _ in c]).tolist(), [v for _, v in c]) for c in drawn_classes]
    assert solve(classes, capacity).items == brute(classes, capacity)


def test_a_front_grown_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    cases = [drawn(rng, 6, 12, 5) for _ in range(40)]
    capacities = [capacity_of(rng, classes) for classes in cases]
    whole = [solve(*case).items for case in zip(cases, capacities, strict=True)]
    monkeypatch.setattr(multiple_choice_knapsack, "CANDIDATES", 3)
    assert [solve(*case).items for case in zip(cases, capacities, strict=True)] == whole


@pytest.mark.parametrize("multiplier", [Fraction(0), Fraction(1, 3), Fraction(10**6)], ids=str)
def test_the_multiplier_decides_nothing_but_speed(multiplier: Fraction, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(9)
    cases = [drawn(rng, 5, 10, 1000) for _ in range(30)]
    capacities = [capacity_of(rng, classes) for classes in cases]
    expected = [solve(*case).items for case in zip(cases, capacities, strict=True)]
    monkeypatch.setattr(multiple_choice_knapsack, "relaxation_multiplier", lambda *_: multiplier)
    assert [solve(*case).items for case in zip(cases, capacities, strict=True)] == expected


def highs_optimum(classes: Sequence[ItemClass], capacity: int) -> int:
    """The same problem with binaries, by HiGHS's branch and bound at zero gap."""
    program = MixedIntegerProgram(maximise=True)
    items = [program.variables(c.values) for c in classes]
    for taken in items:
        program.row([(taken, 1.0)], 1.0, 1.0)
    program.row([(taken, c.weights) for taken, c in zip(items, classes, strict=True)], 0.0, capacity)
    answer = program.solve(60.0)
    assert answer is not None
    return round(answer.objective)


def test_equals_the_branch_and_bound_of_highs() -> None:
    rng = np.random.default_rng(10)
    for _ in range(25):
        classes = [c for c in drawn(rng, 8, 30, 1000) if len(c.weights) > 1]
        capacity = capacity_of(rng, classes) // 2
        found = solve(classes, capacity)
        assert found.value == highs_optimum(classes, capacity)
        assert found.value <= found.bound


def test_large_numbers_stay_exact() -> None:
    """One unit in 10¹⁷ decides, which no float64 can tell."""
    classes = [item_class([10], [10**17]), item_class([10], [10**17 + 1]), item_class([10], [10**17])]
    assert solve(classes, 10) == Selection(items=(0, 1, 0), weight=10, value=10**17 + 1, bound=10**17 + 1)
    assert solve(classes, 29).items == (1, 1, 0)


def test_no_capacity_and_no_options() -> None:
    assert solve([item_class([3], [5])], 0).items == (0,)
    assert solve([item_class([], []), item_class([3], [5])], 9) == Selection(items=(0, 1), weight=3, value=5, bound=5)
    assert solve([item_class([], [])], 9) == Selection(items=(0,), weight=0, value=0, bound=0)
