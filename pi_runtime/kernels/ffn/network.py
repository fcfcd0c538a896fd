"""The feed-forward network of one expert over a range of neurons, for one token or many, dense or predicted.

    y_t ← y_t + route_weight_t Σ_i a(first_i · x_t) [up_i · x_t] down_i          i in the neurons that t's rung keeps

    names → first · x → what fires → up · x → Σ factor · down

    name_neurons     which neurons each token's selector names                       (`selection`)
    list_chunks      first · x of these, and which of them fire                      (`list_firing` in `blocks`)
    sum_chunks       up · x of those, their factors, and the sums of rows of `down`     (`add_block` in `blocks`)
    merge            y ← y + the chunks' sums, over the factors' root mean square where they are normed

All of them take an `Ffn` and a `Batch` (see `memory`), and a range of the `CHUNKS` chunks that neurons are dealt to. A
chunk goes through its neurons block by block. A token's sum adds up its blocks in order, and then its chunks in order.
So its bits depend neither on the number of threads nor on the tokens beside it, nor on the ranges.

Up to `FEW_TOKENS` tokens go these steps; more tokens of answers that skip neurons do so some at a time. Others write
their factors first (`factor_chunks`), and which rows these are of; then their sums are computed in tiles of columns and
tokens, which stay in the first-level cache (`sum_tiles`). So weights are read from the memory once for all tokens.

Shape letters: F neurons of the layer (with experts, of one expert) in stored order, of which [low, high) are computed;
D model width, T tokens, N of them that are computed here, K places for the neurons of a chunk, P padded columns.
"""

import numpy as np
from numba import prange

from pi_runtime.artifact.footprint import CHUNKS, FEW_TOKENS, STRIP, SUM_NEURONS
from pi_runtime.kernels.codegen.jit import device, loop_body, parallel, public
from pi_runtime.kernels.data.matrix_view import Floats, Ints, is_quantised
from pi_runtime.kernels.data.weight_table import LayerRecord
from pi_runtime.kernels.ffn.blocks import (
    add_block,
    factor,
    first_products,
    limit_of,
    list_firing,
    norm_scale,
    up_products,
)
from pi_runtime.kernels.ffn.down import add_tile, few_at_a_time
from pi_runtime.kernels.ffn.memory import (
    FIRES,
    KEPT,
    READ,
    Batch,
    Ffn,
    block_end,
    block_neurons,
    factors_of,
    list_neurons,
    list_of,
    lists_of,
    some_tokens,
    squares_of,
    sums_of,
    tally_of,
    ups_of,
    weights_of,
)
from pi_runtime.kernels.ffn.selection import name_neurons, scored_of, scores_of, selector_format
from pi_runtime.kernels.ops.activations import activate
from pi_runtime.kernels.ops.linear import prepare_inputs

SLICES = 16
"""Parts of the columns that threads merge the chunks' sums in."""
STRIP_TOKENS = 16
"""Tokens of one tile of sums where there are many: so its sums stay in the first-level cache."""


@public
def prepare(f: Ffn, w: LayerRecord, x_TD: Floats) -> None:
    """Prepare the inputs of a layer's FFN for all its experts; what is prepared for a block format serves all."""
    rows = w.inputs_format
    prepare_inputs(rows if is_quantised(rows) else selector_format(f, w), x_TD, f.inputs)


@device
def add_batch(f: Ffn, e: Batch, given: bool, threads: bool | None, tally_T3: Ints, y_TD: Floats) -> None:
    """y ← y + the neurons of a batch, whose inputs are prepared; `tally_T3` ← tally + their counts.

    `given`: the scores of the tokens that select are there. `threads` is None for the calling thread alone: numba then
    compiles one of two branches, not both; tokens are few.
    """
    name_neurons(f, e, given, threads)
    if threads is None:
        _serial_list(f, e, 0, CHUNKS)
        _serial_sum(f, e, 0, CHUNKS)
        _serial_merge(f, e, y_TD)
    elif few_at_a_time(e):
        for first in range(0, e.token_N.shape[0], FEW_TOKENS):
            some = some_tokens(e, first, e.low, e.high)
            list_chunks(f, some, 0, CHUNKS)
            sum_chunks(f, some, 0, CHUNKS)
            merge(f, some, y_TD)
    else:
        factor_chunks(f, e, 0, CHUNKS)
        sum_tiles(f, e, 0, CHUNKS, y_TD, y_TD)
    add_counts(f, e, tally_T3)


@public
def add(f: Ffn, e: Batch, tally_T3: Ints, y_TD: Floats) -> None:
    """`add_batch` on numba's threads."""
    add_batch(f, e, False, True, tally_T3, y_TD)


@public
def add_neurons(f: Ffn, e: Batch, x_TD: Floats, tally_T3: Ints, y_TD: Floats) -> None:
    """y ← y + the neurons of a batch, of T tokens in all, on numba's threads.

    `tally_T3` ← for each token (0, rows of `first` read, neurons kept).
    """
    prepare(f, weights_of(e), x_TD)
    tally_T3[:] = 0
    add_batch(f, e, False, True, tally_T3, y_TD)


@public
def serial_add_neurons(f: Ffn, e: Batch, x_TD: Floats, tally_T3: Ints, y_TD: Floats) -> None:
    """`add_neurons` for few tokens on the calling thread alone, for the thread that stands in for a GPU."""
    prepare(f, weights_of(e), x_TD)
    tally_T3[:] = 0
    add_batch(f, e, False, None, tally_T3, y_TD)


@public
def count_neurons(f: Ffn, e: Batch, x_TD: Floats, tally_T3: Ints) -> None:
    """Compute every neuron of a batch, and add up nothing: `factors_of` ← the factors of those that the rung keeps.

    `tally_T3` ← for each token tally + (neurons that fire, rows of `first` that the rung reads, neurons that fire and
    are kept).
    """
    prepare(f, weights_of(e), x_TD)
    name_neurons(f, e, False, True)
    count_chunks(f, e)
    add_counts(f, e, tally_T3)


@public
def add_counts(f: Ffn, e: Batch, tally_T3: Ints) -> None:
    """tally ← tally + what all chunks counted."""
    tokens = e.token_N.shape[0]
    for chunk in range(CHUNKS):
        tally_N3 = tally_of(f, chunk, tokens)
        for n in range(tokens):
            for k in range(3):
                tally_T3[e.token_N[n], k] += tally_N3[n, k]


@device
def _begin_chunk(f: Ffn, e: Batch, chunk: int) -> bool:
    """List the chunk's neurons; returns whether a selector names those of some tokens."""
    list_neurons(f, e, chunk)
    tokens, named = e.token_N.shape[0], False
    tally_of(f, chunk, e.first + tokens)[e.first :] = 0
    if weights_of(e).ffn_inner_norm != 0:
        squares_of(f, chunk, e.first + tokens)[e.first :] = np.float32(0)
    for n in range(e.first, e.first + tokens):
        named |= scored_of(f, n + 1)[n] >= 0
    return named


@loop_body
def _list_chunk(f: Ffn, e: Batch, chunk: int) -> None:
    """List what fires in one chunk for a few tokens."""
    named, own, list_K, neurons = _begin_chunk(f, e, chunk), lists_of(f, chunk), list_of(f, chunk), block_neurons(f, e)
    begin, block = 0, 0
    own.size_2[1] = 0
    while begin < list_K.shape[0]:
        own.block_B[block], end = begin, block_end(neurons, list_K, begin)
        list_firing(f, e, named, chunk, block, end, False)
        begin, block = end, block + 1
    own.block_B[block], own.size_2[0] = begin, block


@loop_body
def _sum_chunk(f: Ffn, e: Batch, chunk: int) -> None:
    """Compute the sums of one chunk for a few tokens, of what is listed."""
    own = lists_of(f, chunk)
    known = own.size_2[1]
    if chunk + 1 < CHUNKS:  # what this thread reads next is fetched with the last rows of this chunk
        after = lists_of(f, chunk + 1)
        for k in range(min(after.size_2[1], SUM_NEURONS)):
            own.list_K[known + k] = after.list_K[k]
        known += min(after.size_2[1], SUM_NEURONS)
    sums_NP = sums_of(f, chunk, e.token_N.shape[0])
    sums_NP[:] = np.float32(0)
    for block in range(own.size_2[0]):
        add_block(f, e, chunk, block, known, sums_NP, False)


@loop_body
def _factor_chunk(f: Ffn, e: Batch, chunk: int) -> None:
    """Compute the factors of one chunk for many tokens, a few at a time."""
    named, own, list_K, neurons = _begin_chunk(f, e, chunk), lists_of(f, chunk), list_of(f, chunk), block_neurons(f, e)
    begin, none_0P = 0, sums_of(f, chunk, 0)
    while begin < list_K.shape[0]:
        end = block_end(neurons, list_K, begin)
        dense = not named and weights_of(e).dense != 0
        if not named:  # rows are read, and with AMX packed, once for all tokens
            first_products(f, e, list_K, begin, end, factors_of(f, chunk, e.token_N.shape[0]))
        if dense and f.gated:
            up_products(f, e, list_K, begin, end, ups_of(f, chunk, e.token_N.shape[0]))
        for first in range(0, e.token_N.shape[0], FEW_TOKENS):
            some = some_tokens(e, first, 0, 0)
            own.size_2[1], own.block_B[0], own.block_B[1] = 0, begin, end
            list_firing(f, some, named, chunk, 0, end, not named)
            add_block(f, some, chunk, 0, own.size_2[1], none_0P, dense)
        begin = end


@loop_body
def _count_chunk(f: Ffn, e: Batch, chunk: int) -> None:
    """Compute the factors of all neurons of one chunk, so that those that fire are counted, read or not."""
    _begin_chunk(f, e, chunk)
    tokens, list_K = e.token_N.shape[0], list_of(f, chunk)
    h_NK, up_NK, count = factors_of(f, chunk, tokens), ups_of(f, chunk, tokens), list_K.shape[0]
    tally_N3, scored_N = tally_of(f, chunk, tokens), scored_of(f, tokens)
    first_products(f, e, list_K, 0, count, h_NK)
    if f.gated:
        up_products(f, e, list_K, 0, count, up_NK)
    for n in range(tokens):
        limit, score_F = limit_of(f, e, n), scores_of(f, scored_N[n])
        activate(f.activation, np.float32(f.threshold), h_NK[n, :count])
        for k in range(count):
            read, h = scored_N[n] < 0 or score_F[list_K[k]] > 0, h_NK[n, k]
            kept = read and not abs(h) <= limit
            h = factor(f, h, up_NK[n, k])
            tally_N3[n, FIRES] += h != 0
            tally_N3[n, READ] += read
            h = h if kept else np.float32(0)
            tally_N3[n, KEPT] += h != 0
            h_NK[n, k] = h


@loop_body
def _merge_slice(f: Ffn, e: Batch, part: int, y_TD: Floats) -> None:
    """y ← y + the sums of the chunks, for one slice of the columns.

    Each sum lies in the cache of the thread that made it: to fetch them all, one thread would need as long as a few
    neurons take.
    """
    low, high = f.d_model * part // SLICES, f.d_model * (part + 1) // SLICES
    for n in range(e.token_N.shape[0]):
        total_P = sums_of(f, 0, n + 1)[n, low:high]
        for chunk in range(1, CHUNKS):
            sums_P = sums_of(f, chunk, n + 1)[n, low:high]
            for j in range(high - low):
                total_P[j] += sums_P[j]
        y_D, scale = y_TD[e.token_N[n], low:high], norm_scale(f, e, n)
        for j in range(high - low):
            y_D[j] += total_P[j] * scale


@loop_body
def _sum_some_tiles(f: Ffn, e: Batch, begin: int, end: int, part: int, carried_ND: Floats, y_TD: Floats) -> None:
    """`sum_tiles` for one of `CHUNKS` parts of the tiles: each has some columns of some tokens."""
    strips, blocks = (f.d_model + STRIP - 1) // STRIP, (e.token_N.shape[0] + STRIP_TOKENS - 1) // STRIP_TOKENS
    total_NP = np.empty((STRIP_TOKENS, STRIP), np.float32)
    sums_NP = np.empty((STRIP_TOKENS, STRIP), np.float32)
    for tile in range(part * strips * blocks // CHUNKS, (part + 1) * strips * blocks // CHUNKS):
        low, first = tile // blocks * STRIP, tile % blocks * STRIP_TOKENS
        columns, tokens = min(STRIP, f.d_model - low), min(STRIP_TOKENS, e.token_N.shape[0] - first)
        total_NP[:] = np.float32(0)
        if begin > 0:
            total_NP[:tokens, :columns] = carried_ND[first : first + tokens, low : low + columns]
        for chunk in range(begin, end):
            sums_NP[:] = np.float32(0)
            add_tile(f, e, chunk, part, low, columns, first, sums_NP[:tokens])
            for n in range(tokens):
                for j in range(columns):
                    total_NP[n, j] += sums_NP[n, j]
        if end < CHUNKS:
            carried_ND[first : first + tokens, low : low + columns] = total_NP[:tokens, :columns]
            continue
        for n in range(tokens):
            y_D, scale = y_TD[e.token_N[first + n], low : low + columns], norm_scale(f, e, first + n)
            for j in range(columns):
                y_D[j] += total_NP[n, j] * scale


def _list_chunks(f: Ffn, e: Batch, begin: int, end: int) -> None:
    """List what fires in the chunks [begin, end), for a few tokens whose neurons are named."""
    for chunk in prange(begin, end):
        _list_chunk(f, e, chunk)


def _sum_chunks(f: Ffn, e: Batch, begin: int, end: int) -> None:
    """Compute the sums of the chunks [begin, end), of what is listed for a few tokens."""
    for chunk in prange(begin, end):
        _sum_chunk(f, e, chunk)


@parallel(_factor_chunk)
def factor_chunks(f: Ffn, e: Batch, begin: int, end: int) -> None:
    """Compute the factors of the chunks [begin, end), for many tokens whose neurons are named."""
    for chunk in prange(begin, end):
        _factor_chunk(f, e, chunk)


@parallel(_count_chunk)
def count_chunks(f: Ffn, e: Batch) -> None:
    """Compute the factors of all neurons."""
    for chunk in prange(CHUNKS):
        _count_chunk(f, e, chunk)


@parallel(_sum_some_tiles)
def sum_tiles(f: Ffn, e: Batch, begin: int, end: int, carried_ND: Floats, y_TD: Floats) -> None:
    """y ← y + the sums of all chunks, for many tokens, of which the chunks [begin, end) are added now.

    `carried_ND` holds the sums of those before, and takes these.
    """
    for part in prange(CHUNKS):
        _sum_some_tiles(f, e, begin, end, part, carried_ND, y_TD)


def _merge(f: Ffn, e: Batch, y_TD: Floats) -> None:
    """y ← y + the sums of all chunks, for a few tokens."""
    for part in prange(SLICES):
        _merge_slice(f, e, part, y_TD)


list_chunks, _serial_list = parallel(_list_chunk)(_list_chunks), device(_list_chunks)
sum_chunks, _serial_sum = parallel(_sum_chunk)(_sum_chunks), device(_sum_chunks)
merge, _serial_merge = parallel(_merge_slice)(_merge), device(_merge)
