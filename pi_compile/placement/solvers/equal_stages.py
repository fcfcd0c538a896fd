"""The least cost where all stages between the ends are equal: how many take each option, not which.

With the nodes in the order that `LayeredGraph.order` names, a path enters one node so many times in a row, then the
other. What n stages in a row can reach is a *front*: the non-dominated (cost, VRAM, RAM). Fronts of one node serve
every stratum of every graph. The least cost of a stratum joins a front of each node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pi_compile.placement.solvers.layered_graph import NEVER, Ints, LayeredGraph, Node

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
