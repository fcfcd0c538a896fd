"""Enumeration of paths through a layered graph: labels of partial paths, extended stage by stage from the last one.

Each node keeps a set of non-dominated labels (vram, ram, cost), and drops labels whose lower bound is too high.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from pi_compile.placement.solvers.layered_graph import COSTS, NEVER, Ints, LayeredGraph, Node, Relaxation, ShortestPath

CANDIDATES = 1 << 18
"""Most labels that are extended at once."""
LARGEST_TABLE = 1 << 22
"""Most cells of a table that `tabulated` fills."""


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


_ZERO, _NONE = np.zeros(1, np.int64), np.zeros(0, np.int64)
_EMPTY = LabelSet(*(_NONE,) * 6)


class Enumeration:
    """All paths of one stratum that cost at most `most`, from the last stage to the first."""

    def __init__(self, graph: LayeredGraph, relaxations: Sequence[Relaxation], stratum: int, most: int) -> None:
        self.graph, self.relaxations, self.stratum = graph, relaxations, stratum
        order = None if graph.ram_budget is None else graph.order(stratum)
        self.most = most << relaxations[0].multipliers.shift
        self.label_sets: list[list[LabelSet]] = []
        """[stage][node]; stages before the current one are still missing."""
        for t in reversed(range(len(graph.stages))):
            nodes = range(len(graph.stages[t]))
            self.label_sets.insert(0, [self._labels(t, k) if order is None or order[t] == k else _EMPTY for k in nodes])

    def _labels(self, t: int, k: int) -> LabelSet:
        """Labels of node k of stage t."""
        node, ram_counts = self.graph.stages[t][k], self.graph.ram_budget is not None
        base = LabelSet(*(_ZERO,) * 6) if t == len(self.graph.stages) - 1 else self._behind(self.graph.arcs[t][k])
        base = replace(base, strata=base.strata + node.stratum)
        base = non_dominated(base.at(np.nonzero(base.strata <= self.stratum)[0]), ram_counts)
        kept = _EMPTY
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
        return _extended(node, base, row, column)

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


def non_dominated(labels: LabelSet, ram_counts: bool) -> LabelSet:
    """The labels that no other of their stratum dominates; of equal labels the first stays.

    Where RAM counts, labels are compared with those of equal RAM first, then with those of less.
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
    kept = labels.at(order[np.concatenate([[True], rank[1:] < before[:-1]])])
    return _without_less_ram(kept) if ram_counts else kept


def _without_less_ram(labels: LabelSet) -> LabelSet:
    """The labels that none with less RAM dominates; they stand by stratum, RAM and VRAM, no two with equal ones."""
    kept = [_NONE]
    for start, stop in _runs(labels.strata):
        ram, row = np.unique(labels.ram[start:stop], return_inverse=True)
        vram, column = np.unique(labels.vram[start:stop], return_inverse=True)
        costs = labels.costs[start:stop]
        rows = max(1, LARGEST_TABLE // len(vram))
        least, within = np.full(len(vram), NEVER, np.int64), np.zeros(stop - start, bool)
        for first in range(0, len(ram), rows):
            begin, end = np.searchsorted(row, (first, first + rows))
            table = np.full((min(rows, len(ram) - first) + 1, len(vram)), NEVER, np.int64)
            table[0] = least
            table[row[begin:end] - first + 1, column[begin:end]] = costs[begin:end]
            np.minimum.accumulate(table, axis=0, out=table)
            np.minimum.accumulate(table, axis=1, out=table)
            within[begin:end] = costs[begin:end] < table[row[begin:end] - first, column[begin:end]]
            least = table[-1]
        kept.append(start + np.nonzero(within)[0])
    return labels.at(np.concatenate(kept))


def _runs(values: Ints) -> list[tuple[int, int]]:
    """Begin and end of every run of equal values."""
    ends = [*(np.nonzero(np.diff(values))[0] + 1).tolist(), len(values)]
    return list(zip([0, *ends], ends, strict=False))


def tabulated(base: LabelSet, node: Node, options: Ints) -> LabelSet | None:
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
    return _extended(node, base, option_of, label)


def _extended(node: Node, base: LabelSet, options: Ints, labels: Ints) -> LabelSet:
    """The labels that go on from labels of `base` by options of a node."""
    return LabelSet(
        node.costs[options] + base.costs[labels],
        node.vram[options] + base.vram[labels],
        node.ram[options] + base.ram[labels],
        base.strata[labels],
        options,
        base.successors[labels],
    )


def _ram_follows(base: LabelSet, node: Node, options: Ints, row: Ints) -> bool:
    """Whether paths of equal stratum and VRAM have equal RAM: every unit of VRAM takes the place of as much RAM."""
    vram, ram = node.vram[options], node.ram[options]
    most, least = int(vram.argmax()), int(vram.argmin())
    rise, run = int(ram[most] - ram[least]), int(vram[most] - vram[least])
    first = np.unique(row, return_index=True)[1][row]
    lines = [(vram - vram[least], ram - ram[least]), (base.vram - base.vram[first], base.ram - base.ram[first])]
    return all((v.astype(object) * rise == r.astype(object) * run).all() for v, r in lines)
