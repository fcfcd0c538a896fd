"""Softmax by blocks against its definition, bit for bit, and against float64."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pi_runtime.artifact.footprint import POSITIONS
from pi_runtime.kernels.codegen.jit import public
from pi_runtime.kernels.ops import reductions
from pi_runtime.kernels.ops.reductions import LN2_HIGH, LN2_LOW, LOG2E, POLYNOMIAL, SMALLEST


@public
def weigh(score_B, seen, scale, largest_1, total_1):  # type: ignore[no-untyped-def]
    return reductions.weigh(score_B, seen, scale, largest_1, total_1)


def exp(x: np.ndarray) -> np.ndarray:
    """The definition: each operation is rounded to float32."""
    f = np.float32
    clamped = np.maximum(x, f(SMALLEST))
    n = np.floor(clamped * f(LOG2E) + f(0.5))
    r = clamped - n * f(LN2_HIGH) - n * f(LN2_LOW)
    p = np.full_like(x, POLYNOMIAL[0])
    for coefficient in (*POLYNOMIAL[1:], 1.0, 1.0):
        p = p * r + f(coefficient)
    power = ((n.astype(np.int32) + 127) << 23).view(np.float32)
    return np.where(x < f(SMALLEST), f(0), p * power)


def halves(values: np.ndarray) -> np.ndarray:
    while len(values) > 1:
        values = values[: len(values) // 2] + values[len(values) // 2 :]
    return values


def test_the_exponential_is_within_two_units_of_the_last_place() -> None:
    x = np.linspace(SMALLEST, 0, 200_001, dtype=np.float32)
    wanted = np.exp(x.astype(np.float64))
    assert (np.abs(exp(x) - wanted) <= 2 * np.spacing(wanted.astype(np.float32))).all()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, POSITIONS), st.sampled_from([0.01, 1.0, 30.0, 1e4]), st.sampled_from([-np.inf, -3.0, 50.0]))
def test_weights_are_those_of_the_definition(seen: int, size: float, before: float) -> None:
    rng = np.random.default_rng(seen)
    scores = rng.standard_normal(POSITIONS).astype(np.float32) * np.float32(size)
    scores[seen:] = np.nan
    largest, total, scale = np.array([before], np.float32), np.array([2], np.float32), np.float32(0.125)
    found = scores.copy()
    rescale = weigh(found, seen, scale, largest, total)
    most = max(np.float32(before), (scores[:seen] * scale).max())
    wanted = np.zeros(POSITIONS, np.float32)
    wanted[:seen] = exp(scores[:seen] * scale - most)
    np.testing.assert_array_equal(found, wanted)
    assert (rescale, largest[0]) == (exp(np.float32([before - most]))[0], most)
    assert total[0] == np.float32(2) * rescale + halves(wanted)[0]


def test_what_is_no_number_stays_none() -> None:
    found, largest, total = np.zeros(POSITIONS, np.float32), np.zeros(1, np.float32), np.zeros(1, np.float32)
    found[3] = np.nan
    weigh(found, 9, np.float32(1), largest, total)
    assert np.isnan(found).sum() in (1, 9)
    assert np.isnan(total[0])
