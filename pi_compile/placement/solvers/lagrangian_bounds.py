"""Lagrangian relaxations of a constrained shortest path: lower bounds from shortest paths without budgets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
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


def coarse_relaxations(graph: LayeredGraph, resource: Resource) -> list[Relaxation]:
    """Relaxations at multipliers that fall from the largest to 0 by factors of four, and closer ones near the best."""
    shift, largest = _scale(graph, resource)
    values = [largest >> n for n in (*range(0, largest.bit_length(), 2), largest.bit_length())]
    found = [Relaxation(graph, _multipliers(resource, shift, v)) for v in values]
    best = max(zip(values, found, strict=True), key=lambda pair: int(pair[1].bounds.min()))[0]
    closer = {min(best * by // 16, largest) for by in (*range(5, 16), *range(18, 64, 4))} - set(values)
    return found + [Relaxation(graph, _multipliers(resource, shift, v)) for v in sorted(closer)]


def joint_relaxations(graph: LayeredGraph) -> list[Relaxation]:
    """Relaxations with both multipliers, for budgets that bind together: pairs a factor of eight apart, then closer.

    Neither multiplier alone leads there: with one of them 0, all is put into the other memory for nothing.
    """
    (shift, most_vram), (_, most_ram) = (_scale(graph, name) for name in _RESOURCES)
    at = cache(lambda vram, ram: Relaxation(graph, Multipliers(shift, min(vram, most_vram), min(ram, most_ram))))
    found = [at(max(most_vram >> n, 1), max(most_ram >> k, 1)) for n, k in product(range(2, 20, 3), repeat=2)]
    for factor in (4, 2, 2):
        best = max(found, key=lambda r: int(r.bounds.min())).multipliers
        near = product(
            (best.vram // factor, best.vram, best.vram * factor), (best.ram // factor, best.ram, best.ram * factor)
        )
        found += [at(vram, ram) for vram, ram in near]
    return found


def fine_relaxations(
    graph: LayeredGraph, coarse: Sequence[Relaxation], stratum: int, factors: Sequence[float]
) -> list[Relaxation]:
    """Relaxations for paths of one stratum: at the best multipliers, by ternary search, and at multiples of them.

    Two multipliers are searched for by turns.
    """
    best = max(coarse, key=lambda r: int(r.bounds[stratum])).multipliers
    names = _RESOURCES[:1] if graph.ram_budget is None else _RESOURCES
    largest = {name: _scale(graph, name)[1] for name in names}
    at = cache(lambda m: Relaxation(graph, m))
    for name in names if len(names) == 1 else names * 2:

        def bound(value: int, name: Resource = name, best: Multipliers = best) -> int:
            return int(at(_changed(best, name, value)).bounds[stratum])

        value = getattr(best, name)
        low, high = value // 4, min(4 * value + 4, largest[name])
        while high - low > 2:
            third = (high - low) // 3
            one, two = low + third, high - third
            low, high = (one, high) if bound(one) < bound(two) else (low, two)
        best = _changed(best, name, max(range(low, high + 1), key=bound))
    near = (_changed(best, name, min(int(getattr(best, name) * by), largest[name])) for name in names for by in factors)
    return [at(multipliers) for multipliers in dict.fromkeys(near)]


def _changed(multipliers: Multipliers, name: Resource, value: int) -> Multipliers:
    return replace(multipliers, **{name: value})


def _multipliers(resource: Resource, shift: int, value: int) -> Multipliers:
    return Multipliers(shift, *((value, 0) if resource == "vram" else (0, value)))


def _scale(graph: LayeredGraph, resource: Resource) -> tuple[int, int]:
    """(shift of costs, largest multiplier) that stay within 64 bits."""
    cost, use = (
        sum(max(int(getattr(n, name).max()) for n in stage) for stage in graph.stages) for name in ("costs", resource)
    )
    cost += sum(max((c for row in rows for c in row if c < NEVER), default=0) for rows in graph.arcs)
    assert cost <= COSTS
    assert use < _PENALTIES
    return (COSTS // max(1, cost)).bit_length() - 1, _PENALTIES // max(1, use)
