"""Panels and the products in registers, on their own: layout, and that nothing but the result is written."""

import numba
import numpy as np
import pytest
from support.rounding import bound, product
from support.stored import StoredMatrix, quantised_inputs, store

from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.data.quantised_input import (
    block_sums_at,
    column_order_at,
    input_stride,
    padded_columns,
    scales_at,
)
from pi_runtime.kernels.ops import gemm_tiles
from pi_runtime.kernels.ops.gemm_tiles import BYTE_TOKENS, FLOAT_TOKENS, PANEL, multiply_bytes, pack_bytes, pack_floats
from pi_runtime.kernels.ops.linear import BYTE_DEPTH

pytestmark = pytest.mark.skipif(PANEL == 0, reason="no vector instructions")
FLOATS, BYTES = ["f32", "f16", "bf16"], ["q8", "q4"]
LAST = [0, 1, 6, 7, 8, 15, PANEL - 1]


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rows_of_panel(row: int, last: int) -> list[int]:
    """The last row stands in for those past it."""
    return [row + min(r, last) for r in range(PANEL)]


@pytest.mark.parametrize("fmt", FLOATS)
@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize(("first", "columns"), [(0, 8), (16, 24), (64, 3), (0, 67)])
def test_a_panel_of_floats(fmt: str, last: int, first: int, columns: int) -> None:
    w = store(fmt, random(0, PANEL + 3, 67))
    panel_KR = np.full((columns + 9, PANEL), np.nan, np.float32)
    pack_floats(w.view, 2, last, first, columns, panel_KR.ctypes.data)
    wanted_RK = w.values[rows_of_panel(2, last), first : first + columns]
    np.testing.assert_array_equal(panel_KR[:columns], wanted_RK.T)
    assert np.isnan(panel_KR[-(-columns // 8) * 8 :]).all(), "wrote past the panel"


def packed(w: StoredMatrix, row: int, last: int, first: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    panel_KR = np.full((BYTE_DEPTH // 4 + 1, PANEL), -1, np.int32)
    scales_BR = np.full((blocks + 1, PANEL), np.nan, np.float32)
    pack_bytes(w.view, row, last, first, blocks, panel_KR.ctypes.data, scales_BR.ctypes.data)
    assert np.all(panel_KR[(blocks + 1) // 2 * 2 * BLOCK // 4 :] == -1), "wrote past the panel"
    assert np.isnan(scales_BR[-1]).all(), "wrote past the scales"
    return panel_KR, scales_BR


@pytest.mark.parametrize("fmt", BYTES)
@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize(("first", "blocks"), [(0, 1), (0, 7), (0, 8), (0, 11), (256, 3), (256, 8), (512, 5)])
def test_a_panel_of_bytes(fmt: str, last: int, first: int, blocks: int) -> None:
    """Four columns of a row lie side by side in one lane, as stored; 128 is added to q8 for unsigned products."""
    w = store(fmt, random(1, PANEL + 3, 661 if first + blocks * BLOCK > 512 else first + blocks * BLOCK - 5))
    assert w.scales is not None
    panel_KR, scales_BR = packed(w, 2, last, first, blocks)
    rows, columns = rows_of_panel(2, last), slice(first, min(w.values.shape[1], first + blocks * BLOCK))
    np.testing.assert_array_equal(scales_BR[:-1].T, w.scales[rows, first // BLOCK :][:, :blocks].astype(np.float32))
    bytes_RK = (
        panel_KR[: blocks * BLOCK // 4].view(np.uint8).reshape(-1, PANEL, 4).transpose(1, 0, 2).reshape(PANEL, -1)
    )
    q_RK = bytes_RK.view(np.int8).astype(int) if fmt == "q8" else bytes_RK.astype(int) - 8
    if fmt == "q8" and ISA.dot:
        q_RK = bytes_RK.astype(int) - 128
    scale_RK = np.repeat(scales_BR[:-1].T, BLOCK, -1)
    found = (scale_RK * q_RK)[:, : columns.stop - columns.start].astype(np.float32)
    np.testing.assert_array_equal(found, w.values[rows, columns])


@pytest.mark.parametrize("count", [1, 2, 33, 64])
@pytest.mark.parametrize("left", range(1, FLOAT_TOKENS + 2))
def test_floats_times_some_vectors(count: int, left: int) -> None:
    """Results are added to what is there; where vectors are missing, so many results behind are scratch."""
    panel_KR, x_TK = random(2, count, PANEL), random(3, left, count)
    out_TR = random(4, FLOAT_TOKENS + 1, PANEL)
    before, tokens = out_TR.copy(), min(left, FLOAT_TOKENS)
    multiply_floats(panel_KR.ctypes.data, 4 * PANEL, count, x_TK.ctypes.data, 4 * count, out_TR.ctypes.data, left)
    wanted = before[:tokens].astype(np.float64) + x_TK[:tokens].astype(np.float64) @ panel_KR.astype(np.float64)
    error = bound(count + 1, np.abs(before[:tokens]) + np.abs(x_TK[:tokens]) @ np.abs(panel_KR))
    assert np.all(np.abs(out_TR[:tokens] - wanted) <= error)
    np.testing.assert_array_equal(out_TR[FLOAT_TOKENS], before[FLOAT_TOKENS])


@numba.njit
def multiply_floats(panel: int, step: int, count: int, x: int, x_stride: int, out: int, left: int) -> None:
    """The intrinsic can be called from compiled code alone."""
    gemm_tiles.multiply_floats(panel, step, count, x, x_stride, out, 4 * PANEL, left)


@pytest.mark.parametrize("fmt", BYTES)
@pytest.mark.parametrize("blocks", [1, 2, 5, 8, 19])
def test_bytes_times_four_vectors(fmt: str, blocks: int) -> None:
    columns = blocks * BLOCK - 5
    w, x_TD = store(fmt, random(5, PANEL, columns)), random(6, BYTE_TOKENS, columns)
    panel_KR, scales_BR = packed(w, 0, PANEL - 1, 0, blocks)
    out_TR = np.zeros((BYTE_TOKENS + 1, PANEL), np.float32)
    out_TR[BYTE_TOKENS] = 7
    record_TN, p = quantised_inputs(w.fmt, x_TD), padded_columns(columns)
    at = [record_TN.ctypes.data + t * input_stride(columns) for t in range(BYTE_TOKENS)]
    parts = [tuple(int(f(a, p)) for a in at) for f in (column_order_at, scales_at, block_sums_at)]
    out = tuple(int(out_TR[t].ctypes.data) for t in range(BYTE_TOKENS))
    multiply_bytes(w.fmt, panel_KR.ctypes.data, scales_BR.ctypes.data, blocks, *parts, out)
    assert product(w, x_TD).holds(out_TR[:BYTE_TOKENS])
    assert np.all(out_TR[BYTE_TOKENS] == 7)
