"""The feed-forward network over a range of neurons: one token with skipping, or a block of tokens dense.

F neurons of the layer in stored order, of which [low, high) are computed here; D model width; R predictor rank;
C = `CHUNKS` partial sums. The row w of a layer's weight table holds addresses (see the module `table`).

A single token walks the ladder: candidates (all rows, or those predicted) → `first` → keep what fires → `rest`. Every
list is cut into shares of equal length whose number is fixed, each is worked off in order, the gaps between the results
are closed in order, and the C partial sums are added in order: the bits do not depend on the number of threads.
While a row is read, one that comes later is fetched.
"""

import numpy as np
from numba import prange

from pi_runtime.artifact.footprint import CHUNKS, SHARES
from pi_runtime.kernels import table
from pi_runtime.kernels.buffers import Buffers
from pi_runtime.kernels.compiling import leaf, operator
from pi_runtime.kernels.linear import combine, linear
from pi_runtime.kernels.memory import Floats, Ints, Matrix, every, from_row, matrix, vector
from pi_runtime.kernels.operand import prepare
from pi_runtime.kernels.rows import row_dot, rows_ahead
from pi_runtime.kernels.table import Shape
from pi_runtime.kernels.weighted import FEW_ROWS, add_rows, rows_at_once


@leaf
def activate(activation: int, x: np.float32) -> np.float32:
    if activation == table.RELU:
        return x if x > 0 else np.float32(0)
    return x / (np.float32(1) + np.exp(-x))


@leaf
def _first_rows(s: Shape, w: Ints) -> Matrix:
    return matrix(s.ffn_format, w[table.FIRST], w[table.FIRST_SCALES], s.d_model)


@leaf
def _rest_rows(s: Shape, w: Ints) -> Matrix:
    """`rest` with its k rows a neuron one after the other."""
    return matrix(s.ffn_format, w[table.REST], w[table.REST_SCALES], s.d_model)


@leaf
def _predictor_rows(s: Shape, w: Ints) -> tuple[Matrix, Matrix]:
    """down [R, D] and up [F, R]."""
    down = matrix(s.predictor_format, w[table.PREDICTOR_DOWN], w[table.PREDICTOR_DOWN_SCALES], s.d_model)
    return down, matrix(s.predictor_format, w[table.PREDICTOR_UP], w[table.PREDICTOR_UP_SCALES], w[table.RANK])


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


def _fire(
    first: Matrix, bias: int, activation: int, dense: bool, low: int, listed: bool, count: int, records: int,
    candidates_F: Ints, index_F: Ints, h_F: Floats, counts_B: Ints,
) -> None:  # fmt: skip
    """`first` of the candidates (`listed`, else all from `low` on), and what fires: `index_F`, `h_F` share by share."""
    ahead = rows_ahead(first)
    for share in prange(SHARES):
        begin, kept = count * share // SHARES, 0
        for k in range(begin, count * (share + 1) // SHARES):
            i, later = low + k, low + k + ahead
            if listed:
                i, later = candidates_F[k], candidates_F[min(k + ahead, count - 1)]
            z = row_dot(first, i, later, records)
            if bias != 0:
                z += vector(bias, i + 1)[i]
            h = activate(activation, z)
            if dense or h != 0:
                index_F[begin + kept], h_F[begin + kept] = i, h
                kept += 1
        counts_B[share] = kept


@leaf
def _close(count: int, counts_B: Ints, index_F: Ints) -> int:
    """Close the gaps between the shares of a list; returns its length."""
    kept = 0
    for share in range(SHARES):
        begin = count * share // SHARES
        for k in range(counts_B[share]):
            index_F[kept] = index_F[begin + k]
            kept += 1
    return kept


@leaf
def _close_both(count: int, counts_B: Ints, index_F: Ints, h_F: Floats) -> int:
    kept = 0
    for share in range(SHARES):
        begin = count * share // SHARES
        if begin == kept:  # no gap so far
            kept += counts_B[share]
            continue
        for k in range(counts_B[share]):
            index_F[kept], h_F[kept] = index_F[begin + k], h_F[begin + k]
            kept += 1
    return kept


def _rest(
    rows: Matrix, down: Matrix, k: int, bias: int, kept: int, records: int, index_F: Ints, h_F: Floats,
    sums_CP: Floats, scratch_CX: Floats,
) -> None:  # fmt: skip
    """C partial sums Σ h_i (up_i · x) down_i (gated: k = 2) or Σ h_i fc2_i (plain: k = 1) over the kept neurons.

    `rows` has k rows a neuron, `down` the last of each.
    """
    at_once, few = rows_at_once(rows.fmt), (kept + FEW_ROWS - 1) // FEW_ROWS
    for c in prange(CHUNKS):
        y_P = sums_CP[c]
        y_P[:] = np.float32(0)
        begin, end = few * c // CHUNKS * FEW_ROWS, min(kept, few * (c + 1) // CHUNKS * FEW_ROWS)
        for start in range(begin, end, at_once):
            last = min(end, start + at_once)
            for n in range(start, last):
                if k == 2:
                    up = row_dot(rows, 2 * index_F[n], 2 * index_F[min(n + FEW_ROWS, kept - 1)], records)
                    if bias != 0:
                        up += vector(bias, index_F[n] + 1)[index_F[n]]
                    h_F[n] *= up
            later_K = index_F[last : min(kept, last + at_once)]
            add_rows(down, index_F[start:last], h_F[start:last], later_K, y_P, scratch_CX[c].ctypes.data)


@leaf
def add_sums(sums_CP: Floats, y_D: Floats) -> None:
    """y ← y + Σ_c sums_c, in order of c."""
    for c in range(sums_CP.shape[0]):
        for j in range(y_D.shape[0]):
            y_D[j] += sums_CP[c, j]


_threaded_predict, _threaded_fire, _threaded_rest = operator(_predict), operator(_fire), operator(_rest)
_serial_predict, _serial_fire, _serial_rest = leaf(_predict), leaf(_fire), leaf(_rest)


@leaf
def _step(s: Shape, w: Ints, x_D: Floats, low: int, high: int, threaded: bool, b: Buffers) -> tuple[int, int]:
    records, count, listed = b.records.ctypes.data, high - low, w[table.RUNG] == table.PREDICTED
    prepare(max(s.ffn_format, s.predictor_format if listed else 0), x_D, records)
    if listed:
        down, up = _predictor_rows(s, w)
        places = records, b.r_TR[: w[table.RANK]], b.r_records.ctypes.data, b.candidates_F, b.counts_B
        if threaded:
            _threaded_predict(down, up, w[table.PREDICTOR_BIAS], low, high, *places)
        else:
            _serial_predict(down, up, w[table.PREDICTOR_BIAS], low, high, *places)
        count = _close(count, b.counts_B, b.candidates_F)
    first, bias, dense = _first_rows(s, w), w[table.FIRST_BIAS], w[table.RUNG] == table.DENSE
    lists = records, b.candidates_F, b.index_F, b.h_F, b.counts_B
    if threaded:
        _threaded_fire(first, bias, s.activation, dense, low, listed, count, *lists)
    else:
        _serial_fire(first, bias, s.activation, dense, low, listed, count, *lists)
    kept = _close_both(count, b.counts_B, b.index_F, b.h_F)
    rest, k = _rest_rows(s, w), s.rest_rows
    last, sums = every(rest, k, k - 1), (records, b.index_F, b.h_F, b.sums_CP, b.scratch_CX)
    if threaded:
        _threaded_rest(rest, last, k, w[table.UP_BIAS], kept, *sums)
    else:
        _serial_rest(rest, last, k, w[table.UP_BIAS], kept, *sums)
    return count, kept


@leaf
def step(s: Shape, w: Ints, x_D: Floats, low: int, high: int, b: Buffers) -> tuple[int, int]:
    """One token, on numba's threads: partial sums into `b.sums_CP`; returns (rows of `first` read, neurons kept)."""
    return _step(s, w, x_D, low, high, True, b)


@leaf
def serial_step(s: Shape, w: Ints, x_D: Floats, low: int, high: int, b: Buffers) -> tuple[int, int]:
    """`step` on the calling thread alone, for the side that stands in for an accelerator."""
    return _step(s, w, x_D, low, high, False, b)


@leaf
def block(
    s: Shape, w: Ints, x_TD: Floats, low: int, high: int, select: bool, b: Buffers, tally_3: Ints, y_TD: Floats
) -> None:
    """y ← y + the sum over [low, high) for T tokens. Computes every neuron; with `select`, a layer on the predicted
    rung then drops those that were not predicted, token by token. `tally_3`: neurons that fire, are read, and both."""
    tokens, rows, k, records = x_TD.shape[0], high - low, s.rest_rows, b.records.ctypes.data
    first, rest = from_row(_first_rows(s, w), low), from_row(_rest_rows(s, w), low * k)
    h_TF = b.h_TF[: tokens * rows].reshape(tokens, rows)
    other_TF = b.other_TF[: tokens * rows].reshape(tokens, rows)
    linear(first, rows, _at(w[table.FIRST_BIAS], low), x_TD, records, h_TF)
    for t in range(tokens):
        for i in range(rows):
            h_TF[t, i] = activate(s.activation, h_TF[t, i])
    if k == 2:
        linear(every(rest, k, 0), rows, _at(w[table.UP_BIAS], low), x_TD, records, other_TF)
        h_TF *= other_TF
    if select and w[table.RUNG] == table.PREDICTED:
        rank = w[table.RANK]
        r_TR = b.r_TR[: tokens * rank].reshape(tokens, rank)
        down, up = _predictor_rows(s, w)
        linear(down, rank, 0, x_TD, records, r_TR)
        linear(from_row(up, low), rows, _at(w[table.PREDICTOR_BIAS], low), r_TR, b.r_records.ctypes.data, other_TF)
    else:
        other_TF[:] = np.float32(1)
    if select:
        _drop(h_TF, other_TF, tally_3)
    combine(every(rest, k, k - 1), h_TF, y_TD)


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
