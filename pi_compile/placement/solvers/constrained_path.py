"""The resource-constrained shortest path through a layered graph, solved exactly and with one answer.

At each stage a path enters one node and takes one of its options. An option has a cost and uses two resources, VRAM and
RAM; an arc between nodes of neighbouring stages has a cost. All are integers, none negative.

    minimise  Σ cost of options and arcs     subject to     Σ vram ≤ VRAM budget,   Σ ram ≤ RAM budget

The method is Lagrangian relaxation and enumeration (Carlyle, Royset and Wood, Lagrangian relaxation and enumeration for
solving constrained shortest-path problems, Networks 52(4), 2008). A Lagrange multiplier λ ≥ 0 moves a budget into the
cost, and what is left is a shortest path without budgets:

    L(λ)  =  min over all paths of   Σ cost + λ · ( Σ vram − VRAM budget )

By weak duality L(λ) is a lower bound of the optimum; the best λ gives the bound of the linear relaxation. The same
holds for a partial path: its cost, λ · its VRAM, and the shortest distance to its first node bound every path that it
is the end of.

Enumeration extends partial paths from the last stage to the first. Each node keeps a set of non-dominated labels
(vram, ram, cost), and drops labels whose lower bound exceeds the relaxation's by more than the gap. The gap doubles
until a path is found. That path is optimal, because whatever was dropped costs more. Multipliers decide how long this
takes, never what is found.

The relaxation is loose where a few large nodes compete with many small options. So paths are divided into *strata* by
the number of large nodes they enter. Each stratum is bounded and enumerated by itself: there the relaxation is tight.

The RAM budget rarely binds. So it is left out at first; an optimum without it that keeps it is the optimum.

Ties: least cost, then least VRAM, then least RAM, then at the first stage where two paths differ the preferred node,
then the earlier option.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pi_compile.placement.solvers.lagrangian_bounds import (
    COSTS,
    NEVER,
    Ints,
    Relaxation,
    Resource,
    coarse_relaxations,
    fine_relaxations,
)
from pi_compile.placement.solvers.pareto_labels import LabelSet, non_dominated, tabulated

CANDIDATES = 1 << 18
"""Most labels that are extended at once."""
_FIRST_GAP = 1 << 22
"""The first gap is the lower bound ÷ this."""
FACTORS = (1, 0, 1 / 2, 7 / 8, 9 / 8, 2)
"""Multipliers to bound with, as multiples of the best one."""


@dataclass(frozen=True, eq=False)
class Node:
    """Cost and use of both resources of each option of one node."""

    costs: Ints
    vram: Ints
    ram: Ints
    preference: int = 0
    """Ties prefer the node of a stage where this is least."""
    stratum: int = 0
    """What the node adds to the stratum of a path: 1 for a large node, 0 for another. It only guides the search."""


Stage = Sequence[Node]
Arcs = Sequence[Sequence[int]]
"""Arcs[k][j]: cost of the arc from node k of a stage to node j of the next, `NEVER` where there is none."""


@dataclass(frozen=True, eq=False)
class LayeredGraph:
    """One problem. Costs sum to at most 2⁵⁰ (18 minutes of picoseconds), each resource to less than 2⁵⁸."""

    stages: Sequence[Stage]
    arcs: Sequence[Arcs]
    """One fewer than stages."""
    vram_budget: int
    ram_budget: int | None = None


@dataclass(frozen=True)
class ShortestPath:
    """The best solution: in graph number `graph`, node `nodes[t]` of stage t with its option `options[t]`."""

    graph: int
    nodes: tuple[int, ...]
    options: tuple[int, ...]
    cost: int
    vram: int
    ram: int
    bound: int = 0
    """Lower bound of the optimum by the relaxations alone, rounded up."""


def solve(graphs: Sequence[LayeredGraph]) -> ShortestPath | None:
    """The exact optimum over some graphs of equal budgets under the tie rule; None where nothing fits."""
    if min(graphs[0].vram_budget, graphs[0].ram_budget or 0) < 0:
        return None
    scaled, vram_unit, ram_unit = _scaled(graphs)
    path = _solve([replace(g, ram_budget=None) for g in scaled])
    if path is not None and scaled[0].ram_budget is not None and path.ram > scaled[0].ram_budget:
        path = _solve(scaled)
    return None if path is None else replace(path, vram=path.vram * vram_unit, ram=path.ram * ram_unit)


def _scaled(graphs: Sequence[LayeredGraph]) -> tuple[list[LayeredGraph], int, int]:
    """The same problem in the largest units that leave all resources whole: multipliers are finer so."""
    nodes = {id(n): n for g in graphs for stage in g.stages for n in stage}
    resources: tuple[Resource, Resource] = ("vram", "ram")
    vram_unit, ram_unit = (
        max(1, math.gcd(*(int(np.gcd.reduce(getattr(n, name))) for n in nodes.values()))) for name in resources
    )
    # A budget above the largest possible use is the same as that use.
    most_vram, most_ram = (
        max(sum(max(int(getattr(n, name).max()) for n in stage) for stage in g.stages) for g in graphs)
        for name in resources
    )
    new = {i: replace(n, vram=n.vram // vram_unit, ram=n.ram // ram_unit) for i, n in nodes.items()}
    vram_budget = min(graphs[0].vram_budget, most_vram) // vram_unit
    ram_budget = None if graphs[0].ram_budget is None else min(graphs[0].ram_budget, most_ram) // ram_unit
    scaled = [
        replace(g, stages=[[new[id(n)] for n in s] for s in g.stages], vram_budget=vram_budget, ram_budget=ram_budget)
        for g in graphs
    ]
    return scaled, vram_unit, ram_unit


@dataclass(frozen=True)
class _Stratum:
    """Paths of one graph that enter equally many large nodes; bounded and enumerated together."""

    graph: int
    stratum: int


class _Bounds:
    """Lower bound of each stratum: coarse for all of them, fine where it is asked for."""

    def __init__(self, graphs: Sequence[LayeredGraph]) -> None:
        self._graphs, self._coarse = graphs, [_coarse(graph) for graph in graphs]
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
            s = min(coarse, key=lambda s: self._bounds[s])
            self._fine[s] = fine_relaxations(self._graphs[s.graph], self._coarse[s.graph], s.stratum, FACTORS)
            self._bounds[s] = _lower_bound(self._fine[s], s.stratum)

    def of(self, s: _Stratum) -> tuple[int, list[Relaxation]]:
        return self._bounds[s], self._fine[s]


def _solve(graphs: Sequence[LayeredGraph]) -> ShortestPath | None:
    """Enumerate every stratum that may hold the optimum, with a growing gap."""
    bounds = _Bounds(graphs)
    gap = 1 + bounds.lowest // _FIRST_GAP
    while gap < 2 * bounds.largest_gap:
        strata, best = bounds.within(gap), None
        most = bounds.lowest + gap
        for s in strata:
            bound, relaxations = bounds.of(s)
            graph = graphs[s.graph]
            path = _Enumeration(graph, relaxations, s.stratum, most).best() if bound <= most else None
            if path is not None:
                most = path.cost
                key = (path.cost, path.vram, path.ram, _preference(graph, path))
                if best is None or key < best[0]:
                    best = (key, replace(path, graph=s.graph))
        if best is not None:
            return replace(best[1], bound=bounds.lowest)
        gap *= 2
    return None


def _coarse(graph: LayeredGraph) -> list[Relaxation]:
    resources: tuple[Resource, ...] = ("vram",) if graph.ram_budget is None else ("vram", "ram")
    return [relaxation for name in resources for relaxation in coarse_relaxations(graph, name)]


def _lower_bound(relaxations: Sequence[Relaxation], stratum: int) -> int:
    """Lower bound of the cost of a path of this stratum."""
    return max(-(-int(r.bounds[stratum]) >> r.multipliers.shift) for r in relaxations)


def _preference(graph: LayeredGraph, path: ShortestPath) -> tuple[int, ...]:
    nodes = (stage[k].preference for stage, k in zip(graph.stages, path.nodes, strict=True))
    return tuple(x for pair in zip(nodes, path.options, strict=True) for x in pair)


_ZERO, _NONE = np.zeros(1, np.int64), np.zeros(0, np.int64)


class _Enumeration:
    """All paths of one stratum that cost at most `most`, from the last stage to the first."""

    def __init__(self, graph: LayeredGraph, relaxations: Sequence[Relaxation], stratum: int, most: int) -> None:
        self.graph, self.relaxations, self.stratum = graph, relaxations, stratum
        self.most = most << relaxations[0].multipliers.shift
        self.label_sets: list[list[LabelSet]] = []
        """[stage][node], stages before the current one missing."""
        for t in reversed(range(len(graph.stages))):
            self.label_sets.insert(0, [self._labels(t, k) for k in range(len(graph.stages[t]))])

    def _labels(self, t: int, k: int) -> LabelSet:
        """Labels of node k of stage t."""
        node, ram_counts = self.graph.stages[t][k], self.graph.ram_budget is not None
        base = LabelSet(*(_ZERO,) * 6) if t == len(self.graph.stages) - 1 else self._behind(self.graph.arcs[t][k])
        base = replace(base, strata=base.strata + node.stratum)
        base = non_dominated(base.at(np.nonzero(base.strata <= self.stratum)[0]), ram_counts)
        kept = LabelSet(*(_NONE,) * 6)
        if not len(base):
            return kept
        # The bound of an option before a label is the option's Lagrangian cost plus this.
        base_bounds = [self._bounds(r, base, t, k) for r in self.relaxations]
        core = np.ones(len(node.costs), bool)
        for r, bounds in zip(self.relaxations, base_bounds, strict=True):
            core &= r.option_costs[t][k] + int(bounds.min()) <= self.most
        options = np.nonzero(core)[0]
        if not ram_counts and len(options) > 2:
            # The first option, the largest cut, may end in a short group and so break the even spacing.
            table = tabulated(base, node, options[1:])
            if table is not None:
                first = self._extended(base, options[:1], base_bounds, t, k)
                return non_dominated(first.followed_by(self._within_bounds(table, t, k)), ram_counts)
        at_once = max(1, CANDIDATES // len(base))
        for start in range(0, len(options), at_once):
            new = self._extended(base, options[start : start + at_once], base_bounds, t, k)
            kept = non_dominated(kept.followed_by(new), ram_counts)
        return kept

    def _within_bounds(self, labels: LabelSet, t: int, k: int) -> LabelSet:
        """The labels that keep the VRAM budget and whose lower bound is at most `most`."""
        labels = labels.at(np.nonzero(labels.vram <= self.graph.vram_budget)[0])
        for r in self.relaxations:
            labels = labels.at(np.nonzero(self._bounds(r, labels, t, k) <= self.most)[0])
        return labels

    def _bounds(self, r: Relaxation, labels: LabelSet, t: int, k: int) -> Ints:
        """Scaled lower bound of each label: its Lagrangian cost and the shortest distance to node k of stage t."""
        lagrangian = r.multipliers.lagrangian(labels.costs, labels.vram, labels.ram)
        return lagrangian + r.distances[t][k][self.stratum - labels.strata]

    def _behind(self, arcs: Sequence[int]) -> LabelSet:
        """The labels of the next stage, node after node, each with the arc to it."""
        behind = self.label_sets[0]
        arc = np.repeat(np.array(arcs, np.int64), [len(labels) for labels in behind])
        indices = np.nonzero(arc < NEVER)[0]
        costs, vram, ram, strata = (
            np.concatenate([getattr(labels, name) for labels in behind])[indices]
            for name in ("costs", "vram", "ram", "strata")
        )
        return LabelSet(costs + arc[indices], vram, ram, strata, indices, indices)

    def _extended(self, base: LabelSet, options: Ints, base_bounds: Sequence[Ints], t: int, k: int) -> LabelSet:
        """These options before every label of `base`, in order of preference, within budgets and bounds."""
        node = self.graph.stages[t][k]
        first, *others = (
            (r.option_costs[t][k], bounds) for r, bounds in zip(self.relaxations, base_bounds, strict=True)
        )
        row, column = np.nonzero(first[0][options, None] + first[1] <= self.most)
        row = options[row]
        fits = node.vram[row] + base.vram[column] <= self.graph.vram_budget
        if self.graph.ram_budget is not None:
            fits &= node.ram[row] + base.ram[column] <= self.graph.ram_budget
        row, column = row[fits], column[fits]
        for option_costs, bounds in others:
            near = option_costs[row] + bounds[column] <= self.most
            row, column = row[near], column[near]
        return LabelSet(
            node.costs[row] + base.costs[column],
            node.vram[row] + base.vram[column],
            node.ram[row] + base.ram[column],
            base.strata[column],
            row,
            base.successors[column],
        )

    def best(self) -> ShortestPath | None:
        """The best path, followed from its label at the first stage."""
        starts = [
            (
                int(labels.costs[i]),
                int(labels.vram[i]),
                int(labels.ram[i]),
                self.graph.stages[0][k].preference,
                k,
                int(i),
            )
            for k, labels in enumerate(self.label_sets[0])
            for i in np.nonzero(labels.strata == self.stratum)[0]
        ]
        if not starts:
            return None
        cost, vram, ram, _, node, label = min(starts)
        nodes, options = [], []
        for t, stage in enumerate(self.label_sets):
            nodes.append(node)
            options.append(int(stage[node].options[label]))
            label, node = int(stage[node].successors[label]), 0
            while t + 1 < len(self.label_sets) and label >= len(self.label_sets[t + 1][node]):
                label, node = label - len(self.label_sets[t + 1][node]), node + 1
        return ShortestPath(0, tuple(nodes), tuple(options), cost, vram, ram)
