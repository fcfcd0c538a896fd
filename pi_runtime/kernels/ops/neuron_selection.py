"""Which neurons of a layer have their row of `first` read: those that a predictor names, or the signs.

F neurons in stored order, of which [low, high) are asked; D model width, R predictor rank, W = ⌈D / 64⌉ words. Lists
are made share by share, and the gaps between the shares closed in order: they do not depend on the number of threads.
"""

import numpy as np
from numba import carray, prange

from pi_runtime.artifact.footprint import SHARES
from pi_runtime.artifact.formats import ROW_ALIGN
from pi_runtime.kernels.codegen.jit import inner, operator
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import (
    Floats,
    Ints,
    Matrix,
    Words,
    address_of,
    count_ones,
    from_row,
    matrix,
    pointer_of,
    vector,
)
from pi_runtime.kernels.data.quantised_input import prepare
from pi_runtime.kernels.data.weight_table import Shape
from pi_runtime.kernels.data.workspace import Buffers
from pi_runtime.kernels.ops.linear import linear
from pi_runtime.kernels.ops.row_dot import row_dot, rows_ahead

_ROWS = 64
"""Rows of signs that a thread takes at once."""


@inner
def selects(w: Ints) -> bool:
    """Whether the layer's rung reads only some rows of `first`."""
    return w[weight_table.RUNG] == weight_table.PREDICTED or w[weight_table.RUNG] == weight_table.SIGN


@inner
def predictor_rows(s: Shape, w: Ints) -> tuple[Matrix, Matrix]:
    """down [R, D] and up [F, R]."""
    down = matrix(s.predictor_format, w[weight_table.PREDICTOR_DOWN], w[weight_table.PREDICTOR_DOWN_SCALES], s.d_model)
    return down, matrix(
        s.predictor_format, w[weight_table.PREDICTOR_UP], w[weight_table.PREDICTOR_UP_SCALES], w[weight_table.RANK]
    )


def _predict(
    down: Matrix, up: Matrix, bias: int, low: int, high: int, records: int, r_R: Floats, middle: int,
    candidates_F: Ints, counts_B: Ints,
) -> None:  # fmt: skip
    """Neurons whose score is above 0, into `candidates_F` share by share; `counts_B` says how many.

    `middle`: room for the record of r = down x.
    """
    rank, count = r_R.shape[0], high - low
    bias_F = vector(bias, high)
    for share in prange(SHARES):
        for k in range(rank * share // SHARES, rank * (share + 1) // SHARES):
            r_R[k] = row_dot(down, k, k + rows_ahead(down), records)
    prepare(up.fmt, r_R, middle)
    for share in prange(SHARES):
        begin, found = count * share // SHARES, 0
        for k in range(begin, count * (share + 1) // SHARES):
            if row_dot(up, low + k, low + k + rows_ahead(up), middle) + bias_F[low + k] > 0:
                candidates_F[begin + found] = low + k
                found += 1
        counts_B[share] = found


@inner
def pack_signs(x_D: Floats, signs_W: Words) -> None:
    """Bit j % 64 of word j / 64 ← whether x_j is below 0; bits beyond the last column are 0."""
    for word in range(signs_W.shape[0]):
        packed = np.uint64(0)
        for j in range(64 * word, min(x_D.shape[0], 64 * word + 64)):
            packed |= np.uint64(x_D[j] < 0) << np.uint64(j % 64)
        signs_W[word] = packed


@inner
def agreement(signs: int, row: int, columns: int, x_W: Words) -> int:
    """Columns in which row and input have the same sign, less those in which they differ."""
    words = x_W.shape[0]
    stride = (8 * words + ROW_ALIGN - 1) // ROW_ALIGN * ROW_ALIGN
    row_W = carray(pointer_of(signs + row * stride), (words,), np.uint64)
    differ = 0
    for word in range(words - 1):
        differ += count_ones(row_W[word] ^ x_W[word])
    unused = np.uint64(64 * words - columns)
    return columns - 2 * (differ + count_ones((row_W[words - 1] ^ x_W[words - 1]) << unused))


def _sign(
    signs: int, columns: int, margin: int, low: int, high: int, x_W: Words, candidates_F: Ints, counts_B: Ints
) -> None:
    """As `_predict`: neurons whose agreement with the input is above the margin."""
    count = high - low
    for share in prange(SHARES):
        begin, found = count * share // SHARES, 0
        for k in range(begin, count * (share + 1) // SHARES):
            if agreement(signs, low + k, columns, x_W) > margin:
                candidates_F[begin + found] = low + k
                found += 1
        counts_B[share] = found


_threaded_predict, _threaded_sign = operator(_predict), operator(_sign)
_serial_predict, _serial_sign = inner(_predict), inner(_sign)


@inner
def candidates(s: Shape, w: Ints, x_D: Floats, low: int, high: int, threads: bool | None, b: Buffers) -> int:
    """List the neurons of [low, high) that the layer's rung selects in `b.candidates_F`; returns how many.

    The record of x in `b.records` is as the format of predictors needs it.
    """
    lists = b.candidates_F, b.counts_B
    if w[weight_table.RUNG] == weight_table.SIGN:
        x_W = b.signs_TW[0]
        pack_signs(x_D, x_W)
        if threads is None:
            _serial_sign(w[weight_table.SIGNS], s.d_model, w[weight_table.MARGIN], low, high, x_W, *lists)
        else:
            _threaded_sign(w[weight_table.SIGNS], s.d_model, w[weight_table.MARGIN], low, high, x_W, *lists)
    else:
        down, up = predictor_rows(s, w)
        middle = b.r_flat[: w[weight_table.RANK]], address_of(b.r_records)
        if threads is None:
            _serial_predict(down, up, w[weight_table.PREDICTOR_BIAS], low, high, address_of(b.records), *middle, *lists)
        else:
            _threaded_predict(
                down, up, w[weight_table.PREDICTOR_BIAS], low, high, address_of(b.records), *middle, *lists
            )
    return close(high - low, b.counts_B, b.candidates_F)


@inner
def close(count: int, counts_B: Ints, index_F: Ints) -> int:
    """Close the gaps between the shares of a list; returns its length."""
    kept = 0
    for share in range(SHARES):
        begin = count * share // SHARES
        for k in range(counts_B[share]):
            index_F[kept] = index_F[begin + k]
            kept += 1
    return kept


@inner
def scores(s: Shape, w: Ints, x_TD: Floats, low: int, b: Buffers, score_TF: Floats) -> None:
    """Of T tokens: numbers above 0 where the layer's rung selects a neuron; of neurons from `low` on."""
    tokens, rows = score_TF.shape
    if w[weight_table.RUNG] == weight_table.SIGN:
        for t in range(tokens):
            pack_signs(x_TD[t], b.signs_TW[t])
        _sign_scores(w[weight_table.SIGNS], s.d_model, w[weight_table.MARGIN], low, b.signs_TW, score_TF)
    else:
        rank = w[weight_table.RANK]
        r_TR = b.r_flat[: tokens * rank].reshape(tokens, rank)
        down, up = predictor_rows(s, w)
        linear(down, rank, 0, x_TD, address_of(b.records), r_TR)
        bias = w[weight_table.PREDICTOR_BIAS] + 4 * low
        linear(from_row(up, low), rows, bias, r_TR, address_of(b.r_records), score_TF)


@operator
def _sign_scores(signs: int, columns: int, margin: int, low: int, x_TW: Words, score_TF: Floats) -> None:
    """Agreement less margin."""
    tokens, rows = score_TF.shape
    for part in prange((rows + _ROWS - 1) // _ROWS):
        for i in range(part * _ROWS, min(rows, (part + 1) * _ROWS)):
            for t in range(tokens):
                score_TF[t, i] = np.float32(agreement(signs, low + i, columns, x_TW[t]) - margin)
