"""Integer sums of rows of block formats against float64, within the bounds that the definition states."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.rounding import TINY, U, blocks_of, bound
from support.stored import BLOCK_FORMATS, StoredMatrix, ends, store, store_integers

from pi_runtime.artifact.footprint import BLOCK_SUM, STRIP, SUM_NEURONS
from pi_runtime.artifact.formats import BLOCK, FORMATS
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.data.matrix_view import MatrixView, columns_from
from pi_runtime.kernels.ops.block_sums import add_block_rows
from pi_runtime.kernels.ops.block_tiles import add_block_tile

FEW = settings(max_examples=60, deadline=None, derandomize=True)
COUNTS = [0, 1, 2, 3, 33, SUM_NEURONS - 1, SUM_NEURONS]
GUARD = 16


def random(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)


def summed(
    w: StoredMatrix, index_K: np.ndarray, h_K: np.ndarray, before_D: np.ndarray, ahead: int = 0, first: int = 0
) -> np.ndarray:
    """y + Σ h row, from column `first` on; `ahead` further numbers of the list are fetched."""
    columns, count = len(before_D), len(h_K)
    whole = -(-columns // BLOCK) * BLOCK
    y_P = np.full(whole + GUARD, np.float32(7))
    y_P[:columns], y_P[columns:whole] = before_D, 0
    scratch = np.full(BLOCK_SUM.end // 4 + 2 * GUARD, np.nan, np.float32)
    scratch[:GUARD] = scratch[-GUARD:] = 7
    listed = np.concatenate([index_K, np.arange(ahead) % len(w.values), [2**62]]).astype(np.int64)
    factors = np.append(h_K, np.float32(np.nan))
    inside = scratch[GUARD:].ctypes.data
    view = MatrixView(*columns_from(w.view, first, columns))
    add_block_rows(view, listed.ctypes.data, count, count + ahead, factors.ctypes.data, y_P[:whole], inside)
    assert np.all(y_P[whole:] == 7), "wrote outside the result"
    assert np.all(scratch[:GUARD] == 7), "wrote outside the scratch"
    assert np.all(scratch[-GUARD:] == 7), "wrote outside the scratch"
    return y_P[:columns]


def rounding_to_16_bits(w: StoredMatrix, index_K: np.ndarray, h_K: np.ndarray) -> np.ndarray:
    """Half a unit g = max |h s| / 32767 of each block of columns for every row, times |q|.

    The quotient itself carries four roundings of up to 32767: 0.01 units. A unit below the smallest normal number makes
    a block vanish.
    """
    columns = w.values.shape[1]
    if not ISA.lanes or not len(index_K):
        return np.zeros(columns)
    s_KB, offset_KB = (beside[index_K] for beside in w.beside(-(-columns // BLOCK)))
    w_KBJ, s_KB = blocks_of(w.values[index_K]).astype(np.float64), np.abs(s_KB)
    if FORMATS[w.format].offset == "minimum":
        w_KBJ = blocks_of((w_KBJ - offset_KB[..., None]).reshape(len(index_K), -1)[:, :columns])
    q_KBJ = np.divide(np.abs(w_KBJ), s_KB[..., None], out=np.zeros_like(w_KBJ), where=s_KB[..., None] > 0)
    g_B = (np.abs(h_K.astype(np.float64))[:, None] * s_KB).max(0) / 32767
    each_B = np.where(g_B < 2.0**-126 * 1.001, 32768 * g_B, 0.51 * g_B)
    return (each_B[:, None] * q_KBJ.sum(0)).ravel()[:columns]


def magnitude_of_minima(w: StoredMatrix, index_K: np.ndarray, h_K: np.ndarray) -> np.ndarray:
    """Σ |h m| of each column, which is added, and which scale · integer may cancel."""
    columns = w.values.shape[1]
    minima_KB = w.beside(-(-columns // BLOCK))[1][index_K] * (FORMATS[w.format].offset == "minimum")
    return 2 * np.repeat(np.abs(h_K) @ np.abs(minima_KB), BLOCK)[:columns]


def check(w: StoredMatrix, index_K: np.ndarray, h_K: np.ndarray, before_D: np.ndarray) -> None:
    h, v, y = h_K.astype(np.float64), w.values[index_K].astype(np.float64), before_D.astype(np.float64)
    slack_D = rounding_to_16_bits(w, index_K, h_K)
    magnitude_D = np.abs(y) + np.abs(h) @ np.abs(v) + slack_D + magnitude_of_minima(w, index_K, h)
    # h s may be denormal before it meets q.
    error_D = bound(len(index_K) + 4, magnitude_D) + 1.001 * slack_D + TINY * 128 * (len(index_K) + 1) * (1 + U)
    assert np.all(np.abs(summed(w, index_K, h_K, before_D) - (y + h @ v)) <= error_D)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
@pytest.mark.parametrize("columns", [300, STRIP + 40])
@pytest.mark.parametrize("count", COUNTS)
def test_counts(fmt: str, count: int, columns: int) -> None:
    w = store(fmt, random(count, 300, columns))
    index_K = np.sort(np.random.default_rng(count).permutation(300)[:count])
    check(w, index_K, random(1, count), random(2, columns))
    if count == 0:
        np.testing.assert_array_equal(summed(w, index_K, random(1, 0), random(2, columns)), random(2, columns))


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
@pytest.mark.parametrize(("count", "tokens"), [(1, 2), (33, 3), (SUM_NEURONS, 9)])
def test_a_tile_has_the_bits_of_each_token_alone(fmt: str, count: int, tokens: int) -> None:
    """Factors of 0 are rows that a token does not need, and are left out of its own list."""
    columns, rng = STRIP + 300, np.random.default_rng(count)
    w, index_K = store(fmt, random(count, 300, columns)), np.sort(rng.permutation(300)[:count])
    h_TK = random(1, tokens, count + 5) * (rng.random((tokens, count + 5)) < 0.7)
    h_TK[0, 0], h_TK[:, count:] = np.inf, np.nan
    whole = -(-columns // BLOCK) * BLOCK
    y_TP, scratch = np.full((tokens, whole + GUARD), np.float32(7)), np.full(BLOCK_SUM.end // 4 + GUARD, np.float32(7))
    y_TP[:, :columns], y_TP[:, columns:whole] = random(2, tokens, columns), 0
    alone = [summed(w, index_K[h != 0], h[h != 0], y[:columns]) for h, y in zip(h_TK[:, :count], y_TP, strict=True)]
    listed = index_K.astype(np.int64)
    view = MatrixView(*columns_from(w.view, 0, columns))
    stride = h_TK.strides[0]
    add_block_tile(view, listed.ctypes.data, count, h_TK.ctypes.data, stride, y_TP, scratch.ctypes.data)
    np.testing.assert_array_equal(y_TP[:, :columns], alone)
    assert np.all(y_TP[:, whole:] == 7), "wrote outside the result"
    assert np.all(scratch[-GUARD:] == 7), "wrote outside the scratch"


@FEW
@given(
    st.sampled_from(BLOCK_FORMATS),
    st.integers(0, SUM_NEURONS),
    st.integers(1, 1100),
    st.integers(-36, 30),
    st.integers(0, 99),
)
@example("q8", 33, 31, 0, 0)
@example("q4", 33, 33, 0, 0)
@example("q4", 1, 65, 0, 0)
@example("q8", 33, 225, 0, 0)
@example("q4", 33, 481, 0, 0)
@example("q4", 5, 512, 0, 0)
@example("q8", 200, 1024, 0, 0)
def test_any_shape_and_magnitude(fmt: str, count: int, columns: int, exponent: int, seed: int) -> None:
    """Factors of wildly different size; rows may come twice, and in any order."""
    rng = np.random.default_rng(seed)
    w = store(fmt, random(seed, 20, columns))
    h_K = random(1, count) * np.float32(10) ** rng.integers(-5, 1, count).astype(np.float32)
    h_K[rng.random(count) < 0.2] = 0
    before_D = random(2, columns, scale=10.0 ** max(exponent, -30))
    check(w, rng.integers(0, 20, count), h_K * np.float32(10.0**exponent), before_D)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_rows_of_wildly_different_scale(fmt: str) -> None:
    """What is lost of the small rows is lost against the largest term, block by block."""
    magnitude = 10.0 ** np.repeat(np.random.default_rng(0).integers(-6, 4, (200, 10)), 32, 1)[:, :300]
    w = store(fmt, (random(1, 200, 300) * magnitude).astype(np.float32))
    check(w, np.arange(200), random(2, 200), np.zeros(300, np.float32))


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_a_row_alone_is_hardly_rounded(fmt: str) -> None:
    """Its factor is the largest there is: 32767 units exactly."""
    w = store(fmt, random(0, 3, 290))
    found = summed(w, np.array([1]), np.float32([-1.5]), np.zeros(290, np.float32))
    cancelled = 1e-7 * np.abs(w.values).max() * (FORMATS[fmt].offset == "minimum")
    np.testing.assert_allclose(found, -1.5 * w.values[1], rtol=1e-6, atol=cancelled)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
@pytest.mark.parametrize("count", [2, 33, SUM_NEURONS - 1, SUM_NEURONS])
def test_the_largest_integers_do_not_overflow(fmt: str, count: int) -> None:
    """All weights and factors at their ends, of one sign or of turning signs: the largest sums there can be."""
    for integer in ends(fmt):
        w = store_integers(fmt, np.full((count, 321), integer), 1.0)
        turning = np.where(np.arange(count) % 2, -1, 1).astype(np.float32)
        halves = np.where(np.arange(count) < count // 2, -1, 1).astype(np.float32)
        for h_K in (np.ones(count, np.float32), -np.ones(count, np.float32), turning, halves):
            found = summed(w, np.arange(count), h_K, np.zeros(321, np.float32))
            np.testing.assert_allclose(found, integer * h_K.sum(), rtol=1e-6)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_zeros_change_no_bit(fmt: str) -> None:
    """A factor of 0 leaves the sum as it would be without its row, wherever the row stands."""
    w, before_D = store(fmt, random(0, 90, 600)), random(2, 600)
    h_K = random(1, 90)
    h_K[np.random.default_rng(0).random(90) < 0.5] = 0
    own_K = np.flatnonzero(h_K)
    wanted = summed(w, own_K, h_K[own_K], before_D)
    np.testing.assert_array_equal(summed(w, np.arange(90), h_K, before_D), wanted)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
@pytest.mark.parametrize("count", [1, 2, 33, SUM_NEURONS])
def test_what_is_fetched_ahead_changes_no_bit(fmt: str, count: int) -> None:
    w, before_D, h_K = store(fmt, random(0, SUM_NEURONS, 600)), random(2, 600), random(1, count)
    wanted = summed(w, np.arange(count), h_K, before_D)
    for ahead in (1, count - 1, count, count + 7):
        np.testing.assert_array_equal(summed(w, np.arange(count), h_K, before_D, ahead), wanted)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_strips_of_columns_are_sums_of_their_own(fmt: str) -> None:
    """A token among many gets its columns strip by strip."""
    w, h_K = store(fmt, random(0, 40, 2 * STRIP)), random(1, 40)
    whole = summed(w, np.arange(40), h_K, np.zeros(2 * STRIP, np.float32))
    for first in (0, STRIP):
        part = summed(w, np.arange(40), h_K, np.zeros(STRIP, np.float32), first=first)
        np.testing.assert_array_equal(part, whole[first : first + STRIP])


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_other_rows_do_not_matter(fmt: str) -> None:
    for columns in (1, 31, 33, 65, 97, 129, 257):
        w = store(fmt, random(columns, 5, columns))
        wanted = summed(w, np.array([1, 3, 1]), random(1, 3), random(2, columns))
        for array in (w.stored, w.scales):
            if array is not None:
                array.view(np.uint8)[[0, 2, 4]] = 0xFF
        np.testing.assert_array_equal(summed(w, np.array([1, 3, 1]), random(1, 3), random(2, columns)), wanted)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
@pytest.mark.parametrize("columns", [40, 700])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_does_not_become_finite(fmt: str, columns: int, wrong: float) -> None:
    w = store(fmt, np.ones((5, columns)))
    found = summed(w, np.arange(4), np.float32([1, wrong, 1, 1]), np.zeros(columns, np.float32))
    assert not np.isfinite(found).any()
    if np.isnan(wrong):
        assert np.isnan(found).all()
