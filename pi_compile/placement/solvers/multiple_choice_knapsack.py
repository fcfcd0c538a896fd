"""The multiple-choice knapsack, solved exactly and with one answer: one item of each class, greatest value that fits.

    maximise  Σ_l value[l][x_l]     subject to     Σ_l weight[l][x_l] ≤ capacity          all integers

A Lagrange multiplier λ ≥ 0 charges each unit of weight. By weak duality any λ gives an upper bound of the optimum:

    bound(λ) = λ·capacity + Σ_l max_j (value[l][j] − λ·weight[l][j])

The reduced cost of item j of class l is what it loses against the class's maximum in this sum. Over the classes of a
solution reduced costs add up to at most  bound − its value.  So every solution within a gap of the bound uses only
items whose reduced cost is at most the gap: the core. Dynamic programming in integers searches the core exhaustively.
If the best solution found is within the gap, no other is better; else the gap grows. The multiplier is the dual of the
linear relaxation, where the bound is lowest; the speed depends on it, and the result does not.

Ties: greatest value, then least weight, then the largest weight in class 0, then in class 1, and so on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

CANDIDATES = 1 << 22
"""Most labels that are extended at once (about 130 MB)."""
_LIMIT = 1 << 61


@dataclass(frozen=True, eq=False)
class ItemClass:
    """The items of one class by strictly rising weight; the first weighs nothing and is worth nothing."""

    weights: Ints
    values: Ints


@dataclass(frozen=True)
class Selection:
    """The best selection: `items[l]` is the item taken of class l."""

    items: tuple[int, ...]
    weight: int
    value: int
    bound: int
    """Upper bound from the linear relaxation, rounded down."""


def solve(classes: Sequence[ItemClass], capacity: int) -> Selection:
    """The exact optimum under the tie rule. Weights and values must sum to less than 2**61 each."""
    assert capacity >= 0
    assert all(_is_sound(c) for c in classes)
    assert max(sum(int(c.values.max()) for c in classes), sum(int(c.weights[-1]) for c in classes)) < _LIMIT
    scaled, units, scale = _scaled(classes, capacity)
    bound, reduced_costs = _reduced_costs(scaled, units, relaxation_multiplier(scaled, units))
    gap = max(len(classes), math.floor(bound) >> 24)
    while True:
        items = _search(scaled, units, reduced_costs, gap)
        value = sum(int(c.values[j]) for c, j in zip(classes, items, strict=True))
        if value * scale >= bound - gap:
            break
        gap *= 4
    weight = sum(int(c.weights[j]) for c, j in zip(classes, items, strict=True))
    assert weight <= capacity
    return Selection(items, weight, value, math.floor(bound / scale))


def _is_sound(c: ItemClass) -> bool:
    return bool(c.weights[0] == c.values[0] == 0 and (np.diff(c.weights) > 0).all())


def _scaled(classes: Sequence[ItemClass], capacity: int) -> tuple[list[ItemClass], int, int]:
    """The same problem in better units: scaled classes, scaled capacity, and the factor on the values.

    Weights are divided by their greatest common divisor and the capacity cut to what can be used. Small values are
    multiplied, so that reduced costs rounded down to integers still tell items apart. Nothing is rounded here.
    """
    unit = max(1, math.gcd(*(int(np.gcd.reduce(c.weights)) for c in classes)))
    most = sum(int(c.weights[-1]) for c in classes)
    scale = max(1, (1 << 40) // max(1, sum(int(c.values.max()) for c in classes)))
    return [ItemClass(c.weights // unit, c.values * scale) for c in classes], min(capacity, most) // unit, scale


def relaxation_multiplier(classes: Sequence[ItemClass], capacity: int) -> Fraction:
    """Lagrange multiplier of the capacity: its dual in the linear relaxation (Sinha and Zoltners 1979).

    The relaxation takes steps of the concave hulls of all classes, those of greatest efficiency first. The multiplier
    is the efficiency of the step that exceeds the capacity; 0 where all steps fit.
    """
    for efficiency, weight in sorted((step for c in classes for step in _hull_steps(c)), reverse=True):
        capacity -= weight
        if capacity < 0:
            # Short fractions keep the exact arithmetic quick; any multiplier gives a valid bound.
            return efficiency.limit_denominator(1 << 20 if efficiency >= 1 else math.ceil((1 << 20) / efficiency))
    return Fraction(0)


def _hull_steps(c: ItemClass) -> list[tuple[Fraction, int]]:
    """(efficiency = value ÷ weight, weight) of each step of the concave hull of a class, by falling efficiency."""
    hull, steps = [(0, 0)], list[tuple[Fraction, int]]()
    for weight, value in zip(c.weights[1:].tolist(), c.values[1:].tolist(), strict=True):
        while True:
            step = weight - hull[-1][0]
            efficiency = Fraction(value - hull[-1][1], step)
            if not steps or efficiency < steps[-1][0]:
                break
            hull.pop()
            steps.pop()
        if efficiency > 0:
            hull.append((weight, value))
            steps.append((efficiency, step))
    return steps


def _reduced_costs(classes: Sequence[ItemClass], capacity: int, multiplier: Fraction) -> tuple[Fraction, list[Ints]]:
    """bound(λ), and for each class the reduced cost of each item at λ, rounded down."""
    p, q = multiplier.numerator, multiplier.denominator
    bound, reduced_costs = multiplier * capacity, []
    for c in classes:
        # Python's integers: the products do not fit into 64 bits.
        scores = c.values.astype(object) * q - c.weights.astype(object) * p
        best = scores.max()
        bound += Fraction(best, q)
        reduced_costs.append(np.minimum((best - scores) // q, _LIMIT).astype(np.int64))
    return bound, reduced_costs


def _core(c: ItemClass, reduced: Ints, gap: int, capacity: int) -> Ints:
    """Items that may be in a solution within the gap, heaviest first (the tie rule); item 0 always is one."""
    kept = (reduced <= gap) & (c.weights <= capacity)
    kept[0] = True
    return np.nonzero(kept)[0][::-1]


@dataclass(frozen=True, eq=False)
class _LabelSet:
    """Non-dominated selections of the classes seen so far: weights and values both rise strictly."""

    weights: Ints
    values: Ints
    reduced_costs: Ints
    """Sum over the items of the selection."""
    parents: Ints
    """Index among the labels before this class was added."""
    items: Ints
    """Item taken of this class."""


def _search(classes: Sequence[ItemClass], capacity: int, reduced_costs: Sequence[Ints], gap: int) -> tuple[int, ...]:
    """The best selection of core items, by non-dominated labels (weight, value), from the last class to the first.

    Selections whose reduced costs sum to more than the gap are dropped, but for the one that takes item 0 of every
    class.
    """
    zero = np.zeros(1, np.int64)
    label_sets = [_LabelSet(zero, zero, zero, zero, zero)]
    for c, reduced in zip(reversed(classes), reversed(reduced_costs), strict=True):
        label_sets.append(_extend(label_sets[-1], c, reduced, _core(c, reduced, gap, capacity), capacity, gap))
    label, items = len(label_sets[-1].values) - 1, []
    for labels in reversed(label_sets[1:]):
        items.append(int(labels.items[label]))
        label = int(labels.parents[label])
    return tuple(items)


def _extend(labels: _LabelSet, c: ItemClass, reduced: Ints, core: Ints, capacity: int, gap: int) -> _LabelSet:
    """Every label with every core item, without what is too heavy, outside the gap, or dominated."""
    n = len(labels.weights)
    step = max(1, CANDIDATES // n)
    kept: _LabelSet | None = None
    for start in range(0, len(core), step):
        items = core[start : start + step, None]
        weights, values = labels.weights + c.weights[items], labels.values + c.values[items]
        sums = labels.reduced_costs + reduced[items]
        allowed = (weights <= capacity) & ((sums <= gap) | (weights == 0))
        parents, taken = np.broadcast_to(np.arange(n), weights.shape), np.broadcast_to(items, weights.shape)
        found = [a[allowed] for a in (weights, values, np.minimum(sums, _LIMIT), parents, taken)]
        if kept is not None:
            old = (kept.weights, kept.values, kept.reduced_costs, kept.parents, kept.items)
            found = [np.concatenate(pair) for pair in zip(old, found, strict=True)]
        kept = _non_dominated(*found)
    assert kept is not None
    return kept


def _non_dominated(weights: Ints, values: Ints, reduced_costs: Ints, parents: Ints, items: Ints) -> _LabelSet:
    """Drop labels that weigh no less and are worth no more than another; of equal ones the first stays."""
    order = np.lexsort((-values, weights))  # stable
    sorted_values = values[order]
    before = np.concatenate([[-1], np.maximum.accumulate(sorted_values)[:-1]])
    order = order[sorted_values > before]
    return _LabelSet(*(a[order] for a in (weights, values, reduced_costs, parents, items)))
