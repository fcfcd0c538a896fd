"""Sets of labels, one a partial path: extended by the options of a node, and rid of dominated ones."""

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from pi_compile.placement.solvers.lagrangian_bounds import COSTS, NEVER, Ints

LARGEST_TABLE = 1 << 22
"""Most cells of a table that `tabulated` fills."""


class Options(Protocol):
    """Cost and use of both resources of each option of a node."""

    @property
    def costs(self) -> Ints: ...
    @property
    def vram(self) -> Ints: ...
    @property
    def ram(self) -> Ints: ...


@dataclass(frozen=True, eq=False)
class LabelSet:
    """Labels of partial paths from one node to the last stage, in order of preference."""

    costs: Ints
    vram: Ints
    ram: Ints
    strata: Ints
    options: Ints
    """Option that each path takes of its first node."""
    successors: Ints
    """Label that each path goes on with: its index among those of the next stage, node after node."""

    def __len__(self) -> int:
        return len(self.costs)

    def at(self, indices: Ints) -> Self:
        """The labels at these indices."""
        return type(self)(*(a[indices] for a in self.arrays()))

    def followed_by(self, other: "LabelSet") -> Self:
        """These labels, then the others."""
        return type(self)(*(np.concatenate(pair) for pair in zip(self.arrays(), other.arrays(), strict=True)))

    def arrays(self) -> tuple[Ints, ...]:
        return self.costs, self.vram, self.ram, self.strata, self.options, self.successors


def non_dominated(labels: LabelSet, ram_counts: bool) -> LabelSet:
    """The labels that no other of their stratum dominates; of equal labels the first stays.

    Where RAM counts, a label is only compared with those of equal RAM: RAM may rise while VRAM falls.
    """
    if not len(labels):
        return labels
    keys = (labels.ram, labels.strata) if ram_counts else (labels.strata,)
    # The sort is stable, so that equal labels keep their order.
    order = np.lexsort(
        (labels.costs, labels.vram, *keys) if ram_counts else (labels.ram, labels.costs, labels.vram, *keys)
    )
    change = np.zeros(len(order), bool)
    for key in keys:
        change[1:] |= np.diff(key[order]) != 0
    # Ranks fall from group to group, so that the running minimum is always one of the label's own group.
    costs, group = labels.costs[order], np.cumsum(change)
    if ram_counts:
        costs = np.unique(costs, return_inverse=True)[1]
    rank = costs - group * (len(order) + 1 if ram_counts else 2 * COSTS)
    before = np.minimum.accumulate(rank)
    return labels.at(order[np.concatenate([[True], rank[1:] < before[:-1]])])


def tabulated(base: LabelSet, node: Options, options: Ints) -> LabelSet | None:
    """The non-dominated labels of every option before every label of `base`, by a table over stratum and VRAM.

    `options` are in order of preference. The table suits identical layers: options and labels are evenly spaced in
    VRAM, and many pairs use the same in all, so that each option is one shifted addition. None where the spacing is not
    even, or where RAM is not a function of VRAM. RAM must not count.
    """
    vram = node.vram[options]
    unit = int(np.gcd.reduce(vram - vram.min()))
    strata, row = np.unique(base.strata, return_inverse=True)
    least_vram = np.full(len(strata), NEVER, np.int64)
    np.minimum.at(least_vram, row, base.vram)
    over = base.vram - least_vram[row]
    if unit == 0 or (over % unit).any() or not _ram_follows(base, node, options, row):
        return None
    column, shift = over // unit, (vram - vram.min()) // unit
    width, largest_shift = int(column.max()) + 1, int(shift.max())
    cells = len(strata) * (width + largest_shift)
    if cells > LARGEST_TABLE or 4 * cells > len(base) * len(options):
        return None
    costs, labels = np.full((len(strata), width), NEVER, np.int64), np.zeros((len(strata), width), np.int32)
    costs[row, column], labels[row, column] = base.costs, np.arange(len(base))
    best = np.full((len(strata), width + largest_shift), NEVER, np.int64)
    best_option, best_label = (np.zeros(best.shape, np.int32) for _ in range(2))
    for option, by in zip(options.tolist(), shift.tolist(), strict=True):
        columns = slice(by, by + width)
        total = costs + int(node.costs[option])
        better = total < best[:, columns]
        np.copyto(best[:, columns], total, where=better)
        np.copyto(best_option[:, columns], option, where=better)
        np.copyto(best_label[:, columns], labels, where=better)
    least = np.minimum.accumulate(best, axis=1)
    kept = best < NEVER
    kept[:, 1:] &= best[:, 1:] < least[:, :-1]
    option_of, label = best_option[kept].astype(np.int64), best_label[kept].astype(np.int64)
    return LabelSet(
        base.costs[label] + node.costs[option_of],
        base.vram[label] + node.vram[option_of],
        base.ram[label] + node.ram[option_of],
        base.strata[label],
        option_of,
        base.successors[label],
    )


def _ram_follows(base: LabelSet, node: Options, options: Ints, row: Ints) -> bool:
    """Whether paths of equal stratum and VRAM have equal RAM: every unit of VRAM takes the place of as much RAM."""
    vram, ram = node.vram[options], node.ram[options]
    most, least = int(vram.argmax()), int(vram.argmin())
    rise, run = int(ram[most] - ram[least]), int(vram[most] - vram[least])
    first = np.unique(row, return_index=True)[1][row]
    lines = [(vram - vram[least], ram - ram[least]), (base.vram - base.vram[first], base.ram - base.ram[first])]
    return all((v.astype(object) * rise == r.astype(object) * run).all() for v, r in lines)
