"""The feed-forward network over a range of neurons: one token with skipping, or a block of tokens dense.

Shape letters: F neurons of the layer (with experts, of one expert) in stored order, of which [low, high) are computed
here; D model width; R predictor rank; T tokens; S = `SEGMENTS`; C = `CHUNKS` partial sums of P = D padded columns each.
A layer's row w of the weight table holds addresses (see `weight_table`).

A single token goes through four steps: candidates (all rows, or those that a selector names) → `first` → keep what
fires → `rest`. Every list is split into a fixed number of segments, each is processed in order, and the results are
compacted in order; the C partial sums are added in order. So the bits do not depend on the number of threads. While a
row is read, a later one is prefetched.

`threads` is None for the calling thread alone: numba then compiles one of two branches, not both.
"""

import numpy as np
from numba import prange

from pi_runtime.artifact.footprint import CHUNKS, SEGMENTS
from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.jit import device, loop_body, parallel, public
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import (
    Floats,
    Ints,
    MatrixView,
    address_of,
    is_quantised,
    matrix,
    rows_from,
    strided_rows,
    vector,
)
from pi_runtime.kernels.data.quantised_input import prepare_input
from pi_runtime.kernels.data.weight_table import KernelConfig
from pi_runtime.kernels.data.workspace import Workspace
from pi_runtime.kernels.ops.activations import activate, activate_all, drop_small, multiply_up, relu
from pi_runtime.kernels.ops.gathered_sum import FLOAT_ROWS, add_gathered, rows_at_once
from pi_runtime.kernels.ops.linear import add_matmul, linear
from pi_runtime.kernels.ops.neuron_selection import list_candidates, scores, selector_format, selects
from pi_runtime.kernels.ops.row_dot import row_dot, rows_ahead


@device
def limit_of(w: Ints) -> np.float32:
    """Limit of the layer's rung: magnitudes of the activation up to here count as 0."""
    return np.int32(w[weight_table.LIMIT]).view(np.float32)


@device
def first_matrix(cfg: KernelConfig, w: Ints) -> MatrixView:
    """The matrix `first`, a row for each neuron."""
    return matrix(cfg.ffn_format, w[weight_table.FIRST], w[weight_table.FIRST_SCALES], cfg.d_model)


@device
def rest_matrix(cfg: KernelConfig, w: Ints) -> MatrixView:
    """The matrix `rest`, with `rows_per_neuron` consecutive rows for each neuron."""
    return matrix(cfg.ffn_format, w[weight_table.REST], w[weight_table.REST_SCALES], cfg.d_model)


def _fire(
    first: MatrixView, bias: int, activation: int, limit: np.float32, dense: bool, low: int, selected: bool, count: int,
    input_at: int, candidates_F: Ints, kept_F: Ints, h_F: Floats, counts_S: Ints,
) -> None:  # fmt: skip
    """Compute `first` of the candidates (`selected`), or of `count` neurons from `low` on.

    Which neurons fire, and how strongly, goes into `kept_F` and `h_F` segment by segment; `counts_S` says how many.
    """
    ahead = rows_ahead(first)
    for segment in prange(SEGMENTS):
        begin, kept = count * segment // SEGMENTS, 0
        for k in range(begin, count * (segment + 1) // SEGMENTS):
            i, later = low + k, low + k + ahead
            if selected:
                i, later = candidates_F[k], candidates_F[min(k + ahead, count - 1)]
            z = row_dot(first, i, later, input_at)
            if bias != 0:
                z += vector(bias, i + 1)[i]
            h = activate(activation, limit, z)
            if dense or h != 0:
                kept_F[begin + kept], h_F[begin + kept] = i, h
                kept += 1
        counts_S[segment] = kept


@device
def compact_kept(count: int, counts_S: Ints, kept_F: Ints, h_F: Floats) -> int:
    """Move what the segments of both lists hold together, in order (stream compaction); returns their length."""
    kept = 0
    for segment in range(SEGMENTS):
        begin = count * segment // SEGMENTS
        if begin == kept:  # no gap so far
            kept += counts_S[segment]
            continue
        for k in range(counts_S[segment]):
            kept_F[kept], h_F[kept] = kept_F[begin + k], h_F[begin + k]
            kept += 1
    return kept


@loop_body
def _rest_chunk(
    begin: int, end: int, rows: MatrixView, down: MatrixView, rows_per_neuron: int, bias: int, relu_up: bool,
    dense: bool, route_weight: np.float32, accumulate: bool, kept: int, input_at: int, kept_F: Ints, h_F: Floats,
    y_P: Floats, gather_X: Floats,
) -> None:  # fmt: skip
    at_once, start, last = rows_at_once(rows.fmt), begin, begin
    if not accumulate:
        y_P[:] = np.float32(0)
    for n in range(begin, end):
        i, h = kept_F[n], h_F[n] * route_weight
        up = np.float32(1)
        if rows_per_neuron == 2:
            up = row_dot(rows, 2 * i, 2 * kept_F[min(n + FLOAT_ROWS, kept - 1)], input_at)
            if bias != 0:
                up += vector(bias, i + 1)[i]
        if relu_up:
            up = relu(up)
        if dense or not relu_up or up != 0:
            kept_F[last], h_F[last] = i, h * up
            last += 1
        if last - start == at_once or (n == end - 1 and last > start):
            prefetch_K = kept_F[n + 1 : min(kept, n + 1 + at_once)]
            add_gathered(down, kept_F[start:last], h_F[start:last], prefetch_K, y_P, address_of(gather_X))
            start = last


def _rest(
    rows: MatrixView, down: MatrixView, rows_per_neuron: int, bias: int, relu_up: bool, dense: bool,
    route_weight: np.float32, accumulate: bool, kept: int, input_at: int, kept_F: Ints, h_F: Floats,
    sums_CP: Floats, gather_CX: Floats,
) -> None:  # fmt: skip
    """sums ← C partial sums over the kept neurons, or what is there plus these (`accumulate`).

    A gated neuron gives route_weight · h_i (up_i · x) down_i, a plain one route_weight · h_i fc2_i. `rows` has
    `rows_per_neuron` rows a neuron, `down` the last of each. With `relu_up` (drelu) a negative up · x counts as 0. Such
    a neuron is dropped before its row of `down` is read, unless `dense`; the others move up in their chunk.
    """
    _rest_chunk()
    few = (kept + FLOAT_ROWS - 1) // FLOAT_ROWS
    for c in prange(CHUNKS):
        begin, end = few * c // CHUNKS * FLOAT_ROWS, min(kept, few * (c + 1) // CHUNKS * FLOAT_ROWS)
        _rest_chunk(
            begin, end, rows, down, rows_per_neuron, bias, relu_up, dense, route_weight, accumulate, kept, input_at,
            kept_F, h_F, sums_CP[c], gather_CX[c],
        )  # fmt: skip


@public
def add_sums(sums_CP: Floats, y_D: Floats) -> None:
    """y ← y + Σ_c sums_c, in order of c."""
    for c in range(sums_CP.shape[0]):
        for j in range(y_D.shape[0]):
            y_D[j] += sums_CP[c, j]


_scores = by_address(scores)
parallel_fire, parallel_rest = parallel(_fire), parallel(_rest)
_serial_fire, _serial_rest = device(_fire), device(_rest)


@device
def _neurons(
    cfg: KernelConfig,
    w: Ints,
    low: int,
    selected: bool,
    count: int,
    route_weight: np.float32,
    accumulate: bool,
    threads: bool | None,
    ws: Workspace,
) -> int:
    """Partial sums of `count` neurons, from `low` on or the candidates (`selected`); returns how many are kept."""
    input_at, bias, dense = address_of(ws.inputs), w[weight_table.FIRST_BIAS], w[weight_table.DENSE] != 0
    first, limit, lists = first_matrix(cfg, w), limit_of(w), (ws.candidates_F, ws.kept_F, ws.h_F, ws.counts_S)
    if threads is None:
        _serial_fire(first, bias, cfg.activation, limit, dense, low, selected, count, input_at, *lists)
    else:
        parallel_fire(first, bias, cfg.activation, limit, dense, low, selected, count, input_at, *lists)
    kept = compact_kept(count, ws.counts_S, ws.kept_F, ws.h_F)
    rest, each, relu_up = rest_matrix(cfg, w), cfg.rows_per_neuron, cfg.activation == weight_table.DRELU
    down, bias = strided_rows(rest, each, each - 1), w[weight_table.UP_BIAS]
    sums = input_at, ws.kept_F, ws.h_F, ws.sums_CP, ws.gather_CX
    if threads is None:
        _serial_rest(rest, down, each, bias, relu_up, dense, route_weight, accumulate, kept, *sums)
    else:
        parallel_rest(rest, down, each, bias, relu_up, dense, route_weight, accumulate, kept, *sums)
    return kept


@device
def _step(
    cfg: KernelConfig,
    w: Ints,
    x_D: Floats,
    low: int,
    high: int,
    route_weight: np.float32,
    accumulate: bool,
    threads: bool | None,
    ws: Workspace,
) -> tuple[int, int]:
    fmt = cfg.ffn_format if is_quantised(cfg.ffn_format) else selector_format(cfg, w)
    prepare_input(fmt, x_D, address_of(ws.inputs))
    count, selected = high - low, selects(w)
    if selected:
        count = list_candidates(cfg, w, x_D, low, high, threads, ws)
    return count, _neurons(cfg, w, low, selected, count, route_weight, accumulate, threads, ws)


@public
def step(
    cfg: KernelConfig,
    w: Ints,
    x_D: Floats,
    low: int,
    high: int,
    route_weight: np.float32,
    accumulate: bool,
    ws: Workspace,
) -> tuple[int, int]:
    """One token, on numba's threads: `ws.sums_CP` ← partial sums times `route_weight`, or what is there plus these
    (`accumulate`).

    Returns (rows of `first` read, neurons kept).
    """
    return _step(cfg, w, x_D, low, high, route_weight, accumulate, True, ws)


@public
def serial_step(
    cfg: KernelConfig,
    w: Ints,
    x_D: Floats,
    low: int,
    high: int,
    route_weight: np.float32,
    accumulate: bool,
    ws: Workspace,
) -> tuple[int, int]:
    """`step` on the calling thread alone, for the thread that stands in for a GPU."""
    return _step(cfg, w, x_D, low, high, route_weight, accumulate, None, ws)


@public
def block(
    cfg: KernelConfig,
    w: Ints,
    x_TD: Floats,
    low: int,
    high: int,
    select: bool,
    ws: Workspace,
    tally_3: Ints,
    y_TD: Floats,
) -> None:
    """y ← y + the sum over the neurons [low, high), for T tokens. Computes every neuron.

    With `select`, drops those that the layer's rung leaves out, token by token, and adds to `tally_3`: neurons that
    fire, rows of `first` that the rung reads, and neurons that fire and are kept.
    """
    tokens, rows, each, inputs_at = x_TD.shape[0], high - low, cfg.rows_per_neuron, address_of(ws.inputs)
    first, rest = rows_from(first_matrix(cfg, w), low), rows_from(rest_matrix(cfg, w), low * each)
    h_N, up_N = ws.h_flat[: tokens * rows], ws.up_flat[: tokens * rows]
    h_TF, up_TF = h_N.reshape(tokens, rows), up_N.reshape(tokens, rows)
    limit, fire = limit_of(w) if select else np.float32(cfg.threshold), 0
    linear(first, rows, _element_address(w[weight_table.FIRST_BIAS], low), x_TD, inputs_at, h_TF)
    activate_all(cfg.activation, np.float32(cfg.threshold), h_N)
    if each == 2:
        up_bias = _element_address(w[weight_table.UP_BIAS], low)
        linear(strided_rows(rest, each, 0), rows, up_bias, x_TD, inputs_at, up_TF)
        fire = multiply_up(cfg.activation == weight_table.DRELU, limit, h_N, up_N)
    elif select:
        fire = drop_small(limit, h_N)
    if select:
        score_N, score_TF = up_N, up_TF  # up is no longer needed
        if selects(w):
            _scores(cfg, w, x_TD, low, ws, score_TF)
        else:
            score_N[:] = np.float32(1)
        tally_3[0] += fire
        _drop(h_N, score_N, tally_3)
    add_matmul(strided_rows(rest, each, each - 1), h_TF, y_TD)


@device
def _drop(h_N: Floats, score_N: Floats, tally_3: Ints) -> None:
    """h ← 0 where the score is not above 0; counts the neurons read, and those of them that fire."""
    read, both = 0, 0
    for n in range(h_N.shape[0]):
        if score_N[n] > 0:
            read += 1
            both += h_N[n] != 0
        else:
            h_N[n] = np.float32(0)
    tally_3[1] += read
    tally_3[2] += both


@device
def _element_address(vector_address: int, low: int) -> int:
    """Address of element `low` of a float32 vector; 0 stays 0 (absent)."""
    return vector_address + low * 4 if vector_address != 0 else vector_address
