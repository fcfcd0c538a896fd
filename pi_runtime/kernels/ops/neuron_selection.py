"""Which neurons of a layer have their row of `first` read: those that the rung's selector names.

    low-rank   up_i · (down x) + bias_i > 0
    signs      columns in which first_i and x have the same sign, minus those in which they differ, above the margin

Shape letters: F neurons in stored order; D model width, R predictor rank, W = ⌈D / 64⌉ words of
signs, T tokens, N of them that are asked for.

A further selector has its column codes and its branches in `score` here.
"""

from typing import NamedTuple

import numpy as np
from numba import carray, prange

from pi_runtime.artifact.formats import ROW_ALIGN
from pi_runtime.kernels.codegen.jit import device, loop_body, parallel, public
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
    vector,
)
from pi_runtime.kernels.data.quantised_input import input_stride, prepare_input
from pi_runtime.kernels.data.weight_table import COLUMN, MARGIN, RANK, SELECTOR, SELECTOR_CODES, KernelConfig
from pi_runtime.kernels.data.workspace import Workspace
from pi_runtime.kernels.ops.row_products import row_products

_DOWN, _UP, _BIAS = COLUMN["predictor/down"], COLUMN["predictor/up"], COLUMN["predictor/bias"]
_DOWN_SCALES, _UP_SCALES = COLUMN["predictor/down_scales"], COLUMN["predictor/up_scales"]
_SIGNS = COLUMN["predictor/signs"]
_NO_SELECTOR, _BY_SIGNS = SELECTOR_CODES[None], SELECTOR_CODES["signs"]
_RANKS_AT_ONCE, _NEURONS_AT_ONCE = 16, 128
"""Rows of `down` and of `up` that a thread takes at once."""


class Inputs(NamedTuple):
    """Addresses of a layer's inputs; see `Workspace`."""

    inputs: int
    """The tokens as inputs of products."""
    low_rank: int
    """down x of the predictor."""
    low_rank_inputs: int
    """The same as inputs of products."""
    signs: int
    scores: int


@public
def inputs_of(ws: Workspace) -> Inputs:
    """The inputs in a workspace, valid as long as that is."""
    low_rank = address_of(ws.low_rank_flat), address_of(ws.low_rank_inputs)
    return Inputs(address_of(ws.inputs), *low_rank, address_of(ws.signs_TW), address_of(ws.score_TF))


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


@device
def score(
    cfg: KernelConfig, w: Ints, x_TD: Floats, token_N: Ints, low: int, high: int, threads: bool | None, x: Inputs
) -> None:
    """Score the neurons [low, high) for some tokens, whose inputs are prepared: above 0 is what the selector names."""
    tokens = token_N.shape[0]
    score_NF = scores_of(cfg, x, tokens)
    if w[SELECTOR] == _BY_SIGNS:
        words = (cfg.d_model + 63) // 64
        signs_NW = carray(pointer_of(x.signs), (tokens, words), np.uint64)
        for n in range(tokens):
            pack_signs(x_TD[token_N[n]], signs_NW[n])
    else:
        down, up = predictor_matrices(cfg, w)
        r_NR = carray(pointer_of(x.low_rank), (tokens, w[RANK]), np.float32)
        if threads is None:
            _serial_reduce(down, x.inputs, token_N, r_NR)
        else:
            _parallel_reduce(down, x.inputs, token_N, r_NR)
        for n in range(tokens):
            prepare_input(up.fmt, r_NR[n], x.low_rank_inputs + n * input_stride(w[RANK]))
    if threads is None:
        _serial_scores(cfg, w, x, low, high, score_NF)
    else:
        _parallel_scores(cfg, w, x, low, high, score_NF)


@device
def scores_of(cfg: KernelConfig, x: Inputs, tokens: int) -> Floats:
    """The scores of the layer's neurons for so many tokens."""
    return carray(pointer_of(x.scores), (tokens, cfg.d_ff), np.float32)


@loop_body
def _reduce_part(down: MatrixView, inputs: int, token_N: Ints, part: int, r_NR: Floats) -> None:
    tokens, rank = r_NR.shape
    first = part * _RANKS_AT_ONCE
    count, out = min(_RANKS_AT_ONCE, rank - first), address_of(r_NR) + 4 * first
    row_products(
        down, first, 0, count, count, inputs, input_stride(down.columns), address_of(token_N), tokens, out, 4 * rank
    )


def _reduce(down: MatrixView, inputs: int, token_N: Ints, r_NR: Floats) -> None:
    """r ← down x."""
    _reduce_part()
    for part in prange((r_NR.shape[1] + _RANKS_AT_ONCE - 1) // _RANKS_AT_ONCE):
        _reduce_part(down, inputs, token_N, part, r_NR)


_parallel_reduce, _serial_reduce = parallel(_reduce), device(_reduce)


@loop_body
def _score_part(cfg: KernelConfig, w: Ints, x: Inputs, low: int, high: int, part: int, score_NF: Floats) -> None:
    tokens = score_NF.shape[0]
    begin = low + part * _NEURONS_AT_ONCE
    end = min(high, begin + _NEURONS_AT_ONCE)
    if w[SELECTOR] == _BY_SIGNS:
        words = (cfg.d_model + 63) // 64
        signs_NW = carray(pointer_of(x.signs), (tokens, words), np.uint64)
        for i in range(begin, end):
            for n in range(tokens):
                score_NF[n, i] = np.float32(agreement(w[_SIGNS], i, cfg.d_model, signs_NW[n]) - w[MARGIN])
        return
    up, bias_F, to = predictor_matrices(cfg, w)[1], vector(w[_BIAS], cfg.d_ff), address_of(score_NF) + 4 * begin
    count, stride = end - begin, input_stride(w[RANK])
    row_products(up, begin, 0, count, count, x.low_rank_inputs, stride, 0, tokens, to, 4 * cfg.d_ff)
    for n in range(tokens):
        for i in range(begin, end):
            score_NF[n, i] += bias_F[i]


def _scores(cfg: KernelConfig, w: Ints, x: Inputs, low: int, high: int, score_NF: Floats) -> None:
    _score_part()
    for part in prange((high - low + _NEURONS_AT_ONCE - 1) // _NEURONS_AT_ONCE):
        _score_part(cfg, w, x, low, high, part, score_NF)


_parallel_scores, _serial_scores = parallel(_scores), device(_scores)
