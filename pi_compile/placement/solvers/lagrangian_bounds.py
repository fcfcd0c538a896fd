"""Lagrangian relaxations of a constrained shortest path: lower bounds from shortest paths without budgets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from pi_compile.placement.solvers.layered_graph import NEVER, Ints, LayeredGraph

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
