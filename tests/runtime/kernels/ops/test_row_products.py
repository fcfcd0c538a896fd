"""Products of stored rows with vectors: every format and width, against float64 and the plain loops."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.rounding import product
from support.row_products import at_the_end_of_memory, products
from support.stored import BLOCK_FORMATS, ROW_FORMATS, StoredMatrix, ends, store, store_integers

from pi_runtime.artifact.formats import FORMATS
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.ops.row_products import portable_row_products, vector_row_products

FEW = settings(max_examples=60, deadline=None, derandomize=True)
EDGES = [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 224, 225, 255, 256, 257, 511, 512, 513, 700]
COMPUTE = vector_row_products if ISA.lanes else portable_row_products


def random(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)


def dots(w: StoredMatrix, x_D: np.ndarray) -> np.ndarray:
    """Every row of w times x."""
    return products(COMPUTE, w, x_D[None])[0]


def portable_dots(w: StoredMatrix, x_D: np.ndarray) -> np.ndarray:
    return products(portable_row_products, w, x_D[None])[0]


def check(w: StoredMatrix, x_D: np.ndarray) -> None:
    exact = product(w, x_D[None])
    assert exact.holds(dots(w, x_D))
    assert exact.holds(portable_dots(w, x_D))


@pytest.mark.parametrize("fmt", ROW_FORMATS)
@pytest.mark.parametrize("columns", EDGES)
def test_widths_at_the_edges(fmt: str, columns: int) -> None:
    check(store(fmt, random(columns, 3, columns)), random(1, columns))


@FEW
@given(st.sampled_from(ROW_FORMATS), st.integers(1, 700), st.integers(-20, 15), st.integers(-4, 3), st.integers(0, 99))
def test_any_width_and_magnitude(fmt: str, columns: int, input_exponent: int, exponent: int, seed: int) -> None:
    w = random(seed, 3, columns) * np.float32(10.0**exponent)
    x_D = random(seed + 1, columns) * np.repeat(10.0 ** np.random.default_rng(seed).integers(-3, 4, 22), 32)[:columns]
    check(store(fmt, w), (x_D * 10.0**input_exponent).astype(np.float32))


@pytest.mark.parametrize("fmt", ROW_FORMATS)
@pytest.mark.parametrize(("weights", "inputs"), [(1e-40, 1e4), (1e-6, 1e-40), (1e-20, 1e-20), (2e4, 1e30), (1, 1e36)])
def test_small_and_large_numbers(fmt: str, weights: float, inputs: float) -> None:
    """1e-40 is denormal in f32 and bf16 and nothing in f16, 1e-6 denormal in f16, and 65504 the largest there."""
    check(store(fmt, np.clip(random(4, 3, 83, scale=weights), -65504, 65504)), random(5, 83, scale=inputs))


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
@pytest.mark.parametrize("columns", EDGES)
def test_integer_sums_are_exact(fmt: str, columns: int) -> None:
    """With powers of two for scales all sums are whole multiples of one, below 2²⁴: nothing is rounded anywhere."""
    rng = np.random.default_rng(columns)
    low, high = ends(fmt)
    q_ND, q_D = rng.integers(low, high + 1, (3, columns)), rng.integers(-127, 128, columns)
    q_D[::32] = 127  # so that the scale of every block is the same
    w, wanted = store_integers(fmt, q_ND, 2.0**-3), q_ND @ q_D * 2.0**2
    assert np.abs(q_ND @ q_D).max() < 2**24
    for found in (dots(w, np.float32(q_D * 2.0**5)), portable_dots(w, np.float32(q_D * 2.0**5))):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("columns", [31, 64, 256, 700])
@pytest.mark.parametrize("sign", [1, -1, 0], ids=["plus", "minus", "both"])
@pytest.mark.parametrize(("fmt", "integer"), [(f, n) for f in BLOCK_FORMATS for n in (*ends(f), 0)])
def test_the_largest_integers_do_not_saturate(fmt: str, integer: int, sign: int, columns: int) -> None:
    """All weights and inputs at their ends: sums of pairs and of fours are as large as they can be."""
    signs_D = np.full(columns, sign) if sign else np.where(np.arange(columns) % 3 == 1, -1, 1)
    w, q_D = store_integers(fmt, np.full((1, columns), integer), 1.0), 127 * signs_D
    for found in (dots(w, q_D.astype(np.float32)), portable_dots(w, q_D.astype(np.float32))):
        assert found.tolist() == [float(integer * q_D.sum())]


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_every_block_takes_its_own_scales(fmt: str) -> None:
    """One block of weights and inputs at a time is not zero; scales are distinct powers of two."""
    columns, blocks = 700, 22
    scale_B = 2.0 ** (np.arange(blocks) % 11 - 5)
    w = store_integers(fmt, np.full((1, columns), 3), scale_B)
    for block in range(blocks):
        x_D = np.zeros(columns, np.float32)
        x_D[32 * block : 32 * (block + 1)] = 127 * 2.0 ** (block - 9)
        n = np.count_nonzero(x_D)
        assert dots(w, x_D).tolist() == [n * 3 * 127 * scale_B[block] * 2.0 ** (block - 9)]


@pytest.mark.parametrize("fmt", ROW_FORMATS)
@pytest.mark.parametrize("columns", [*EDGES, 1, 5, 97, 193])
def test_other_rows_do_not_matter(fmt: str, columns: int) -> None:
    """The rows before and after hold NaN and the largest bytes, in values and in scales."""
    w, x_D = store(fmt, random(columns, 3, columns)), random(1, columns)
    wanted = dots(w, x_D)[1], portable_dots(w, x_D)[1]
    for array in (w.stored, w.scales):
        if array is not None:
            array.view(np.uint8)[[0, 2]] = 0xFF
    assert dots(w, x_D)[1] == wanted[0]
    assert portable_dots(w, x_D)[1] == wanted[1]


@pytest.mark.parametrize("fmt", ROW_FORMATS)
@pytest.mark.parametrize("columns", [5, 40, 300])
def test_nan_and_infinities_come_through(fmt: str, columns: int) -> None:
    """Bytes have no sign of infinity: of an infinite input block formats make NaN."""
    w = store(fmt, np.ones((1, columns)))
    for wrong in (np.inf, -np.inf, np.nan):
        x_D = np.ones(columns, np.float32)
        x_D[columns // 2] = wrong
        wanted = np.nan if w.quantised else wrong
        for found in (dots(w, x_D), portable_dots(w, x_D)):
            np.testing.assert_array_equal(found, np.float32([wanted]))


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
@pytest.mark.parametrize("lane", [0, 13, 31])
def test_every_bit_pattern_multiplies(fmt: str, lane: int) -> None:
    """All 65536 numbers of the format, one a row, zeros around it."""
    stored = np.zeros((65536, 32), np.uint16)
    stored[:, lane] = np.arange(65536)
    w = StoredMatrix(fmt, stored, FORMATS[fmt].decode(stored.view(FORMATS[fmt].stored), 32))
    np.testing.assert_array_equal(dots(w, np.ones(32, np.float32)), w.values[:, lane])


@FEW
@given(st.sampled_from(ROW_FORMATS), st.integers(1, 14), st.integers(1, 20), st.integers(1, 700), st.integers(0, 99))
@example("f16", 13, 9, 2048, 0)
@example("q8", 13, 9, 2048, 0)
@example("q4", 13, 9, 1120, 0)
@example("q5", 13, 9, 1120, 0)
@example("q6", 13, 9, 1120, 0)
def test_a_product_has_the_same_bits_in_any_company(fmt: str, tokens: int, rows: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w, x_TD = store(fmt, random(seed, rows, columns)), random(1, tokens, columns)
    alone_TN = np.array([[products(COMPUTE, w, x_D[None], [row])[0, 0] for row in range(rows)] for x_D in x_TD])
    np.testing.assert_array_equal(products(COMPUTE, w, x_TD), alone_TN)
    index, chosen = rng.integers(0, rows, 11).tolist(), rng.permutation(tokens)[: tokens // 2 + 1].tolist()
    np.testing.assert_array_equal(products(COMPUTE, w, x_TD, index, chosen), alone_TN[chosen][:, index])
    assert product(w, x_TD).holds(alone_TN)


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_no_rows_and_no_columns_past_the_last_are_read(fmt: str) -> None:
    """A matrix that ends where memory ends."""
    w, x_D = store(fmt, random(0, 3, 45)), random(1, 45)
    np.testing.assert_array_equal(dots(replace(w, stored=at_the_end_of_memory(w.stored)), x_D), dots(w, x_D))
