"""The feed-forward network over a range of neurons: one token with skipping, or a block of tokens dense.

F neurons of the layer (with experts, of one expert) in stored order, of which [low, high) are computed here; D model
width; R predictor rank; C = `CHUNKS` partial sums. The row w of the weight table holds addresses (see the module
`table`).

A single token walks the ladder: candidates (all rows, or those selected) → `first` → keep what fires → `rest`. Every
list is cut into shares of equal length whose number is fixed, each is worked off in order, the gaps between the results
are closed in order, and the C partial sums are added in order: the bits do not depend on the number of threads.
While a row is read, one that comes later is fetched.

`threads` None means the calling thread alone: numba then compiles one of two branches, not both.
"""

import numpy as np
from numba import prange

from pi_runtime.artifact.footprint import CHUNKS, SHARES
from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.jit import body, inner, leaf, operator
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import Floats, Ints, Matrix, address_of, every, from_row, matrix, vector
from pi_runtime.kernels.data.quantised_input import prepare
from pi_runtime.kernels.data.weight_table import Shape
from pi_runtime.kernels.data.workspace import Buffers
from pi_runtime.kernels.ops.activations import activate, activate_all, drop_small, multiply, relu
from pi_runtime.kernels.ops.gathered_sum import FEW_ROWS, add_rows, rows_at_once
from pi_runtime.kernels.ops.linear import combine, linear
from pi_runtime.kernels.ops.neuron_selection import candidates, scores, selects
from pi_runtime.kernels.ops.row_dot import row_dot, rows_ahead


@inner
def limit_of(w: Ints) -> np.float32:
    """Magnitudes of the activation up to here count as 0 on the layer's rung."""
    return np.int32(w[weight_table.LIMIT]).view(np.float32)


@inner
def first_rows(s: Shape, w: Ints) -> Matrix:
    return matrix(s.ffn_format, w[weight_table.FIRST], w[weight_table.FIRST_SCALES], s.d_model)


@inner
def rest_rows(s: Shape, w: Ints) -> Matrix:
    """`rest` with its k rows a neuron one after the other."""
    return matrix(s.ffn_format, w[weight_table.REST], w[weight_table.REST_SCALES], s.d_model)


def _fire(
    first: Matrix, bias: int, activation: int, limit: np.float32, dense: bool, low: int, listed: bool, count: int,
    records: int, candidates_F: Ints, index_F: Ints, h_F: Floats, counts_B: Ints,
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
            h = activate(activation, limit, z)
            if dense or h != 0:
                index_F[begin + kept], h_F[begin + kept] = i, h
                kept += 1
        counts_B[share] = kept


@inner
def _close(count: int, counts_B: Ints, index_F: Ints, h_F: Floats) -> int:
    """Close the gaps between the shares of both lists; returns their length."""
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


@body
def _rest_chunk(
    begin: int, end: int, rows: Matrix, down: Matrix, k: int, bias: int, cut_off: bool, dense: bool, share: np.float32,
    more: bool, kept: int, records: int, index_F: Ints, h_F: Floats, y_P: Floats, scratch_X: Floats,
) -> None:  # fmt: skip
    at_once, start, last = rows_at_once(rows.fmt), begin, begin
    if not more:
        y_P[:] = np.float32(0)
    for n in range(begin, end):
        i, h = index_F[n], h_F[n] * share
        up = np.float32(1)
        if k == 2:
            up = row_dot(rows, 2 * i, 2 * index_F[min(n + FEW_ROWS, kept - 1)], records)
            if bias != 0:
                up += vector(bias, i + 1)[i]
        if cut_off:
            up = relu(up)
        if dense or not cut_off or up != 0:
            index_F[last], h_F[last] = i, h * up
            last += 1
        if last - start == at_once or (n == end - 1 and last > start):
            later_K = index_F[n + 1 : min(kept, n + 1 + at_once)]
            add_rows(down, index_F[start:last], h_F[start:last], later_K, y_P, address_of(scratch_X))
            start = last


def _rest(
    rows: Matrix, down: Matrix, k: int, bias: int, cut_off: bool, dense: bool, share: np.float32, more: bool,
    kept: int, records: int, index_F: Ints, h_F: Floats, sums_CP: Floats, scratch_CX: Floats,
) -> None:  # fmt: skip
    """C partial sums of share · Σ h_i (up_i · x) down_i (gated: k = 2) or Σ h_i fc2_i (plain: k = 1) over the kept
    neurons, added to what is there (`more`) or to 0.

    `rows` has k rows a neuron, `down` the last of each. With `cut_off` (drelu) up · x counts as 0 where it is below 0;
    such a neuron is left out before its row of `down` is read, unless all are to be (`dense`), and the others move up
    in their chunk of the lists.
    """
    _rest_chunk()
    few = (kept + FEW_ROWS - 1) // FEW_ROWS
    for c in prange(CHUNKS):
        begin, end = few * c // CHUNKS * FEW_ROWS, min(kept, few * (c + 1) // CHUNKS * FEW_ROWS)
        _rest_chunk(
            begin, end, rows, down, k, bias, cut_off, dense, share, more, kept, records, index_F, h_F, sums_CP[c],
            scratch_CX[c],
        )  # fmt: skip


@leaf
def add_sums(sums_CP: Floats, y_D: Floats) -> None:
    """y ← y + Σ_c sums_c, in order of c."""
    for c in range(sums_CP.shape[0]):
        for j in range(y_D.shape[0]):
            y_D[j] += sums_CP[c, j]


_scores = by_address(scores)
_threaded_fire, _threaded_rest = operator(_fire), operator(_rest)
_serial_fire, _serial_rest = inner(_fire), inner(_rest)


@inner
def _neurons(
    s: Shape,
    w: Ints,
    low: int,
    listed: bool,
    count: int,
    share: np.float32,
    more: bool,
    threads: bool | None,
    b: Buffers,
) -> int:
    """Partial sums of `count` neurons, those from `low` on or those in `b.candidates_F`; returns how many are kept."""
    records, bias, dense = address_of(b.records), w[weight_table.FIRST_BIAS], w[weight_table.RUNG] == weight_table.DENSE
    first, limit, lists = first_rows(s, w), limit_of(w), (b.candidates_F, b.index_F, b.h_F, b.counts_B)
    if threads is None:
        _serial_fire(first, bias, s.activation, limit, dense, low, listed, count, records, *lists)
    else:
        _threaded_fire(first, bias, s.activation, limit, dense, low, listed, count, records, *lists)
    kept = _close(count, b.counts_B, b.index_F, b.h_F)
    rest, k, bias, cut_off = rest_rows(s, w), s.rest_rows, w[weight_table.UP_BIAS], s.activation == weight_table.DRELU
    last, sums = every(rest, k, k - 1), (records, b.index_F, b.h_F, b.sums_CP, b.scratch_CX)
    if threads is None:
        _serial_rest(rest, last, k, bias, cut_off, dense, share, more, kept, *sums)
    else:
        _threaded_rest(rest, last, k, bias, cut_off, dense, share, more, kept, *sums)
    return kept


@inner
def _step(
    s: Shape, w: Ints, x_D: Floats, low: int, high: int, share: np.float32, more: bool, threads: bool | None, b: Buffers
) -> tuple[int, int]:
    predicted = w[weight_table.RUNG] == weight_table.PREDICTED
    prepare(max(s.ffn_format, s.predictor_format if predicted else 0), x_D, address_of(b.records))
    count, listed = high - low, selects(w)
    if listed:
        count = candidates(s, w, x_D, low, high, threads, b)
    return count, _neurons(s, w, low, listed, count, share, more, threads, b)


@leaf
def step(
    s: Shape, w: Ints, x_D: Floats, low: int, high: int, share: np.float32, more: bool, b: Buffers
) -> tuple[int, int]:
    """One token, on numba's threads: partial sums, times `share`, into `b.sums_CP`, or added to them (`more`).

    Returns (rows of `first` read, neurons kept).
    """
    return _step(s, w, x_D, low, high, share, more, True, b)


@leaf
def serial_step(
    s: Shape, w: Ints, x_D: Floats, low: int, high: int, share: np.float32, more: bool, b: Buffers
) -> tuple[int, int]:
    """`step` on the calling thread alone, for the side that stands in for an accelerator."""
    return _step(s, w, x_D, low, high, share, more, None, b)


@leaf
def block(
    s: Shape, w: Ints, x_TD: Floats, low: int, high: int, select: bool, b: Buffers, tally_3: Ints, y_TD: Floats
) -> None:
    """y ← y + the sum over [low, high) for T tokens. Computes every neuron; with `select`, drops those that the layer's
    rung leaves out, token by token, and adds to `tally_3`: neurons that fire, rows of `first` read, and neurons that
    fire and are kept."""
    tokens, rows, k, records = x_TD.shape[0], high - low, s.rest_rows, address_of(b.records)
    first, rest = from_row(first_rows(s, w), low), from_row(rest_rows(s, w), low * k)
    h_N, other_N = b.h_flat[: tokens * rows], b.other_flat[: tokens * rows]
    h_TF, other_TF = h_N.reshape(tokens, rows), other_N.reshape(tokens, rows)
    limit, fire = limit_of(w) if select else np.float32(s.threshold), 0
    linear(first, rows, _at(w[weight_table.FIRST_BIAS], low), x_TD, records, h_TF)
    activate_all(s.activation, np.float32(s.threshold), h_N)
    if k == 2:
        linear(every(rest, k, 0), rows, _at(w[weight_table.UP_BIAS], low), x_TD, records, other_TF)
        fire = multiply(s.activation == weight_table.DRELU, limit, h_N, other_N)
    elif select:
        fire = drop_small(limit, h_N)
    if select:
        if selects(w):
            _scores(s, w, x_TD, low, b, other_TF)
        else:
            other_N[:] = np.float32(1)
        tally_3[0] += fire
        _drop(h_N, other_N, tally_3)
    combine(every(rest, k, k - 1), h_TF, y_TD)


@inner
def _drop(h_N: Floats, score_N: Floats, tally_3: Ints) -> None:
    """h ← 0 where the score is not above 0; counts those that are read, and those that fire among them."""
    read, both = 0, 0
    for n in range(h_N.shape[0]):
        if score_N[n] > 0:
            read += 1
            both += h_N[n] != 0
        else:
            h_N[n] = np.float32(0)
    tally_3[1] += read
    tally_3[2] += both


@inner
def _at(vector_address: int, low: int) -> int:
    """Address of element `low` of an f32 vector; 0 stays 0 (absent)."""
    return vector_address + low * 4 if vector_address != 0 else vector_address
