"""Formats with tables of integers: products and rows against float64 and the plain loops, alone and in company."""

import numpy as np
import pytest
from support.rounding import product
from support.row_products import products
from support.stored import TABLE_FORMATS, StoredMatrix, store

from pi_runtime.artifact.formats import BLOCK, BYTE_SCALES, FORMATS
from pi_runtime.artifact.quantisation import dequantise, empty_stored, pack_rows
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.data.row_loading import load_row
from pi_runtime.kernels.ops.row_products import portable_row_products, vector_row_products

COMPUTE = vector_row_products if ISA.lanes else portable_row_products
EACH = pytest.mark.parametrize("fmt", TABLE_FORMATS)
BY_BYTES = pytest.mark.parametrize("fmt", [name for name in TABLE_FORMATS if FORMATS[name].byte_scale])


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def stored_at_random(fmt: str, seed: int, rows: int, columns: int, lowest: int = 0, highest: int = 255) -> StoredMatrix:
    """Any bytes as integers, and as scales those between two; others are near 1."""
    f, rng = FORMATS[fmt], np.random.default_rng(seed)
    stored, scales = empty_stored(f, (rows, columns))
    stored[:] = rng.integers(0, 256, stored.shape, np.uint8)
    if f.byte_scale:
        scales[:] = rng.integers(lowest, highest + 1, scales.shape, np.uint8)
        if f.row_scaled:
            scales[:, :4] = rng.uniform(0.5, 2, rows).astype(np.float32).view(np.uint8).reshape(rows, 4)
        return StoredMatrix(fmt, stored, dequantise(f, stored, scales, columns), scales)
    scales = store(fmt, random(seed, rows, columns)).scales
    return StoredMatrix(fmt, stored, dequantise(f, stored, scales, columns), scales)


@EACH
@pytest.mark.parametrize("columns", [32, 96, 256, 288, 640, 1504])
def test_products_and_rows(fmt: str, columns: int) -> None:
    """Whole groups of blocks and single ones, of which the last may be half of a pair."""
    columns = -(-columns // 256) * 256 if FORMATS[fmt].grouped else columns
    middle = (100, 150) if FORMATS[fmt].byte_scale == "e8m0" else (0, 255)
    w, x_TD = stored_at_random(fmt, columns, 9, columns, *middle), random(1, 7, columns)
    found = products(COMPUTE, w, x_TD)
    assert product(w, x_TD).holds(found)
    np.testing.assert_array_equal(products(portable_row_products, w, x_TD), found)
    for t in range(len(x_TD)):
        np.testing.assert_array_equal(products(COMPUTE, w, x_TD[t : t + 1])[0], found[t])
    row_D = np.empty(columns, np.float32)
    for first in range(0, columns, 256):
        load_row(w.view, 4, first, row_D[: columns - first])
        np.testing.assert_array_equal(row_D[: columns - first], w.values[4, first:])


@EACH
def test_the_largest_integers_of_either_sign(fmt: str) -> None:
    """Sums of pairs might saturate."""
    f = FORMATS[fmt]
    columns, one = (256, 32) if f.grouped else (352, 1)
    stored, scales = empty_stored(f, (len(f.table), columns))
    stored[:] = np.arange(16, dtype=np.uint8)[:, None] * 17
    if f.grouped:
        scales[:, :2] = np.full((len(scales), 1), 1 / 32, np.float16).view(np.uint8)
        scales[:, 2:8] = 0  # 0 stands for −32
        one = -1
    elif f.row_scaled:
        scales[:, :4] = np.full((len(scales), 1), 2, np.float32).view(np.uint8)
        scales[:, 4:] = 0x38  # half of 1
    else:
        scales[:] = 128 if f.byte_scale else 1
    w = StoredMatrix(fmt, stored, dequantise(f, stored, scales, columns), scales)
    x_TD = np.full((2, columns), np.float32(127))
    x_TD[1] = -127
    wanted = 127 * columns * one * np.array(f.table)
    np.testing.assert_array_equal(products(COMPUTE, w, x_TD), [wanted, -wanted])


@BY_BYTES
def test_every_byte_as_a_scale(fmt: str) -> None:
    """Denormal ones are no zeros, and 127 of four bits of exponent is."""
    f, columns = FORMATS[fmt], 256 * BLOCK // FORMATS[fmt].scales
    _, scales = empty_stored(f, (1, columns))
    scales[:, : 4 * f.row_scaled] = np.ones(1, np.float32).view(np.uint8)[: 4 * f.row_scaled]
    scales[0, 4 * f.row_scaled :][:256] = np.arange(256)
    stored = pack_rows(f, np.ones((1, columns), np.int8), scales)[0]
    row_D = np.empty(columns, np.float32)
    load_row(StoredMatrix(fmt, stored, row_D[None], scales).view, 0, 0, row_D)
    known = 255 if f.byte_scale == "e8m0" else 256
    found = row_D.reshape(256, -1)[:known]
    np.testing.assert_array_equal(found, np.repeat(BYTE_SCALES[f.byte_scale][:known, None], found.shape[1], 1))
    w = StoredMatrix(fmt, stored, row_D[None], scales)
    x_TD = np.zeros((2, columns), np.float32)
    x_TD[0, : BLOCK // f.scales] = 127  # of the first scale, 2⁻¹²⁸ or 0
    wanted = 127 * BLOCK // f.scales * BYTE_SCALES[f.byte_scale][0]
    np.testing.assert_array_equal(products(COMPUTE, w, x_TD), [[wanted], [0]])


@EACH
def test_rounding_is_near(fmt: str) -> None:
    """Rounding what lies on the grid loses next to nothing, and an array of zeros nothing."""
    values = random(0, 5, 768)
    w = store(fmt, values)
    first = np.square(w.values - values).sum()
    assert first < 0.014 * np.square(values).sum()
    assert np.square(store(fmt, w.values).values - w.values).sum() < first / 4
    assert not store(fmt, np.zeros((1, 256))).values.any()
