"""The exact solver against brute force, against HiGHS's branch and bound, and against itself with other multipliers."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi_compile.placement.solvers import constrained_path, enumeration
from pi_compile.placement.solvers.constrained_path import most_value, solve
from pi_compile.placement.solvers.layered_graph import NEVER, LayeredGraph, Node
from pi_compile.placement.solvers.mixed_integer_program import MixedIntegerProgram

Answer = tuple[int, int, int, tuple[int, ...]]


def brute(graphs: Sequence[LayeredGraph]) -> Answer | None:
    """Cost, VRAM, RAM and preference of the best path, by looking at all of them."""
    found = []
    for graph in graphs:
        for nodes in itertools.product(*(range(len(stage)) for stage in graph.stages)):
            arcs = sum(graph.arcs[t][a][b] for t, (a, b) in enumerate(itertools.pairwise(nodes)))
            entered = [stage[k] for stage, k in zip(graph.stages, nodes, strict=True)]
            for options in itertools.product(*(range(len(n.costs)) for n in entered)):
                cost, vram, ram = (
                    sum(int(getattr(n, name)[o]) for n, o in zip(entered, options, strict=True))
                    for name in ("costs", "vram", "ram")
                )
                over = vram > graph.vram_budget or (graph.ram_budget is not None and ram > graph.ram_budget)
                if arcs < NEVER and not over:
                    ranks = (x for n, o in zip(entered, options, strict=True) for x in (n.preference, o))
                    found.append((cost + arcs, vram, ram, tuple(ranks)))
    return min(found, default=None)


def answer(graphs: Sequence[LayeredGraph]) -> Answer | None:
    path = solve(graphs)
    if path is None:
        return None
    assert path.bound <= path.cost
    entered = [stage[k] for stage, k in zip(graphs[path.graph].stages, path.nodes, strict=True)]
    ranks = (x for n, o in zip(entered, path.options, strict=True) for x in (n.preference, o))
    return path.cost, path.vram, path.ram, tuple(ranks)


def drawn(rng: np.random.Generator, most: int) -> list[LayeredGraph]:
    """One or two graphs with the same budgets, of up to four stages."""
    heaviest, stages = int(rng.choice([3, 40])), int(rng.integers(1, 5))
    vram_budget, ram_budget = int(rng.integers(0, 60)), None if rng.random() < 0.4 else int(rng.integers(0, 25))
    graphs = []
    for _ in range(int(rng.integers(1, 3))):
        nodes = [
            [
                Node(
                    costs=rng.integers(0, most, n),
                    vram=rng.integers(0, heaviest, n),
                    ram=rng.integers(0, 10, n),
                    preference=rank,
                    stratum=int(rng.integers(0, 2)),
                )
                for rank, n in enumerate(rng.integers(1, 4, int(rng.integers(1, 3))))
            ]
            for _ in range(stages)
        ]
        arcs = [
            [[NEVER if rng.random() < 0.1 else int(rng.integers(0, most)) for _ in b] for _ in a]
            for a, b in itertools.pairwise(nodes)
        ]
        graphs.append(LayeredGraph(nodes, arcs, vram_budget, ram_budget))
    return graphs


@pytest.mark.parametrize("most", [2, 20, 10**9])
def test_equals_brute_force_ties_included(most: int, long: bool) -> None:
    rng = np.random.default_rng(most)
    for case in range(80 if long else 30):
        graphs = drawn(rng, most)
        assert answer(graphs) == brute(graphs), (case, graphs)


option = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))
node = st.lists(option, min_size=1, max_size=3)


@given(st.lists(st.lists(node, min_size=2, max_size=2), min_size=1, max_size=3), st.integers(0, 15), st.integers(0, 15))
def test_equals_brute_force_for_any_options(
    stages: list[list[list[tuple[int, int, int]]]], vram_budget: int, ram_budget: int
) -> None:
    made = [
        [
            Node(*(np.array(a, np.int64) for a in zip(*n, strict=True)), preference=k, stratum=k)  # type: ignore[arg-type]
            for k, n in enumerate(stage)
        ]
        for stage in stages
    ]
    graph = LayeredGraph(made, [[[0, 2], [3, 0]]] * (len(made) - 1), vram_budget, ram_budget)
    assert answer([graph]) == brute([graph])


def equal(rng: np.random.Generator) -> list[LayeredGraph]:
    """Two graphs of equal layers with two sides, as placing makes them; crossings from free to dear."""
    crossing, heaviest, layers = int(rng.choice([0, 1, 8])), int(rng.choice([2, 9])), int(rng.integers(2, 4))

    def node(options: int, rank: int) -> Node:
        use = (rng.integers(0, most, options) for most in (10, heaviest, heaviest))
        return Node(*use, preference=rank, stratum=int(rank == large))

    large = int(rng.integers(0, 2))
    inner, between = [node(3, 0), node(2, 1)], [[0, crossing], [crossing, 0]]
    vram_budget, ram_budget = (int(rng.integers(0, 2 * layers * heaviest // 3 + 1)) for _ in range(2))
    graphs = []
    for start, end in ((0, 1), (1, 1)):
        stages = [[node(1, start)], *[inner] * layers, [node(1, end)]]
        ends = [between[start]], [[row[end]] for row in between]
        graphs.append(LayeredGraph(stages, [ends[0], *[between] * (layers - 1), ends[1]], vram_budget, ram_budget))
    return [
        replace(g, stages=[[replace(n, stratum=0)] if len(s) == 1 else s for s in g.stages for n in s[:1]])
        for g in graphs
    ]


def test_equal_layers_equal_brute_force_ties_included(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fronts are too large, everything is enumerated, with the same answer."""
    rng = np.random.default_rng(5)
    fits = 0
    for case in range(24):
        graphs = equal(rng)
        expected = brute(graphs)
        assert answer(graphs) == expected, case
        fits += expected is not None
        with monkeypatch.context() as patch:
            patch.setattr(constrained_path, "MOST_LABELS", 0)
            assert answer(graphs) == expected, case
    assert fits > 4


def layered(rng: np.random.Generator, layers: int, cuts: int, *, same: bool) -> LayeredGraph:
    """As placing makes them: two sides, cuts of falling worth, a block with one side, crossings."""
    stages = []
    for n in range(layers):
        if n == 0 or not same:
            gains = -np.sort(-rng.integers(0, 1000, cuts))
            block, saved = int(rng.integers(30, 60)), int(rng.integers(500, 5000))
        time = int(gains.sum()) - np.concatenate([[0], np.cumsum(gains)])
        vram = 7 * np.arange(cuts + 1)
        sides = [(0, block, -1, 1), (saved, 0, 0, 0)]
        stages.append([Node(time + more, vram + block, vram[::-1], *rest) for more, block, *rest in sides])
    whole = sum(int(stage[0].vram.max()) for stage in stages)
    return LayeredGraph(stages, [[[0, 300], [300, 0]]] * (layers - 1), whole * int(rng.integers(1, 90)) // 100)


def highs_optimum(graph: LayeredGraph) -> int:
    """A binary an option and one a crossing, solved by branch and bound at zero gap."""
    program = MixedIntegerProgram()
    taken = [[program.variables(n.costs) for n in stage] for stage in graph.stages]
    for nodes in taken:
        program.row([(options, 1.0) for options in nodes], 1.0, 1.0)
    for t, (before, after) in enumerate(itertools.pairwise(taken)):
        for k, j in ((0, 1), (1, 0)):
            crossing = program.variables([graph.arcs[t][k][j]])
            program.row([(crossing, 1.0), (before[k], -1.0), (after[j], -1.0)], -1.0, np.inf)
    vram = [(taken[t][k], n.vram) for t, stage in enumerate(graph.stages) for k, n in enumerate(stage)]
    program.row(vram, 0.0, graph.vram_budget)
    answer = program.solve(60.0)
    assert answer is not None
    return round(answer.objective)


@pytest.mark.parametrize("same", [False, True], ids=["differing", "identical"])
def test_equals_the_branch_and_bound_of_highs(same: bool) -> None:
    rng = np.random.default_rng(10)
    for _ in range(6):
        graph = layered(rng, 5, 8, same=same)
        path = solve([graph])
        assert path is not None
        assert path.cost == highs_optimum(graph)


def test_neither_multipliers_nor_gap_nor_pieces_decide_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(11)
    graphs = [layered(rng, 6, 10, same=bool(n % 2)) for n in range(4)]
    graphs += [replace(c, ram_budget=7 * 40) for c in graphs]
    expected = [answer([c]) for c in graphs]
    changes = [("FACTORS", (0,)), ("FACTORS", (3, 0.1)), ("_FIRST_GAP", 4), ("CANDIDATES", 7)]
    for name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(constrained_path if hasattr(constrained_path, name) else enumeration, name, value)
            assert [answer([c]) for c in graphs] == expected, name


def test_a_table_finds_what_sorting_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers alike whose cuts are worth the same a byte over long stretches: nearly everything is a tie."""
    rng, used = np.random.default_rng(13), []
    tabulated = enumeration.tabulated
    graphs = []
    for n in range(6):
        stages = layered(rng, 6, 60, same=True).stages
        gain, last = int(rng.integers(5, 50)), 3 if n % 3 == 0 else 7
        costs = gain * np.arange(61)
        steps = np.array([*range(0, 60 * 7, 7), 59 * 7 + last])
        alike = [
            [
                Node(costs + int(n.costs.min()), steps[::-1] + int(n.vram.min()), steps, n.preference, n.stratum)
                for n in stage
            ]
            for stage in stages
        ]
        capacity = 6 * 60 * 7 * int(rng.integers(10, 90)) // 100
        graphs.append(LayeredGraph(alike, [[[0, 300], [300, 0]]] * 5, capacity))
    monkeypatch.setattr(enumeration, "tabulated", lambda *a: used.append(tabulated(*a)) or used[-1])
    found = [answer([c]) for c in graphs]
    assert any(front is not None for front in used)
    monkeypatch.setattr(enumeration, "tabulated", lambda *_: None)
    assert [answer([c]) for c in graphs] == found


def test_tallies_only_guide() -> None:
    rng = np.random.default_rng(12)
    for _ in range(10):
        graph = layered(rng, 5, 6, same=False)
        plain = replace(graph, stages=[[replace(n, stratum=0) for n in stage] for stage in graph.stages])
        assert answer([plain]) == answer([graph])


def test_large_numbers_stay_exact() -> None:
    """One picosecond in 15 minutes decides."""

    def node(*costs: int) -> Node:
        return Node(np.array(costs), np.array([0, 10]), np.array([0, 0]))

    first, second = node(3 * 10**14 + 1, 3 * 10**14), node(3 * 10**14 + 1, 3 * 10**14 - 1)
    path = solve([LayeredGraph([[first], [second]], [[[0]]], 10)])
    assert path is not None
    assert (path.options, path.cost, path.vram) == ((0, 1), 6 * 10**14, 10)


def test_nothing_fits() -> None:
    heavy = Node(np.array([1]), np.array([5]), np.array([5]))
    assert solve([LayeredGraph([[heavy]], [], 4)]) is None
    assert solve([LayeredGraph([[heavy]], [], 5, 4)]) is None
    assert solve([LayeredGraph([[heavy]], [], -1)]) is None
    assert solve([LayeredGraph([[heavy], [heavy]], [[[NEVER]]], 50)]) is None
    path = solve([LayeredGraph([[heavy]], [], 5, 5)])
    assert path is not None
    assert path.cost == 1


# The knapsack.

Classes = list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]


def most_value_by_hand(classes: Classes, capacity: int) -> list[int]:
    """Greatest value, then least weight, then the heaviest items of the first classes."""
    fitting = []
    for items in itertools.product(*(range(len(weights)) for weights, _ in classes)):
        weight, value = (sum(int(one[k][j]) for one, j in zip(classes, items, strict=True)) for k in (0, 1))
        if weight <= capacity:
            fitting.append((value, -weight, items))
    return list(max(fitting)[2])


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=4), min_size=1, max_size=4),
    st.integers(0, 60),
    st.sampled_from([1, 10**13]),
)
@settings(max_examples=100, deadline=None)
def test_the_knapsack_equals_brute_force(drawn: list[list[tuple[int, int]]], capacity: int, unit: int) -> None:
    """One unit in 10¹³ decides, too."""
    classes = [
        (np.cumsum([0, *(w for w, _ in c)]), np.array([0, *(unit + v if unit > 1 else v for _, v in c)])) for c in drawn
    ]
    assert most_value(classes, capacity) == most_value_by_hand(classes, capacity)


def test_the_knapsack_equals_the_branch_and_bound_of_highs() -> None:
    rng = np.random.default_rng(10)
    for _ in range(10):
        classes = [(7 * np.arange(20), np.cumsum(-np.sort(-rng.integers(0, 1000, 20)))) for _ in range(8)]
        classes = [(weights, values - values[0]) for weights, values in classes]
        capacity, program = int(rng.integers(0, 500)), MixedIntegerProgram(maximise=True)
        items = [program.variables(values) for _, values in classes]
        for taken in items:
            program.row([(taken, 1.0)], 1.0, 1.0)
        program.row([(taken, weights) for taken, (weights, _) in zip(items, classes, strict=True)], 0.0, capacity)
        answer = program.solve(60.0)
        assert answer is not None
        found = most_value(classes, capacity)
        assert sum(int(values[j]) for (_, values), j in zip(classes, found, strict=True)) == round(answer.objective)
