"""Formats with scales of groups: products and rows against float64 and the plain loops, alone and in company."""

import numpy as np
import pytest
from support.rounding import product
from support.row_products import products
from support.stored import GROUPED_FORMATS, StoredMatrix, store

from pi_runtime.artifact.formats import FORMATS, GROUP
from pi_runtime.artifact.quantisation import bounds, dequantise, meant, pack_rows, records
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.data.row_loading import load_row
from pi_runtime.kernels.ops.row_products import portable_row_products, vector_row_products

COMPUTE = vector_row_products if ISA.lanes else portable_row_products
EACH = pytest.mark.parametrize("fmt", GROUPED_FORMATS)
WIDTHS = pytest.mark.parametrize("columns", [256, 512, 1280])


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def of_records(fmt: str, q: np.ndarray, heads: np.ndarray, fields: np.ndarray) -> StoredMatrix:
    """Rows of signed integers, and what groups have beside them."""
    f = FORMATS[fmt]
    stored, scales = pack_rows(f, q.astype(np.int8), records(f, heads.astype(np.float16), fields))
    with np.errstate(invalid="ignore"):
        return StoredMatrix(fmt, stored, dequantise(f, stored, scales, q.shape[1]), scales)


def random_records(fmt: str, seed: int, rows: int, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers over their whole range, of weights and of scales."""
    f, rng = FORMATS[fmt], np.random.default_rng(seed)
    parts = f.field_bits // f.scale_bits
    q = meant(f, rng.integers(0, 1 << f.bits, (rows, 256 * groups), np.uint8))
    heads = rng.standard_normal((rows, groups, f.head_nbytes // 2)) / 64
    return q, heads, rng.integers(0, 1 << f.scale_bits, (rows, groups, GROUP, parts))


@EACH
@WIDTHS
def test_products_and_rows(fmt: str, columns: int) -> None:
    w, x_TD = of_records(fmt, *random_records(fmt, columns, 9, columns // 256)), random(1, 7, columns)
    found = products(COMPUTE, w, x_TD)
    assert product(w, x_TD).holds(found)
    np.testing.assert_array_equal(products(portable_row_products, w, x_TD), found)
    for t in range(len(x_TD)):
        np.testing.assert_array_equal(products(COMPUTE, w, x_TD[t : t + 1])[0], found[t])
    row_D = np.empty(columns - 256, np.float32)
    for first in range(0, columns, 256):
        load_row(w.view, 4, first, row_D[: columns - first])
        np.testing.assert_array_equal(row_D[: columns - first], w.values[4, first:][: len(row_D)])


@EACH
def test_the_largest_integers_of_either_sign(fmt: str) -> None:
    """Sums of pairs might saturate, and sums of halves times their scales reach 16,646,144: below 2²⁴ all are exact."""
    f = FORMATS[fmt]
    lowest, highest = bounds(f)
    parts, most = f.field_bits // f.scale_bits, (1 << f.scale_bits) - 1
    for q in (lowest, highest):
        for field in (0, most):
            w = of_records(
                fmt, np.full((1, 256), q), np.ones((1, 1, f.head_nbytes // 2)), np.full((1, 1, GROUP, parts), field)
            )
            x_TD = np.full((2, 256), np.float32(127))
            x_TD[1] = -127
            wanted = 127 * 256 * (q * (field - f.scale_zero) + (field if f.offset else 0))
            np.testing.assert_array_equal(products(COMPUTE, w, x_TD).ravel(), [wanted, -wanted])


@EACH
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0**-24, 65504.0])
def test_any_number_of_a_group(fmt: str, number: float) -> None:
    """NaN and infinity stay in what they belong to; scales of 0 give what is added alone."""
    q, heads, fields = random_records(fmt, 3, 3, 2)
    heads[1, 0] = number
    fields[2] = FORMATS[fmt].scale_zero
    w, x_TD = of_records(fmt, q, heads, fields), random(5, 2, 512)
    found, plain = products(COMPUTE, w, x_TD), products(portable_row_products, w, x_TD)
    np.testing.assert_array_equal(found, plain)
    assert np.isfinite(found[:, [0, 2]]).all()
    assert np.isfinite(found[:, 1]).all() == np.isfinite(number)
    row_D = np.empty(512, np.float32)
    load_row(w.view, 1, 0, row_D)
    np.testing.assert_array_equal(row_D, w.values[1])


@EACH
def test_rounding_is_near(fmt: str) -> None:
    """A grid of so many bits: no value is further from its own than half a step and what its scale lost."""
    values = random(0, 5, 768)
    w = store(fmt, values)
    assert np.abs(w.values - values).max() < 8 / (1 << FORMATS[fmt].bits)
    again = store(fmt, w.values)
    assert np.abs(again.values - w.values).max() <= 2 * np.abs(w.values - values).max()
    assert not store(fmt, np.zeros((1, 256))).values.any()
