"""Intervals of an evaluation: their closed forms, and how often they hold the truth."""

import math

import numpy as np
import pytest

pytest.importorskip("scipy")

pytest.importorskip("torch")

from pi_compile.evaluation.window_scores import accuracy_interval, increase_interval


@pytest.mark.parametrize(("right", "items"), [(0, 4), (1, 2), (23, 100), (100, 100)])
def test_wilsons_interval_has_its_closed_form(right: int, items: int) -> None:
    z, p = 1.959963984540054, right / items
    middle = (p + z**2 / (2 * items)) / (1 + z**2 / items)
    margin = z / (1 + z**2 / items) * math.sqrt(p * (1 - p) / items + z**2 / (4 * items**2))
    found = accuracy_interval(np.arange(items) < right)
    assert found == pytest.approx((middle - margin, middle + margin), abs=1e-12)
    assert found[0] <= p <= found[1]
    assert found[1] - found[0] > 0.03


def test_a_single_window_has_no_interval_and_equal_losses_one_without_width() -> None:
    losses_N = np.array([3.0, 4.0, 5.0])
    assert increase_interval(losses_N[:1], losses_N[:1]) is None
    assert increase_interval(losses_N, losses_N) == (0.0, 0.0)


def test_how_hard_a_window_is_cancels() -> None:
    """Differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / √3, Student's t with two degrees of freedom 4.303."""
    base_N = np.array([1.0, 50.0, 9.0])
    margin = 4.302652729749462 * 0.1 / math.sqrt(3)
    wanted = (math.expm1(0.2 - margin), math.expm1(0.2 + margin))
    assert increase_interval(base_N + np.array([0.1, 0.2, 0.3]), base_N) == pytest.approx(wanted)


def test_few_windows_hold_the_true_increase_as_often_as_said() -> None:
    """Of 2000 texts of four windows 95 % of the intervals hold the truth; twice the standard error held it in 86 %."""
    rng, held, by_two_errors = np.random.default_rng(0), 0, 0
    for change_N in rng.normal(0.01, 0.02, (2000, 4)):
        low, high = increase_interval(change_N, np.zeros(4)) or (math.nan, math.nan)
        held += low <= math.expm1(0.01) <= high
        by_two_errors += abs(change_N.mean() - 0.01) <= 1.96 * change_N.std(ddof=1) / 2
    assert 0.935 < held / 2000 < 0.965
    assert by_two_errors / 2000 < 0.9
