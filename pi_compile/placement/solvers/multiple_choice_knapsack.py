"""The multiple-choice knapsack, solved exactly and with one answer: one option of each class, greatest value that fits.

    maximise  Σ_l value[l][x_l]     subject to     Σ_l weight[l][x_l] ≤ capacity          all integers

HiGHS solves the linear relaxation, one column per (class, option). Its dual is a price λ per unit of weight, and by
weak duality any price λ ≥ 0 bounds what can be had:

    bound(λ) = λ·capacity + Σ_l max_j (value[l][j] − λ·weight[l][j])

What option j of class l loses against its class's maximum at that price adds up over the classes of a solution to at
most  bound − its value.  So every solution within a slack of the bound uses only options that lose no more than the
slack. These few are searched exhaustively by dynamic programming, in integers; if the best solution found lies within
the slack no other can be better, else the slack grows. Floating point only chooses the price, on which the speed
depends and the result does not: it is the same with any version of the solver and on any machine.

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
"""Capacities up to this are searched by a table over all weights, larger ones by a front of the weights reached."""
CANDIDATES = 1 << 22
"""Extended states held at once while a front grows (about 130 MB)."""
_LIMIT = 1 << 61


@dataclass(frozen=True, eq=False)
class Choice:
    """The options of one class by strictly rising weight; the first weighs nothing and is worth nothing."""

    weights: Ints
    values: Ints


@dataclass(frozen=True)
class Solution:
    """The best selection: `picks[l]` is the option taken of class l."""

    picks: tuple[int, ...]
    weight: int
    value: int
    relaxed: int
    """Upper bound from the linear relaxation, rounded down."""


def solve(choices: Sequence[Choice], capacity: int) -> Solution:
    """The exact optimum under the tie rule. Weights and values must sum to less than 2**61 each."""
    assert capacity >= 0
    assert all(_is_sound(c) for c in choices)
    assert max(sum(int(c.values.max()) for c in choices), sum(int(c.weights[-1]) for c in choices)) < _LIMIT
    scaled, units, scale = _in_units(choices, capacity)
    bound, losses = _losses(scaled, units, relaxation_price(scaled, units))
    search = search_table if units <= TABLE_CELLS else search_front
    slack = max(len(choices), math.floor(bound) >> 24)
    while True:
        picks = search(scaled, units, losses, slack)
        value = sum(int(c.values[j]) for c, j in zip(choices, picks, strict=True))
        if value * scale >= bound - slack:
            break
        slack *= 4
    weight = sum(int(c.weights[j]) for c, j in zip(choices, picks, strict=True))
    assert weight <= capacity
    return Solution(picks, weight, value, math.floor(bound / scale))


def _is_sound(choice: Choice) -> bool:
    return bool(choice.weights[0] == choice.values[0] == 0 and (np.diff(choice.weights) > 0).all())


def _in_units(choices: Sequence[Choice], capacity: int) -> tuple[list[Choice], int, int]:
    """The same program in better units, exactly: scaled choices, capacity, and the factor on the values.

    Weights are divided by their greatest common divisor and the capacity cut to what can be used. Small values are
    multiplied, so that losses rounded down to integers still tell options apart.
    """
    unit = max(1, math.gcd(*(int(np.gcd.reduce(c.weights)) for c in choices)))
    most = sum(int(c.weights[-1]) for c in choices)
    scale = max(1, (1 << 40) // max(1, sum(int(c.values.max()) for c in choices)))
    return [Choice(c.weights // unit, c.values * scale) for c in choices], min(capacity, most) // unit, scale


def relaxation_price(choices: Sequence[Choice], capacity: int) -> Fraction:
    """Value of one more unit of capacity in the linear relaxation (HiGHS, primal simplex, one thread)."""
    weights = np.concatenate([c.weights[1:] for c in choices])
    values = np.concatenate([c.values[1:] for c in choices])
    if not len(weights):
        return Fraction(0)
    classes = np.repeat(np.arange(len(choices), dtype=np.int32), [len(c.weights) - 1 for c in choices])
    # Powers of two bring the coefficients into the range of the solver's tolerances and round nothing.
    value_unit, weight_unit = (2.0 ** max(0, int(x.max()).bit_length() - 20) for x in (values, weights))
    model = _model(classes, weights / weight_unit, values / value_unit, len(choices), capacity / weight_unit)
    highs = highspy.Highs()
    options: dict[str, Any] = {"output_flag": False, "parallel": "off", "threads": 1, "random_seed": 0}
    # Primal simplex without presolve: 0.5 s where the default takes 3 (96 classes of 768 options).
    options |= {"presolve": "off", "solver": "simplex", "simplex_strategy": 4}
    for name, option in options.items():
        highs.setOptionValue(name, option)
    highs.passModel(model)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise RuntimeError(f"HiGHS: {highs.modelStatusToString(highs.getModelStatus())}")
    dual = max(0.0, highs.getSolution().row_dual[-1]) * value_unit / weight_unit
    # Short fractions keep the exact arithmetic quick; any price is a valid one.
    return (
        Fraction(dual).limit_denominator(1 << 20 if dual >= 1 else math.ceil(2.0**20 / dual)) if dual else Fraction(0)
    )


def _model(
    classes: npt.NDArray[np.int32],
    weights: npt.NDArray[np.float64],
    values: npt.NDArray[np.float64],
    n_classes: int,
    capacity: float,
) -> Any:
    """Columns in 0…1, one per option but the first; a row per class (≤ 1) and the capacity as the last row."""
    n = len(classes)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = n, n_classes + 1
    model.sense_ = highspy.ObjSense.kMaximize
    model.col_cost_, model.col_lower_, model.col_upper_ = values, np.zeros(n), np.ones(n)
    model.row_lower_ = np.full(n_classes + 1, -highspy.kHighsInf)
    model.row_upper_ = np.append(np.ones(n_classes), capacity)
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = 2 * np.arange(n + 1)
    model.a_matrix_.index_ = np.stack([classes, np.full(n, n_classes, np.int32)], axis=1).ravel()
    model.a_matrix_.value_ = np.stack([np.ones(n), weights], axis=1).ravel()
    return model


def _losses(choices: Sequence[Choice], capacity: int, price: Fraction) -> tuple[Fraction, list[Ints]]:
    """bound(price), and per class what each option loses at that price, rounded down."""
    p, q = price.numerator, price.denominator
    bound, losses = price * capacity, []
    for choice in choices:
        # Python's integers: the products do not fit into 64 bits.
        scores = choice.values.astype(object) * q - choice.weights.astype(object) * p
        best = scores.max()
        bound += Fraction(best, q)
        losses.append(np.minimum((best - scores) // q, _LIMIT).astype(np.int64))
    return bound, losses


def search_table(choices: Sequence[Choice], capacity: int, losses: Sequence[Ints], slack: int) -> tuple[int, ...]:
    """The best selection among options that lose at most `slack`, by a table over every weight up to the capacity.

    best_l(w) = max_j best_{l+1}(w − weight_j) + value_j, from the last class to the first.
    """
    best = np.full(capacity + 1, -1, np.int64)
    best[0], taken = 0, []
    for choice, loss in zip(reversed(choices), reversed(losses), strict=True):
        extended, option = np.full(capacity + 1, -1, np.int64), np.zeros(capacity + 1, np.int32)
        for j in _core(choice, loss, slack, capacity):
            weight = int(choice.weights[j])
            rest = best[: capacity + 1 - weight]
            better = (rest >= 0) & (rest + choice.values[j] > extended[weight:])
            extended[weight:][better] = rest[better] + choice.values[j]
            option[weight:][better] = j
        best = extended
        taken.append(option)
    weight, picks = int(best.argmax()), []
    for choice, option in zip(choices, reversed(taken), strict=True):
        picks.append(int(option[weight]))
        weight -= int(choice.weights[picks[-1]])
    return tuple(picks)


def _core(choice: Choice, loss: Ints, slack: int, capacity: int) -> Ints:
    """Options that may be in a solution within the slack, heaviest first (the tie rule); option 0 always is one."""
    kept = (loss <= slack) & (choice.weights <= capacity)
    kept[0] = True
    return np.nonzero(kept)[0][::-1]


@dataclass(frozen=True, eq=False)
class _Front:
    """Selections of the classes seen so far, none dominated: weights and values both rise strictly."""

    weights: Ints
    values: Ints
    losses: Ints
    parents: Ints
    """Place in the front before this class was added."""
    options: Ints
    """Option taken of this class."""


def search_front(choices: Sequence[Choice], capacity: int, losses: Sequence[Ints], slack: int) -> tuple[int, ...]:
    """The best selection that loses at most `slack`, by the front of undominated (weight, value), last class first.

    Selections that lose more are dropped, but for the one that takes option 0 of every class.
    """
    zero = np.zeros(1, np.int64)
    fronts = [_Front(zero, zero, zero, zero, zero)]
    for choice, loss in zip(reversed(choices), reversed(losses), strict=True):
        fronts.append(_extend(fronts[-1], choice, loss, _core(choice, loss, slack, capacity), capacity, slack))
    place, picks = len(fronts[-1].values) - 1, []
    for front in reversed(fronts[1:]):
        picks.append(int(front.options[place]))
        place = int(front.parents[place])
    return tuple(picks)


def _extend(front: _Front, choice: Choice, loss: Ints, core: Ints, capacity: int, slack: int) -> _Front:
    """Every selection of the front with every option of the core, less what is too heavy, too poor or dominated."""
    n = len(front.weights)
    step = max(1, CANDIDATES // n)
    kept: _Front | None = None
    for start in range(0, len(core), step):
        options = core[start : start + step, None]
        weights, values = front.weights + choice.weights[options], front.values + choice.values[options]
        lost = front.losses + loss[options]
        allowed = (weights <= capacity) & ((lost <= slack) | (weights == 0))
        parents, taken = np.broadcast_to(np.arange(n), weights.shape), np.broadcast_to(options, weights.shape)
        found = [a[allowed] for a in (weights, values, np.minimum(lost, _LIMIT), parents, taken)]
        if kept is not None:
            old = (kept.weights, kept.values, kept.losses, kept.parents, kept.options)
            found = [np.concatenate(pair) for pair in zip(old, found, strict=True)]
        kept = _undominated(*found)
    assert kept is not None
    return kept


def _undominated(weights: Ints, values: Ints, losses: Ints, parents: Ints, options: Ints) -> _Front:
    """Drop what weighs no less and is worth no more than another; of equals the first stays (sorting is stable)."""
    order = np.lexsort((-values, weights))
    sorted_values = values[order]
    before = np.concatenate([[-1], np.maximum.accumulate(sorted_values)[:-1]])
    order = order[sorted_values > before]
    return _Front(*(a[order] for a in (weights, values, losses, parents, options)))
