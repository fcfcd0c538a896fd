"""The best multipliers of two budgets that bind together, by column generation.

The best bound over both multipliers is a linear program over paths, which are its columns:

    minimise  Σ x_p cost_p     subject to     Σ x_p vram_p ≤ VRAM budget,   Σ x_p ram_p ≤ RAM budget,   Σ x_p = 1

Its prices are the multipliers. The simplex method runs on the columns known so far, in fractions. Its prices give a
shortest path without budgets; that path is the next column, until none lowers the cost (Dantzig and Wolfe,
Decomposition principle for linear programs, Operations Research 8(1), 1960). A shortest path of every stratum comes
from one pass through the graph, so that what one stratum finds starts the next.
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from pi_compile.placement.solvers.layered_graph import COSTS, NEVER, Ints, LayeredGraph, Multipliers, scale

_STEPS = 400
"""Most steps of the simplex method; fewer give a lower bound that is not the best one."""
_NOT_FOUND = 16
"""A path that keeps the budgets and is not found yet counts as so many times the dearest."""


class Columns:
    """The paths of one graph that are known so far, and the multipliers that follow from them."""

    def __init__(self, graph: LayeredGraph) -> None:
        self._graph = graph
        (self._shift, self._most_vram), (_, self._most_ram) = scale(graph, "vram"), scale(graph, "ram")
        self._dearest = COSTS >> self._shift
        self._known: list[Ints] = []
        """Of each pass (cost, VRAM, RAM) × strata."""

    def multipliers(self, stratum: int | None) -> Multipliers:
        """The best multipliers for the paths of one stratum; None: of all."""
        graph = self._graph
        program = _Program(graph.vram_budget, graph.ram_budget or 0, _NOT_FOUND * self._dearest)
        columns = [self._of(paths, stratum) for paths in self._known]
        for _ in range(_STEPS):
            prices = program.prices
            if min(prices[:2]) < 0:
                program.enter(0, (1, 0, 0) if prices[0] < 0 else (0, 1, 0))
                continue
            at = self._rounded(prices)
            entered = program.enter_best(at, columns)
            if not entered:
                self._known.append(shortest_paths(graph, at))
                columns.append(self._of(self._known[-1], stratum))
                entered = program.enter_best(at, columns[-1:])
            if not entered:
                return at
        return at

    def _rounded(self, prices: Sequence[Fraction]) -> Multipliers:
        vram, ram = (round(price * (1 << self._shift)) for price in prices[:2])
        return Multipliers(self._shift, min(vram, self._most_vram), min(ram, self._most_ram))

    @staticmethod
    def _of(paths: Ints, stratum: int | None) -> Ints:
        paths = paths if stratum is None else paths[:, stratum : stratum + 1]
        return paths[:, paths[0] < NEVER]


class _Program:
    """The linear program: a basis of three columns, by its inverse."""

    def __init__(self, vram_budget: int, ram_budget: int, not_found: int) -> None:
        one, zero = Fraction(1), Fraction(0)
        self._rows = [
            [one, zero, zero, Fraction(vram_budget)],
            [zero, one, zero, Fraction(ram_budget)],
            [zero, zero, one, one],
        ]
        """The inverse, and the value of each column of the basis."""
        self._costs = [0, 0, not_found]

    @property
    def prices(self) -> list[Fraction]:
        """Multipliers of both resources, and the program's value with them."""
        vram, ram, value = (sum(c * row[k] for c, row in zip(self._costs, self._rows, strict=True)) for k in range(3))
        return [Fraction(-vram), Fraction(-ram), Fraction(value)]

    def enter_best(self, at: Multipliers, columns: Sequence[Ints]) -> bool:
        """Enter the column with the least Lagrangian cost, if it lowers the program's."""
        if not columns:
            return False
        cost, vram, ram = np.concatenate(columns, axis=1)
        if not len(cost):
            return False
        best = int(at.lagrangian(cost, vram, ram).argmin())
        use = int(vram[best]), int(ram[best]), 1
        prices = self.prices
        if int(cost[best]) + prices[0] * use[0] + prices[1] * use[1] >= prices[2]:
            return False
        self.enter(int(cost[best]), use)
        return True

    def enter(self, cost: int, use: tuple[int, int, int]) -> None:
        """Take a column into the basis in place of the first that reaches 0."""
        change = [sum(row[k] * use[k] for k in range(3)) for row in self._rows]
        _, out = min((row[3] / d, n) for n, (row, d) in enumerate(zip(self._rows, change, strict=True)) if d > 0)
        pivot = [x / change[out] for x in self._rows[out]]
        self._rows = [
            pivot if n == out else [x - d * p for x, p in zip(row, pivot, strict=True)]
            for n, (row, d) in enumerate(zip(self._rows, change, strict=True))
        ]
        self._costs[out] = cost


def shortest_paths(graph: LayeredGraph, multipliers: Multipliers) -> Ints:
    """(cost, VRAM, RAM) × strata of a path with the least Lagrangian cost; cost `NEVER` where a stratum has none."""
    best = {}
    for node in {id(n): n for stage in graph.stages for n in stage}.values():
        lagrangian = multipliers.lagrangian(node.costs, node.vram, node.ram)
        i = int(lagrangian.argmin())
        best[id(node)] = np.array([[lagrangian[i]], [node.costs[i]], [node.vram[i]], [node.ram[i]]])
    strata = len(graph.stages) + 1
    none = np.zeros((4, strata), np.int64)
    none[0] = NEVER
    start = none.copy()
    start[0, 0] = 0
    before = [start] * len(graph.stages[0])
    for t, stage in enumerate(graph.stages):
        through = []
        for node, paths in zip(stage, before, strict=True):
            after = none.copy()
            after[:, node.stratum :] = paths[:, : strata - node.stratum] + best[id(node)]
            through.append(after)
        if t == len(graph.arcs):
            break
        before = [
            _least([paths + _arc(row[j], multipliers) for paths, row in zip(through, graph.arcs[t], strict=True)])
            for j in range(len(graph.arcs[t][0]))
        ]
    found = _least(through)
    found[1, found[0] >= NEVER] = NEVER
    return found[1:]


def _arc(cost: int, multipliers: Multipliers) -> Ints:
    never = cost >= NEVER
    return np.array([[NEVER if never else cost << multipliers.shift], [0 if never else cost], [0], [0]])


def _least(paths: Sequence[Ints]) -> Ints:
    found = paths[0]
    for other in paths[1:]:
        found = np.where(other[0] < found[0], other, found)
    found[0] = np.minimum(found[0], NEVER)
    return found
