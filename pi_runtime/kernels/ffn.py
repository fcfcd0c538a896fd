"""The feed-forward network over a range of neurons: one token with skipping, or a block of tokens dense.

F neurons of the layer in stored order, of which [low, high) are computed here; D model width; R predictor rank;
C = `CHUNKS` partial sums. The row w of a layer's weight table holds addresses (see the module `table`).

A single token walks the ladder: candidates (all rows, or those predicted) → `first` → keep what fires → `rest`. The
rows are cut into blocks and the kept ones into C chunks, both fixed, and the C partial sums are added in order: the
bits do not depend on the number of threads.
"""

import numpy as np
from numba import prange

from pi_runtime.kernels import table
from pi_runtime.kernels.buffers import CHUNKS, GROUP, Buffers
from pi_runtime.kernels.compiling import leaf, operator
from pi_runtime.kernels.linear import combine, linear
from pi_runtime.kernels.memory import Floats, Ints, row_add, row_dot, row_stride, vector
from pi_runtime.kernels.table import Shape


@leaf
def activate(activation: int, x: np.float32) -> np.float32:
    if activation == table.RELU:
        return x if x > 0 else np.float32(0)
    return x / (np.float32(1) + np.exp(-x))


def _select(
    s: Shape, w: Ints, x_D: Floats, low: int, high: int, r_R: Floats, index_F: Ints, h_F: Floats, counts_B2: Ints
) -> None:
    """Candidates of each block of neurons, `first`, and what fires: `index_F`, `h_F` filled block by block.

    `counts_B2[b]` = (rows of `first` read, neurons kept) of block b.
    """
    blocks = (high - low + GROUP - 1) // GROUP
    first, stride = w[table.FIRST], row_stride(s.ffn_format, x_D.shape[0])
    rung, rank = w[table.RUNG], w[table.RANK]
    if rung == table.PREDICTED:
        down_stride = row_stride(s.predictor_format, x_D.shape[0])
        for k in prange(rank):
            r_R[k] = row_dot(s.predictor_format, w[table.PREDICTOR_DOWN] + k * down_stride, x_D)
    up_stride = row_stride(s.predictor_format, rank)
    for b in prange(blocks):
        begin = low + b * GROUP
        read, kept = 0, 0
        for i in range(begin, min(high, begin + GROUP)):
            if rung == table.PREDICTED:
                score = row_dot(s.predictor_format, w[table.PREDICTOR_UP] + i * up_stride, r_R[:rank])
                if score + vector(w[table.PREDICTOR_BIAS], i + 1)[i] <= 0:
                    continue
            read += 1
            z = row_dot(s.ffn_format, first + i * stride, x_D)
            if w[table.FIRST_BIAS] != 0:
                z += vector(w[table.FIRST_BIAS], i + 1)[i]
            h = activate(s.activation, z)
            if rung == table.DENSE or h != 0:
                index_F[begin - low + kept], h_F[begin - low + kept] = i, h
                kept += 1
        counts_B2[b, 0], counts_B2[b, 1] = read, kept


@leaf
def _compact(low: int, high: int, index_F: Ints, h_F: Floats, counts_B2: Ints) -> tuple[int, int]:
    """Close the gaps between the blocks; returns (rows of `first` read, neurons kept)."""
    read, kept = 0, 0
    for b in range((high - low + GROUP - 1) // GROUP):
        read += counts_B2[b, 0]
        for k in range(counts_B2[b, 1]):
            index_F[kept], h_F[kept] = index_F[b * GROUP + k], h_F[b * GROUP + k]
            kept += 1
    return read, kept


def _rest(s: Shape, w: Ints, x_D: Floats, kept: int, index_F: Ints, h_F: Floats, sums_CD: Floats) -> None:
    """C partial sums Σ h_i (up_i · x) down_i (gated) or Σ h_i fc2_i (plain) over the kept neurons."""
    stride = row_stride(s.ffn_format, x_D.shape[0])
    for c in prange(CHUNKS):
        y_D = sums_CD[c]
        y_D[:] = np.float32(0)
        for k in range(kept * c // CHUNKS, kept * (c + 1) // CHUNKS):
            i, h = index_F[k], h_F[k]
            rest = w[table.REST] + i * s.rest_rows * stride
            if s.rest_rows == 2:
                up = row_dot(s.ffn_format, rest, x_D)
                if w[table.UP_BIAS] != 0:
                    up += vector(w[table.UP_BIAS], i + 1)[i]
                h *= up
                rest += stride
            row_add(s.ffn_format, rest, h, y_D)


@leaf
def add_sums(sums_CD: Floats, y_D: Floats) -> None:
    """y ← y + Σ_c sums_c, in order of c."""
    for c in range(sums_CD.shape[0]):
        for j in range(y_D.shape[0]):
            y_D[j] += sums_CD[c, j]


_threaded_select, _threaded_rest = operator(_select), operator(_rest)
_serial_select, _serial_rest = leaf(_select), leaf(_rest)


@leaf
def step(s: Shape, w: Ints, x_D: Floats, low: int, high: int, b: Buffers) -> tuple[int, int]:
    """One token, on numba's threads: partial sums into `b.sums_CD`; returns (rows of `first` read, neurons kept)."""
    _threaded_select(s, w, x_D, low, high, b.r_R, b.index_F, b.h_F, b.counts_B2)
    read, kept = _compact(low, high, b.index_F, b.h_F, b.counts_B2)
    _threaded_rest(s, w, x_D, kept, b.index_F, b.h_F, b.sums_CD)
    return read, kept


@leaf
def serial_step(s: Shape, w: Ints, x_D: Floats, low: int, high: int, b: Buffers) -> tuple[int, int]:
    """`step` on the calling thread alone, for the side that stands in for an accelerator."""
    _serial_select(s, w, x_D, low, high, b.r_R, b.index_F, b.h_F, b.counts_B2)
    read, kept = _compact(low, high, b.index_F, b.h_F, b.counts_B2)
    _serial_rest(s, w, x_D, kept, b.index_F, b.h_F, b.sums_CD)
    return read, kept


@leaf
def block(
    s: Shape, w: Ints, x_TD: Floats, low: int, high: int, select: bool, b: Buffers, tally_3: Ints, y_TD: Floats
) -> None:
    """y ← y + the sum over [low, high) for T tokens. Computes every neuron; with `select`, a layer on the predicted
    rung then drops those that were not predicted, token by token. `tally_3`: neurons that fire, are read, and both."""
    tokens, width = x_TD.shape
    stride, rows = row_stride(s.ffn_format, width), high - low
    rest_stride = s.rest_rows * stride
    rest = w[table.REST] + low * rest_stride
    h_TF = b.h_TF[: tokens * rows].reshape(tokens, rows)
    other_TF = b.other_TF[: tokens * rows].reshape(tokens, rows)
    linear(s.ffn_format, w[table.FIRST] + low * stride, stride, rows, _at(w[table.FIRST_BIAS], low), x_TD, h_TF)
    for t in range(tokens):
        for i in range(rows):
            h_TF[t, i] = activate(s.activation, h_TF[t, i])
    if s.rest_rows == 2:
        linear(s.ffn_format, rest, rest_stride, rows, _at(w[table.UP_BIAS], low), x_TD, other_TF)
        h_TF *= other_TF
        rest += stride
    if select and w[table.RUNG] == table.PREDICTED:
        rank = w[table.RANK]
        r_TR = b.r_TR[: tokens * rank].reshape(tokens, rank)
        up = w[table.PREDICTOR_UP] + low * row_stride(s.predictor_format, rank)
        down_stride, up_stride = row_stride(s.predictor_format, width), row_stride(s.predictor_format, rank)
        linear(s.predictor_format, w[table.PREDICTOR_DOWN], down_stride, rank, 0, x_TD, r_TR)
        linear(s.predictor_format, up, up_stride, rows, _at(w[table.PREDICTOR_BIAS], low), r_TR, other_TF)
    else:
        other_TF[:] = np.float32(1)
    if select:
        _drop(h_TF, other_TF, tally_3)
    combine(s.ffn_format, rest, rest_stride, width, h_TF, y_TD)


@leaf
def _drop(h_TF: Floats, score_TF: Floats, tally_3: Ints) -> None:
    """h ← 0 where the score is not above 0; counts neurons that fire, that are read, and both."""
    fire, read, both = 0, 0, 0
    for t in range(h_TF.shape[0]):
        for i in range(h_TF.shape[1]):
            if h_TF[t, i] != 0:
                fire += 1
            if score_TF[t, i] > 0:
                read += 1
                if h_TF[t, i] != 0:
                    both += 1
            else:
                h_TF[t, i] = np.float32(0)
    tally_3[0], tally_3[1], tally_3[2] = fire, read, both


@leaf
def _at(vector_address: int, low: int) -> int:
    """Address of element `low` of an f32 vector; 0 stays 0 (absent)."""
    return vector_address + low * 4 if vector_address != 0 else vector_address
