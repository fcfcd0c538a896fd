"""The feed-forward network over a range of neurons, for one token or many, dense or with what a rung skips.

    y_t ← y_t + route_weight_t Σ_i a(first_i · x_t) [up_i · x_t] down_i          i in the neurons that t's rung keeps

Neurons are dealt to `CHUNKS` chunks in groups of `GROUP`: neuron i belongs to chunk (i / GROUP) mod CHUNKS. A chunk
goes through its neurons in order: candidates (all, or those that a selector names for some token) → `first` → keep
what fires for some token → `up` → keep again → one factor for each neuron and token, 0 where the token skips it. Then
each chunk's rows of `down` are summed in order, and the sums of the chunks are added in order. So the bits of a token
depend neither on the number of threads nor on the tokens beside it.

Shape letters: F neurons of the layer (with experts, of one expert) in stored order, of which [low, high) are computed;
D model width, T tokens, N of them that are computed here, K places for the neurons of a chunk, P sums, C chunks. A
layer's row w of the weight table holds addresses (see `weight_table`).

`threads` is None for the calling thread alone: numba then compiles one of two branches, not both.
"""

from typing import NamedTuple

import numpy as np
from numba import carray, prange

from pi_runtime.artifact.footprint import CHUNKS, FEW_TOKENS, GROUP, SUM_ROWS
from pi_runtime.kernels.codegen.jit import device, loop_body, parallel, public
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import (
    Floats,
    Ints,
    MatrixView,
    address_of,
    columns_from,
    is_quantised,
    matrix,
    pointer_of,
    strided_rows,
    vector,
)
from pi_runtime.kernels.data.quantised_input import input_stride, padded_columns
from pi_runtime.kernels.data.weight_table import DRELU, KernelConfig
from pi_runtime.kernels.data.workspace import Workspace
from pi_runtime.kernels.ops.activations import activate, relu
from pi_runtime.kernels.ops.linear import prepare_inputs
from pi_runtime.kernels.ops.neuron_selection import (
    Inputs,
    inputs_of,
    prepare_selection,
    score_neurons,
    selector_format,
    selects,
)
from pi_runtime.kernels.ops.row_products import row_products
from pi_runtime.kernels.ops.row_sums import row_sums

REST_NEURONS = 8
"""Neurons of a chunk whose `up` and `down` are read in turn; a multiple of `SUM_ROWS`."""
SLICES = 16
"""Parts of the columns that threads merge the chunks' sums in."""
STRIP, STRIP_TOKENS = 512, 16
"""Columns and tokens of one task where there are many tokens: so its sums stay in the first-level cache."""
FIRES, READ, KEPT = range(3)
"""What is counted for each token: neurons that fire (of all, if asked for), rows of `first` read, neurons kept."""


class Chunks(NamedTuple):
    """Addresses of what the chunks work with, and its sizes; see `Workspace`."""

    neurons: int
    tokens: int
    """Room for so many tokens."""
    candidates_F: int
    list_CK: int
    count_C: int
    h_CTK: int
    up_CTK: int
    named_CTK: int
    tally_CT3: int
    sums_CTP: int
    sum_columns_P: int


@public
def chunks_of(cfg: KernelConfig, ws: Workspace) -> Chunks:
    """The chunks' memory in a workspace, valid as long as that is."""
    return Chunks(
        cfg.d_ff,
        ws.x_TD.shape[0],
        address_of(ws.candidates_F),
        address_of(ws.list_CK),
        address_of(ws.count_C),
        address_of(ws.h_CTK),
        address_of(ws.up_CTK),
        address_of(ws.named_CTK),
        address_of(ws.tally_CT3),
        address_of(ws.sums_CTP),
        address_of(ws.sum_columns_P),
    )


@device
def chunk_places(neurons: int) -> int:
    """Places for the neurons of one chunk: `footprint.chunk_places`, for kernels."""
    groups = (neurons + GROUP - 1) // GROUP
    return (groups + CHUNKS - 1) // CHUNKS * GROUP


@device
def input_format(cfg: KernelConfig, w: Ints) -> int:
    """Format that the FFN's inputs are prepared for; what is prepared for a block format serves all."""
    return cfg.ffn_format if is_quantised(cfg.ffn_format) else selector_format(cfg, w)


@device
def limit_of(w: Ints) -> np.float32:
    """Limit of the layer's rung: magnitudes of the activation up to here count as 0."""
    return np.int32(w[weight_table.LIMIT]).view(np.float32)


@device
def list_of(m: Chunks, chunk: int) -> Ints:
    """The chunk's list of neurons."""
    places = chunk_places(m.neurons)
    return carray(pointer_of(m.list_CK + 8 * chunk * places), (places,), np.int64)


@device
def counts_of(m: Chunks) -> Ints:
    """Length of each chunk's list."""
    return carray(pointer_of(m.count_C), (CHUNKS,), np.int64)


@device
def _numbers_of(base: int, m: Chunks, chunk: int, tokens: int) -> Floats:
    """The chunk's numbers for each token and place, with room for zeros behind them."""
    width = chunk_places(m.neurons) + SUM_ROWS
    return carray(pointer_of(base + 4 * chunk * m.tokens * width), (tokens, width), np.float32)


@device
def tally_of(m: Chunks, chunk: int, tokens: int) -> Ints:
    """What the chunk counts for each token."""
    return carray(pointer_of(m.tally_CT3 + 8 * chunk * m.tokens * 3), (tokens, 3), np.int64)


@device
def _list_range(chunk: int, low: int, high: int, list_K: Ints) -> int:
    """List the chunk's neurons of [low, high); returns how many."""
    count, first = 0, low // GROUP
    group = first + (chunk - first) % CHUNKS
    while group * GROUP < high:
        for i in range(max(low, group * GROUP), min(high, (group + 1) * GROUP)):
            list_K[count] = i
            count += 1
        group += CHUNKS
    return count


@device
def deal(candidates_F: Ints, count: int, m: Chunks) -> None:
    """Deal `count` neurons in ascending order to the chunks' lists."""
    count_C = counts_of(m)
    count_C[:] = 0
    for k in range(count):
        chunk = candidates_F[k] // GROUP % CHUNKS
        list_of(m, chunk)[count_C[chunk]] = candidates_F[k]
        count_C[chunk] += 1


@device
def collect(m: Chunks, candidates_F: Ints) -> int:
    """List the chunks' neurons together in ascending order; returns how many."""
    found, next_C = 0, np.zeros(CHUNKS, np.int64)
    for group in range((m.neurons + GROUP - 1) // GROUP):
        chunk = group % CHUNKS
        list_K, k, count = list_of(m, chunk), next_C[chunk], counts_of(m)[chunk]
        while k < count and list_K[k] // GROUP == group:
            candidates_F[found] = list_K[k]
            found, k = found + 1, k + 1
        next_C[chunk] = k
    return found


@device
def _keep(begin: int, end: int, list_K: Ints, x_NK: Floats) -> int:
    """Of the places [begin, end), close the gaps where every token has 0; returns the new end."""
    kept = begin
    for k in range(begin, end):
        some = False
        for n in range(x_NK.shape[0]):
            some |= x_NK[n, k] != 0
        if some:
            list_K[kept] = list_K[k]
            for n in range(x_NK.shape[0]):
                x_NK[n, kept] = x_NK[n, k]
            kept += 1
    return kept


@device
def _products(
    cfg: KernelConfig, rows: MatrixView, bias: int, inputs: int, token_N: Ints, list_K: Ints, low: int, high: int,
    known: int, y_NK: Floats,
) -> None:  # fmt: skip
    """y ← rows · x + bias for the places [low, high) of a list of `known` neurons."""
    tokens, width = y_NK.shape
    listed, to = address_of(list_K) + 8 * low, address_of(y_NK) + 4 * low
    vectors = inputs, input_stride(cfg.d_model), address_of(token_N), tokens
    row_products(rows, 0, listed, high - low, known - low, *vectors, to, 4 * width)
    if bias != 0:
        bias_F = vector(bias, cfg.d_ff)
        for n in range(tokens):
            for k in range(low, high):
                y_NK[n, k] += bias_F[list_K[k]]


@device
def _name(cfg: KernelConfig, w: Ints, x: Inputs, select_N: Ints, list_K: Ints, count: int, named_NK: Floats) -> None:
    """named ← 1 where a token's selector names a neuron, or the token has none, else 0."""
    score_neurons(cfg, w, x, list_K, count, named_NK)
    for n in range(named_NK.shape[0]):
        for k in range(count):
            named_NK[n, k] = np.float32(named_NK[n, k] > 0 or select_N[n] == 0)


@device
def _first(cfg: KernelConfig, w: Ints) -> MatrixView:
    return matrix(cfg.ffn_format, w[weight_table.FIRST], w[weight_table.FIRST_SCALES], cfg.d_model)


@device
def _rest(cfg: KernelConfig, w: Ints, part: int) -> MatrixView:
    """The rows of `up` (part 0 of 2) or of `down` (the last part)."""
    rest = matrix(cfg.ffn_format, w[weight_table.REST], w[weight_table.REST_SCALES], cfg.d_model)
    return strided_rows(rest, cfg.rows_per_neuron, part)


@loop_body
def _fire_chunk(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, route_weight_N: Floats, low: int,
    high: int, given: bool, chunk: int,
) -> None:  # fmt: skip
    """One chunk up to its factors; its list ends with the neurons that some token keeps. `given`: its list is there."""
    tokens, list_K = token_N.shape[0], list_of(m, chunk)
    h_NK, up_NK = _numbers_of(m.h_CTK, m, chunk, tokens), _numbers_of(m.up_CTK, m, chunk, tokens)
    named_NK = _numbers_of(m.named_CTK, m, chunk, tokens)
    tally_N3, dense = tally_of(m, chunk, tokens), w[weight_table.DENSE] != 0
    count, named = counts_of(m)[chunk] if given else _list_range(chunk, low, high, list_K), False
    if selects(w) and not given:
        for n in range(tokens):
            named |= select_N[n] != 0
    if named:
        _name(cfg, w, x, select_N, list_K, count, named_NK)
        count = _keep(0, count, list_K, named_NK)
    _products(cfg, _first(cfg, w), w[weight_table.FIRST_BIAS], x.inputs, token_N, list_K, 0, count, count, h_NK)
    for n in range(tokens):
        limit = limit_of(w) if select_N[n] != 0 else np.float32(cfg.threshold)
        read, fire = 0, 0
        for k in range(count):
            if named and named_NK[n, k] == 0:
                h_NK[n, k] = np.float32(0)
            else:
                h_NK[n, k] = activate(cfg.activation, limit, h_NK[n, k])
                read += 1
                fire += h_NK[n, k] != 0
        tally_N3[n, FIRES], tally_N3[n, READ], tally_N3[n, KEPT] = 0, read, read if dense else fire
    if not dense:
        count = _keep(0, count, list_K, h_NK)
    counts_of(m)[chunk] = count
    if tokens <= FEW_TOKENS:
        # A neuron's rows of `rest` lie together: what the memory brings along of one is not lost on the other.
        sums_NP = _sums_of(cfg, m, chunk, tokens)
        sums_NP[:] = np.float32(0)
        for begin in range(0, count, REST_NEURONS):
            end = _factors(
                cfg, w, x, token_N, route_weight_N, list_K, begin, min(count, begin + REST_NEURONS), count, up_NK, h_NK
            )
            _add_rows(cfg, w, m, chunk, begin, end, count, sums_NP)
    else:
        counts_of(m)[chunk] = _factors(cfg, w, x, token_N, route_weight_N, list_K, 0, count, count, up_NK, h_NK)


@device
def _factors(
    cfg: KernelConfig, w: Ints, x: Inputs, token_N: Ints, route_weight_N: Floats, list_K: Ints, begin: int, end: int,
    known: int, up_NK: Floats, h_NK: Floats,
) -> int:  # fmt: skip
    """h ← the factors of the rows of `down` for the places [begin, end) of a list; returns the new end."""
    relu_up = cfg.activation == DRELU
    if cfg.rows_per_neuron == 2:
        _products(cfg, _rest(cfg, w, 0), w[weight_table.UP_BIAS], x.inputs, token_N, list_K, begin, end, known, up_NK)
        _multiply_up(relu_up, begin, end, up_NK, h_NK)
        if relu_up and w[weight_table.DENSE] == 0:
            end = _keep(begin, end, list_K, h_NK)
    for n in range(h_NK.shape[0]):
        for k in range(begin, end):
            h_NK[n, k] *= route_weight_N[n]
        h_NK[n, end : begin + (end - begin + SUM_ROWS - 1) // SUM_ROWS * SUM_ROWS] = np.float32(0)
    return end


@loop_body
def _count_chunk(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, route_weight_N: Floats, low: int,
    high: int, chunk: int,
) -> None:  # fmt: skip
    """The same with every neuron computed first, so that those that fire are counted, read or not."""
    tokens, list_K = token_N.shape[0], list_of(m, chunk)
    h_NK, up_NK = _numbers_of(m.h_CTK, m, chunk, tokens), _numbers_of(m.up_CTK, m, chunk, tokens)
    named_NK = _numbers_of(m.named_CTK, m, chunk, tokens)
    tally_N3, count = tally_of(m, chunk, tokens), _list_range(chunk, low, high, list_K)
    if selects(w):
        _name(cfg, w, x, select_N, list_K, count, named_NK)
    else:
        named_NK[:] = np.float32(1)
    _products(cfg, _first(cfg, w), w[weight_table.FIRST_BIAS], x.inputs, token_N, list_K, 0, count, count, h_NK)
    tally_N3[:] = 0
    for n in range(tokens):
        limit = limit_of(w) if select_N[n] != 0 else np.float32(cfg.threshold)
        for k in range(count):
            tally_N3[n, READ] += named_NK[n, k] != 0
            h_NK[n, k] = activate(cfg.activation, np.float32(cfg.threshold), h_NK[n, k])
            if abs(h_NK[n, k]) <= limit:
                named_NK[n, k] = np.float32(0)
    if cfg.rows_per_neuron == 2:
        _products(cfg, _rest(cfg, w, 0), w[weight_table.UP_BIAS], x.inputs, token_N, list_K, 0, count, count, up_NK)
        _multiply_up(cfg.activation == DRELU, 0, count, up_NK, h_NK)
    for n in range(tokens):
        for k in range(count):
            tally_N3[n, FIRES] += h_NK[n, k] != 0
            if named_NK[n, k] == 0:
                h_NK[n, k] = np.float32(0)
            tally_N3[n, KEPT] += h_NK[n, k] != 0
            h_NK[n, k] *= route_weight_N[n]
        h_NK[n, count : (count + SUM_ROWS - 1) // SUM_ROWS * SUM_ROWS] = np.float32(0)
    counts_of(m)[chunk] = count
    if tokens <= FEW_TOKENS:
        sums_NP = _sums_of(cfg, m, chunk, tokens)
        sums_NP[:] = np.float32(0)
        _add_rows(cfg, w, m, chunk, 0, count, count, sums_NP)


@device
def _multiply_up(relu_up: bool, begin: int, end: int, up_NK: Floats, h_NK: Floats) -> None:
    """h ← h · up, or h · max(up, 0) with `relu_up`; what does not fire stays 0."""
    for n in range(h_NK.shape[0]):
        for k in range(begin, end):
            if h_NK[n, k] != 0:
                h_NK[n, k] *= relu(up_NK[n, k]) if relu_up else up_NK[n, k]


@device
def _sums_of(cfg: KernelConfig, m: Chunks, chunk: int, tokens: int) -> Floats:
    width = padded_columns(cfg.d_model)
    return carray(pointer_of(m.sums_CTP + 4 * chunk * min(m.tokens, FEW_TOKENS) * width), (tokens, width), np.float32)


@device
def _down(cfg: KernelConfig, w: Ints) -> MatrixView:
    return _rest(cfg, w, cfg.rows_per_neuron - 1)


@device
def _add_rows(
    cfg: KernelConfig, w: Ints, m: Chunks, chunk: int, begin: int, end: int, known: int, sums_NP: Floats
) -> None:
    """Add the rows of `down` at the places [begin, end) of the chunk's list."""
    tokens, width = sums_NP.shape
    h_NK = _numbers_of(m.h_CTK, m, chunk, tokens)
    h_at, listed = address_of(h_NK) + 4 * begin, address_of(list_of(m, chunk)) + 8 * begin
    to = tokens, address_of(sums_NP), 4 * width
    row_sums(_down(cfg, w), 0, listed, end - begin, known - begin, h_at, 4 * h_NK.shape[1], *to)


@loop_body
def _merge_slice(cfg: KernelConfig, m: Chunks, token_N: Ints, part: int, y_TD: Floats) -> None:
    """y ← y + the sums of the chunks, for one slice of the columns.

    Each sum lies in the cache of the thread that made it: to fetch them all, one thread would need as long as a few
    neurons take.
    """
    width = padded_columns(cfg.d_model)
    column_P = carray(pointer_of(m.sum_columns_P), (width,), np.int64)
    low, high = width * part // SLICES, width * (part + 1) // SLICES
    for n in range(token_N.shape[0]):
        total_P = _sums_of(cfg, m, 0, n + 1)[n, low:high]
        for chunk in range(1, CHUNKS):
            sums_P = _sums_of(cfg, m, chunk, n + 1)[n, low:high]
            for j in range(high - low):
                total_P[j] += sums_P[j]
        y_D = y_TD[token_N[n]]
        for j in range(high - low):
            if column_P[low + j] < cfg.d_model:
                y_D[column_P[low + j]] += total_P[j]


@loop_body
def _sum_tile(cfg: KernelConfig, w: Ints, m: Chunks, token_N: Ints, tile: int, y_TD: Floats) -> None:
    """y ← y + the sums of all chunks, for some columns of some tokens."""
    column_P = carray(pointer_of(m.sum_columns_P), (padded_columns(cfg.d_model),), np.int64)
    strips = (cfg.d_model + STRIP - 1) // STRIP
    low, first = tile % strips * STRIP, tile // strips * STRIP_TOKENS
    columns, tokens = min(STRIP, cfg.d_model - low), min(STRIP_TOKENS, token_N.shape[0] - first)
    down = columns_from(_down(cfg, w), low, columns)
    total_NP = np.zeros((tokens, STRIP), np.float32)
    sums_NP = np.empty((tokens, STRIP), np.float32)
    for chunk in range(CHUNKS):
        sums_NP[:] = np.float32(0)
        h_NK = _numbers_of(m.h_CTK, m, chunk, first + tokens)
        h_at, stride, count = address_of(h_NK[first]), 4 * h_NK.shape[1], counts_of(m)[chunk]
        to = tokens, address_of(sums_NP), 4 * STRIP
        row_sums(down, 0, address_of(list_of(m, chunk)), count, count, h_at, stride, *to)
        for n in range(tokens):
            for j in range(STRIP):
                total_NP[n, j] += sums_NP[n, j]
    for n in range(tokens):
        y_D = y_TD[token_N[first + n]]
        for j in range(min(STRIP, column_P.shape[0] - low)):
            if column_P[low + j] < cfg.d_model:
                y_D[column_P[low + j]] += total_NP[n, j]


def _fire(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, route_weight_N: Floats, low: int,
    high: int, given: bool, count_all: bool,
) -> None:  # fmt: skip
    _fire_chunk()
    _count_chunk()
    for chunk in prange(CHUNKS):
        if count_all:
            _count_chunk(cfg, w, m, x, token_N, select_N, route_weight_N, low, high, chunk)
        else:
            _fire_chunk(cfg, w, m, x, token_N, select_N, route_weight_N, low, high, given, chunk)


def _merge(cfg: KernelConfig, m: Chunks, token_N: Ints, y_TD: Floats) -> None:
    _merge_slice()
    for part in prange(SLICES):
        _merge_slice(cfg, m, token_N, part, y_TD)


@parallel
def _sum_tiles(cfg: KernelConfig, w: Ints, m: Chunks, token_N: Ints, y_TD: Floats) -> None:
    _sum_tile()
    strips, blocks = (cfg.d_model + STRIP - 1) // STRIP, (token_N.shape[0] + STRIP_TOKENS - 1) // STRIP_TOKENS
    for tile in prange(strips * blocks):
        _sum_tile(cfg, w, m, token_N, tile, y_TD)


_parallel_fire, _parallel_merge = parallel(_fire), parallel(_merge)
_serial_fire, _serial_merge = device(_fire), device(_merge)


@device
def neurons(
    cfg: KernelConfig, w: Ints, x_TD: Floats, token_N: Ints, select_N: Ints, route_weight_N: Floats, low: int,
    high: int, given: bool, count_all: bool, threads: bool | None, m: Chunks, x: Inputs, tally_T3: Ints, y_TD: Floats,
) -> None:  # fmt: skip
    """y ← y + the neurons of one expert for its tokens, whose inputs are prepared; `tally_T3` ← tally + their counts.

    `given`: of the neurons [low, high), those on the chunks' lists.
    """
    tokens = token_N.shape[0]
    if selects(w) and not given:
        prepare_selection(cfg, w, x_TD, token_N, threads, x)
    if threads is None:
        _serial_fire(cfg, w, m, x, token_N, select_N, route_weight_N, low, high, given, count_all)
        _serial_merge(cfg, m, token_N, y_TD)
    else:
        _parallel_fire(cfg, w, m, x, token_N, select_N, route_weight_N, low, high, given, count_all)
        if tokens <= FEW_TOKENS:
            _parallel_merge(cfg, m, token_N, y_TD)
        else:
            _sum_tiles(cfg, w, m, token_N, y_TD)
    for chunk in range(CHUNKS):
        tally_N3 = tally_of(m, chunk, tokens)
        for n in range(tokens):
            for k in range(3):
                tally_T3[token_N[n], k] += tally_N3[n, k]


@public
def add_expert(
    cfg: KernelConfig, w: Ints, x_TD: Floats, token_N: Ints, select_N: Ints, route_weight_N: Floats, count_all: bool,
    ws: Workspace, tally_T3: Ints, y_TD: Floats,
) -> None:  # fmt: skip
    """y ← y + one expert's neurons for its tokens, whose inputs are prepared; adds their counts to `tally_T3`."""
    m, x = chunks_of(cfg, ws), inputs_of(ws)
    neurons(cfg, w, x_TD, token_N, select_N, route_weight_N, 0, cfg.d_ff, False, count_all, True, m, x, tally_T3, y_TD)


@device
def _add(
    cfg: KernelConfig, w: Ints, x_TD: Floats, low: int, high: int, route_weight: np.float32, select: bool,
    count_all: bool, threads: bool | None, ws: Workspace, tally_T3: Ints, y_TD: Floats,
) -> None:  # fmt: skip
    tokens, m, x = x_TD.shape[0], chunks_of(cfg, ws), inputs_of(ws)
    token_N, select_N, weight_N = ws.token_T[:tokens], ws.taken_select_T[:tokens], ws.taken_weight_T[:tokens]
    select_N[:], weight_N[:] = int(select), route_weight
    prepare_inputs(input_format(cfg, w), x_TD, x.inputs)
    tally_T3[:] = 0
    neurons(cfg, w, x_TD, token_N, select_N, weight_N, low, high, False, count_all, threads, m, x, tally_T3, y_TD)


@public
def add_neurons(
    cfg: KernelConfig, w: Ints, x_TD: Floats, low: int, high: int, route_weight: np.float32, select: bool,
    count_all: bool, ws: Workspace, tally_T3: Ints, y_TD: Floats,
) -> None:  # fmt: skip
    """y ← y + route_weight · the sum over the neurons [low, high) for T tokens, on numba's threads.

    `select`: skip what the layer's rung skips. `tally_T3` ← for each token (0, rows of `first` read, neurons kept), or
    with `count_all` (neurons that fire, rows of `first` that the rung reads, neurons that fire and are kept).
    """
    _add(cfg, w, x_TD, low, high, route_weight, select, count_all, True, ws, tally_T3, y_TD)


@public
def serial_add_neurons(
    cfg: KernelConfig, w: Ints, x_TD: Floats, low: int, high: int, route_weight: np.float32, select: bool,
    count_all: bool, ws: Workspace, tally_T3: Ints, y_TD: Floats,
) -> None:  # fmt: skip
    """`add_neurons` for few tokens on the calling thread alone, for the thread that stands in for a GPU."""
    _add(cfg, w, x_TD, low, high, route_weight, select, count_all, None, ws, tally_T3, y_TD)


def _name_all(cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, select_N: Ints) -> None:
    _name_chunk()
    for chunk in prange(CHUNKS):
        _name_chunk(cfg, w, m, x, select_N, chunk)


@loop_body
def _name_chunk(cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, select_N: Ints, chunk: int) -> None:
    """The chunk's list ← the neurons that the selector names for some token."""
    list_K, named_NK = list_of(m, chunk), _numbers_of(m.named_CTK, m, chunk, select_N.shape[0])
    count = _list_range(chunk, 0, cfg.d_ff, list_K)
    _name(cfg, w, x, select_N, list_K, count, named_NK)
    counts_of(m)[chunk] = _keep(0, count, list_K, named_NK)


name_all = parallel(_name_all)
