"""Products with a stored matrix, and norms.

Shape letters: T tokens, D columns of the matrix, N rows; in a panel K columns, R rows, B blocks; in `add_matmul` R rows
and C columns at once. One thread computes each output in one order, so the bits do not depend on the number of threads.
"""

import numpy as np
from numba import prange

from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.jit import device, loop_body, parallel, public
from pi_runtime.kernels.data.matrix_view import Floats, Ints, MatrixView, address_of, is_quantised, vector
from pi_runtime.kernels.data.quantised_input import (
    block_sums_at,
    column_order_at,
    input_stride,
    padded_columns,
    prepare_input,
    scales_at,
)
from pi_runtime.kernels.data.row_loading import load_row
from pi_runtime.kernels.ops.gemm_tiles import (
    BYTE_TOKENS,
    FLOAT_TOKENS,
    PANEL,
    multiply_bytes,
    multiply_floats,
    pack_bytes,
    pack_floats,
)
from pi_runtime.kernels.ops.row_dot import row_dot, rows_ahead

ROWS_AT_ONCE = 32
"""Rows that a thread takes at once."""
COLUMNS_AT_ONCE = 256
"""Columns that a thread takes at once in `add_matmul`."""
FLOAT_DEPTH, BYTE_DEPTH = 256, 1024
"""Columns of a panel that are packed and multiplied at once: so a panel stays in the first-level cache."""


@public
def linear(m: MatrixView, rows: int, bias: int, x_TD: Floats, inputs_at: int, y_TN: Floats) -> None:
    """y ← x Wᵀ + bias for the first `rows` rows of m; `bias` is an address or 0.

    `inputs_at`: memory for T inputs.
    """
    if x_TD.shape[0] == 1 or PANEL == 0:
        for t in range(x_TD.shape[0]):
            _prepare_input(m.fmt, x_TD[t], inputs_at + t * input_stride(m.columns))
        _by_rows(m, rows, bias, inputs_at, y_TN)
    elif is_quantised(m.fmt):
        _prepare_inputs(m.fmt, x_TD, inputs_at)
        _by_panels_of_bytes(m, rows, bias, inputs_at, y_TN)
    else:
        _by_panels_of_floats(m, rows, bias, x_TD, y_TN)


@parallel
def _by_rows(m: MatrixView, rows: int, bias: int, inputs_at: int, y_TN: Floats) -> None:
    tokens, stride, ahead = y_TN.shape[0], input_stride(m.columns), rows_ahead(m)
    for block in prange((rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE):
        for n in range(block * ROWS_AT_ONCE, min(rows, (block + 1) * ROWS_AT_ONCE)):
            b = vector(bias, rows)[n] if bias != 0 else np.float32(0)
            for t in range(tokens):
                y_TN[t, n] = row_dot(m, n, n + ahead, inputs_at + t * stride) + b


_prepare_input = by_address(prepare_input)


@parallel
def _prepare_inputs(fmt: int, x_TD: Floats, inputs_at: int) -> None:
    _prepare_input()
    for t in prange(x_TD.shape[0]):
        _prepare_input(fmt, x_TD[t], inputs_at + t * input_stride(x_TD.shape[1]))


@loop_body
def _panel_of_floats(m: MatrixView, row: int, last: int, bias: int, x_TD: Floats, y_TN: Floats) -> None:
    out_TR = np.zeros((x_TD.shape[0] + FLOAT_TOKENS, PANEL), np.float32)
    panel_KR = np.empty((FLOAT_DEPTH, PANEL), np.float32)
    _floats_panel(m, row, last, x_TD, panel_KR, out_TR)
    _write_panel(out_TR, row, last, bias, y_TN)


@parallel
def _by_panels_of_floats(m: MatrixView, rows: int, bias: int, x_TD: Floats, y_TN: Floats) -> None:
    _panel_of_floats()
    for panel in prange((rows + PANEL - 1) // PANEL):
        _panel_of_floats(m, panel * PANEL, min(rows - panel * PANEL, PANEL) - 1, bias, x_TD, y_TN)


@loop_body
def _panel_of_bytes(m: MatrixView, row: int, last: int, bias: int, inputs_at: int, y_TN: Floats) -> None:
    out_TR = np.zeros((y_TN.shape[0] + FLOAT_TOKENS, PANEL), np.float32)
    panel_KR = np.empty((BYTE_DEPTH // 4, PANEL), np.int32)
    scales_BR = np.empty((BYTE_DEPTH // BLOCK, PANEL), np.float32)
    _bytes_panel(m, row, last, y_TN.shape[0], inputs_at, panel_KR, scales_BR, out_TR)
    _write_panel(out_TR, row, last, bias, y_TN)


@parallel
def _by_panels_of_bytes(m: MatrixView, rows: int, bias: int, inputs_at: int, y_TN: Floats) -> None:
    _panel_of_bytes()
    for panel in prange((rows + PANEL - 1) // PANEL):
        _panel_of_bytes(m, panel * PANEL, min(rows - panel * PANEL, PANEL) - 1, bias, inputs_at, y_TN)


@device
def _write_panel(out_TR: Floats, row: int, last: int, bias: int, y_TN: Floats) -> None:
    """y[:, row : row + last + 1] ← out + bias."""
    for r in range(last + 1):
        b = vector(bias, row + r + 1)[row + r] if bias != 0 else np.float32(0)
        for t in range(y_TN.shape[0]):
            y_TN[t, row + r] = out_TR[t, r] + b


@device
def _floats_panel(m: MatrixView, row: int, last: int, x_TD: Floats, panel_KR: Floats, out_TR: Floats) -> None:
    """out ← rows row … row + last of m times all vectors; rows of `out_TR` past the last vector are overwritten."""
    tokens, columns = x_TD.shape
    panel, out, step = address_of(panel_KR), address_of(out_TR), 4 * PANEL
    for first in range(0, columns, FLOAT_DEPTH):
        count = min(columns - first, FLOAT_DEPTH)
        pack_floats(m, row, last, first, count, panel)
        for t in range(0, tokens, FLOAT_TOKENS):
            x = address_of(x_TD) + 4 * (t * columns + first)
            multiply_floats(panel, step, count, x, 4 * columns, out + t * step, step, tokens - t)


@device
def _bytes_panel(
    m: MatrixView, row: int, last: int, tokens: int, inputs_at: int, panel_KR: Ints, scales_BR: Floats, out_TR: Floats
) -> None:
    """out ← rows row … row + last of m times all vectors, for a block format and quantised inputs."""
    columns, p, stride = m.columns, padded_columns(m.columns), input_stride(m.columns)
    panel, scales, out, step = address_of(panel_KR), address_of(scales_BR), address_of(out_TR), 4 * PANEL
    for first in range(0, columns, BYTE_DEPTH):
        blocks = (min(columns - first, BYTE_DEPTH) + BLOCK - 1) // BLOCK
        pack_bytes(m, row, last, first, blocks, panel, scales)
        for t in range(0, tokens, BYTE_TOKENS):
            r0, r1 = inputs_at + min(t, tokens - 1) * stride, inputs_at + min(t + 1, tokens - 1) * stride
            r2, r3 = inputs_at + min(t + 2, tokens - 1) * stride, inputs_at + min(t + 3, tokens - 1) * stride
            q, s, n = column_order_at(0, p) + first, scales_at(0, p) + first // 8, block_sums_at(0, p) + first // 8
            o = out + t * step
            multiply_bytes(
                m.fmt,
                panel,
                scales,
                blocks,
                (r0 + q, r1 + q, r2 + q, r3 + q),
                (r0 + s, r1 + s, r2 + s, r3 + s),
                (r0 + n, r1 + n, r2 + n, r3 + n),
                (o, o + step, o + 2 * step, o + 3 * step),
            )


@loop_body
def _some_columns(m: MatrixView, h_TN: Floats, first: int, columns: int, y_TD: Floats) -> None:
    tokens, rows = h_TN.shape
    w_RC, out_TC = (
        np.zeros((ROWS_AT_ONCE, COLUMNS_AT_ONCE), np.float32),
        np.zeros((tokens + FLOAT_TOKENS, COLUMNS_AT_ONCE), np.float32),
    )
    for start in range(0, rows, ROWS_AT_ONCE):
        count = min(rows - start, ROWS_AT_ONCE)
        for r in range(count):
            load_row(m, start + r, first, w_RC[r, :columns])
        _add_tile(w_RC, count, h_TN, start, columns, out_TC)
    for t in range(tokens):
        for j in range(columns):
            y_TD[t, first + j] += out_TC[t, j]


@public
def add_matmul(m: MatrixView, h_TN: Floats, y_TD: Floats) -> None:
    """y ← y + h W: the rows of m times h, added in row order. Each thread owns some columns."""
    _combine(m, h_TN, y_TD)


@parallel
def _combine(m: MatrixView, h_TN: Floats, y_TD: Floats) -> None:
    _some_columns()
    width = y_TD.shape[1]
    for tile in prange((width + COLUMNS_AT_ONCE - 1) // COLUMNS_AT_ONCE):
        _some_columns(m, h_TN, tile * COLUMNS_AT_ONCE, min(width - tile * COLUMNS_AT_ONCE, COLUMNS_AT_ONCE), y_TD)


@device
def _add_tile(w_RC: Floats, count: int, h_TN: Floats, start: int, columns: int, out_TC: Floats) -> None:
    """out ← out + h[:, start : start + count] w."""
    tokens, rows = h_TN.shape
    if PANEL == 0:
        for t in range(tokens):
            for r in range(count):
                for j in range(columns):
                    out_TC[t, j] += h_TN[t, start + r] * w_RC[r, j]
        return
    h, step = address_of(h_TN) + 4 * start, 4 * COLUMNS_AT_ONCE
    for j in range(0, columns, max(PANEL, 1)):
        w, out = address_of(w_RC) + 4 * j, address_of(out_TC) + 4 * j
        for t in range(0, tokens, FLOAT_TOKENS):
            multiply_floats(w, step, count, h + 4 * rows * t, 4 * rows, out + t * step, step, tokens - t)


@public
def norm(centred: int, eps: np.float32, weight: int, bias: int, x_TD: Floats, y_TD: Floats) -> None:
    """rms: x / √(mean x² + eps) · weight;  centred (layer norm): (x − mean) / √(var + eps) · weight + bias."""
    tokens, width = x_TD.shape
    w_D = vector(weight, width)
    for t in range(tokens):
        mean = np.float32(0)
        if centred:
            for j in range(width):
                mean += x_TD[t, j]
            mean /= np.float32(width)
        square = np.float32(0)
        for j in range(width):
            square += (x_TD[t, j] - mean) * (x_TD[t, j] - mean)
        scale = np.float32(1) / np.sqrt(square / np.float32(width) + eps)
        for j in range(width):
            y_TD[t, j] = (x_TD[t, j] - mean) * scale * w_D[j]
        if centred:
            add_vector(bias, y_TD[t])


@public
def add_vector(address: int, y_D: Floats) -> None:
    """y ← y + the vector at an address, if there is one (0: none)."""
    if address != 0:
        b_D = vector(address, y_D.shape[0])
        for j in range(y_D.shape[0]):
            y_D[j] += b_D[j]
