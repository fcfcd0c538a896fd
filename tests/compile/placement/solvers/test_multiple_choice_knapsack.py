"""The exact knapsack against brute force, against HiGHS's own search, and against itself by another way."""

import itertools
from collections.abc import Sequence
from fractions import Fraction

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi_compile.placement.solvers import multiple_choice_knapsack
from pi_compile.placement.solvers.multiple_choice_knapsack import Choice, Solution, search_front, search_table, solve


def brute(choices: Sequence[Choice], capacity: int) -> tuple[int, ...]:
    """Greatest value, then least weight, then the largest options of the first classes."""
    options = [range(len(c.weights)) for c in choices]
    fitting = []
    for picks in itertools.product(*options):
        weight = sum(int(c.weights[j]) for c, j in zip(choices, picks, strict=True))
        if weight <= capacity:
            fitting.append((sum(int(c.values[j]) for c, j in zip(choices, picks, strict=True)), -weight, picks))
    return max(fitting)[2]


def choice(weights: Sequence[int], values: Sequence[int]) -> Choice:
    return Choice(np.array([0, *weights], np.int64), np.array([0, *values], np.int64))


def drawn(rng: np.random.Generator, classes: int, options: int, most: int) -> list[Choice]:
    """Classes as layers make them: values rise with weights, by falling steps or any."""
    found = []
    for _ in range(classes):
        steps = rng.integers(0, most, int(rng.integers(0, options + 1)))
        values = np.cumsum(-np.sort(-steps) if rng.random() < 0.7 else steps)
        weight = int(rng.integers(1, 40))
        first = int(rng.integers(0, len(steps) + 1))
        weights = weight * np.arange(1, len(steps) + 1)
        found.append(choice(weights[first:].tolist(), values[first:].tolist()))
    return found


def capacity_of(rng: np.random.Generator, choices: Sequence[Choice]) -> int:
    return int(rng.integers(0, sum(int(c.weights[-1]) for c in choices) + 3))


@pytest.mark.parametrize("most", [2, 5, 1000, 10**12])
def test_equals_brute_force_ties_included(most: int) -> None:
    rng = np.random.default_rng(most)
    for case in range(400):
        choices = drawn(rng, 3, 5, most)
        capacity = capacity_of(rng, choices)
        assert solve(choices, capacity).picks == brute(choices, capacity), (case, choices, capacity)


classes = st.lists(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=4), min_size=1, max_size=4)


@given(classes, st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_equals_brute_force_for_any_options(drawn_classes: list[list[tuple[int, int]]], capacity: int) -> None:
    choices = [choice(np.cumsum([w for w, _ in c]).tolist(), [v for _, v in c]) for c in drawn_classes]
    assert solve(choices, capacity).picks == brute(choices, capacity)


@pytest.mark.parametrize("search", [search_table, search_front], ids=["table", "front"])
def test_each_search_alone_equals_brute_force(search: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiple_choice_knapsack, "search_table", search)
    monkeypatch.setattr(multiple_choice_knapsack, "search_front", search)
    rng = np.random.default_rng(7)
    for _ in range(300):
        choices = drawn(rng, 3, 5, 6)
        capacity = capacity_of(rng, choices)
        assert solve(choices, capacity).picks == brute(choices, capacity), (choices, capacity)


def test_a_front_grown_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    monkeypatch.setattr(multiple_choice_knapsack, "TABLE_CELLS", -1)
    cases = [drawn(rng, 6, 12, 5) for _ in range(40)]
    capacities = [capacity_of(rng, choices) for choices in cases]
    whole = [solve(*case).picks for case in zip(cases, capacities, strict=True)]
    monkeypatch.setattr(multiple_choice_knapsack, "CANDIDATES", 3)
    assert [solve(*case).picks for case in zip(cases, capacities, strict=True)] == whole


@pytest.mark.parametrize("price", [Fraction(0), Fraction(1, 3), Fraction(10**6)], ids=str)
@pytest.mark.parametrize("cells", [-1, 1 << 18], ids=["front", "table"])
def test_the_price_decides_nothing_but_speed(price: Fraction, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(9)
    monkeypatch.setattr(multiple_choice_knapsack, "TABLE_CELLS", cells)
    cases = [drawn(rng, 5, 10, 1000) for _ in range(30)]
    capacities = [capacity_of(rng, choices) for choices in cases]
    expected = [solve(*case).picks for case in zip(cases, capacities, strict=True)]
    monkeypatch.setattr(multiple_choice_knapsack, "relaxation_price", lambda *_: price)
    assert [solve(*case).picks for case in zip(cases, capacities, strict=True)] == expected


def highs_optimum(choices: Sequence[Choice], capacity: int) -> int:
    """The same program with binaries, by HiGHS's branch and bound at zero gap."""
    classes = np.repeat(np.arange(len(choices), dtype=np.int32), [len(c.weights) - 1 for c in choices])
    weights = np.concatenate([c.weights[1:] for c in choices]).astype(float)
    values = np.concatenate([c.values[1:] for c in choices]).astype(float)
    model = multiple_choice_knapsack._model(classes, weights, values, len(choices), float(capacity))
    model.integrality_ = np.full(len(classes), highspy.HighsVarType.kInteger)
    highs = highspy.Highs()
    options = {"output_flag": False, "threads": 1, "mip_rel_gap": 0.0, "mip_abs_gap": 0.0}
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(model)
    highs.run()
    return round(highs.getInfo().objective_function_value)


def test_equals_the_branch_and_bound_of_highs() -> None:
    rng = np.random.default_rng(10)
    for _ in range(25):
        choices = [c for c in drawn(rng, 8, 30, 1000) if len(c.weights) > 1]
        capacity = capacity_of(rng, choices) // 2
        found = solve(choices, capacity)
        assert found.value == highs_optimum(choices, capacity)
        assert found.value <= found.relaxed


def test_large_numbers_stay_exact() -> None:
    """One unit in 10¹⁷ decides, which no float64 can tell."""
    choices = [choice([10], [10**17]), choice([10], [10**17 + 1]), choice([10], [10**17])]
    assert solve(choices, 10) == Solution(picks=(0, 1, 0), weight=10, value=10**17 + 1, relaxed=10**17 + 1)
    assert solve(choices, 29).picks == (1, 1, 0)


def test_no_capacity_and_no_options() -> None:
    assert solve([choice([3], [5])], 0).picks == (0,)
    assert solve([choice([], []), choice([3], [5])], 9) == Solution(picks=(0, 1), weight=3, value=5, relaxed=5)
    assert solve([choice([], [])], 9) == Solution(picks=(0,), weight=0, value=0, relaxed=0)
