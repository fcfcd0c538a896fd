"""Fronts of partial ways through a chain: extended by options, and rid of what is dominated."""

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from pi_compile.placement.solvers.lagrangian_bounds import COSTS, NEVER, Ints

LARGEST_TABLE = 1 << 22
"""Cells of a table that `tabulated` may fill."""


class Options(Protocol):
    """What a node offers."""

    @property
    def costs(self) -> Ints: ...
    @property
    def weights(self) -> Ints: ...
    @property
    def loads(self) -> Ints: ...


@dataclass(frozen=True, eq=False)
class Front:
    """Ways from one node on, none dominated by an earlier one."""

    costs: Ints
    weights: Ints
    loads: Ints
    tallies: Ints
    options: Ints
    tails: Ints
    """Place among the fronts of the next stage, one after the other."""

    def __len__(self) -> int:
        return len(self.costs)

    def at(self, places: Ints) -> Self:
        return type(self)(*(a[places] for a in self.arrays()))

    def and_(self, other: "Front") -> Self:
        return type(self)(*(np.concatenate(pair) for pair in zip(self.arrays(), other.arrays(), strict=True)))

    def arrays(self) -> tuple[Ints, ...]:
        return self.costs, self.weights, self.loads, self.tallies, self.options, self.tails


def undominated(f: Front, load_counts: bool) -> Front:
    """Drop what another of the same tally is no worse than; of equals the first stays, sorting being stable.

    Where the load counts, only ways of equal load are compared: it may rise as the weight falls.
    """
    if not len(f):
        return f
    keys = (f.loads, f.tallies) if load_counts else (f.tallies,)
    order = np.lexsort((f.costs, f.weights, *keys) if load_counts else (f.loads, f.costs, f.weights, *keys))
    change = np.zeros(len(order), bool)
    for key in keys:
        change[1:] |= np.diff(key[order]) != 0
    # Ranks fall from group to group, so that the least so far is always one of the own group.
    costs, group = f.costs[order], np.cumsum(change)
    if load_counts:
        costs = np.unique(costs, return_inverse=True)[1]
    rank = costs - group * (len(order) + 1 if load_counts else 2 * COSTS)
    before = np.minimum.accumulate(rank)
    return f.at(order[np.concatenate([[True], rank[1:] < before[:-1]])])


def tabulated(base: Front, node: Options, options: Ints) -> Front | None:
    """The undominated of all these options before every way of `base`, options being in order of preference.

    A table over tally and weight, for where options and ways are evenly spaced in weight and many weigh the same in
    all, as where layers are alike: each option is then one shifted addition. None where they are not, or where the
    load is not a function of the weight; the load must not count.
    """
    weights = node.weights[options]
    unit = int(np.gcd.reduce(weights - weights.min()))
    tallies, row = np.unique(base.tallies, return_inverse=True)
    lightest = np.full(len(tallies), NEVER, np.int64)
    np.minimum.at(lightest, row, base.weights)
    over = base.weights - lightest[row]
    if unit == 0 or (over % unit).any() or not _load_follows(base, node, options, row):
        return None
    column, shift = over // unit, (weights - weights.min()) // unit
    width, more = int(column.max()) + 1, int(shift.max())
    cells = len(tallies) * (width + more)
    if cells > LARGEST_TABLE or 4 * cells > len(base) * len(options):
        return None
    costs, places = np.full((len(tallies), width), NEVER, np.int64), np.zeros((len(tallies), width), np.int32)
    costs[row, column], places[row, column] = base.costs, np.arange(len(base))
    best = np.full((len(tallies), width + more), NEVER, np.int64)
    taken, tail = (np.zeros(best.shape, np.int32) for _ in range(2))
    for option, by in zip(options.tolist(), shift.tolist(), strict=True):
        here = slice(by, by + width)
        total = costs + int(node.costs[option])
        better = total < best[:, here]
        np.copyto(best[:, here], total, where=better)
        np.copyto(taken[:, here], option, where=better)
        np.copyto(tail[:, here], places, where=better)
    least = np.minimum.accumulate(best, axis=1)
    kept = best < NEVER
    kept[:, 1:] &= best[:, 1:] < least[:, :-1]
    option_of, place = taken[kept].astype(np.int64), tail[kept].astype(np.int64)
    return Front(
        base.costs[place] + node.costs[option_of],
        base.weights[place] + node.weights[option_of],
        base.loads[place] + node.loads[option_of],
        base.tallies[place],
        option_of,
        base.tails[place],
    )


def _load_follows(base: Front, node: Options, options: Ints, row: Ints) -> bool:
    """Whether ways of one tally and weight have one load: it falls by the same for each unit of weight everywhere."""
    weights, loads = node.weights[options], node.loads[options]
    heavy, light = int(weights.argmax()), int(weights.argmin())
    rise, run = int(loads[heavy] - loads[light]), int(weights[heavy] - weights[light])
    first = np.unique(row, return_index=True)[1][row]
    along = [(weights - weights[light], loads - loads[light])]
    along.append((base.weights - base.weights[first], base.loads - base.loads[first]))
    return all((w.astype(object) * rise == x.astype(object) * run).all() for w, x in along)
