"""The resource-constrained shortest path through a layered graph, solved exactly and with one answer.

At each stage a path enters one node and takes one of its options. An option has a cost and uses two resources, VRAM and
RAM; an arc between nodes of neighbouring stages has a cost. All are integers, none negative.

    minimise  Σ cost of options and arcs     subject to     Σ vram ≤ VRAM budget,   Σ ram ≤ RAM budget

The method is Lagrangian relaxation and enumeration (Carlyle, Royset and Wood, Lagrangian relaxation and enumeration for
solving constrained shortest-path problems, Networks 52(4), 2008). A Lagrange multiplier λ ≥ 0 moves a budget into the
cost, and what is left is a shortest path without budgets:

    L(λ)  =  min over all paths of   Σ cost + λ · ( Σ vram − VRAM budget )

By weak duality L(λ) is a lower bound of the optimum; the best λ gives the bound of the linear relaxation. The same
holds for a partial path: its cost, λ · its VRAM, and the shortest distance to its first node are together a lower bound
of every path that ends with it.

Enumeration extends partial paths from the last stage to the first. Each node keeps a set of non-dominated labels
(vram, ram, cost), and drops labels whose lower bound exceeds the relaxation's by more than the gap. The gap doubles
until a path is found. That path is optimal, because whatever was dropped costs more. Multipliers decide how long this
takes, never what is found.

The relaxation is loose where a few large nodes compete with many small options. So paths are divided into *strata* by
the number of large nodes they enter. Each stratum is bounded and enumerated by itself: there the relaxation is tight.

The RAM budget rarely binds. So it is left out at first. If the optimum found without it keeps it, that is the optimum.
If not, and if any path keeps both budgets, each has a multiplier (`column_generation`).

Ties: least cost, then least VRAM, then least RAM, then at the first stage where two paths differ the preferred node,
then the earlier option.

Where all stages between the ends are equal, the least cost is known before anything is enumerated: how many take each
option, not which. With the nodes in the order that `LayeredGraph.order` names, a path enters one node so many times in
a row, then the other. What n stages in a row can reach is a *front*: the non-dominated (cost, VRAM, RAM). Fronts of one
node serve every stratum of every graph. The least cost of a stratum joins a front of each node.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from pi_compile.placement.solvers.column_generation import Columns
from pi_compile.placement.solvers.enumeration import Enumeration
from pi_compile.placement.solvers.layered_graph import (
    COSTS,
    NEVER,
    Ints,
    LayeredGraph,
    Node,
    Relaxation,
    ShortestPath,
    coarse_relaxations,
    fine_relaxations,
    least_ram,
    relaxations_near,
    scaled,
)

_FIRST_GAP = 1 << 22
"""The first gap is the lower bound ÷ this."""
FACTORS = (1, 0, 1 / 2, 7 / 8, 9 / 8, 2)
"""Multipliers to bound with, as multiples of the best one."""


def solve(graphs: Sequence[LayeredGraph]) -> ShortestPath | None:
    """The exact optimum over some graphs of equal budgets under the tie rule; None where nothing fits."""
    if min(graphs[0].vram_budget, graphs[0].ram_budget or 0) < 0:
        return None
    graphs, vram_unit, ram_unit = scaled(graphs)
    path = _solve([replace(g, ram_budget=None) for g in graphs])
    budget = graphs[0].ram_budget
    if path is not None and budget is not None and path.ram > budget:
        least = _solve([replace(least_ram(g), ram_budget=None) for g in graphs])
        path = _solve(graphs) if least is not None and least.cost <= budget else None
    return None if path is None else replace(path, vram=path.vram * vram_unit, ram=path.ram * ram_unit)


def most_value(classes: Sequence[tuple[Ints, Ints]], capacity: int) -> list[int]:
    """The multiple-choice knapsack: one item of each class, so that the most value fits into the capacity.

    It is a path through stages of one node. A class is (weights, values) of its items by strictly rising weight, the
    first of which weighs nothing. Values sum to less than 2⁵⁰. Ties: greatest value, then least weight, then the
    heaviest item of class 0, then of class 1, and so on.
    """
    stages = [[Node((v.max() - v)[::-1], vram=w[::-1], ram=np.zeros_like(w))] for w, v in classes]
    path = solve([LayeredGraph(stages, [[[0]]] * (len(stages) - 1), capacity)])
    assert path is not None
    return [len(w) - 1 - option for (w, _), option in zip(classes, path.options, strict=True)]


@dataclass(frozen=True)
class _Stratum:
    """Paths of one graph that enter equally many large nodes; bounded and enumerated together."""

    graph: int
    stratum: int


class _Bounds:
    """Lower bound of each stratum: coarse for all of them, fine where it is asked for."""

    def __init__(self, graphs: Sequence[LayeredGraph]) -> None:
        self._graphs = graphs
        self._columns = [None if graph.ram_budget is None else Columns(graph) for graph in graphs]
        self._coarse = [
            coarse_relaxations(graph) if columns is None else [Relaxation(graph, columns.multipliers(None))]
            for graph, columns in zip(graphs, self._columns, strict=True)
        ]
        self._fine: dict[_Stratum, list[Relaxation]] = {}
        self._bounds = {
            _Stratum(graph, stratum): _lower_bound(relaxations, stratum)
            for graph, relaxations in enumerate(self._coarse)
            for stratum in range(len(relaxations[0].bounds))
        }
        # No path costs this much more than the lower bound, so that an enumeration with this gap drops nothing.
        self.largest_gap = 4 * max(COSTS >> relaxations[0].multipliers.shift for relaxations in self._coarse)

    @property
    def lowest(self) -> int:
        return min(self._bounds.values())

    def within(self, gap: int) -> list[_Stratum]:
        """Strata whose fine bound is within the gap of the lowest bound, the lowest first."""
        while True:
            near = [s for s, bound in self._bounds.items() if bound <= self.lowest + gap]
            coarse = [s for s in near if s not in self._fine]
            if not coarse:
                return sorted(near, key=lambda s: self._bounds[s])
            self._refine(min(coarse, key=lambda s: self._bounds[s]))

    def _refine(self, s: _Stratum) -> None:
        graph, columns = self._graphs[s.graph], self._columns[s.graph]
        self._fine[s] = (
            fine_relaxations(graph, self._coarse[s.graph], s.stratum, FACTORS)
            if columns is None
            else [Relaxation(graph, columns.multipliers(s.stratum))]
        )
        self._bounds[s] = max(self._bounds[s], _lower_bound(self._fine[s], s.stratum))

    def of(self, s: _Stratum) -> tuple[int, list[Relaxation]]:
        """The bound, and the relaxations to enumerate with."""
        if s not in self._fine:
            self._refine(s)
        fine = self._fine[s]
        if self._columns[s.graph] is not None and len(fine) == 1:
            fine += relaxations_near(self._graphs[s.graph], fine[0].multipliers, FACTORS)
        return self._bounds[s], fine


def _solve(graphs: Sequence[LayeredGraph]) -> ShortestPath | None:
    """Enumerate every stratum that may hold the optimum, with a growing gap."""
    bounds = _Bounds(graphs)
    known = None if graphs[0].ram_budget is None else least_costs(graphs)
    if known is not None:
        least = min(map(min, known))
        if least == NEVER:
            return None
        bounds.within(0)
        where = [_Stratum(g, n) for g, costs in enumerate(known) for n, cost in enumerate(costs) if cost == least]
        best = _best(graphs, bounds, where, least)
        assert best is not None
        return best
    gap, found = 1 + bounds.lowest // _FIRST_GAP, NEVER
    while gap < 2 * bounds.largest_gap:
        strata = bounds.within(gap)
        best = _best(graphs, bounds, strata, bounds.lowest + gap)
        # A path that costs more than was looked for says how much more is enough.
        if best is not None and best.cost <= bounds.lowest + gap:
            return best
        found = found if best is None else min(found, best.cost)
        gap = min(2 * gap, found - bounds.lowest)
    return None


def _best(
    graphs: Sequence[LayeredGraph], bounds: "_Bounds", strata: Sequence[_Stratum], most: int
) -> ShortestPath | None:
    """The best path of these strata, if any costs at most `most`; else any path or None."""
    best = None
    for s in strata:
        bound, relaxations = bounds.of(s)
        graph = graphs[s.graph]
        path = Enumeration(graph, relaxations, s.stratum, most).best() if bound <= most else None
        if path is not None:
            most = min(most, path.cost)
            key = (path.cost, path.vram, path.ram, _preference(graph, path))
            if best is None or key < best[0]:
                best = (key, replace(path, graph=s.graph))
    return None if best is None else replace(best[1], bound=bounds.lowest)


def _lower_bound(relaxations: Sequence[Relaxation], stratum: int) -> int:
    """Lower bound of the cost of a path of this stratum."""
    return max(-(-int(r.bounds[stratum]) >> r.multipliers.shift) for r in relaxations)


def _preference(graph: LayeredGraph, path: ShortestPath) -> tuple[int, ...]:
    nodes = (stage[k].preference for stage, k in zip(graph.stages, path.nodes, strict=True))
    return tuple(x for pair in zip(nodes, path.options, strict=True) for x in pair)


LARGEST_TABLE = 1 << 22
"""Most cells of a table over the VRAM and RAM of a front; where it takes more, nothing is said."""
MOST_LABELS = 1 << 28
"""Most labels that are made for all fronts of a node; where there are more, nothing is said."""


def least_costs(graphs: Sequence[LayeredGraph]) -> list[list[int]] | None:
    """[graph][stratum]: the least cost within the budgets, `NEVER` where nothing fits.

    None where stages are not equal or fronts too large. All graphs have the same nodes between their ends, and budgets
    for both resources.
    """
    layers = len(graphs[0].stages) - 2
    if layers < 2:
        return None
    inner = graphs[0].stages[1]
    same = all(one is other for graph in graphs for one, other in zip(graph.stages[1], inner, strict=True))
    orders = [[graph.order(stratum) for stratum in range(layers + 1)] for graph in graphs]
    if not same or any(order is None for per_stratum in orders for order in per_stratum):
        return None
    fronts = [front for node in inner if (front := _fronts(node, layers, graphs[0])) is not None]
    if len(fronts) < len(inner):
        return None
    large = next(k for k, node in enumerate(inner) if node.stratum)
    found = [[NEVER] * (len(graph.stages) + 1) for graph in graphs]
    for stratum in range(layers + 1):
        one, other = fronts[large][stratum], fronts[1 - large][layers - stratum]
        table = other.table()
        for graph, orders_of, costs in zip(graphs, orders, found, strict=True):
            order = orders_of[stratum]
            assert order is not None
            costs[stratum] = _joined(graph, order, one, table)
    return found


@dataclass(frozen=True, eq=False)
class _Front:
    """Non-dominated labels: what some stages in a row cost and use."""

    costs: Ints
    vram: Ints
    ram: Ints

    def table(self) -> tuple[Ints, Ints, Ints]:
        """(VRAM, RAM, least cost within each of either): a first row and column stand for too little."""
        vram, column = np.unique(self.vram, return_inverse=True)
        ram, row = np.unique(self.ram, return_inverse=True)
        table = np.full((len(ram) + 1, len(vram) + 1), NEVER, np.int64)
        table[row + 1, column + 1] = self.costs
        return vram, ram, _least_within(table)


def _joined(graph: LayeredGraph, order: tuple[int, ...], one: _Front, table: tuple[Ints, Ints, Ints]) -> int:
    """The least cost of a path with these fronts between the ends."""
    ends = [graph.stages[0][0], graph.stages[-1][0]]
    arcs = sum(graph.arcs[t][a][b] for t, (a, b) in enumerate(pairwise(order)))
    cost, vram_left, ram_left = arcs, graph.vram_budget, graph.ram_budget or 0
    for end in ends:
        cost, vram_left, ram_left = cost + int(end.costs[0]), vram_left - int(end.vram[0]), ram_left - int(end.ram[0])
    vram, ram, least = table
    rows = np.searchsorted(ram, ram_left - one.ram, side="right")
    columns = np.searchsorted(vram, vram_left - one.vram, side="right")
    totals = one.costs + least[rows, columns]
    return min(NEVER, cost + int(totals.min())) if len(totals) else NEVER


def _fronts(node: Node, most: int, graph: LayeredGraph) -> list[_Front] | None:
    """The front of 0, 1, … `most` stages with this node; None where they are too large."""
    zero = np.zeros(1, np.int64)
    found, made = [_Front(zero, zero, zero)], 0
    for _ in range(most):
        front = found[-1]
        made += len(front.costs) * len(node.costs)
        (vram, columns), (ram, rows) = _sums(node.vram, front.vram), _sums(node.ram, front.ram)
        if made > MOST_LABELS or (len(vram) + 1) * (len(ram) + 1) > LARGEST_TABLE:
            return None
        table = np.full((len(ram) + 1, len(vram) + 1), NEVER, np.int64)
        for cost, row, column in zip(node.costs.tolist(), rows, columns, strict=True):
            # Labels of a front differ in VRAM or RAM, so that no cell is named twice.
            table[row + 1, column + 1] = np.minimum(table[row + 1, column + 1], front.costs + cost)
        least = _least_within(table.copy())
        table[1:, 1:][np.minimum(least[:-1, 1:], least[1:, :-1]) <= table[1:, 1:]] = NEVER
        row, column = np.nonzero(table < NEVER)
        fits = (ram[row - 1] <= (graph.ram_budget or 0)) & (vram[column - 1] <= graph.vram_budget)
        row, column = row[fits], column[fits]
        found.append(_Front(table[row, column], vram[column - 1], ram[row - 1]))
    return found


def _sums(options: Ints, labels: Ints) -> tuple[Ints, Ints]:
    """The different sums of both, rising, and which of them an option and a label have."""
    (options, option), (labels, label) = (np.unique(values, return_inverse=True) for values in (options, labels))
    values, index = np.unique(np.add.outer(options, labels), return_inverse=True)
    return values, index.reshape(len(options), len(labels))[np.ix_(option, label)]


def _least_within(table: Ints) -> Ints:
    """The least of each cell and of those before it in both directions, in place."""
    for axis in (0, 1):
        np.minimum.accumulate(table, axis=axis, out=table)
    return table
