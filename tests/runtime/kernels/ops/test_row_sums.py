"""Sums of stored rows times factors, for one token or many: against float64, and the same bits in any company."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.rounding import bound
from support.stored import StoredMatrix, store

from pi_runtime.artifact.footprint import SUM_ROWS
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.data.matrix_view import RowList
from pi_runtime.kernels.ops.list_sums import list_sums
from pi_runtime.kernels.ops.row_sums import portable_row_sums, vector_row_sums

FEW = settings(max_examples=60, deadline=None, derandomize=True)
FORMATS = ["f32", "f16", "bf16"]
COUNTS = [0, 1, 2, 7, 8, 9, 33, 70]
COMPUTE = vector_row_sums if ISA.lanes else portable_row_sums


def random(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)


def summed(
    w: StoredMatrix, index_K: np.ndarray | None, h_TK: np.ndarray, before_TD: np.ndarray, compute: Any = COMPUTE
) -> np.ndarray:
    """(T, D); without a list the first rows are summed."""
    (tokens, columns), count = before_TD.shape, h_TK.shape[1]
    around = np.full((tokens + 2, columns), np.float32(7))
    around[1:-1] = before_TD
    factors = np.zeros((tokens, -(-count // SUM_ROWS) * SUM_ROWS + 8), np.float32)
    factors[:, :count] = h_TK
    index = None if index_K is None else np.asarray(index_K, np.int64)
    rows = RowList(0, 0 if index is None else index.ctypes.data, count, count)
    result = tokens, around[1:].ctypes.data, around.strides[0]
    compute(w.view, rows, factors.ctypes.data, factors.strides[0], *result)
    assert np.all(around[[0, -1]] == 7), "wrote outside the result"
    return around[1:-1]


def check(w: StoredMatrix, index_K: np.ndarray, h_TK: np.ndarray, before_TD: np.ndarray) -> None:
    h, v, y = h_TK.astype(np.float64), w.values[index_K].astype(np.float64), before_TD.astype(np.float64)
    error_TD = bound(h.shape[1] + 2, np.abs(y) + np.abs(h) @ np.abs(v))
    for compute in (COMPUTE, portable_row_sums):
        assert np.all(np.abs(summed(w, index_K, h_TK, before_TD, compute) - (y + h @ v)) <= error_TD)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("count", COUNTS[1:])
def test_counts(fmt: str, count: int) -> None:
    w = store(fmt, random(count, 90, 300))
    index_K = np.sort(np.random.default_rng(count).permutation(90)[:count])
    check(w, index_K, random(1, 3, count), random(2, 3, 300))
    first, turn = random(1, 2, count), random(2, 2, 300)
    np.testing.assert_array_equal(summed(w, None, first, turn), summed(w, np.arange(count), first, turn))


@FEW
@given(st.sampled_from(FORMATS), st.integers(1, 70), st.integers(1, 600), st.integers(-30, 30), st.integers(0, 99))
@example("f32", 33, 31, 0, 0)
@example("bf16", 33, 33, 0, 0)
@example("f32", 1, 65, 0, 0)
@example("bf16", 5, 512, 0, 0)
@example("f16", 5, 17, 0, 0)
def test_any_shape_and_magnitude(fmt: str, count: int, columns: int, exponent: int, seed: int) -> None:
    """Factors of wildly different size; rows may come twice, and in any order."""
    rng = np.random.default_rng(seed)
    w, tokens = store(fmt, random(seed, 20, columns)), int(rng.integers(1, 4))
    h_TK = random(1, tokens, count) * np.float32(10) ** rng.integers(-5, 1, count).astype(np.float32)
    h_TK[rng.random((tokens, count)) < 0.2] = 0
    before_TD = random(2, tokens, columns, scale=10.0**exponent)
    check(w, rng.integers(0, 20, count), h_TK * np.float32(10.0**exponent), before_TD)


@FEW
@given(
    st.sampled_from(FORMATS), st.integers(1, 9), st.integers(1, 40), st.integers(1, 600), st.floats(0, 1),
    st.integers(0, 99),
)  # fmt: skip
@example("bf16", 9, 40, 2048, 0.1, 0)
@example("f16", 9, 40, 2048, 0.1, 0)
@example("f16", 17, 150, 200, 0.9, 0)
def test_a_sum_has_the_same_bits_alone_and_among_rows_of_others(
    fmt: str, tokens: int, rows: int, columns: int, density: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    w, h_TK, before_TD = store(fmt, random(seed, rows, columns)), random(1, tokens, rows), random(2, tokens, columns)
    h_TK[rng.random(h_TK.shape) >= density] = 0
    together_TD = summed(w, np.arange(rows), h_TK, before_TD)
    for h_K, before_D, found_D in zip(h_TK, before_TD, together_TD, strict=True):
        own_K = np.flatnonzero(h_K)
        if len(own_K):
            alone_1D = summed(w, own_K, h_K[None, own_K], before_D[None])
            np.testing.assert_array_equal(alone_1D[0], found_D)
        else:
            np.testing.assert_array_equal(before_D, found_D)


@pytest.mark.skipif(not ISA.lanes, reason="for vector instructions alone")
@pytest.mark.parametrize("fmt", FORMATS)
def test_lists_of_several_tokens_give_the_bits_of_each_list(fmt: str) -> None:
    """Tokens share some rows, one needs none, and nobody reads the others."""
    rng, (tokens, rows, columns) = np.random.default_rng(0), (5, 150, 192)
    w, h_TK, before_TD = store(fmt, random(1, rows, columns)), random(2, tokens, rows), random(3, tokens, columns)
    needed_TK = rng.random((tokens, rows)) < 0.2
    needed_TK[2], needed_TK[:, :7] = False, False
    w.stored.view(np.uint8)[~needed_TK.any(0)] = 0xFF
    index_K, place_TK, counts_T = np.arange(rows), np.zeros((tokens, rows), np.int32), needed_TK.sum(1)
    own_TK, found_TD = np.zeros_like(h_TK), before_TD.copy()
    for t, needed_K in enumerate(needed_TK):
        place_TK[t, : counts_T[t]], own_TK[t, : counts_T[t]] = np.flatnonzero(needed_K), h_TK[t, needed_K]
    lists = place_TK.ctypes.data, own_TK.ctypes.data, 4 * rows, counts_T.ctypes.data
    listed = RowList(0, index_K.ctypes.data, rows, rows)
    list_sums(w.view, listed, *lists, tokens, found_TD.ctypes.data, 4 * columns)
    for t, needed_K in enumerate(needed_TK):
        own_K = np.flatnonzero(needed_K)
        wanted = summed(w, own_K, h_TK[None, t, own_K], before_TD[None, t])[0] if len(own_K) else before_TD[t]
        np.testing.assert_array_equal(found_TD[t], wanted)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_alone_is_its_weights(fmt: str) -> None:
    w = store(fmt, random(0, 3, 290))
    found = summed(w, np.array([1]), np.float32([[-1.5]]), np.zeros((1, 290), np.float32))
    np.testing.assert_array_equal(found[0], np.float32(-1.5) * w.values[1])


@pytest.mark.parametrize("fmt", FORMATS)
def test_other_rows_do_not_matter(fmt: str) -> None:
    for columns in (1, 31, 33, 65, 97, 129, 257):
        w, h_TK, before_TD = store(fmt, random(columns, 5, columns)), random(1, 2, 3), random(2, 2, columns)
        wanted = summed(w, np.array([1, 3, 1]), h_TK, before_TD)
        w.stored.view(np.uint8)[[0, 2, 4]] = 0xFF
        np.testing.assert_array_equal(summed(w, np.array([1, 3, 1]), h_TK, before_TD), wanted)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_with_its_token(fmt: str, wrong: float) -> None:
    w = store(fmt, np.ones((5, 40)))
    h_TK = np.ones((3, 4), np.float32)
    h_TK[1, 1] = wrong
    found = summed(w, np.arange(4), h_TK, np.zeros((3, 40), np.float32))
    assert not np.isfinite(found[1]).any()
    np.testing.assert_array_equal(found[[0, 2]], summed(w, np.arange(4), h_TK[[0, 2]], np.zeros((2, 40), np.float32)))
