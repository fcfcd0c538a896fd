"""The feed-forward network over a range of neurons, for one token or many, dense or with what a rung skips.

    y_t ← y_t + route_weight_t Σ_i a(first_i · x_t) [up_i · x_t] down_i          i in the neurons that t's rung keeps

Neurons are dealt to `CHUNKS` chunks in groups of `GROUP`: neuron i goes to chunk turn((i / GROUP) mod CHUNKS). A chunk
goes through its neurons in blocks, cut where their numbers say: names (all, or those that a token's selector names) →
`first` → what fires → `up` → one factor for each neuron and token, 0 where the token skips it → the token's sum of the
block's rows of `down`. The sums of the blocks and then those of the chunks are added in order. So the bits of a token
depend neither on the number of threads nor on the tokens beside it.

Tokens that share a block read its rows from the memory once: the first one that needs a row brings it into the cache.
Where most tokens need most rows, tiles of rows and tokens are computed; else each token takes a list of its own.

Shape letters: F neurons of the layer (with experts, of one expert) in stored order, of which [low, high) are computed;
D model width, T tokens, N of them that are computed here, K places for the neurons of a chunk, P sums, C chunks. A
layer's row w of the weight table holds addresses (see `weight_table`).

`threads` is None for the calling thread alone: numba then compiles one of two branches, not both.
"""

from typing import NamedTuple

import numpy as np
from numba import carray, prange

from pi_runtime.artifact.footprint import BLOCK_SUM_FLOATS, CHUNKS, FEW_TOKENS, GROUP, STRIP, SUM_NEURONS, SUM_ROWS
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
from pi_runtime.kernels.ops.block_sums import add_block_rows
from pi_runtime.kernels.ops.linear import prepare_inputs
from pi_runtime.kernels.ops.neuron_selection import (
    Inputs,
    inputs_of,
    score,
    scores_of,
    selector_format,
    selects,
)
from pi_runtime.kernels.ops.row_products import AHEAD_NBYTES, row_products
from pi_runtime.kernels.ops.row_sums import row_sums

SLICES = 16
"""Parts of the columns that threads merge the chunks' sums in."""
STRIP_TOKENS = 16
"""Tokens of one task where there are many: so its sums stay in the first-level cache."""
BLOCK_NBYTES = 2**19
"""Bytes of one matrix in a block of neurons: a third of the second-level cache at most, and more than most tokens
need."""
FIRES, READ, KEPT = range(3)
"""What is counted for each token: neurons that fire (of all, if asked for), rows of `first` read, neurons kept."""


class Chunks(NamedTuple):
    """Addresses of what the chunks work with, and its sizes; see `Workspace`."""

    neurons: int
    tokens: int
    """Room for so many tokens."""
    list_CK: int
    count_C: int
    h_CTK: int
    up_CTK: int
    scored_T: int
    asking_T: int
    tally_CT3: int
    sums_CTP: int
    scratch_CX: int


@public
def chunks_of(cfg: KernelConfig, ws: Workspace) -> Chunks:
    """The chunks' memory in a workspace, valid as long as that is."""
    return Chunks(
        cfg.d_ff,
        ws.x_TD.shape[0],
        address_of(ws.list_CK),
        address_of(ws.count_C),
        address_of(ws.h_CTK),
        address_of(ws.up_CTK),
        address_of(ws.scored_T),
        address_of(ws.asking_T),
        address_of(ws.tally_CT3),
        address_of(ws.sums_CTP),
        address_of(ws.scratch_CX),
    )


@device
def chunk_places(neurons: int) -> int:
    """Places for the neurons of one chunk: `footprint.chunk_places`, for kernels."""
    groups = (neurons + GROUP - 1) // GROUP
    return (groups + CHUNKS - 1) // CHUNKS * GROUP


@device
def list_places(neurons: int) -> int:
    """Places for the lists of a chunk: `footprint.list_places`, for kernels."""
    return FEW_TOKENS * chunk_places(neurons) + 2 * SUM_NEURONS + SUM_ROWS


@device
def ffn_floats(neurons: int) -> int:
    """4-byte numbers that a chunk works in: `footprint.ffn_floats`, for kernels."""
    blocks = chunk_places(neurons) // GROUP
    return 6 * list_places(neurons) + 4 * blocks * (FEW_TOKENS + 1) + 6 + BLOCK_SUM_FLOATS


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
def _up_of(m: Chunks, chunk: int, tokens: int) -> Floats:
    """The chunk's products with the up rows for each place, of a few tokens."""
    width = chunk_places(m.neurons) + SUM_ROWS
    return carray(pointer_of(m.up_CTK + 4 * chunk * min(m.tokens, FEW_TOKENS) * width), (tokens, width), np.float32)


@device
def tally_of(m: Chunks, chunk: int, tokens: int) -> Ints:
    """What the chunk counts for each token."""
    return carray(pointer_of(m.tally_CT3 + 8 * chunk * m.tokens * 3), (tokens, 3), np.int64)


@device
def _turn(group: int) -> int:
    """The chunk that a group of a round goes to, and the group of a round that a chunk gets: its five bits reversed.

    Neurons are stored by how often they fire. So neighbouring chunks, which one thread takes, get as many as others.
    """
    found = 0
    for bit in range(5):
        found |= (group >> bit & 1) << (4 - bit)
    return found


@device
def _list_range(chunk: int, low: int, high: int, list_K: Ints) -> int:
    """List the chunk's neurons of [low, high); returns how many."""
    count, first = 0, low // GROUP
    group = first + (_turn(chunk) - first) % CHUNKS
    while group * GROUP < high:
        for i in range(max(low, group * GROUP), min(high, (group + 1) * GROUP)):
            list_K[count] = i
            count += 1
        group += CHUNKS
    return count


@device
def _block_neurons(cfg: KernelConfig, w: Ints) -> int:
    """Neurons of a block of all chunks together: neuron i belongs to block i / this."""
    if is_quantised(cfg.ffn_format):
        return CHUNKS * SUM_NEURONS
    places = BLOCK_NBYTES // _first(cfg, w).stride // GROUP * GROUP
    return CHUNKS * max(GROUP, min(SUM_NEURONS, places))


@device
def _block_end(neurons: int, list_K: Ints, begin: int, count: int) -> int:
    """The place behind the block that the neuron at place `begin` of a list belongs to."""
    behind, end = (list_K[begin] // neurons + 1) * neurons, begin + 1
    while end < count and list_K[end] < behind:
        end += 1
    return end


class _Lists(NamedTuple):
    """The lists of a few tokens, each of its own neurons of a block, one after the other; in memory of the chunk.

    They go by block and token: the n-th token of block u has number u · `FEW_TOKENS` + n.
    """

    list_K: Ints
    place_K: Ints
    """The neurons' places in the list of the chunk."""
    h_K: Floats
    product_K: Floats
    start_U: Ints
    count_U: Ints
    block_U: Ints
    """Where each block begins in the chunk's list."""
    tiled_U: Ints
    """Whether a block's factors stand in `h_CTK` for every place."""
    size_2: Ints
    """How many blocks there are, and how long the lists are together."""
    sums: int
    """The address of what integer sums work in."""


@device
def _lists_of(m: Chunks, chunk: int) -> _Lists:
    places, blocks = list_places(m.neurons), chunk_places(m.neurons) // GROUP
    at = m.scratch_CX + 4 * ffn_floats(m.neurons) * chunk
    numbers = at + 24 * places
    return _Lists(
        carray(pointer_of(at), (places,), np.int64),
        carray(pointer_of(at + 8 * places), (places,), np.int64),
        carray(pointer_of(at + 16 * places), (places,), np.float32),
        carray(pointer_of(at + 20 * places), (places,), np.float32),
        carray(pointer_of(numbers), (blocks * FEW_TOKENS,), np.int64),
        carray(pointer_of(numbers + 8 * blocks * FEW_TOKENS), (blocks * FEW_TOKENS,), np.int64),
        carray(pointer_of(numbers + 16 * blocks * FEW_TOKENS), (blocks + 1,), np.int64),
        carray(pointer_of(numbers + 16 * blocks * FEW_TOKENS + 8 * (blocks + 1)), (blocks,), np.int64),
        carray(pointer_of(numbers + 16 * blocks * (FEW_TOKENS + 1) + 8), (2,), np.int64),
        numbers + 16 * blocks * (FEW_TOKENS + 1) + 24,
    )


@device
def _products(
    cfg: KernelConfig, rows: MatrixView, bias: int, inputs: int, token_N: Ints, list_K: Ints, begin: int, end: int,
    y_NK: Floats,
) -> None:  # fmt: skip
    """y ← rows · x + bias for the places [begin, end) of a list, for N tokens."""
    tokens, width = y_NK.shape
    listed, to, count = address_of(list_K) + 8 * begin, address_of(y_NK) + 4 * begin, end - begin
    vectors = inputs, input_stride(cfg.d_model), address_of(token_N), tokens
    row_products(rows, 0, listed, count, list_K.shape[0] - begin, *vectors, to, 4 * width)
    if bias != 0:
        bias_F = vector(bias, cfg.d_ff)
        for n in range(tokens):
            for k in range(begin, end):
                y_NK[n, k] += bias_F[list_K[k]]


@device
def _list_products(
    cfg: KernelConfig, rows: MatrixView, bias: int, inputs: int, token_N: Ints, own: _Lists, block: int, known: int
) -> None:
    """products ← rows · x + bias for a block's lists; with the last rows of one list those that follow are fetched, up
    to place `known` of the lists."""
    listed, to, stride = address_of(own.list_K), address_of(own.product_K), input_stride(cfg.d_model)
    bias_F = vector(bias, cfg.d_ff if bias != 0 else 0)
    for n in range(token_N.shape[0]):
        start, count = own.start_U[block * FEW_TOKENS + n], own.count_U[block * FEW_TOKENS + n]
        x_at = inputs + token_N[n] * stride
        row_products(rows, 0, listed + 8 * start, count, known - start, x_at, stride, 0, 1, to + 4 * start, 0)
        if bias != 0:
            for k in range(start, start + count):
                own.product_K[k] += bias_F[own.list_K[k]]


@device
def _first(cfg: KernelConfig, w: Ints) -> MatrixView:
    return matrix(cfg.ffn_format, w[weight_table.FIRST], w[weight_table.FIRST_SCALES], cfg.d_model)


@device
def _rest(cfg: KernelConfig, w: Ints, part: int) -> MatrixView:
    """The rows of `up` (part 0 of 2) or of `down` (the last part)."""
    rest = matrix(cfg.ffn_format, w[weight_table.REST], w[weight_table.REST_SCALES], cfg.d_model)
    return strided_rows(rest, cfg.rows_per_neuron, part)


@device
def scored_of(m: Chunks, tokens: int) -> Ints:
    """Which of the scores are a token's; −1 where it has none, and reads every neuron."""
    return carray(pointer_of(m.scored_T), (tokens,), np.int64)


@loop_body
def _first_chunk(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, low: int, high: int, chunk: int
) -> None:
    """List what fires in one chunk for a few tokens."""
    named, own, count = _begin_chunk(m, low, high, token_N, chunk), _lists_of(m, chunk), counts_of(m)[chunk]
    list_K, begin, block, neurons = list_of(m, chunk)[:count], 0, 0, _block_neurons(cfg, w)
    own.size_2[1] = 0
    while begin < count:
        own.block_U[block], end = begin, _block_end(neurons, list_K, begin, count)
        _first_block(cfg, w, m, x, token_N, select_N, scored_of(m, token_N.shape[0]), high, chunk, block, end, 0, named)
        begin, block = end, block + 1
    own.block_U[block], own.size_2[0] = count, block


@loop_body
def _rest_chunk(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, route_weight_N: Floats, chunk: int
) -> None:
    """The sums of one chunk for a few tokens, of what is listed."""
    own, tokens = _lists_of(m, chunk), token_N.shape[0]
    known = own.size_2[1]
    if chunk + 1 < CHUNKS:  # what this thread reads next is fetched with the last rows of this chunk
        after = _lists_of(m, chunk + 1)
        for k in range(min(after.size_2[1], SUM_NEURONS)):
            own.list_K[known + k] = after.list_K[k]
        known += min(after.size_2[1], SUM_NEURONS)
    sums_NP = _sums_of(cfg, m, chunk, tokens)
    sums_NP[:] = np.float32(0)
    for block in range(own.size_2[0]):
        _rest_block(cfg, w, m, x, token_N, route_weight_N, chunk, block, 0, known, sums_NP)


@loop_body
def _fire_chunk(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, route_weight_N: Floats, low: int,
    high: int, chunk: int,
) -> None:  # fmt: skip
    """One chunk up to its factors for many tokens, a few at a time."""
    tokens, list_K, own = token_N.shape[0], list_of(m, chunk), _lists_of(m, chunk)
    named, none_0P = _begin_chunk(m, low, high, token_N, chunk), _sums_of(cfg, m, chunk, 0)
    begin, count, neurons, scored_N = 0, counts_of(m)[chunk], _block_neurons(cfg, w), scored_of(m, tokens)
    while begin < count:
        end = _block_end(neurons, list_K, begin, count)
        for first in range(0, tokens, FEW_TOKENS):
            some = slice(first, min(tokens, first + FEW_TOKENS))
            own.size_2[1], own.block_U[0], own.block_U[1] = 0, begin, end
            _first_block(cfg, w, m, x, token_N[some], select_N[some], scored_N[some], 0, chunk, 0, end, first, named)
            _rest_block(cfg, w, m, x, token_N[some], route_weight_N[some], chunk, 0, first, own.size_2[1], none_0P)
        begin = end


@device
def _begin_chunk(m: Chunks, low: int, high: int, token_N: Ints, chunk: int) -> bool:
    """List the chunk's neurons; returns whether a selector names some of them."""
    tokens, named = token_N.shape[0], False
    counts_of(m)[chunk] = _list_range(chunk, low, high, list_of(m, chunk))
    tally_of(m, chunk, tokens)[:] = 0
    for n in range(tokens):
        named |= scored_of(m, tokens)[n] >= 0
    return named


@device
def _first_block(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, scored_N: Ints, high: int,
    chunk: int, block: int, end: int, first: int, named: bool,
) -> None:  # fmt: skip
    """List what fires for a few tokens (from token `first` on) in a block that ends at place `end`."""
    tokens, own = token_N.shape[0], _lists_of(m, chunk)
    begin = own.block_U[block]
    listed = named and _list_named(cfg, m, x, scored_N, chunk, block, end)
    own.tiled_U[block] = not listed
    h_NK, list_K = _numbers_of(m.h_CTK, m, chunk, first + tokens)[first:], list_of(m, chunk)[: counts_of(m)[chunk]]
    tally_N3, fire = tally_of(m, chunk, first + tokens)[first:], own.size_2[1]
    if listed:
        last = block * FEW_TOKENS + tokens - 1
        known = _list_ahead(cfg, w, m, x, high, chunk, end, own.start_U[last] + own.count_U[last])
        _list_products(cfg, _first(cfg, w), w[weight_table.FIRST_BIAS], x.inputs, token_N, own, block, known)
    else:
        _products(cfg, _first(cfg, w), w[weight_table.FIRST_BIAS], x.inputs, token_N, list_K, begin, end, h_NK)
    for n in range(tokens):
        limit, u = limit_of(w) if select_N[n] != 0 else np.float32(cfg.threshold), block * FEW_TOKENS + n
        start, read = fire, end - begin
        if listed:
            read = own.count_U[u]
            for k in range(own.start_U[u], own.start_U[u] + read):
                h = activate(cfg.activation, limit, own.product_K[k])
                own.list_K[fire], own.place_K[fire], own.h_K[fire] = own.list_K[k], own.place_K[k], h
                fire += h != 0
        else:
            if scored_N[n] >= 0:
                read = _drop_unnamed(scores_of(cfg, x, scored_N[n] + 1)[scored_N[n]], list_K, begin, end, h_NK[n])
            for k in range(begin, end):
                h = activate(cfg.activation, limit, h_NK[n, k])
                own.list_K[fire], own.place_K[fire], own.h_K[fire], h_NK[n, k] = list_K[k], k, h, h
                fire += h != 0
        own.start_U[u], own.count_U[u] = start, fire - start
        tally_N3[n, READ] += read
        tally_N3[n, KEPT] += read if w[weight_table.DENSE] != 0 else fire - start
    if w[weight_table.DENSE] == 0 and 2 * (fire - own.size_2[1]) <= tokens * (end - begin):
        own.tiled_U[block] = 0
    own.size_2[1] = fire


@device
def _list_named(cfg: KernelConfig, m: Chunks, x: Inputs, scored_N: Ints, chunk: int, block: int, end: int) -> bool:
    """List the neurons of a block that the tokens' selectors name; returns False where these are most of them."""
    tokens, list_K, own = scored_N.shape[0], list_of(m, chunk), _lists_of(m, chunk)
    begin, total = own.block_U[block], own.size_2[1]
    for n in range(tokens):
        u, everything = block * FEW_TOKENS + n, scored_N[n] < 0
        score_F = scores_of(cfg, x, max(0, scored_N[n]) + 1)[max(0, scored_N[n])]
        own.start_U[u] = total
        for k in range(begin, end):
            own.list_K[total], own.place_K[total] = list_K[k], k
            total += everything or score_F[list_K[k]] > 0
        own.count_U[u] = total - own.start_U[u]
    return tokens == 1 or 2 * (total - own.size_2[1]) <= tokens * (end - begin)


@device
def _drop_unnamed(score_F: Floats, list_K: Ints, begin: int, end: int, h_K: Floats) -> int:
    """h ← 0 at the places [begin, end) whose neuron is not named; returns how many are."""
    named = 0
    for k in range(begin, end):
        h_K[k] = h_K[k] if score_F[list_K[k]] > 0 else np.float32(0)
        named += score_F[list_K[k]] > 0
    return named


@device
def _list_ahead(cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, high: int, chunk: int, end: int, total: int) -> int:
    """List the rows that will be read next behind the first `total` of a chunk's lists; returns how many it has then.

    They are those that the first token reads in the next block, or in the next chunk up to neuron `high`.
    """
    own, list_K, count = _lists_of(m, chunk), list_of(m, chunk), counts_of(m)[chunk]
    scored = max(0, scored_of(m, 1)[0])
    score_F, most = scores_of(cfg, x, scored + 1)[scored], total + AHEAD_NBYTES // _first(cfg, w).stride
    for k in range(end, count):
        if total < most and score_F[list_K[k]] > 0:
            own.list_K[total] = list_K[k]
            total += 1
    group = list_K[0] // GROUP // CHUNKS * CHUNKS + _turn(chunk + 1)
    while end == count and chunk + 1 < CHUNKS and total < most and group * GROUP < high:
        for i in range(group * GROUP, min(high, (group + 1) * GROUP)):
            if total < most and score_F[i] > 0:
                own.list_K[total] = i
                total += 1
        group += CHUNKS
    return total


@device
def _rest_block(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, route_weight_N: Floats, chunk: int, block: int,
    first: int, known: int, sums_NP: Floats,
) -> None:  # fmt: skip
    """Add a block's sums for a few tokens (from token `first` on); where `sums_NP` has none, write their factors."""
    tokens, own, relu_up = token_N.shape[0], _lists_of(m, chunk), cfg.activation == DRELU
    begin, end, list_K = own.block_U[block], own.block_U[block + 1], list_of(m, chunk)[: counts_of(m)[chunk]]
    h_NK = _numbers_of(m.h_CTK, m, chunk, first + tokens)[first:]
    if own.tiled_U[block]:
        if cfg.rows_per_neuron == 2:
            up_NK = _up_of(m, chunk, tokens)
            _products(cfg, _rest(cfg, w, 0), w[weight_table.UP_BIAS], x.inputs, token_N, list_K, begin, end, up_NK)
            _multiply_up(relu_up, begin, end, up_NK, h_NK)
        for n in range(tokens):
            for k in range(begin, end):
                h_NK[n, k] *= route_weight_N[n]
        if sums_NP.shape[0] > 0:
            _add_tile(_down(cfg, w), own, list_K, begin, end, h_NK, sums_NP)
        return
    if cfg.rows_per_neuron == 2:
        _list_products(cfg, _rest(cfg, w, 0), w[weight_table.UP_BIAS], x.inputs, token_N, own, block, known)
    for n in range(tokens):
        u = block * FEW_TOKENS + n
        for k in range(own.start_U[u], own.start_U[u] + own.count_U[u]):
            if cfg.rows_per_neuron == 2:
                own.h_K[k] *= relu(own.product_K[k]) if relu_up else own.product_K[k]
            own.h_K[k] *= route_weight_N[n]
        if sums_NP.shape[0] > 0:
            _add_list(_down(cfg, w), own, own.start_U[u], own.count_U[u], relu_up, known, sums_NP[n])
        else:
            h_NK[n, begin:end] = np.float32(0)
            for k in range(own.start_U[u], own.start_U[u] + own.count_U[u]):
                h_NK[n, own.place_K[k]] = own.h_K[k]


@device
def _add_list(down: MatrixView, own: _Lists, start: int, count: int, gaps: bool, known: int, y_P: Floats) -> None:
    """y ← y + the sum of the `count` rows listed from `start` on; with them those that follow in the lists are fetched.

    `gaps`: factors may be 0, and their rows are not read.
    """
    if gaps:
        last = start
        for k in range(start, start + count):
            own.list_K[last], own.h_K[last] = own.list_K[k], own.h_K[k]
            last += own.h_K[k] != 0
        count = last - start
    listed, y_at, following = address_of(own.list_K) + 8 * start, address_of(y_P), count if gaps else known - start
    if is_quantised(down.fmt):
        add_block_rows(down, listed, count, following, address_of(own.h_K) + 4 * start, y_P, own.sums)
    else:
        h_K = own.product_K[own.product_K.shape[0] - SUM_NEURONS - SUM_ROWS :][: count + SUM_ROWS]
        h_K[:count], h_K[count:] = own.h_K[start : start + count], np.float32(0)
        row_sums(down, 0, listed, count, following, address_of(h_K), 0, 1, y_at, 0)


@device
def _add_tile(down: MatrixView, own: _Lists, list_K: Ints, begin: int, end: int, h_NK: Floats, y_NP: Floats) -> None:
    """y ← y + the sums of the rows at the places [begin, end) of a list, times their factors, for a few tokens."""
    tokens, count = y_NP.shape[0], end - begin
    if is_quantised(down.fmt) or count % SUM_ROWS != 0 or not _mostly(h_NK, tokens, begin, end):
        start = own.list_K.shape[0] - SUM_NEURONS - SUM_ROWS  # behind the tokens' lists
        for n in range(tokens):
            last = start
            for k in range(begin, end):
                own.list_K[last], own.h_K[last] = list_K[k], h_NK[n, k]
                last += h_NK[n, k] != 0
            _add_list(down, own, start, last - start, False, last, y_NP[n])
    else:
        listed, h_at = address_of(list_K) + 8 * begin, address_of(h_NK) + 4 * begin
        to = tokens, address_of(y_NP), 4 * y_NP.shape[1]
        row_sums(down, 0, listed, count, count, h_at, 4 * h_NK.shape[1], *to)


@device
def _mostly(h_NK: Floats, tokens: int, begin: int, end: int) -> bool:
    """Whether most factors are not 0."""
    found = 0
    for n in range(tokens):
        for k in range(begin, end):
            found += h_NK[n, k] != 0
    return 2 * found > tokens * (end - begin)


@loop_body
def _count_chunk(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, route_weight_N: Floats, low: int,
    high: int, chunk: int,
) -> None:  # fmt: skip
    """The same with every neuron computed first, so that those that fire are counted, read or not."""
    tokens, list_K = token_N.shape[0], list_of(m, chunk)
    h_NK, up_NK = _numbers_of(m.h_CTK, m, chunk, tokens), _numbers_of(m.up_CTK, m, chunk, tokens)
    tally_N3, count, scored_N = tally_of(m, chunk, tokens), _list_range(chunk, low, high, list_K), scored_of(m, tokens)
    counts_of(m)[chunk] = count
    _products(cfg, _first(cfg, w), w[weight_table.FIRST_BIAS], x.inputs, token_N, list_K, 0, count, h_NK)
    tally_N3[:] = 0
    if cfg.rows_per_neuron == 2:
        _products(cfg, _rest(cfg, w, 0), w[weight_table.UP_BIAS], x.inputs, token_N, list_K, 0, count, up_NK)
    relu_up = cfg.activation == DRELU
    for n in range(tokens):
        limit = limit_of(w) if select_N[n] != 0 else np.float32(cfg.threshold)
        score_F = scores_of(cfg, x, scored_N[n] + 1)[max(0, scored_N[n])]
        for k in range(count):
            read = scored_N[n] < 0 or score_F[list_K[k]] > 0
            h = activate(cfg.activation, np.float32(cfg.threshold), h_NK[n, k])
            kept = read and abs(h) > limit
            if cfg.rows_per_neuron == 2 and h != 0:
                h *= relu(up_NK[n, k]) if relu_up else up_NK[n, k]
            tally_N3[n, FIRES] += h != 0
            tally_N3[n, READ] += read
            h = h if kept else np.float32(0)
            tally_N3[n, KEPT] += h != 0
            h_NK[n, k] = h * route_weight_N[n]
    if tokens <= FEW_TOKENS:
        sums_NP = _sums_of(cfg, m, chunk, tokens)
        sums_NP[:] = np.float32(0)
        begin, neurons = 0, _block_neurons(cfg, w)
        while begin < count:
            end = _block_end(neurons, list_K, begin, count)
            _add_tile(_down(cfg, w), _lists_of(m, chunk), list_K, begin, end, h_NK, sums_NP)
            begin = end


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


@loop_body
def _merge_slice(cfg: KernelConfig, m: Chunks, token_N: Ints, part: int, y_TD: Floats) -> None:
    """y ← y + the sums of the chunks, for one slice of the columns.

    Each sum lies in the cache of the thread that made it: to fetch them all, one thread would need as long as a few
    neurons take.
    """
    low, high = cfg.d_model * part // SLICES, cfg.d_model * (part + 1) // SLICES
    for n in range(token_N.shape[0]):
        total_P = _sums_of(cfg, m, 0, n + 1)[n, low:high]
        for chunk in range(1, CHUNKS):
            sums_P = _sums_of(cfg, m, chunk, n + 1)[n, low:high]
            for j in range(high - low):
                total_P[j] += sums_P[j]
        y_D = y_TD[token_N[n], low:high]
        for j in range(high - low):
            y_D[j] += total_P[j]


@loop_body
def _sum_tiles_of(cfg: KernelConfig, w: Ints, m: Chunks, token_N: Ints, part: int, y_TD: Floats) -> None:
    """y ← y + the sums of all chunks, for every `CHUNKS`-th tile of some columns of some tokens."""
    strips, blocks = (cfg.d_model + STRIP - 1) // STRIP, (token_N.shape[0] + STRIP_TOKENS - 1) // STRIP_TOKENS
    total_NP = np.empty((STRIP_TOKENS, STRIP), np.float32)
    sums_NP = np.empty((STRIP_TOKENS, STRIP), np.float32)
    neurons, own = _block_neurons(cfg, w), _lists_of(m, part)
    for tile in range(part, strips * blocks, CHUNKS):
        low, first = tile % strips * STRIP, tile // strips * STRIP_TOKENS
        columns, tokens = min(STRIP, cfg.d_model - low), min(STRIP_TOKENS, token_N.shape[0] - first)
        down = columns_from(_down(cfg, w), low, columns)
        total_NP[:] = np.float32(0)
        for chunk in range(CHUNKS):
            sums_NP[:] = np.float32(0)
            list_K, count = list_of(m, chunk), counts_of(m)[chunk]
            h_NK, begin = _numbers_of(m.h_CTK, m, chunk, first + tokens)[first:], 0
            while begin < count:
                end = _block_end(neurons, list_K, begin, count)
                _add_tile(down, own, list_K, begin, end, h_NK, sums_NP[:tokens])
                begin = end
            for n in range(tokens):
                for j in range(columns):
                    total_NP[n, j] += sums_NP[n, j]
        for n in range(tokens):
            y_D = y_TD[token_N[first + n], low : low + columns]
            for j in range(columns):
                y_D[j] += total_NP[n, j]


def _fire_few(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, route_weight_N: Floats, low: int,
    high: int,
) -> None:  # fmt: skip
    _first_chunk()
    _rest_chunk()
    for chunk in prange(CHUNKS):
        _first_chunk(cfg, w, m, x, token_N, select_N, low, high, chunk)
    for chunk in prange(CHUNKS):
        _rest_chunk(cfg, w, m, x, token_N, route_weight_N, chunk)


@parallel
def _fire_many(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, route_weight_N: Floats, low: int,
    high: int,
) -> None:  # fmt: skip
    _fire_chunk()
    for chunk in prange(CHUNKS):
        _fire_chunk(cfg, w, m, x, token_N, select_N, route_weight_N, low, high, chunk)


@parallel
def _count(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, route_weight_N: Floats, low: int,
    high: int,
) -> None:  # fmt: skip
    _count_chunk()
    for chunk in prange(CHUNKS):
        _count_chunk(cfg, w, m, x, token_N, select_N, route_weight_N, low, high, chunk)


def _merge(cfg: KernelConfig, m: Chunks, token_N: Ints, y_TD: Floats) -> None:
    _merge_slice()
    for part in prange(SLICES):
        _merge_slice(cfg, m, token_N, part, y_TD)


@parallel
def _sum_tiles(cfg: KernelConfig, w: Ints, m: Chunks, token_N: Ints, y_TD: Floats) -> None:
    _sum_tiles_of()
    for part in prange(CHUNKS):
        _sum_tiles_of(cfg, w, m, token_N, part, y_TD)


_parallel_fire, _parallel_merge = parallel(_fire_few), parallel(_merge)
_serial_fire, _serial_merge = device(_fire_few), device(_merge)


@device
def _scored(w: Ints, token_N: Ints, select_N: Ints, given: bool, m: Chunks) -> int:
    """Number the tokens whose neurons are scored, and list them; returns how many."""
    tokens, asked = token_N.shape[0], 0
    scored_N, asking_N = scored_of(m, tokens), carray(pointer_of(m.asking_T), (tokens,), np.int64)
    for n in range(tokens):
        asks = (selects(w) or given) and select_N[n] != 0
        scored_N[n] = asked if asks else -1
        if asks:
            asking_N[asked] = token_N[n]
            asked += 1
    return asked


@device
def neurons(
    cfg: KernelConfig, w: Ints, x_TD: Floats, token_N: Ints, select_N: Ints, route_weight_N: Floats, low: int,
    high: int, given: bool, count_all: bool, threads: bool | None, m: Chunks, x: Inputs, tally_T3: Ints, y_TD: Floats,
) -> None:  # fmt: skip
    """y ← y + the neurons of one expert for its tokens, whose inputs are prepared; `tally_T3` ← tally + their counts.

    `given`: the scores of the tokens that select are there, in the order of these tokens.
    """
    tokens = token_N.shape[0]
    scored = _scored(w, token_N, select_N, given, m)
    if scored > 0 and not given:
        score(cfg, w, x_TD, carray(pointer_of(m.asking_T), (scored,), np.int64), low, high, threads, x)
    if threads is None:
        _serial_fire(cfg, w, m, x, token_N, select_N, route_weight_N, low, high)
        _serial_merge(cfg, m, token_N, y_TD)
    else:
        if count_all:
            _count(cfg, w, m, x, token_N, select_N, route_weight_N, low, high)
        elif tokens <= FEW_TOKENS:
            _parallel_fire(cfg, w, m, x, token_N, select_N, route_weight_N, low, high)
        else:
            _fire_many(cfg, w, m, x, token_N, select_N, route_weight_N, low, high)
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
