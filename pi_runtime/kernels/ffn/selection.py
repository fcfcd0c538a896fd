"""Which neurons of a layer have their row of `first` read: those that its predictor names.

    up_i · (down x) + bias_i > 0

Shape letters: F neurons in stored order; D model width, R predictor rank, T tokens, N of them that are asked for.
"""

import numpy as np
from numba import carray, prange

from pi_runtime.kernels.codegen.intrinsics import input_nbytes
from pi_runtime.kernels.codegen.jit import device, loop_body, parallel
from pi_runtime.kernels.data.matrix_view import (
    F32,
    Floats,
    Ints,
    RowList,
    Vectors,
    address_of,
    integers,
    matrix,
    pointer_of,
    vector,
)
from pi_runtime.kernels.data.quantised_input import prepare_input
from pi_runtime.kernels.data.weight_table import LayerRecord
from pi_runtime.kernels.ffn.memory import Batch, Ffn, weights_of
from pi_runtime.kernels.ops.row_products import row_products
from pi_runtime.kernels.ops.tile_packing import BY_TILES, lay_tiles, tile_vectors

_RANKS_AT_ONCE, _NEURONS_AT_ONCE = 16, 128
"""Rows of `down` and of `up` that a thread takes at once."""


@device
def selector_format(f: Ffn, w: LayerRecord) -> int:
    """Format of the matrix that a predictor multiplies the FFN's input with; f32 where there is none."""
    return f.predictor_format if w.picks != 0 else F32


@device
def name_neurons(f: Ffn, e: Batch, given: bool, threads: bool | None) -> int:
    """Score the neurons [low, high) for the tokens that select: above 0 is what the predictor names.

    Returns how many tokens select. `given`: their scores are there, in the order of these tokens.
    """
    tokens, asked, selects = e.token_N.shape[0], 0, weights_of(e).picks != 0
    scored_N, asking_N = scored_of(f, tokens), integers(f.asking_T, tokens)
    for n in range(tokens):
        asks = (selects or given) and e.select_N[n] != 0
        scored_N[n] = asked if asks else -1
        if asks:
            asking_N[asked] = e.token_N[n]
            asked += 1
    if asked > 0 and not given:
        score(f, e, asking_N[:asked], threads)
    return asked


@device
def scored_of(f: Ffn, tokens: int) -> Ints:
    """Which of the scores are a token's; −1 where it has none, and reads every neuron."""
    return integers(f.scored_T, tokens)


@device
def scores_of(f: Ffn, scored: int) -> Floats:
    """Scores of the layer's neurons: those of one token, by its number among the scored ones (−1: the first)."""
    return vector(f.scores + 4 * max(0, scored) * f.d_ff, f.d_ff)


@device
def score(f: Ffn, e: Batch, token_N: Ints, threads: bool | None) -> None:
    """Score the neurons [low, high) for some tokens, whose inputs are prepared."""
    w, tokens = weights_of(e), token_N.shape[0]
    r_NR = carray(pointer_of(f.low_rank), (tokens, w.rank), np.float32)
    if threads is None:
        _serial_reduce(f, e, token_N, r_NR)
    else:
        _parallel_reduce(f, e, token_N, r_NR)
    for n in range(tokens):
        prepare_input(f.predictor_format, r_NR[n], f.low_rank_inputs + n * input_nbytes(w.rank))
    if BY_TILES:
        lay_tiles(w.rank, tile_vectors(f.predictor_format, tokens), f.low_rank_inputs)
    if threads is None:
        _serial_scores(f, e, tokens)
    else:
        _parallel_scores(f, e, tokens)


@loop_body
def _reduce_part(f: Ffn, e: Batch, token_N: Ints, part: int, r_NR: Floats) -> None:
    w, first = weights_of(e), part * _RANKS_AT_ONCE
    down = matrix(f.predictor_format, w.predictor_down, w.predictor_down_scales, f.d_model)
    rows = RowList(first, 0, min(_RANKS_AT_ONCE, w.rank - first), w.rank - first)
    x = Vectors(f.inputs, input_nbytes(f.d_model), address_of(token_N), token_N.shape[0])
    row_products(down, rows, x, address_of(r_NR) + 4 * first, 4 * w.rank)


def _reduce(f: Ffn, e: Batch, token_N: Ints, r_NR: Floats) -> None:
    """r ← down x."""
    for part in prange((r_NR.shape[1] + _RANKS_AT_ONCE - 1) // _RANKS_AT_ONCE):
        _reduce_part(f, e, token_N, part, r_NR)


_parallel_reduce, _serial_reduce = parallel(_reduce_part)(_reduce), device(_reduce)


@loop_body
def _score_part(f: Ffn, e: Batch, tokens: int, part: int) -> None:
    w, begin = weights_of(e), e.low + part * _NEURONS_AT_ONCE
    end = min(e.high, begin + _NEURONS_AT_ONCE)
    up = matrix(f.predictor_format, w.predictor_up, w.predictor_up_scales, w.rank)
    x = Vectors(f.low_rank_inputs, input_nbytes(w.rank), 0, tokens)
    row_products(up, RowList(begin, 0, end - begin, e.high - begin), x, f.scores + 4 * begin, 4 * f.d_ff)
    bias_F = vector(w.predictor_bias, f.d_ff)
    for n in range(tokens):
        score_F = scores_of(f, n)
        for i in range(begin, end):
            score_F[i] += bias_F[i]


def _scores(f: Ffn, e: Batch, tokens: int) -> None:
    for part in prange((e.high - e.low + _NEURONS_AT_ONCE - 1) // _NEURONS_AT_ONCE):
        _score_part(f, e, tokens, part)


_parallel_scores, _serial_scores = parallel(_score_part)(_scores), device(_scores)
