"""Shortest ways through a chain where weight and load have a price: what bounds the ways within the budgets."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

NEVER = 1 << 61
"""Cost of a step that is not allowed."""
COSTS, _PRICED = 1 << 50, 1 << 58
"""Ranges of scaled costs and of priced weights: prices reach 256 times what all weight costs on average."""


class _Node(Protocol):
    @property
    def costs(self) -> Ints: ...
    @property
    def weights(self) -> Ints: ...
    @property
    def loads(self) -> Ints: ...
    @property
    def tally(self) -> int: ...


class _Chain(Protocol):
    @property
    def stages(self) -> Sequence[Sequence[_Node]]: ...
    @property
    def steps(self) -> Sequence[Sequence[Sequence[int]]]: ...
    @property
    def capacity(self) -> int: ...
    @property
    def limit(self) -> int | None: ...


@dataclass(frozen=True)
class Price:
    """Of one unit of weight and of load. Costs are multiplied by 2^shift, so that integer prices are fine enough."""

    shift: int
    weight: int
    load: int

    def of(self, costs: Ints, weights: Ints, loads: Ints) -> Ints:
        """Lengths: scaled costs and what weight and load cost."""
        return (costs << self.shift) + weights * self.weight + loads * self.load


class Shortest:
    """Lengths of everything at one price, by how many nodes of a way have a tally."""

    def __init__(self, chain: _Chain, price: Price) -> None:
        self.price = price
        nodes = {id(n): n for stage in chain.stages for n in stage}
        lengths = {i: price.of(n.costs, n.weights, n.loads) for i, n in nodes.items()}
        self.own = [[lengths[id(n)] for n in stage] for stage in chain.stages]
        """Of each option of each node."""
        size = len(chain.stages) + 1
        start = np.full(size, NEVER, np.int64)
        start[0] = -price.weight * chain.capacity - price.load * (chain.limit or 0)
        self.heads: list[list[Ints]] = [[start] * len(chain.stages[0])]
        """Of the shortest way to each node with each tally, its own not included, less what the budgets are worth."""
        for t, rows in enumerate(chain.steps):
            here = self._through(chain, t)
            steps = [[min(c << price.shift, NEVER) for c in row] for row in rows]
            self.heads.append(
                [
                    np.minimum(np.min([h + row[j] for h, row in zip(here, steps, strict=True)], axis=0), NEVER)
                    for j in range(len(rows[0]))
                ]
            )
        self.whole = np.min(self._through(chain, len(chain.stages) - 1), axis=0)
        """Of the shortest way with each tally, less what the budgets are worth: none within them is shorter."""

    def _through(self, chain: _Chain, t: int) -> list[Ints]:
        """Lengths to the end of each node of a stage."""
        found = []
        for k, node in enumerate(chain.stages[t]):
            shifted = np.full_like(self.heads[t][k], NEVER)
            shifted[node.tally :] = self.heads[t][k][: len(shifted) - node.tally]
            found.append(np.minimum(shifted + int(self.own[t][k].min()), NEVER))
        return found


def coarse_prices(chain: _Chain, what: str) -> list[Shortest]:
    """Bounds at prices from none to the dearest by factors of four, and closer ones around the best of them."""
    shift, dearest = _ranges(chain, what)
    values = [dearest >> n for n in (*range(0, dearest.bit_length(), 2), dearest.bit_length())]
    found = [Shortest(chain, _price(what, shift, v)) for v in values]
    best = max(zip(values, found, strict=True), key=lambda pair: int(pair[1].whole.min()))[0]
    closer = {min(best * by // 16, dearest) for by in (*range(5, 16), *range(18, 64, 4))} - set(values)
    return found + [Shortest(chain, _price(what, shift, v)) for v in sorted(closer)]


def fine_prices(chain: _Chain, coarse: Sequence[Shortest], tally: int, factors: Sequence[float]) -> list[Shortest]:
    """Bounds for ways of one tally: at the best price, found by ternary search, and at multiples of it."""
    best = max(coarse, key=lambda s: int(s.whole[tally])).price
    what = "loads" if best.load else "weights"
    shift, dearest = _ranges(chain, what)
    value = best.load or best.weight
    at = cache(lambda v: Shortest(chain, _price(what, shift, v)))
    low, high = value // 4, min(4 * value + 4, dearest)
    while high - low > 2:
        third = (high - low) // 3
        one, two = low + third, high - third
        low, high = (one, high) if at(one).whole[tally] < at(two).whole[tally] else (low, two)
    value = max(range(low, high + 1), key=lambda v: int(at(v).whole[tally]))
    return [at(v) for v in dict.fromkeys(min(int(value * by), dearest) for by in factors)]


def _price(what: str, shift: int, value: int) -> Price:
    return Price(shift, *((value, 0) if what == "weights" else (0, value)))


def _ranges(chain: _Chain, what: str) -> tuple[int, int]:
    """(shift of costs, dearest price)."""
    cost, used = (
        sum(max(int(getattr(n, name).max()) for n in stage) for stage in chain.stages) for name in ("costs", what)
    )
    cost += sum(max((c for row in rows for c in row if c < NEVER), default=0) for rows in chain.steps)
    assert cost <= COSTS
    assert used < _PRICED
    return (COSTS // max(1, cost)).bit_length() - 1, _PRICED // max(1, used)
