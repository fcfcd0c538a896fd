"""The feed-forward network over a range of neurons, for one token or many, dense or with what a rung skips.

    y_t ← y_t + route_weight_t Σ_i a(first_i · x_t) [up_i · x_t] down_i          i in the neurons that t's rung keeps

Each of `CHUNKS` chunks goes through its neurons (see `neuron_chunks`) block by block (see `neuron_blocks`): names (all,
or those that a token's selector names) → `first` → what fires → `up` → one factor for each neuron that fires → the
token's sum of the block's rows of `down`. A token's sum adds up its blocks in order, and then its chunks in order. So
its bits depend neither on the number of threads nor on the tokens beside it.

Up to `FEW_TOKENS` tokens each chunk has sums of its own, which are then merged. Many tokens write their factors first,
a few tokens at a time; then their sums are computed in tiles of columns and tokens, which stay in the first-level
cache. Weights are read from the memory once for all tokens.

Shape letters: F neurons of the layer (with experts, of one expert) in stored order, of which [low, high) are computed;
D model width, T tokens, N of them that are computed here, K places for the neurons of a chunk, P padded columns. A
layer's row w of the weight table holds addresses (see `weight_table`).

`threads` is None for the calling thread alone: numba then compiles one of two branches, not both.
"""

import numpy as np
from numba import prange

from pi_runtime.artifact.footprint import CHUNKS, FEW_TOKENS, STRIP, SUM_NEURONS
from pi_runtime.kernels.codegen.jit import device, loop_body, parallel, public
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import Floats, Ints, columns_from, is_quantised
from pi_runtime.kernels.data.neuron_chunks import (
    FIRES,
    KEPT,
    READ,
    Chunks,
    asking_of,
    block_end,
    block_neurons,
    chunks_of,
    counts_of,
    factors_of,
    list_of,
    list_range,
    lists_of,
    scored_of,
    sums_of,
    tally_of,
    ups_of,
)
from pi_runtime.kernels.data.weight_table import DRELU, KernelConfig
from pi_runtime.kernels.data.workspace import Workspace
from pi_runtime.kernels.ops.activations import activate, times_up
from pi_runtime.kernels.ops.linear import prepare_inputs
from pi_runtime.kernels.ops.neuron_blocks import (
    add_block,
    add_whole,
    down_rows,
    first_rows,
    limit_of,
    list_firing,
    products,
    up_rows,
)
from pi_runtime.kernels.ops.neuron_selection import (
    Inputs,
    inputs_of,
    score,
    scores_of,
    selector_format,
    selects,
)

SLICES = 16
"""Parts of the columns that threads merge the chunks' sums in."""
STRIP_TOKENS = 16
"""Tokens of one tile of sums where there are many: so its sums stay in the first-level cache."""


@device
def input_format(cfg: KernelConfig, w: Ints) -> int:
    """Format that the FFN's inputs are prepared for; what is prepared for a block format serves all."""
    return cfg.ffn_format if is_quantised(cfg.ffn_format) else selector_format(cfg, w)


@device
def _begin_chunk(m: Chunks, low: int, high: int, tokens: int, chunk: int) -> bool:
    """List the chunk's neurons; returns whether a selector names those of some tokens."""
    counts_of(m)[chunk] = list_range(chunk, low, high, list_of(m, chunk))
    tally_of(m, chunk, tokens)[:] = 0
    named = False
    for n in range(tokens):
        named |= scored_of(m, tokens)[n] >= 0
    return named


@loop_body
def list_chunk(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, low: int, high: int,
    chunk: int,
) -> None:  # fmt: skip
    """List what fires in one chunk for a few tokens."""
    tokens, own = token_N.shape[0], lists_of(m, chunk)
    named, count = _begin_chunk(m, low, high, tokens, chunk), counts_of(m)[chunk]
    list_K, neurons, scored_N = list_of(m, chunk)[:count], block_neurons(first_rows(cfg, w)), scored_of(m, tokens)
    begin, block = 0, 0
    own.size_2[1] = 0
    while begin < count:
        own.block_B[block], end = begin, block_end(neurons, list_K, begin, count)
        list_firing(cfg, w, m, x, token_N, select_N, scored_N, named, high, chunk, block, end, 0)
        begin, block = end, block + 1
    own.block_B[block], own.size_2[0] = count, block


@loop_body
def sum_chunk(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, route_weight_N: Floats, chunk: int
) -> None:
    """Compute the sums of one chunk for a few tokens, of what is listed."""
    own, tokens = lists_of(m, chunk), token_N.shape[0]
    known = own.size_2[1]
    if chunk + 1 < CHUNKS:  # what this thread reads next is fetched with the last rows of this chunk
        after = lists_of(m, chunk + 1)
        for k in range(min(after.size_2[1], SUM_NEURONS)):
            own.list_K[known + k] = after.list_K[k]
        known += min(after.size_2[1], SUM_NEURONS)
    sums_NP = sums_of(cfg, m, chunk, tokens)
    sums_NP[:] = np.float32(0)
    for block in range(own.size_2[0]):
        add_block(cfg, w, m, x, token_N, route_weight_N, chunk, block, 0, known, sums_NP)


@loop_body
def factor_chunk(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, route_weight_N: Floats, low: int,
    high: int, chunk: int,
) -> None:  # fmt: skip
    """Compute the factors of one chunk for many tokens, a few at a time."""
    tokens, list_K, own = token_N.shape[0], list_of(m, chunk), lists_of(m, chunk)
    named, none_0P = _begin_chunk(m, low, high, tokens, chunk), sums_of(cfg, m, chunk, 0)
    begin, count, neurons, scored_N = 0, counts_of(m)[chunk], block_neurons(first_rows(cfg, w)), scored_of(m, tokens)
    while begin < count:
        end = block_end(neurons, list_K, begin, count)
        for first in range(0, tokens, FEW_TOKENS):
            some = slice(first, min(tokens, first + FEW_TOKENS))
            own.size_2[1], own.block_B[0], own.block_B[1] = 0, begin, end
            list_firing(cfg, w, m, x, token_N[some], select_N[some], scored_N[some], named, 0, chunk, 0, end, first)
            add_block(cfg, w, m, x, token_N[some], route_weight_N[some], chunk, 0, first, own.size_2[1], none_0P)
        begin = end


@loop_body
def count_chunk(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, route_weight_N: Floats, low: int,
    high: int, chunk: int,
) -> None:  # fmt: skip
    """Compute the factors, and for few tokens the sums, of one chunk, with every neuron computed.

    So those that fire are counted, read or not.
    """
    tokens, gated = token_N.shape[0], cfg.rows_per_neuron == 2
    _begin_chunk(m, low, high, tokens, chunk)
    list_K = list_of(m, chunk)[: counts_of(m)[chunk]]
    h_NK, up_NK, count = factors_of(m, chunk, tokens), ups_of(m, chunk, tokens), counts_of(m)[chunk]
    tally_N3, scored_N = tally_of(m, chunk, tokens), scored_of(m, tokens)
    products(cfg, first_rows(cfg, w), w[weight_table.FIRST_BIAS], x.inputs, token_N, list_K, 0, count, h_NK)
    if gated:
        products(cfg, up_rows(cfg, w), w[weight_table.UP_BIAS], x.inputs, token_N, list_K, 0, count, up_NK)
    for n in range(tokens):
        limit, scored = limit_of(cfg, w, select_N[n]), max(0, scored_N[n])
        score_F = scores_of(cfg, x, scored + 1)[scored]
        for k in range(count):
            read = scored_N[n] < 0 or score_F[list_K[k]] > 0
            h = activate(cfg.activation, np.float32(cfg.threshold), h_NK[n, k])
            kept = read and not abs(h) <= limit
            h = times_up(cfg.activation == DRELU, h, up_NK[n, k]) if gated else h
            tally_N3[n, FIRES] += h != 0
            tally_N3[n, READ] += read
            h = h if kept else np.float32(0)
            tally_N3[n, KEPT] += h != 0
            h_NK[n, k] = h * route_weight_N[n]
    if tokens <= FEW_TOKENS:
        sums_NP = sums_of(cfg, m, chunk, tokens)
        sums_NP[:] = np.float32(0)
        begin, neurons = 0, block_neurons(first_rows(cfg, w))
        while begin < count:
            end = block_end(neurons, list_K, begin, count)
            add_whole(down_rows(cfg, w), lists_of(m, chunk), list_K, begin, end, h_NK, sums_NP)
            begin = end


@loop_body
def merge_slice(cfg: KernelConfig, m: Chunks, token_N: Ints, part: int, y_TD: Floats) -> None:
    """y ← y + the sums of the chunks, for one slice of the columns.

    Each sum lies in the cache of the thread that made it: to fetch them all, one thread would need as long as a few
    neurons take.
    """
    low, high = cfg.d_model * part // SLICES, cfg.d_model * (part + 1) // SLICES
    for n in range(token_N.shape[0]):
        total_P = sums_of(cfg, m, 0, n + 1)[n, low:high]
        for chunk in range(1, CHUNKS):
            sums_P = sums_of(cfg, m, chunk, n + 1)[n, low:high]
            for j in range(high - low):
                total_P[j] += sums_P[j]
        y_D = y_TD[token_N[n], low:high]
        for j in range(high - low):
            y_D[j] += total_P[j]


@loop_body
def sum_some_tiles(
    cfg: KernelConfig, w: Ints, m: Chunks, token_N: Ints, begin_chunk: int, end_chunk: int, part: int,
    carried_ND: Floats, y_TD: Floats,
) -> None:  # fmt: skip
    """y ← y + the sums of all chunks, for every `CHUNKS`-th tile of some columns of some tokens.

    Of the chunks [begin_chunk, end_chunk) in this call: `carried_ND` holds the sums of those before, and takes these.
    """
    strips, blocks = (cfg.d_model + STRIP - 1) // STRIP, (token_N.shape[0] + STRIP_TOKENS - 1) // STRIP_TOKENS
    total_NP = np.empty((STRIP_TOKENS, STRIP), np.float32)
    sums_NP = np.empty((STRIP_TOKENS, STRIP), np.float32)
    neurons, own = block_neurons(first_rows(cfg, w)), lists_of(m, part)
    for tile in range(part, strips * blocks, CHUNKS):
        low, first = tile % strips * STRIP, tile // strips * STRIP_TOKENS
        columns, tokens = min(STRIP, cfg.d_model - low), min(STRIP_TOKENS, token_N.shape[0] - first)
        down = columns_from(down_rows(cfg, w), low, columns)
        total_NP[:] = np.float32(0)
        if begin_chunk > 0:
            total_NP[:tokens, :columns] = carried_ND[first : first + tokens, low : low + columns]
        for chunk in range(begin_chunk, end_chunk):
            sums_NP[:] = np.float32(0)
            list_K, count = list_of(m, chunk), counts_of(m)[chunk]
            h_NK, begin = factors_of(m, chunk, first + tokens)[first:], 0
            while begin < count:
                end = block_end(neurons, list_K, begin, count)
                add_whole(down, own, list_K, begin, end, h_NK, sums_NP[:tokens])
                begin = end
            for n in range(tokens):
                for j in range(columns):
                    total_NP[n, j] += sums_NP[n, j]
        if end_chunk < CHUNKS:
            carried_ND[first : first + tokens, low : low + columns] = total_NP[:tokens, :columns]
            continue
        for n in range(tokens):
            y_D = y_TD[token_N[first + n], low : low + columns]
            for j in range(columns):
                y_D[j] += total_NP[n, j]


def _sums(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, route_weight_N: Floats, low: int,
    high: int,
) -> None:  # fmt: skip
    list_chunk()
    sum_chunk()
    for chunk in prange(CHUNKS):
        list_chunk(cfg, w, m, x, token_N, select_N, low, high, chunk)
    for chunk in prange(CHUNKS):
        sum_chunk(cfg, w, m, x, token_N, route_weight_N, chunk)


@parallel
def _factor_chunks(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, route_weight_N: Floats, low: int,
    high: int,
) -> None:  # fmt: skip
    factor_chunk()
    for chunk in prange(CHUNKS):
        factor_chunk(cfg, w, m, x, token_N, select_N, route_weight_N, low, high, chunk)


@parallel
def _count_chunks(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, route_weight_N: Floats, low: int,
    high: int,
) -> None:  # fmt: skip
    count_chunk()
    for chunk in prange(CHUNKS):
        count_chunk(cfg, w, m, x, token_N, select_N, route_weight_N, low, high, chunk)


def _merge(cfg: KernelConfig, m: Chunks, token_N: Ints, y_TD: Floats) -> None:
    merge_slice()
    for part in prange(SLICES):
        merge_slice(cfg, m, token_N, part, y_TD)


@parallel
def _sum_tiles(cfg: KernelConfig, w: Ints, m: Chunks, token_N: Ints, y_TD: Floats) -> None:
    sum_some_tiles()
    for part in prange(CHUNKS):
        sum_some_tiles(cfg, w, m, token_N, 0, CHUNKS, part, y_TD, y_TD)


_parallel_sums, _parallel_merge = parallel(_sums), parallel(_merge)
_serial_sums, _serial_merge = device(_sums), device(_merge)


@device
def number_scored(w: Ints, token_N: Ints, select_N: Ints, given: bool, m: Chunks) -> int:
    """Number the tokens whose neurons are scored, and list them; returns how many."""
    tokens, asked = token_N.shape[0], 0
    scored_N, asking_N = scored_of(m, tokens), asking_of(m, tokens)
    for n in range(tokens):
        asks = (selects(w) or given) and select_N[n] != 0
        scored_N[n] = asked if asks else -1
        if asks:
            asking_N[asked] = token_N[n]
            asked += 1
    return asked


@device
def add_some(
    cfg: KernelConfig, w: Ints, x_TD: Floats, token_N: Ints, select_N: Ints, route_weight_N: Floats, low: int,
    high: int, given: bool, count_all: bool, threads: bool | None, m: Chunks, x: Inputs, tally_T3: Ints, y_TD: Floats,
) -> None:  # fmt: skip
    """y ← y + neurons of one expert for some tokens, whose inputs are prepared; `tally_T3` ← tally + their counts.

    These are the neurons [low, high). `given`: the scores of the tokens that select are there, in the order of these
    tokens. Without threads tokens are few, and `count_all` does not count.
    """
    tokens = token_N.shape[0]
    scored = number_scored(w, token_N, select_N, given, m)
    if scored > 0 and not given:
        score(cfg, w, x_TD, asking_of(m, scored), low, high, threads, x)
    if threads is None:
        _serial_sums(cfg, w, m, x, token_N, select_N, route_weight_N, low, high)
        _serial_merge(cfg, m, token_N, y_TD)
    else:
        if count_all:
            _count_chunks(cfg, w, m, x, token_N, select_N, route_weight_N, low, high)
        elif tokens <= FEW_TOKENS:
            _parallel_sums(cfg, w, m, x, token_N, select_N, route_weight_N, low, high)
        else:
            _factor_chunks(cfg, w, m, x, token_N, select_N, route_weight_N, low, high)
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
    add_some(cfg, w, x_TD, token_N, select_N, route_weight_N, 0, cfg.d_ff, False, count_all, True, m, x, tally_T3, y_TD)


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
    add_some(cfg, w, x_TD, token_N, select_N, weight_N, low, high, False, count_all, threads, m, x, tally_T3, y_TD)


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
    """`add_neurons` for few tokens on the calling thread alone, for the thread that stands in for a GPU.

    What fires beyond what is read is not counted, whatever `count_all` says.
    """
    _add(cfg, w, x_TD, low, high, route_weight, select, count_all, None, ws, tally_T3, y_TD)
