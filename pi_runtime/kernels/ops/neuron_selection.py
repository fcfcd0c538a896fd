"""Which neurons of a layer have their row of `first` read: those that the rung's selector names.

F neurons in stored order, of which [low, high) are asked; D model width, R predictor rank, W = ⌈D / 64⌉ words of signs,
S = `SEGMENTS`, T tokens. The range is split into a fixed number of segments, each is processed in order, and the lists
they give are compacted in order: so the result does not depend on the number of threads.

A further selector has its column codes, its kernels and its branch in `list_candidates` and `scores` here.
"""

import numpy as np
from numba import carray, prange

from pi_runtime.artifact.footprint import SEGMENTS
from pi_runtime.artifact.formats import ROW_ALIGN
from pi_runtime.kernels.codegen.jit import device, parallel
from pi_runtime.kernels.data.matrix_view import (
    F32,
    Floats,
    Ints,
    MatrixView,
    Words,
    address_of,
    count_ones,
    matrix,
    pointer_of,
    rows_from,
    vector,
)
from pi_runtime.kernels.data.quantised_input import prepare_input
from pi_runtime.kernels.data.weight_table import COLUMN, MARGIN, RANK, SELECTOR, SELECTOR_CODES, KernelConfig
from pi_runtime.kernels.data.workspace import Workspace
from pi_runtime.kernels.ops.linear import linear
from pi_runtime.kernels.ops.row_dot import row_dot, rows_ahead

_DOWN, _UP, _BIAS = COLUMN["predictor/down"], COLUMN["predictor/up"], COLUMN["predictor/bias"]
_DOWN_SCALES, _UP_SCALES = COLUMN["predictor/down_scales"], COLUMN["predictor/up_scales"]
_SIGNS = COLUMN["predictor/signs"]
_NO_SELECTOR, _BY_SIGNS = SELECTOR_CODES[None], SELECTOR_CODES["signs"]
_ROWS_AT_ONCE = 64
"""Rows of signs that a thread takes at once."""


@device
def selects(w: Ints) -> bool:
    """Whether the layer's rung reads only some rows of `first`."""
    return w[SELECTOR] != _NO_SELECTOR


@device
def selector_format(cfg: KernelConfig, w: Ints) -> int:
    """Format of the matrices that the selector multiplies the FFN's input with; f32 where it multiplies none."""
    return cfg.predictor_format if selects(w) and w[SELECTOR] != _BY_SIGNS else F32


@device
def predictor_matrices(cfg: KernelConfig, w: Ints) -> tuple[MatrixView, MatrixView]:
    """The low-rank predictor's down [R, D] and up [F, R]."""
    down = matrix(cfg.predictor_format, w[_DOWN], w[_DOWN_SCALES], cfg.d_model)
    return down, matrix(cfg.predictor_format, w[_UP], w[_UP_SCALES], w[RANK])


def _predict(
    down: MatrixView, up: MatrixView, bias: int, low: int, high: int, input_at: int, r_R: Floats, r_input_at: int,
    candidates_F: Ints, counts_S: Ints,
) -> None:  # fmt: skip
    """List the neurons whose score is above 0 in `candidates_F`, segment by segment; `counts_S` says how many.

    `r_input_at`: memory for the input of `up`, made of r = down x.
    """
    rank, count = r_R.shape[0], high - low
    bias_F = vector(bias, high)
    for segment in prange(SEGMENTS):
        for k in range(rank * segment // SEGMENTS, rank * (segment + 1) // SEGMENTS):
            r_R[k] = row_dot(down, k, k + rows_ahead(down), input_at)
    prepare_input(up.fmt, r_R, r_input_at)
    for segment in prange(SEGMENTS):
        begin, found = count * segment // SEGMENTS, 0
        for k in range(begin, count * (segment + 1) // SEGMENTS):
            if row_dot(up, low + k, low + k + rows_ahead(up), r_input_at) + bias_F[low + k] > 0:
                candidates_F[begin + found] = low + k
                found += 1
        counts_S[segment] = found


@device
def pack_signs(x_D: Floats, signs_W: Words) -> None:
    """Bit j % 64 of word j / 64 ← whether x_j is below 0; bits beyond the last column are 0."""
    for word in range(signs_W.shape[0]):
        packed = np.uint64(0)
        for j in range(64 * word, min(x_D.shape[0], 64 * word + 64)):
            packed |= np.uint64(x_D[j] < 0) << np.uint64(j % 64)
        signs_W[word] = packed


@device
def agreement(signs: int, row: int, columns: int, x_W: Words) -> int:
    """Columns in which row and input have the same sign, minus those in which they differ."""
    words = x_W.shape[0]
    stride = (8 * words + ROW_ALIGN - 1) // ROW_ALIGN * ROW_ALIGN
    row_W = carray(pointer_of(signs + row * stride), (words,), np.uint64)
    differ = 0
    for word in range(words - 1):
        differ += count_ones(row_W[word] ^ x_W[word])
    unused = np.uint64(64 * words - columns)
    return columns - 2 * (differ + count_ones((row_W[words - 1] ^ x_W[words - 1]) << unused))


def _agree(
    signs: int, columns: int, margin: int, low: int, high: int, x_W: Words, candidates_F: Ints, counts_S: Ints
) -> None:
    """List the neurons whose agreement with the input is above the margin, as `_predict` lists them."""
    count = high - low
    for segment in prange(SEGMENTS):
        begin, found = count * segment // SEGMENTS, 0
        for k in range(begin, count * (segment + 1) // SEGMENTS):
            if agreement(signs, low + k, columns, x_W) > margin:
                candidates_F[begin + found] = low + k
                found += 1
        counts_S[segment] = found


_parallel_predict, _parallel_agree = parallel(_predict), parallel(_agree)
_serial_predict, _serial_agree = device(_predict), device(_agree)


@device
def list_candidates(
    cfg: KernelConfig, w: Ints, x_D: Floats, low: int, high: int, threads: bool | None, ws: Workspace
) -> int:
    """List the neurons of [low, high) that the layer's selector names in `ws.candidates_F`; returns how many.

    `ws.inputs` holds x as `selector_format` needs it.
    """
    lists = ws.candidates_F, ws.counts_S
    if w[SELECTOR] == _BY_SIGNS:
        x_W = ws.signs_TW[0]
        pack_signs(x_D, x_W)
        if threads is None:
            _serial_agree(w[_SIGNS], cfg.d_model, w[MARGIN], low, high, x_W, *lists)
        else:
            _parallel_agree(w[_SIGNS], cfg.d_model, w[MARGIN], low, high, x_W, *lists)
    else:
        down, up = predictor_matrices(cfg, w)
        r = ws.low_rank_flat[: w[RANK]], address_of(ws.low_rank_inputs)
        if threads is None:
            _serial_predict(down, up, w[_BIAS], low, high, address_of(ws.inputs), *r, *lists)
        else:
            _parallel_predict(down, up, w[_BIAS], low, high, address_of(ws.inputs), *r, *lists)
    return compact(high - low, ws.counts_S, ws.candidates_F)


@device
def compact(count: int, counts_S: Ints, index_F: Ints) -> int:
    """Move what the segments of a list hold together, in order (stream compaction); returns the list's length."""
    kept = 0
    for segment in range(SEGMENTS):
        begin = count * segment // SEGMENTS
        for k in range(counts_S[segment]):
            index_F[kept] = index_F[begin + k]
            kept += 1
    return kept


@device
def scores(cfg: KernelConfig, w: Ints, x_TD: Floats, low: int, ws: Workspace, score_TF: Floats) -> None:
    """score ← numbers above 0 where the layer's selector names a neuron, for T tokens and the neurons from `low` on."""
    tokens, rows = score_TF.shape
    if w[SELECTOR] == _BY_SIGNS:
        for t in range(tokens):
            pack_signs(x_TD[t], ws.signs_TW[t])
        _agreement_scores(w[_SIGNS], cfg.d_model, w[MARGIN], low, ws.signs_TW, score_TF)
    else:
        rank = w[RANK]
        r_TR = ws.low_rank_flat[: tokens * rank].reshape(tokens, rank)
        down, up = predictor_matrices(cfg, w)
        linear(down, rank, 0, x_TD, address_of(ws.inputs), r_TR)
        linear(rows_from(up, low), rows, w[_BIAS] + 4 * low, r_TR, address_of(ws.low_rank_inputs), score_TF)


@parallel
def _agreement_scores(signs: int, columns: int, margin: int, low: int, x_TW: Words, score_TF: Floats) -> None:
    """score ← agreement minus margin."""
    tokens, rows = score_TF.shape
    for part in prange((rows + _ROWS_AT_ONCE - 1) // _ROWS_AT_ONCE):
        for i in range(part * _ROWS_AT_ONCE, min(rows, (part + 1) * _ROWS_AT_ONCE)):
            for t in range(tokens):
                score_TF[t, i] = np.float32(agreement(signs, low + i, columns, x_TW[t]) - margin)
