"""Weighted sums of scattered rows against float64, within the bounds the definition states."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.rounding import TINY, U, blocks_of, bound
from support.stored import WEIGHT_FORMATS, StoredMatrix, store, store_integers

from pi_runtime.artifact.footprint import GROUP_ROWS, gather_floats
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.data.quantised_input import padded_columns
from pi_runtime.kernels.ops.gathered_sum import add_gathered

FEW = settings(max_examples=60, deadline=None, derandomize=True)
COUNTS = [0, 1, 2, 3, 31, 32, 33, 70]


def random(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)


def summed(w: StoredMatrix, index_K: np.ndarray, h_K: np.ndarray, before_D: np.ndarray) -> np.ndarray:
    columns = len(before_D)
    y_P = np.full(padded_columns(columns) + 16, np.float32(7))
    y_P[:columns], y_P[columns:-16] = before_D, 0
    workspace = np.full(gather_floats(columns) + 16, np.nan, np.float32)
    workspace[-16:] = 7
    prefetch_K = np.arange(len(w.values))[: len(h_K) % 5]
    add_gathered(w.view, np.asarray(index_K, np.int64), h_K, prefetch_K, y_P[:-16], workspace.ctypes.data)
    assert np.all(y_P[-16:] == 7), "wrote outside the result"
    assert np.all(workspace[-16:] == 7), "wrote outside the scratch"
    return y_P[:columns]


def rounding_to_16_bits(w: StoredMatrix, index_K: np.ndarray, h_K: np.ndarray) -> np.ndarray:
    """Half a unit g = max |h s| / 32767 of each group and block for every row, times |q|.

    The quotient itself carries four roundings of up to 32767: 0.01 units. A unit below the smallest normal number makes
    a block of a group vanish.
    """
    columns = w.values.shape[1]
    error_D = np.zeros(columns)
    if not w.quantised or not ISA.lanes:
        return error_D
    assert w.scales is not None
    for start in range(0, len(index_K), GROUP_ROWS):
        rows, h = index_K[start : start + GROUP_ROWS], h_K[start : start + GROUP_ROWS].astype(np.float64)
        w_KBJ = np.abs(blocks_of(w.values[rows]).astype(np.float64))
        s_KB = np.abs(w.scales[rows, : w_KBJ.shape[1]].astype(np.float64))
        q_KBJ = np.divide(w_KBJ, s_KB[..., None], out=np.zeros_like(w_KBJ), where=s_KB[..., None] > 0)
        g_B = (np.abs(h)[:, None] * s_KB).max(0) / 32767
        each_B = np.where(g_B < 2.0**-126 * 1.001, 32768 * g_B, 0.51 * g_B)
        error_D += (each_B[:, None] * q_KBJ.sum(0)).ravel()[:columns]
    return error_D


def check(w: StoredMatrix, index_K: np.ndarray, h_K: np.ndarray, before_D: np.ndarray) -> None:
    h, v, y = h_K.astype(np.float64), w.values[index_K].astype(np.float64), before_D.astype(np.float64)
    slack_D = rounding_to_16_bits(w, index_K, h_K)
    magnitude_D = np.abs(y) + np.abs(h) @ np.abs(v) + slack_D
    error_D = bound(len(index_K) + 4, magnitude_D) + 1.001 * slack_D
    if w.quantised:  # h s may be denormal before it meets q
        error_D += TINY * 128 * (len(index_K) + 1) * (1 + U)
    assert np.all(np.abs(summed(w, index_K, h_K, before_D) - (y + h @ v)) <= error_D)


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
@pytest.mark.parametrize("count", COUNTS)
def test_counts(fmt: str, count: int) -> None:
    w = store(fmt, random(count, 90, 300))
    index_K = np.sort(np.random.default_rng(count).permutation(90)[:count])
    check(w, index_K, random(1, count), random(2, 300))
    if count == 0:
        np.testing.assert_array_equal(summed(w, index_K, random(1, 0), random(2, 300)), random(2, 300))


@FEW
@given(
    st.sampled_from(WEIGHT_FORMATS), st.integers(0, 70), st.integers(1, 600), st.integers(-36, 30), st.integers(0, 99)
)
@example("q8", 33, 31, 0, 0)
@example("q4", 33, 33, 0, 0)
@example("q4", 1, 65, 0, 0)
@example("q8", 33, 225, 0, 0)
@example("q4", 33, 481, 0, 0)
@example("q4", 5, 512, 0, 0)
@example("f16", 5, 17, 0, 0)
def test_any_shape_and_magnitude(fmt: str, count: int, columns: int, exponent: int, seed: int) -> None:
    """Weights h of wildly different size; rows may come twice, and in any order."""
    rng = np.random.default_rng(seed)
    w = store(fmt, random(seed, 20, columns))
    h_K = random(1, count) * np.float32(10) ** rng.integers(-5, 1, count).astype(np.float32)
    h_K[rng.random(count) < 0.2] = 0
    before_D = random(2, columns, scale=10.0 ** max(exponent, -30))
    check(w, rng.integers(0, 20, count), h_K * np.float32(10.0**exponent), before_D)


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_rows_of_wildly_different_scale_in_one_group(fmt: str) -> None:
    """What is lost of the small rows is lost against the largest term of their group, block by block."""
    magnitude = 10.0 ** np.repeat(np.random.default_rng(0).integers(-6, 4, (40, 10)), 32, 1)[:, :300]
    w = store(fmt, (random(1, 40, 300) * magnitude).astype(np.float32))
    check(w, np.arange(40), random(2, 40), np.zeros(300, np.float32))


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_a_row_alone_is_hardly_rounded(fmt: str) -> None:
    """Its factor is the largest of its group: 32767 units exactly."""
    w = store(fmt, random(0, 3, 290))
    found = summed(w, np.array([1]), np.float32([-1.5]), np.zeros(290, np.float32))
    np.testing.assert_allclose(found, -1.5 * w.values[1], rtol=1e-6)


@pytest.mark.parametrize("fmt", ["q8", "q4"])
@pytest.mark.parametrize("count", [2, 31, 32, 33])
def test_the_largest_integers_do_not_overflow(fmt: str, count: int) -> None:
    """All weights and factors at their ends, one sign: the largest sums there can be, and they are exact."""
    for integer in (127, -127) if fmt == "q8" else (7, -8):
        w = store_integers(fmt, np.full((count, 321), integer), 1.0)
        for h in (1.0, -1.0):
            found = summed(w, np.arange(count), np.full(count, h, np.float32), np.zeros(321, np.float32))
            np.testing.assert_allclose(found, count * integer * h, rtol=1e-6)


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_other_rows_do_not_matter(fmt: str) -> None:
    for columns in (1, 31, 33, 65, 97, 129, 257):
        w = store(fmt, random(columns, 5, columns))
        wanted = summed(w, np.array([1, 3, 1]), random(1, 3), random(2, columns))
        for array in (w.stored, w.scales):
            if array is not None:
                array.view(np.uint8)[[0, 2, 4]] = 0xFF
        np.testing.assert_array_equal(summed(w, np.array([1, 3, 1]), random(1, 3), random(2, columns)), wanted)


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_does_not_become_finite(fmt: str, wrong: float) -> None:
    w = store(fmt, np.ones((5, 40)))
    found = summed(w, np.arange(4), np.float32([1, wrong, 1, 1]), np.zeros(40, np.float32))
    assert not np.isfinite(found).any()
    if np.isnan(wrong):
        assert np.isnan(found).all()
