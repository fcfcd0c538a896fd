"""Products, weighted sums of rows, norms and number formats against NumPy in float64."""

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stored import WEIGHT_FORMATS, Matrix, store

from pi_runtime.artifact.formats import FORMATS
from pi_runtime.kernels.linear import COLUMNS, ROWS, add_vector, combine, linear, norm
from pi_runtime.kernels.memory import row_add, row_dot, row_load, row_stride

FEW = settings(max_examples=40, deadline=None, derandomize=True)
FMT = st.sampled_from(WEIGHT_FORMATS)
SEED = st.integers(0, 999)
# The unit roundoff, and the largest error of one operation whose result is denormal.
U, TINY = 2.0**-24, 2.0**-149


def random(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)


def bound(terms: int, magnitude: np.ndarray) -> np.ndarray:
    """Largest error of a sum of products in any order (Higham, 2002, section 3.1), denormals included."""
    return (terms + 1) * U * 1.01 * magnitude + (terms + 1) * TINY


def assert_product(found: np.ndarray, x_TD: np.ndarray, w_ND: np.ndarray, b_N: np.ndarray) -> None:
    x, w, b = x_TD.astype(np.float64), w_ND.astype(np.float64), b_N.astype(np.float64)
    assert np.all(np.abs(found - (x @ w.T + b)) <= bound(w.shape[1] + 1, np.abs(x) @ np.abs(w).T + np.abs(b)))


@FEW
@given(FMT, st.integers(1, 9), st.integers(1, 90), st.integers(1, 2 * ROWS + 7), st.booleans(), SEED)
@example("f32", 1, 1, 1, False, 0)
@example("f16", 1, 300, ROWS, True, 0)
@example("bf16", 64, 33, ROWS + 1, True, 0)
@example("f32", 2, 16, 2 * ROWS, True, 0)
def test_linear(fmt: str, tokens: int, columns: int, rows: int, biased: bool, seed: int) -> None:
    w, x_TD = store(fmt, random(seed, rows, columns)), random(seed + 1, tokens, columns)
    bias_N = random(seed + 2, rows) if biased else np.zeros(rows, np.float32)
    around = np.full((tokens + 2, rows), np.float32(7))
    linear(w.fmt, w.address, w.stride, rows, bias_N.ctypes.data if biased else 0, x_TD, around[1:-1])
    assert_product(around[1:-1], x_TD, w.values, bias_N)
    assert np.all(around[[0, -1]] == 7), "wrote outside the result"


@FEW
@given(FMT, st.integers(1, 5), st.data())
def test_linear_over_some_rows_gives_their_part_of_the_whole(fmt: str, tokens: int, data: st.DataObject) -> None:
    rows, columns = 75, 21
    low = data.draw(st.integers(0, rows - 1))
    high = data.draw(st.integers(low + 1, rows))
    w, x_TD, b_N = store(fmt, random(1, rows, columns)), random(2, tokens, columns), random(3, rows)
    part = np.empty((tokens, high - low), np.float32)
    address = w.address + low * w.stride
    linear(w.fmt, address, w.stride, high - low, b_N[low:].ctypes.data, x_TD, part)
    assert_product(part, x_TD, w.values[low:high], b_N[low:high])


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("scale", [1e-40, 1e-6, 2e4])
def test_linear_of_small_and_large_weights(fmt: str, tokens: int, scale: float) -> None:
    """1e-40 is denormal in f32 and bf16 and nothing in f16, 1e-6 denormal in f16, and 65504 the largest there."""
    w = store(fmt, np.clip(random(4, 40, 19, scale=scale), -65504, 65504))
    x_TD, y_TN = random(5, tokens, 19, scale=1e4), np.empty((tokens, 40), np.float32)
    linear(w.fmt, w.address, w.stride, 40, 0, x_TD, y_TN)
    assert_product(y_TN, x_TD, w.values, np.zeros(40))
    assert bool(y_TN.any()) == bool(w.values.any())


@pytest.mark.parametrize("tokens", [1, 3])
def test_infinities_and_nan_come_through(tokens: int) -> None:
    w = store("f32", np.ones((5, 20)))
    x_TD = np.ones((tokens, 20), np.float32)
    y_TN = np.empty((tokens, 5), np.float32)
    for wrong in (np.inf, -np.inf, np.nan):
        x_TD[-1, 7] = wrong
        linear(w.fmt, w.address, w.stride, 5, 0, x_TD, y_TN)
        np.testing.assert_array_equal(y_TN[-1], np.full(5, wrong, np.float32))
        assert np.all(y_TN[:-1] == 20)


@FEW
@given(FMT, st.integers(1, 6), st.integers(1, 30), st.integers(1, 70), st.floats(0, 1), SEED)
@example("f16", 1, 7, COLUMNS, 0.5, 0)
@example("bf16", 3, 5, COLUMNS + 1, 0.5, 0)
@example("f32", 2, 4, 2 * COLUMNS + 3, 1.0, 0)
@example("f32", 2, 4, 3, 0.0, 0)
def test_combine(fmt: str, tokens: int, rows: int, columns: int, density: float, seed: int) -> None:
    w, h_TN, before_TD = (
        store(fmt, random(seed, rows, columns)),
        random(seed + 1, tokens, rows),
        random(2, tokens, columns),
    )
    h_TN[np.random.default_rng(seed).random(h_TN.shape) >= density] = 0
    y_TD = before_TD.copy()
    combine(w.fmt, w.address, w.stride, columns, h_TN, y_TD)
    h, v, y = h_TN.astype(np.float64), w.values.astype(np.float64), before_TD.astype(np.float64)
    assert np.all(np.abs(y_TD - (y + h @ v)) <= bound(rows + 1, np.abs(y) + np.abs(h) @ np.abs(v)))
    idle = ~h_TN.any(1)
    np.testing.assert_array_equal(y_TD[idle], before_TD[idle])


def test_combine_takes_every_second_row_of_rest() -> None:
    """`rest` holds up and down side by side: rows of down are two strides apart."""
    rest = store("f16", random(1, 9, 2, 13))
    h_TN, y_TD = random(2, 3, 9), np.zeros((3, 13), np.float32)
    stride = int(row_stride(rest.fmt, 13))
    combine(rest.fmt, rest.address + stride, 2 * stride, 13, h_TN, y_TD)
    np.testing.assert_allclose(y_TD, h_TN @ rest.values[:, 1], rtol=1e-5, atol=1e-5)


@FEW
@given(st.booleans(), st.booleans(), st.integers(1, 5), st.integers(1, 300), st.sampled_from([1e-3, 1.0, 1e4]), SEED)
def test_norm(centred: bool, biased: bool, tokens: int, width: int, scale: float, seed: int) -> None:
    x_TD, w_D, b_D = random(seed, tokens, width, scale=scale), random(1, width), random(2, width)
    y_TD = np.empty_like(x_TD)
    norm(int(centred), np.float32(1e-5), w_D.ctypes.data, b_D.ctypes.data if biased else 0, x_TD, y_TD)
    x = x_TD.astype(np.float64)
    x = x - x.mean(1, keepdims=True) if centred else x
    wanted = x / np.sqrt((x * x).mean(1, keepdims=True) + float(np.float32(1e-5))) * w_D
    wanted = wanted + b_D if centred and biased else wanted
    np.testing.assert_allclose(y_TD, wanted, rtol=1e-4, atol=1e-5 * np.sqrt(width) * (1 + scale * (width == 1)))


def test_norm_in_place() -> None:
    """The head normalises the residual stream where it lies."""
    x_TD, w_D = random(1, 4, 33), random(2, 33)
    apart = np.empty_like(x_TD)
    norm(0, np.float32(1e-5), w_D.ctypes.data, 0, x_TD, apart)
    norm(0, np.float32(1e-5), w_D.ctypes.data, 0, x_TD, x_TD)
    np.testing.assert_array_equal(x_TD, apart)


@FEW
@given(FMT, st.integers(1, 200), SEED)
def test_one_row(fmt: str, columns: int, seed: int) -> None:
    w = store(fmt, random(seed, 3, columns))
    x_D, before_D = random(seed + 1, columns), random(seed + 2, columns)
    row = w.values[1].astype(np.float64)
    address = w.address + w.stride
    assert w.stride == row_stride(w.fmt, columns)
    assert abs(row_dot(w.fmt, address, x_D) - row @ x_D) <= bound(columns, np.abs(row) @ np.abs(x_D))
    out_D, y_D = np.empty(columns, np.float32), before_D.copy()
    row_load(w.fmt, address, out_D)
    np.testing.assert_array_equal(out_D, w.values[1])
    row_add(w.fmt, address, np.float32(-1.5), y_D)
    np.testing.assert_allclose(y_D, before_D - 1.5 * row, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_rows_are_as_far_apart_as_the_format_says(fmt: str, columns: int) -> None:
    assert row_stride(FORMATS[fmt].code, columns) == FORMATS[fmt].nbytes((1, columns))


@pytest.mark.parametrize("address", ["given", "none"])
def test_add_vector(address: str) -> None:
    b_D, y_D = random(1, 37), random(2, 37)
    wanted = y_D + b_D if address == "given" else y_D.copy()
    add_vector(b_D.ctypes.data if address == "given" else 0, y_D)
    np.testing.assert_array_equal(y_D, wanted)


def every_number(fmt: str) -> Matrix:
    """All 65536 bit patterns of a 16-bit format, one a column."""
    stored = np.arange(65536, dtype=np.uint16).view(FORMATS[fmt].stored).reshape(1, -1)
    return Matrix(FORMATS[fmt].code, stored, FORMATS[fmt].decode(stored, 65536))


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
def test_every_bit_pattern_converts(fmt: str) -> None:
    w = every_number(fmt)
    values = w.values[0]
    loaded, added = np.empty(65536, np.float32), np.zeros(65536, np.float32)
    row_load(w.fmt, w.address, loaded)
    np.testing.assert_array_equal(loaded, values)
    np.testing.assert_array_equal(np.signbit(loaded), np.signbit(values))
    row_add(w.fmt, w.address, np.float32(1), added)
    np.testing.assert_array_equal(added, values)


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
@pytest.mark.parametrize("tokens", [1, 2])
def test_every_bit_pattern_multiplies(fmt: str, tokens: int) -> None:
    """The same through the product, one number a row: for one token and for a block."""
    stored = np.zeros((65536, 32), np.uint16)
    stored[:, 0] = np.arange(65536)
    y_TN = np.empty((tokens, 65536), np.float32)
    linear(FORMATS[fmt].code, stored.ctypes.data, 64, 65536, 0, np.full((tokens, 1), 1, np.float32), y_TN)
    for y_N in y_TN:
        np.testing.assert_array_equal(y_N, every_number(fmt).values[0])


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one thread only")
@pytest.mark.parametrize("tokens", [1, 7])
def test_threads_do_not_change_a_bit(tokens: int) -> None:
    w, x_TD, h_TN = store("f16", random(1, 333, 301)), random(2, tokens, 301), random(3, tokens, 333)
    found = []
    for threads in range(1, numba.config.NUMBA_NUM_THREADS + 1):
        numba.set_num_threads(threads)
        y_TN, y_TD = np.empty((tokens, 333), np.float32), np.zeros((tokens, 301), np.float32)
        linear(w.fmt, w.address, w.stride, 333, 0, x_TD, y_TN)
        combine(w.fmt, w.address, w.stride, 301, h_TN, y_TD)
        found.append((y_TN.tobytes(), y_TD.tobytes()))
    assert len(set(found)) == 1
