"""Products with a matrix and norms against NumPy in float64."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.rounding import product
from support.stored import ROW_FORMATS, StoredMatrix, store, store_integers

from pi_runtime.artifact.footprint import input_nbytes
from pi_runtime.kernels.data.matrix_view import rows_from, strided_rows
from pi_runtime.kernels.ops.linear import ROWS_AT_ONCE, add_vector, linear, norm

FEW = settings(max_examples=40, deadline=None, derandomize=True)
FMT = st.sampled_from(ROW_FORMATS)
SEED = st.integers(0, 999)


def random(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)


def times(w: StoredMatrix, x_TD: np.ndarray, bias_N: np.ndarray | None = None) -> np.ndarray:
    """x Wᵀ + bias, nothing written around it."""
    tokens, rows = len(x_TD), len(w.values)
    around = np.full((tokens + 2, rows), np.float32(7))
    room = np.full(tokens * input_nbytes(x_TD.shape[1]) + 64, 0xA5, np.uint8)
    linear(w.view, rows, 0 if bias_N is None else bias_N.ctypes.data, x_TD, room.ctypes.data, around[1:-1])
    assert np.all(around[[0, -1]] == 7), "wrote outside the result"
    assert np.all(room[-64:] == 0xA5), "wrote outside the inputs"
    return around[1:-1]


def check(w: StoredMatrix, x_TD: np.ndarray, bias_N: np.ndarray | None = None) -> None:
    exact = product(w, x_TD)
    found = times(w, x_TD, bias_N)
    if bias_N is not None:
        error = exact.error * 1.001 + 2.0**-24 * (np.abs(exact.value) + np.abs(bias_N)) + 2.0**-149
        exact = exact._replace(value=exact.value + bias_N, error=error)
    assert exact.holds(found)


@FEW
@given(FMT, st.integers(1, 9), st.integers(1, 300), st.integers(1, 2 * ROWS_AT_ONCE + 7), st.booleans(), SEED)
@example("f32", 1, 1, 1, False, 0)
@example("f16", 1, 300, ROWS_AT_ONCE, True, 0)
@example("bf16", 64, 33, ROWS_AT_ONCE + 1, True, 0)
@example("q8", 64, 33, ROWS_AT_ONCE + 1, True, 0)
@example("q4", 64, 65, 2 * ROWS_AT_ONCE + 1, True, 0)
@example("f32", 2, 16, 2 * ROWS_AT_ONCE, True, 0)
def test_linear(fmt: str, tokens: int, columns: int, rows: int, biased: bool, seed: int) -> None:
    bias_N = random(seed + 2, rows) if biased else None
    check(store(fmt, random(seed, rows, columns)), random(seed + 1, tokens, columns), bias_N)


@pytest.mark.parametrize("fmt", ROW_FORMATS)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("columns", [256, 257, 521, 1024, 1025, 1121])
def test_many_columns(fmt: str, tokens: int, columns: int) -> None:
    check(store(fmt, random(0, 37, columns)), random(1, tokens, columns))


@FEW
@given(FMT, st.integers(2, 9), st.integers(1, 300), st.integers(1, 70), st.booleans(), SEED)
def test_a_token_gets_the_same_bits_alone(
    fmt: str, tokens: int, columns: int, rows: int, biased: bool, seed: int
) -> None:
    w, x_TD, bias_N = store(fmt, random(seed, rows, columns)), random(1, tokens, columns), random(2, rows)
    bias = bias_N if biased else None
    alone = np.concatenate([times(w, x_TD[t : t + 1], bias) for t in range(tokens)])
    np.testing.assert_array_equal(times(w, x_TD, bias), alone)


@FEW
@given(FMT, st.integers(1, 5), st.data())
def test_linear_over_some_rows_gives_their_part_of_the_whole(fmt: str, tokens: int, data: st.DataObject) -> None:
    rows, columns = 75, 21
    low = data.draw(st.integers(0, rows - 1))
    high = data.draw(st.integers(low + 1, rows))
    w, x_TD, b_N = store(fmt, random(1, rows, columns)), random(2, tokens, columns), random(3, rows)
    part, room = np.empty((tokens, high - low), np.float32), np.empty(tokens * input_nbytes(columns), np.uint8)
    linear(rows_from(w.view, low), high - low, b_N[low:].ctypes.data, x_TD, room.ctypes.data, part)
    whole = times(w, x_TD, b_N)
    np.testing.assert_allclose(part, whole[:, low:high], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fmt", ROW_FORMATS)
@pytest.mark.parametrize("tokens", [1, 4])
def test_linear_takes_every_second_row(fmt: str, tokens: int) -> None:
    rest, x_TD = store(fmt, random(1, 40, 2, 330)), random(2, tokens, 330)
    room, y_TN = np.empty(tokens * input_nbytes(330), np.uint8), np.empty((tokens, 40), np.float32)
    for which in range(2):
        linear(strided_rows(rest.view, 2, which), 40, 0, x_TD, room.ctypes.data, y_TN)
        assert rest.scales is None or rest.scales.shape[:2] == (40, 2)
        scales = None if rest.scales is None else rest.scales[:, which]
        one = StoredMatrix(fmt, rest.stored[:, which], np.ascontiguousarray(rest.values[:, which]), scales)
        assert product(one, x_TD).holds(y_TN)


@pytest.mark.parametrize("fmt", ROW_FORMATS)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("scale", [1e-40, 1e-6, 2e4])
def test_linear_of_small_and_large_weights(fmt: str, tokens: int, scale: float) -> None:
    """1e-40 is denormal in f32 and bf16 and nothing in f16, 1e-6 denormal in f16, and 65504 the largest there."""
    w, x_TD = store(fmt, np.clip(random(4, 40, 19, scale=scale), -65504, 65504)), random(5, tokens, 19, scale=1e4)
    check(w, x_TD)
    assert bool(times(w, x_TD).any()) == bool(w.values.any())


@pytest.mark.parametrize("fmt", ROW_FORMATS)
@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e30])
def test_linear_of_small_and_large_inputs(fmt: str, scale: float) -> None:
    w = store(fmt, random(6, 40, 69))
    for tokens in (1, 5):
        check(w, random(7, tokens, 69, scale=scale))


@pytest.mark.parametrize("fmt", ["q8", "q4"])
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("columns", [64, 300, 700])
def test_integer_sums_are_exact_in_a_block_too(fmt: str, tokens: int, columns: int) -> None:
    """One scale, a power of two, and sums below 2²⁴; among them rows and inputs of nothing but the largest integers."""
    rng = np.random.default_rng(columns)
    low, high = (-127, 128) if fmt == "q8" else (-8, 8)
    q_ND, q_TD = rng.integers(low, high, (40, columns)), rng.integers(-127, 128, (tokens, columns))
    q_ND[0], q_ND[1], q_TD[:, ::32], q_TD[-1] = low, high - 1, 127, 127
    found = times(store_integers(fmt, q_ND, 2.0**-3), np.float32(q_TD * 2.0**5))
    np.testing.assert_array_equal(found, q_TD @ q_ND.T * 2.0**2)


@pytest.mark.parametrize("fmt", ROW_FORMATS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_infinities_and_nan_come_through(fmt: str, tokens: int) -> None:
    """Where inputs become bytes an infinite one is NaN. Other tokens are not touched."""
    w, x_TD = store(fmt, np.ones((5, 20))), np.ones((tokens, 20), np.float32)
    for wrong in (np.inf, -np.inf, np.nan):
        x_TD[-1, 7] = wrong
        y_TN = times(w, x_TD)
        np.testing.assert_array_equal(y_TN[-1], np.full(5, np.nan if w.quantised else wrong, np.float32))
        np.testing.assert_allclose(y_TN[:-1], 20 * w.values[0, 0], rtol=1e-6)


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


@pytest.mark.parametrize("address", ["given", "none"])
def test_add_vector(address: str) -> None:
    b_D, y_D = random(1, 37), random(2, 37)
    wanted = y_D + b_D if address == "given" else y_D.copy()
    add_vector(b_D.ctypes.data if address == "given" else 0, y_D)
    np.testing.assert_array_equal(y_D, wanted)
