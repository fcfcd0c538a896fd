"""The multiple-choice knapsack, solved exactly and with one answer: one item of each class, greatest value that fits.

    maximise  Σ_l value[l][x_l]     subject to     Σ_l weight[l][x_l] ≤ capacity          all integers

HiGHS solves the linear relaxation, one column per (class, item). Its dual gives a Lagrange multiplier λ per unit of
weight. By weak duality any λ ≥ 0 gives an upper bound of the optimum:

    bound(λ) = λ·capacity + Σ_l max_j (value[l][j] − λ·weight[l][j])

The reduced cost of item j of class l is what it loses against the class's maximum in this sum. Over the classes of a
solution reduced costs add up to at most  bound − its value.  So every solution within a gap of the bound uses only
items whose reduced cost is at most the gap: the core. Dynamic programming in integers searches the core exhaustively.
If the best solution found is within the gap, no other is better; else the gap grows. Floating point only chooses the
multiplier, on which the speed depends and the result does not: the answer is the same with any version of HiGHS and on
any machine.

Ties: greatest value, then least weight, then the largest weight in class 0, then in class 1, and so on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import highspy
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

TABLE_CELLS = 1 << 18
"""Capacities up to this are searched by a table over all weights, larger ones by sets of non-dominated labels."""
CANDIDATES = 1 << 22
"""Most labels that are extended at once (about 130 MB)."""
_LIMIT = 1 << 61


@dataclass(frozen=True, eq=False)
class ItemClass:
    """The items of one class by strictly rising weight; the first weighs nothing and is worth nothing."""

    weights: Ints
    values: Ints


@dataclass(frozen=True)
class Solution:
    """The best selection: `items[l]` is the item taken of class l."""

    items: tuple[int, ...]
    weight: int
    value: int
    bound: int
    """Upper bound from the linear relaxation, rounded down."""


def solve(classes: Sequence[ItemClass], capacity: int) -> Solution:
    """The exact optimum under the tie rule. Weights and values must sum to less than 2**61 each."""
    assert capacity >= 0
    assert all(_is_sound(c) for c in classes)
    assert max(sum(int(c.values.max()) for c in classes), sum(int(c.weights[-1]) for c in classes)) < _LIMIT
    scaled, units, scale = _scaled(classes, capacity)
    bound, reduced_costs = _reduced_costs(scaled, units, relaxation_multiplier(scaled, units))
    search = search_table if units <= TABLE_CELLS else search_labels
    gap = max(len(classes), math.floor(bound) >> 24)
    while True:
        items = search(scaled, units, reduced_costs, gap)
        value = sum(int(c.values[j]) for c, j in zip(classes, items, strict=True))
        if value * scale >= bound - gap:
            break
        gap *= 4
    weight = sum(int(c.weights[j]) for c, j in zip(classes, items, strict=True))
    assert weight <= capacity
    return Solution(items, weight, value, math.floor(bound / scale))


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
    """Lagrange multiplier of the capacity: its dual in the linear relaxation (HiGHS, primal simplex, one thread)."""
    weights = np.concatenate([c.weights[1:] for c in classes])
    values = np.concatenate([c.values[1:] for c in classes])
    if not len(weights):
        return Fraction(0)
    class_of = np.repeat(np.arange(len(classes), dtype=np.int32), [len(c.weights) - 1 for c in classes])
    # Powers of two bring the coefficients into the range of the solver's tolerances and round nothing.
    value_unit, weight_unit = (2.0 ** max(0, int(x.max()).bit_length() - 20) for x in (values, weights))
    model = _model(class_of, weights / weight_unit, values / value_unit, len(classes), capacity / weight_unit)
    highs = highspy.Highs()
    options: dict[str, Any] = {"output_flag": False, "parallel": "off", "threads": 1, "random_seed": 0}
    # Primal simplex without presolve: 0.5 s where the default takes 3 (96 classes of 768 items).
    options |= {"presolve": "off", "solver": "simplex", "simplex_strategy": 4}
    for name, option in options.items():
        highs.setOptionValue(name, option)
    highs.passModel(model)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise RuntimeError(f"HiGHS: {highs.modelStatusToString(highs.getModelStatus())}")
    dual = max(0.0, highs.getSolution().row_dual[-1]) * value_unit / weight_unit
    # Short fractions keep the exact arithmetic quick; any multiplier gives a valid bound.
    return (
        Fraction(dual).limit_denominator(1 << 20 if dual >= 1 else math.ceil(2.0**20 / dual)) if dual else Fraction(0)
    )


def _model(
    class_of: npt.NDArray[np.int32],
    weights: npt.NDArray[np.float64],
    values: npt.NDArray[np.float64],
    n_classes: int,
    capacity: float,
) -> Any:
    """The linear program: a column in 0…1 for each item but the first, a row (≤ 1) for each class, one of capacity."""
    n = len(class_of)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = n, n_classes + 1
    model.sense_ = highspy.ObjSense.kMaximize
    model.col_cost_, model.col_lower_, model.col_upper_ = values, np.zeros(n), np.ones(n)
    model.row_lower_ = np.full(n_classes + 1, -highspy.kHighsInf)
    model.row_upper_ = np.append(np.ones(n_classes), capacity)
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = 2 * np.arange(n + 1)
    model.a_matrix_.index_ = np.stack([class_of, np.full(n, n_classes, np.int32)], axis=1).ravel()
    model.a_matrix_.value_ = np.stack([np.ones(n), weights], axis=1).ravel()
    return model


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


def search_table(
    classes: Sequence[ItemClass], capacity: int, reduced_costs: Sequence[Ints], gap: int
) -> tuple[int, ...]:
    """The best selection of core items, by a table over every weight up to the capacity.

    best_l(w) = max_j best_{l+1}(w − weight_j) + value_j, from the last class to the first.
    """
    best = np.full(capacity + 1, -1, np.int64)
    best[0], tables = 0, []
    for c, reduced in zip(reversed(classes), reversed(reduced_costs), strict=True):
        extended, item_at = np.full(capacity + 1, -1, np.int64), np.zeros(capacity + 1, np.int32)
        for j in _core(c, reduced, gap, capacity):
            weight = int(c.weights[j])
            rest = best[: capacity + 1 - weight]
            better = (rest >= 0) & (rest + c.values[j] > extended[weight:])
            extended[weight:][better] = rest[better] + c.values[j]
            item_at[weight:][better] = j
        best = extended
        tables.append(item_at)
    weight, items = int(best.argmax()), []
    for c, item_at in zip(classes, reversed(tables), strict=True):
        items.append(int(item_at[weight]))
        weight -= int(c.weights[items[-1]])
    return tuple(items)


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


def search_labels(
    classes: Sequence[ItemClass], capacity: int, reduced_costs: Sequence[Ints], gap: int
) -> tuple[int, ...]:
    """The best selection within the gap, by non-dominated labels (weight, value), from the last class to the first.

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
