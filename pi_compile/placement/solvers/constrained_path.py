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
If not, and if any path keeps both budgets, each has a multiplier (`column_generation`). Where all stages between the
ends are equal, the least cost is known before anything is enumerated (`equal_stages`).

Ties: least cost, then least VRAM, then least RAM, then at the first stage where two paths differ the preferred node,
then the earlier option.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pi_compile.placement.solvers.column_generation import Columns
from pi_compile.placement.solvers.enumeration import Enumeration
from pi_compile.placement.solvers.equal_stages import least_costs
from pi_compile.placement.solvers.lagrangian_bounds import (
    COSTS,
    Relaxation,
    coarse_relaxations,
    fine_relaxations,
    relaxations_near,
)
from pi_compile.placement.solvers.layered_graph import NEVER, LayeredGraph, ShortestPath, least_ram, scaled

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
