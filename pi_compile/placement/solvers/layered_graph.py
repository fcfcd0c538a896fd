"""A layered graph: stages of nodes, each with options that cost and use two resources, and arcs between stages.

Lagrangian relaxations of a constrained shortest path through it are lower bounds, from shortest paths without budgets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

NEVER = 1 << 61
"""Cost of an arc that is not allowed."""


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

    def order(self, stratum: int) -> tuple[int, ...] | None:
        """The nodes that the best path of a stratum enters, where all stages between the ends are equal.

        Paths may then be reordered: equal nodes side by side cross least, and of such orders the tie rule has the one
        with the preferred node first. None where stages or arcs differ, or where crossing costs less than the ends say.
        """
        inner, between = self.stages[1:-1], self.arcs[1:-1]
        if not between or len(self.stages[0]) + len(self.stages[-1]) > 2 or len(inner[0]) != 2:
            return None
        if any(node is not first for stage in inner for node, first in zip(stage, inner[0], strict=True)):
            return None
        (into,), out, crossing = self.arcs[0], [row[0] for row in self.arcs[-1]], between[0][0][1]
        ends_matter = max(abs(into[0] - into[1]), abs(out[0] - out[1])) > crossing
        if ends_matter or any(list(map(list, arcs)) != [[0, crossing], [crossing, 0]] for arcs in between):
            return None
        large = [node.stratum for node in inner[0]]
        preferred = min((0, 1), key=lambda k: inner[0][k].preference)
        if sorted(large) != [0, 1] or inner[0][0].preference == inner[0][1].preference:
            return None
        counts = [stratum if k else len(inner) - stratum for k in large]
        if min(counts) < 0:
            return None
        first, last = sorted((preferred, 1 - preferred), key=lambda k: into[k] + out[1 - k])
        return (0, *[first] * counts[first], *[last] * counts[last], 0)


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


def scaled(graphs: Sequence[LayeredGraph]) -> tuple[list[LayeredGraph], int, int]:
    """The same problem in the largest units that keep all resources whole, which makes multipliers finer.

    Equal nodes become one.
    """
    nodes = {id(n): n for g in graphs for stage in g.stages for n in stage}
    resources = ("vram", "ram")
    vram_unit, ram_unit = (
        max(1, math.gcd(*(int(np.gcd.reduce(getattr(n, name))) for n in nodes.values()))) for name in resources
    )
    # A budget above the largest possible use is the same as that use.
    most_vram, most_ram = (
        max(sum(max(int(getattr(n, name).max()) for n in stage) for stage in g.stages) for g in graphs)
        for name in resources
    )
    known: dict[tuple[object, ...], Node] = {}
    new = {}
    for i, n in nodes.items():
        key = n.costs.tobytes(), n.vram.tobytes(), n.ram.tobytes(), n.preference, n.stratum
        new[i] = known.setdefault(key, replace(n, vram=n.vram // vram_unit, ram=n.ram // ram_unit))
    vram_budget = min(graphs[0].vram_budget, most_vram) // vram_unit
    ram_budget = None if graphs[0].ram_budget is None else min(graphs[0].ram_budget, most_ram) // ram_unit
    found = [
        replace(g, stages=[[new[id(n)] for n in s] for s in g.stages], vram_budget=vram_budget, ram_budget=ram_budget)
        for g in graphs
    ]
    return found, vram_unit, ram_unit


def least_ram(graph: LayeredGraph) -> LayeredGraph:
    """The graph in which a path costs what it takes of RAM."""
    known = {id(n): replace(n, costs=n.ram) for stage in graph.stages for n in stage}
    stages = [[known[id(n)] for n in stage] for stage in graph.stages]
    arcs = [[[NEVER if cost >= NEVER else 0 for cost in row] for row in rows] for rows in graph.arcs]
    return replace(graph, stages=stages, arcs=arcs)


Resource = Literal["vram", "ram"]
_RESOURCES: tuple[Resource, ...] = ("vram", "ram")

COSTS, _PENALTIES = 1 << 50, 1 << 58
"""Ranges of scaled costs, and of multiplier · use: multipliers reach 256 times the mean cost of a unit of resource."""


@dataclass(frozen=True)
class Multipliers:
    """Lagrange multipliers of both resources, as integers: costs are scaled by 2^shift to make these fine enough."""

    shift: int
    vram: int
    ram: int

    def lagrangian(self, costs: Ints, vram: Ints, ram: Ints) -> Ints:
        """Scaled costs plus multiplier · use of both resources."""
        return (costs << self.shift) + vram * self.vram + ram * self.ram


class Relaxation:
    """Lagrangian costs and shortest distances at one pair of multipliers, by stratum of the path."""

    def __init__(self, graph: LayeredGraph, multipliers: Multipliers) -> None:
        self.multipliers = multipliers
        nodes = {id(n): n for stage in graph.stages for n in stage}
        costs = {i: multipliers.lagrangian(n.costs, n.vram, n.ram) for i, n in nodes.items()}
        self.option_costs = [[costs[id(n)] for n in stage] for stage in graph.stages]
        """[stage][node]: (options,) Lagrangian cost of each option."""
        strata = len(graph.stages) + 1
        start = np.full(strata, NEVER, np.int64)
        start[0] = -multipliers.vram * graph.vram_budget - multipliers.ram * (graph.ram_budget or 0)
        self.distances: list[list[Ints]] = [[start] * len(graph.stages[0])]
        """[stage][node]: (strata,) shortest distance to the node, itself not included, less multiplier · budget."""
        for t, rows in enumerate(graph.arcs):
            through = self._through(graph, t)
            arcs = [[min(c << multipliers.shift, NEVER) for c in row] for row in rows]
            self.distances.append(
                [
                    np.minimum(np.min([d + row[j] for d, row in zip(through, arcs, strict=True)], axis=0), NEVER)
                    for j in range(len(rows[0]))
                ]
            )
        self.bounds = np.min(self._through(graph, len(graph.stages) - 1), axis=0)
        """(strata,) scaled lower bound: no path of the stratum that keeps the budgets has a lower scaled cost."""

    def _through(self, graph: LayeredGraph, t: int) -> list[Ints]:
        """Distances to the nodes of a stage, each with its own best option."""
        found = []
        for k, node in enumerate(graph.stages[t]):
            shifted = np.full_like(self.distances[t][k], NEVER)
            shifted[node.stratum :] = self.distances[t][k][: len(shifted) - node.stratum]
            found.append(np.minimum(shifted + int(self.option_costs[t][k].min()), NEVER))
        return found


def coarse_relaxations(graph: LayeredGraph) -> list[Relaxation]:
    """Relaxations at multipliers that fall from the largest to 0 by factors of four, and closer ones near the best."""
    shift, largest = scale(graph, "vram")
    values = [largest >> n for n in (*range(0, largest.bit_length(), 2), largest.bit_length())]
    found = [Relaxation(graph, Multipliers(shift, v, 0)) for v in values]
    best = max(zip(values, found, strict=True), key=lambda pair: int(pair[1].bounds.min()))[0]
    closer = {min(best * by // 16, largest) for by in (*range(5, 16), *range(18, 64, 4))} - set(values)
    return found + [Relaxation(graph, Multipliers(shift, v, 0)) for v in sorted(closer)]


def fine_relaxations(
    graph: LayeredGraph, coarse: Sequence[Relaxation], stratum: int, factors: Sequence[float]
) -> list[Relaxation]:
    """Relaxations for paths of one stratum of a graph without a RAM budget.

    At the best multiplier, by ternary search, and at multiples of it.
    """
    best = max(coarse, key=lambda r: int(r.bounds[stratum])).multipliers
    largest = scale(graph, "vram")[1]
    at = cache(lambda vram: Relaxation(graph, replace(best, vram=vram)))

    def bound(value: int) -> int:
        return int(at(value).bounds[stratum])

    low, high = best.vram // 4, min(4 * best.vram + 4, largest)
    while high - low > 2:
        third = (high - low) // 3
        one, two = low + third, high - third
        low, high = (one, high) if bound(one) < bound(two) else (low, two)
    value = max(range(low, high + 1), key=bound)
    return [at(vram) for vram in dict.fromkeys(min(int(value * by), largest) for by in factors)]


def relaxations_near(graph: LayeredGraph, best: Multipliers, factors: Sequence[float]) -> list[Relaxation]:
    """Relaxations at multiples of either multiplier."""
    near = (
        replace(best, **{name: min(int(getattr(best, name) * by), scale(graph, name)[1])})
        for name in _RESOURCES
        for by in factors
    )
    return [Relaxation(graph, multipliers) for multipliers in dict.fromkeys(near)]


def scale(graph: LayeredGraph, resource: Resource) -> tuple[int, int]:
    """(shift of costs, largest multiplier) that stay within 64 bits."""
    cost, use = (
        sum(max(int(getattr(n, name).max()) for n in stage) for stage in graph.stages) for name in ("costs", resource)
    )
    cost += sum(max((c for row in rows for c in row if c < NEVER), default=0) for rows in graph.arcs)
    assert cost <= COSTS
    assert use < _PENALTIES
    return (COSTS // max(1, cost)).bit_length() - 1, _PENALTIES // max(1, use)
