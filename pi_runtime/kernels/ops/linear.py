"""Products with a stored matrix, norms, and activations by the codes of `weight_table` (see `artifact.decoder`).

Shape letters: T tokens, D columns of the matrix, N rows. One thread computes each output in one order, so the bits do
not depend on the number of threads, nor on the other tokens. Several kernels compute activations, for lists and for
tiles, so each operation rounds as written: else the compiler might choose another order in each.
"""

import numpy as np
from numba import prange

from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.intrinsics import input_nbytes
from pi_runtime.kernels.codegen.jit import loop_body, parallel, public
from pi_runtime.kernels.data.matrix_view import Floats, MatrixView, RowList, Vectors, address_of, vector
from pi_runtime.kernels.data.quantised_input import prepare_input
from pi_runtime.kernels.ops.reductions import squares, total
from pi_runtime.kernels.ops.row_products import row_products
from pi_runtime.kernels.ops.tile_packing import BY_TILES, TILE, lay_tiles, tile_vectors

ROWS_AT_ONCE = 32
"""Rows that a thread takes at once."""
LOGITS_AT_ONCE = 1024
"""Logits of a token that a thread scales at once."""


@public
def linear(m: MatrixView, rows: int, bias: int, x_TD: Floats, inputs_at: int, y_TN: Floats) -> None:
    """y ← x Wᵀ + bias for the first `rows` rows of m; `bias` is an address or 0.

    `inputs_at`: memory for T inputs.
    """
    prepare_inputs(m.fmt, x_TD, inputs_at)
    product(m, 0, rows, bias, inputs_at, y_TN)


_prepare_input = by_address(prepare_input)


@public
def prepare_inputs(fmt: int, x_TD: Floats, inputs_at: int) -> None:
    """Write T vectors as inputs of products with a matrix of format `fmt`, one after the other, and lay them as tiles
    where these multiply them."""
    if x_TD.shape[0] == 1:
        _prepare_input(fmt, x_TD[0], inputs_at)
    else:
        _prepare_inputs(fmt, x_TD, inputs_at)


@loop_body
def _prepare_some(fmt: int, x_TD: Floats, first: int, count: int, inputs_at: int) -> None:
    tokens, columns = x_TD.shape
    for t in range(first, min(first + count, tokens)):
        _prepare_input(fmt, x_TD[t], inputs_at + t * input_nbytes(columns))
    if BY_TILES and count == TILE and first + count <= tokens:
        lay_tiles(columns, count, inputs_at + first * input_nbytes(columns))


@parallel(_prepare_some, _prepare_input)
def _prepare_inputs(fmt: int, x_TD: Floats, inputs_at: int) -> None:
    tokens = x_TD.shape[0]
    at_once = TILE if BY_TILES and tile_vectors(fmt, tokens) > 0 else 1
    for part in prange((tokens + at_once - 1) // at_once):
        _prepare_some(fmt, x_TD, part * at_once, at_once, inputs_at)


@loop_body
def _some_rows(
    m: MatrixView, begin: int, first: int, rows: int, known: int, bias: int, inputs_at: int, y_TN: Floats
) -> None:
    tokens, width = y_TN.shape
    out = address_of(y_TN) + 4 * first
    x = Vectors(inputs_at, input_nbytes(m.columns), 0, tokens)
    row_products(m, RowList(first - begin, 0, rows, known), x, out, 4 * width)
    if bias != 0:
        bias_N = vector(bias, first + rows)
        for t in range(tokens):
            for n in range(first, first + rows):
                y_TN[t, n] += bias_N[n]


@parallel(_some_rows)
def product(m: MatrixView, begin: int, end: int, bias: int, inputs_at: int, y_TN: Floats) -> None:
    """y ← x Wᵀ + bias for inputs that are prepared, in the columns [begin, end) of y: m has a row for each."""
    for part in prange((end - begin + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE):
        first = begin + part * ROWS_AT_ONCE
        _some_rows(m, begin, first, min(end - first, ROWS_AT_ONCE), end - first, bias, inputs_at, y_TN)


@public
def norm(centred: int, eps: np.float32, weight: int, bias: int, x_TD: Floats, y_TD: Floats) -> None:
    """rms: x / √(mean x² + eps) · weight;  centred (layer norm): (x − mean) / √(var + eps) · weight + bias."""
    tokens, width = x_TD.shape
    w_D = vector(weight, width)
    for t in range(tokens):
        mean = total(x_TD[t]) / np.float32(width) if centred else np.float32(0)
        scale = np.float32(1) / np.sqrt(squares(x_TD[t], mean) / np.float32(width) + eps)
        for j in range(width):
            y_TD[t, j] = (x_TD[t, j] - mean) * scale * w_D[j]
        if centred:
            add_vector(bias, y_TD[t])


@loop_body
def _finish(scale: np.float32, softcap: np.float32, first: int, count: int, z_TV: Floats) -> None:
    for t in range(z_TV.shape[0]):
        for n in range(first, first + count):
            z = z_TV[t, n] * scale
            z_TV[t, n] = softcap * np.tanh(z / softcap) if softcap > 0 else z


@parallel(_finish)
def finish_logits(scale: np.float32, softcap: np.float32, z_TV: Floats) -> None:
    """z ← s z, or c tanh(s z / c) with a cap c above 0."""
    vocabulary = z_TV.shape[1]
    for part in prange((vocabulary + LOGITS_AT_ONCE - 1) // LOGITS_AT_ONCE):
        first = part * LOGITS_AT_ONCE
        _finish(scale, softcap, first, min(vocabulary - first, LOGITS_AT_ONCE), z_TV)


@public
def add_vector(address: int, y_D: Floats) -> None:
    """y ← y + the vector at an address, if there is one (0: none)."""
    if address != 0:
        b_D = vector(address, y_D.shape[0])
        for j in range(y_D.shape[0]):
            y_D[j] += b_D[j]
