"""The exact chain solver against brute force, against HiGHS's branch and bound, and against itself by other prices."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi_compile.placement.solvers import constrained_path as module
from pi_compile.placement.solvers import pareto_labels
from pi_compile.placement.solvers.constrained_path import Chain, Node, solve
from pi_compile.placement.solvers.lagrangian_bounds import NEVER

Answer = tuple[int, int, int, tuple[int, ...]]


def brute(cases: Sequence[Chain]) -> Answer | None:
    """Cost, weight, load and preference of the best way, by looking at all of them."""
    found = []
    for chain in cases:
        for nodes in itertools.product(*(range(len(stage)) for stage in chain.stages)):
            steps = sum(chain.steps[t][a][b] for t, (a, b) in enumerate(itertools.pairwise(nodes)))
            entered = [stage[k] for stage, k in zip(chain.stages, nodes, strict=True)]
            for options in itertools.product(*(range(len(n.costs)) for n in entered)):
                cost, weight, load = (
                    sum(int(getattr(n, name)[o]) for n, o in zip(entered, options, strict=True))
                    for name in ("costs", "weights", "loads")
                )
                over = weight > chain.capacity or (chain.limit is not None and load > chain.limit)
                if steps < NEVER and not over:
                    ranks = (x for n, o in zip(entered, options, strict=True) for x in (n.rank, o))
                    found.append((cost + steps, weight, load, tuple(ranks)))
    return min(found, default=None)


def answer(cases: Sequence[Chain]) -> Answer | None:
    way = solve(cases)
    if way is None:
        return None
    assert way.bound <= way.cost
    entered = [stage[k] for stage, k in zip(cases[way.case].stages, way.nodes, strict=True)]
    ranks = (x for n, o in zip(entered, way.options, strict=True) for x in (n.rank, o))
    return way.cost, way.weight, way.load, tuple(ranks)


def drawn(rng: np.random.Generator, most: int) -> list[Chain]:
    """One or two cases with the same budgets, of up to four stages."""
    heaviest, stages = int(rng.choice([3, 40])), int(rng.integers(1, 5))
    capacity, limit = int(rng.integers(0, 60)), None if rng.random() < 0.4 else int(rng.integers(0, 25))
    cases = []
    for _ in range(int(rng.integers(1, 3))):
        nodes = [
            [
                Node(
                    costs=rng.integers(0, most, n),
                    weights=rng.integers(0, heaviest, n),
                    loads=rng.integers(0, 10, n),
                    rank=rank,
                    tally=int(rng.integers(0, 2)),
                )
                for rank, n in enumerate(rng.integers(1, 4, int(rng.integers(1, 3))))
            ]
            for _ in range(stages)
        ]
        steps = [
            [[NEVER if rng.random() < 0.1 else int(rng.integers(0, most)) for _ in b] for _ in a]
            for a, b in itertools.pairwise(nodes)
        ]
        cases.append(Chain(nodes, steps, capacity, limit))
    return cases


@pytest.mark.parametrize("most", [2, 20, 10**9])
def test_equals_brute_force_ties_included(most: int) -> None:
    rng = np.random.default_rng(most)
    for case in range(80):
        cases = drawn(rng, most)
        assert answer(cases) == brute(cases), (case, cases)


option = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))
node = st.lists(option, min_size=1, max_size=3)


@given(st.lists(st.lists(node, min_size=2, max_size=2), min_size=1, max_size=3), st.integers(0, 15), st.integers(0, 15))
@settings(max_examples=100, deadline=None)
def test_equals_brute_force_for_any_options(
    stages: list[list[list[tuple[int, int, int]]]], capacity: int, limit: int
) -> None:
    made = [
        [Node(*(np.array(a, np.int64) for a in zip(*n, strict=True)), rank=k, tally=k) for k, n in enumerate(stage)]  # type: ignore[arg-type]
        for stage in stages
    ]
    chain = Chain(made, [[[0, 2], [3, 0]]] * (len(made) - 1), capacity, limit)
    assert answer([chain]) == brute([chain])


def layered(rng: np.random.Generator, layers: int, cuts: int, *, same: bool) -> Chain:
    """As placing makes them: two sides, cuts of falling worth, a block with one side, crossings."""
    stages = []
    for n in range(layers):
        if n == 0 or not same:
            gains = -np.sort(-rng.integers(0, 1000, cuts))
            block, saved = int(rng.integers(30, 60)), int(rng.integers(500, 5000))
        time = int(gains.sum()) - np.concatenate([[0], np.cumsum(gains)])
        weights = 7 * np.arange(cuts + 1)
        sides = [(0, block, -1, 1), (saved, 0, 0, 0)]
        stages.append([Node(time + more, weights + heavy, weights[::-1], *rest) for more, heavy, *rest in sides])
    whole = sum(int(stage[0].weights.max()) for stage in stages)
    return Chain(stages, [[[0, 300], [300, 0]]] * (layers - 1), whole * int(rng.integers(1, 90)) // 100)


def highs_optimum(chain: Chain) -> int:
    """A binary an option and one a crossing, solved by branch and bound at zero gap."""
    model = highspy.Highs()
    for name, value in {"output_flag": False, "threads": 1, "mip_rel_gap": 0.0, "mip_abs_gap": 0.0}.items():
        model.setOptionValue(name, value)
    taken = [[[model.addBinary() for _ in n.costs] for n in stage] for stage in chain.stages]
    cost, weight = [], []
    for stage, binaries in zip(chain.stages, taken, strict=True):
        model.addConstr(sum(b for node in binaries for b in node) == 1)
        for n, row in zip(stage, binaries, strict=True):
            cost += [int(c) * b for c, b in zip(n.costs, row, strict=True)]
            weight += [int(w) * b for w, b in zip(n.weights, row, strict=True)]
    for t, (here, there) in enumerate(itertools.pairwise(taken)):
        for k, j in ((0, 1), (1, 0)):
            crossing = model.addBinary()
            model.addConstr(crossing >= sum(here[k]) + sum(there[j]) - 1)
            cost.append(chain.steps[t][k][j] * crossing)
    model.addConstr(sum(weight) <= chain.capacity)
    model.minimize(sum(cost))
    return round(model.getObjectiveValue())


@pytest.mark.parametrize("same", [False, True], ids=["differing", "identical"])
def test_equals_the_branch_and_bound_of_highs(same: bool) -> None:
    rng = np.random.default_rng(10)
    for _ in range(6):
        chain = layered(rng, 5, 8, same=same)
        way = solve([chain])
        assert way is not None
        assert way.cost == highs_optimum(chain)


def test_neither_prices_nor_slack_nor_pieces_decide_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(11)
    chains = [layered(rng, 6, 10, same=bool(n % 2)) for n in range(8)]
    chains += [replace(c, limit=7 * 40) for c in chains]
    expected = [answer([c]) for c in chains]
    for name, value in (("AROUND", (0,)), ("AROUND", (3, 0.1)), ("_FIRST_SLACK", 4), ("CANDIDATES", 7)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert [answer([c]) for c in chains] == expected, name


def test_a_table_finds_what_sorting_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers alike whose cuts are worth the same a byte over long stretches: nearly everything is a tie."""
    rng, used = np.random.default_rng(13), []
    tabulated = pareto_labels.tabulated
    chains = []
    for n in range(6):
        stages = layered(rng, 6, 60, same=True).stages
        gain, last = int(rng.integers(5, 50)), 3 if n % 3 == 0 else 7
        costs = gain * np.arange(61)
        steps = np.array([*range(0, 60 * 7, 7), 59 * 7 + last])
        alike = [
            [
                Node(costs + int(n.costs.min()), steps[::-1] + int(n.weights.min()), steps, n.rank, n.tally)
                for n in stage
            ]
            for stage in stages
        ]
        capacity = 6 * 60 * 7 * int(rng.integers(10, 90)) // 100
        chains.append(Chain(alike, [[[0, 300], [300, 0]]] * 5, capacity))
    monkeypatch.setattr(module, "tabulated", lambda *a: used.append(tabulated(*a)) or used[-1])
    found = [answer([c]) for c in chains]
    assert any(front is not None for front in used)
    monkeypatch.setattr(module, "tabulated", lambda *_: None)
    assert [answer([c]) for c in chains] == found


def test_tallies_only_guide() -> None:
    rng = np.random.default_rng(12)
    for _ in range(10):
        chain = layered(rng, 5, 6, same=False)
        plain = replace(chain, stages=[[replace(n, tally=0) for n in stage] for stage in chain.stages])
        assert answer([plain]) == answer([chain])


def test_large_numbers_stay_exact() -> None:
    """One picosecond in 15 minutes decides."""

    def node(*costs: int) -> Node:
        return Node(np.array(costs), np.array([0, 10]), np.array([0, 0]))

    first, second = node(3 * 10**14 + 1, 3 * 10**14), node(3 * 10**14 + 1, 3 * 10**14 - 1)
    way = solve([Chain([[first], [second]], [[[0]]], 10)])
    assert way is not None
    assert (way.options, way.cost, way.weight) == ((0, 1), 6 * 10**14, 10)


def test_nothing_fits() -> None:
    heavy = Node(np.array([1]), np.array([5]), np.array([5]))
    assert solve([Chain([[heavy]], [], 4)]) is None
    assert solve([Chain([[heavy]], [], 5, 4)]) is None
    assert solve([Chain([[heavy]], [], -1)]) is None
    assert solve([Chain([[heavy], [heavy]], [[[NEVER]]], 50)]) is None
    way = solve([Chain([[heavy]], [], 5, 5)])
    assert way is not None
    assert way.cost == 1
