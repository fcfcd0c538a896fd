"""The cheapest way through a chain of stages within two budgets, solved exactly and with one answer.

At each stage one node is entered and one of its options taken. An option has a cost, a weight and a load; a step from
one node to a node of the next stage has a cost. All integers, none negative.

    minimise  Σ cost of options and steps     subject to     Σ weight ≤ capacity,   Σ load ≤ limit

A price λ a unit of weight turns the budget into a cost, and what is left is a shortest path. By weak duality its length
less λ · capacity bounds the optimum from below (by the linear relaxation's bound at the best price). The same holds
of what completes a partial way: at any price, its cost so far, the price of its weight, and the length of the shortest
way to its beginning bound every way that it is part of.

The relaxation is loose where a few heavy nodes compete with many light options. So ways are bounded and searched by
their *tally*, the number of heavy nodes they enter: with that number fixed it is tight. The chain is searched from the
last stage to the first, with a front of undominated (weight, load, cost) for each node; whatever is bounded above the
relaxation's bound plus a slack is dropped. The slack grows until a way is found; that way is the optimum, because what
was dropped costs more. Prices decide how long it takes, never what is found.

The load rarely binds. So it is left out at first; if the optimum without it keeps the limit, it is the optimum.

Ties: least cost, then least weight, then least load, then at the first stage where two solutions differ the node of
lower rank, then the earlier option.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pi_compile.placement.solvers.lagrangian_bounds import COSTS, NEVER, Ints, Shortest, coarse_prices, fine_prices
from pi_compile.placement.solvers.pareto_labels import Front, tabulated, undominated

CANDIDATES = 1 << 18
"""Extended states held at once while a front grows."""
_FIRST_SLACK = 1 << 22
"""Part of the bound that the first search allows above it."""
AROUND = (1, 0, 1 / 2, 7 / 8, 9 / 8, 2)
"""Prices to bound with, as multiples of the best one."""


@dataclass(frozen=True, eq=False)
class Node:
    """Options of one node."""

    costs: Ints
    weights: Ints
    loads: Ints
    rank: int = 0
    """Place in the order of preference among a stage's nodes."""
    tally: int = 0
    """1 for a heavy node, 0 for another. It only guides the search."""


Stage = Sequence[Node]
Steps = Sequence[Sequence[int]]
"""Steps[k][j]: cost of the step from node k of a stage to node j of the next, `NEVER` where there is none."""


@dataclass(frozen=True, eq=False)
class Chain:
    """A program. Costs sum to at most 2⁵⁰ (18 minutes of picoseconds), weights and loads to less than 2⁵⁸."""

    stages: Sequence[Stage]
    steps: Sequence[Steps]
    """One fewer than stages."""
    capacity: int
    limit: int | None = None


@dataclass(frozen=True)
class Way:
    """The best solution: of chain `case`, `nodes[t]` is entered at stage t and its `options[t]` taken."""

    case: int
    nodes: tuple[int, ...]
    options: tuple[int, ...]
    cost: int
    weight: int
    load: int
    bound: int = 0
    """No solution within the budgets costs less, by the relaxations alone; rounded up."""


def solve(cases: Sequence[Chain]) -> Way | None:
    """The exact optimum over some chains under the tie rule; None where nothing fits. Their budgets are the same."""
    if min(cases[0].capacity, cases[0].limit or 0) < 0:
        return None
    small, weight_unit, load_unit = _in_units(cases)
    way = _solve([replace(c, limit=None) for c in small])
    if way is not None and small[0].limit is not None and way.load > small[0].limit:
        way = _solve(small)
    return None if way is None else replace(way, weight=way.weight * weight_unit, load=way.load * load_unit)


def _in_units(cases: Sequence[Chain]) -> tuple[list[Chain], int, int]:
    """The same program in the largest units in which every weight and load is whole: prices are finer so."""
    nodes = {id(n): n for c in cases for stage in c.stages for n in stage}
    weight, load = (
        max(1, math.gcd(*(int(np.gcd.reduce(getattr(n, name))) for n in nodes.values())))
        for name in ("weights", "loads")
    )
    # More than everything is as good as everything.
    most_weight, most_load = (
        max(sum(max(int(getattr(n, name).max()) for n in stage) for stage in c.stages) for c in cases)
        for name in ("weights", "loads")
    )
    new = {i: replace(n, weights=n.weights // weight, loads=n.loads // load) for i, n in nodes.items()}
    capacity = min(cases[0].capacity, most_weight) // weight
    limit = None if cases[0].limit is None else min(cases[0].limit, most_load) // load
    scaled = [
        replace(c, stages=[[new[id(n)] for n in s] for s in c.stages], capacity=capacity, limit=limit) for c in cases
    ]
    return scaled, weight, load


@dataclass(frozen=True)
class _Place:
    """Where ways are bounded and searched together."""

    case: int
    tally: int


class _Bounds:
    """Least cost of a way at each place: roughly everywhere, closely where it is asked for."""

    def __init__(self, cases: Sequence[Chain]) -> None:
        self._cases, self._coarse = cases, [_coarse(chain) for chain in cases]
        self._tight: dict[_Place, list[Shortest]] = {}
        self._least = {
            _Place(case, tally): _bound(shortest, tally)
            for case, shortest in enumerate(self._coarse)
            for tally in range(len(shortest[0].whole))
        }
        # The relaxation is never this far from a way, so that a search with it drops nothing.
        self.enough = 4 * max(COSTS >> shortest[0].price.shift for shortest in self._coarse)

    @property
    def lowest(self) -> int:
        return min(self._least.values())

    def within(self, slack: int) -> list[_Place]:
        """Places bounded by at most the lowest bound and a slack, the lowest first; all of them closely."""
        while True:
            near = [place for place, bound in self._least.items() if bound <= self.lowest + slack]
            rough = [place for place in near if place not in self._tight]
            if not rough:
                return sorted(near, key=lambda place: self._least[place])
            place = min(rough, key=lambda place: self._least[place])
            self._tight[place] = fine_prices(self._cases[place.case], self._coarse[place.case], place.tally, AROUND)
            self._least[place] = _bound(self._tight[place], place.tally)

    def at(self, place: _Place) -> tuple[int, list[Shortest]]:
        return self._least[place], self._tight[place]


def _solve(cases: Sequence[Chain]) -> Way | None:
    """Every place that may hold the optimum, with growing slack."""
    bounds = _Bounds(cases)
    slack = 1 + bounds.lowest // _FIRST_SLACK
    while slack < 2 * bounds.enough:
        places, best = bounds.within(slack), None
        most = bounds.lowest + slack
        for place in places:
            bound, shortest = bounds.at(place)
            way = _Search(cases[place.case], shortest, place.tally, most).best() if bound <= most else None
            if way is not None:
                most = way.cost
                key = (way.cost, way.weight, way.load, _preference(cases[place.case], way))
                if best is None or key < best[0]:
                    best = (key, replace(way, case=place.case))
        if best is not None:
            return replace(best[1], bound=bounds.lowest)
        slack *= 2
    return None


def _coarse(chain: Chain) -> list[Shortest]:
    what = ("weights",) if chain.limit is None else ("weights", "loads")
    return [shortest for name in what for shortest in coarse_prices(chain, name)]


def _bound(shortest: Sequence[Shortest], tally: int) -> int:
    """Least cost of a way with this tally."""
    return max(-(-int(s.whole[tally]) >> s.price.shift) for s in shortest)


def _preference(chain: Chain, way: Way) -> tuple[int, ...]:
    nodes = (stage[k].rank for stage, k in zip(chain.stages, way.nodes, strict=True))
    return tuple(x for pair in zip(nodes, way.options, strict=True) for x in pair)


_ZERO, _NONE = np.zeros(1, np.int64), np.zeros(0, np.int64)


class _Search:
    """One search for ways of one tally, from the last stage to the first."""

    def __init__(self, chain: Chain, shortest: Sequence[Shortest], tally: int, most: int) -> None:
        """Of ways that cost at most `most`."""
        self.chain, self.shortest, self.tally = chain, shortest, tally
        self.most = most << shortest[0].price.shift
        self.fronts: list[list[Front]] = []
        for t in reversed(range(len(chain.stages))):
            self.fronts.insert(0, [self._front(t, k) for k in range(len(chain.stages[t]))])

    def _front(self, t: int, k: int) -> Front:
        node = self.chain.stages[t][k]
        base = Front(*(_ZERO,) * 6) if t == len(self.chain.stages) - 1 else self._after(self.chain.steps[t][k])
        base = replace(base, tallies=base.tallies + node.tally)
        base = undominated(base.at(np.nonzero(base.tallies <= self.tally)[0]), self.chain.limit is not None)
        kept = Front(*(_NONE,) * 6)
        if not len(base):
            return kept
        # What every option adds to: lengths of the tails, and of the shortest way to the node.
        ahead = [self._ahead(s, base, t, k) for s in self.shortest]
        core = np.ones(len(node.costs), bool)
        for s, length in zip(self.shortest, ahead, strict=True):
            core &= s.own[t][k] + int(length.min()) <= self.most
        options = np.nonzero(core)[0]
        if self.chain.limit is None and len(options) > 2:
            # The first, largest cut may end in a short group, out of step with the others.
            table = tabulated(base, node, options[1:])
            if table is not None:
                first = self._extended(base, options[:1], ahead, t, k)
                return undominated(first.and_(self._bounded(table, t, k)), False)
        at_once = max(1, CANDIDATES // len(base))
        for start in range(0, len(options), at_once):
            new = self._extended(base, options[start : start + at_once], ahead, t, k)
            kept = undominated(kept.and_(new), self.chain.limit is not None)
        return kept

    def _bounded(self, front: Front, t: int, k: int) -> Front:
        """Without what is too heavy or bounded above `most`."""
        front = front.at(np.nonzero(front.weights <= self.chain.capacity)[0])
        for s in self.shortest:
            front = front.at(np.nonzero(self._ahead(s, front, t, k) <= self.most)[0])
        return front

    def _ahead(self, s: Shortest, front: Front, t: int, k: int) -> Ints:
        return s.price.of(front.costs, front.weights, front.loads) + s.heads[t][k][self.tally - front.tallies]

    def _after(self, steps: Sequence[int]) -> Front:
        """The fronts of the next stage, one after the other, with the step to them."""
        after = self.fronts[0]
        step = np.repeat(np.array(steps, np.int64), [len(f) for f in after])
        places = np.nonzero(step < NEVER)[0]
        costs, weights, loads, tallies = (
            np.concatenate([getattr(f, name) for f in after])[places]
            for name in ("costs", "weights", "loads", "tallies")
        )
        return Front(costs + step[places], weights, loads, tallies, places, places)

    def _extended(self, base: Front, options: Ints, ahead: Sequence[Ints], t: int, k: int) -> Front:
        """These options before every way of `base`, in order of preference, without what is bounded above `most`."""
        node = self.chain.stages[t][k]
        first, *others = ((s.own[t][k], length) for s, length in zip(self.shortest, ahead, strict=True))
        row, column = np.nonzero(first[0][options, None] + first[1] <= self.most)
        row = options[row]
        fits = node.weights[row] + base.weights[column] <= self.chain.capacity
        if self.chain.limit is not None:
            fits &= node.loads[row] + base.loads[column] <= self.chain.limit
        row, column = row[fits], column[fits]
        for own, length in others:
            near = own[row] + length[column] <= self.most
            row, column = row[near], column[near]
        return Front(
            node.costs[row] + base.costs[column],
            node.weights[row] + base.weights[column],
            node.loads[row] + base.loads[column],
            base.tallies[column],
            row,
            base.tails[column],
        )

    def best(self) -> Way | None:
        """Follow the best way from the first stage."""
        starts = [
            (int(f.costs[i]), int(f.weights[i]), int(f.loads[i]), self.chain.stages[0][k].rank, k, int(i))
            for k, f in enumerate(self.fronts[0])
            for i in np.nonzero(f.tallies == self.tally)[0]
        ]
        if not starts:
            return None
        cost, weight, load, _, node, at = min(starts)
        nodes, options = [], []
        for t, stage in enumerate(self.fronts):
            nodes.append(node)
            options.append(int(stage[node].options[at]))
            at, node = int(stage[node].tails[at]), 0
            while t + 1 < len(self.fronts) and at >= len(self.fronts[t + 1][node]):
                at, node = at - len(self.fronts[t + 1][node]), node + 1
        return Way(0, tuple(nodes), tuple(options), cost, weight, load)
