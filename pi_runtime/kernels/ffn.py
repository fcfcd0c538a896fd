"""The feed-forward network over a range of neurons, for one token or many, dense or with what a rung skips.

    y_t ← y_t + route_weight_t Σ_i a(first_i · x_t) [up_i · x_t] down_i          i in the neurons that t's rung keeps

Neurons are dealt to `CHUNKS` chunks in groups of `GROUP`: neuron i belongs to chunk (i / GROUP) mod CHUNKS. A chunk
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

from pi_runtime.artifact.footprint import CHUNKS, FEW_TOKENS, FFN_FLOATS, GROUP, STRIP, SUM_NEURONS, SUM_ROWS
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
    row_stride,
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
from pi_runtime.kernels.ops.row_products import fetch_rows, row_products_beside
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
    candidates_F: int
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
        address_of(ws.candidates_F),
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


class _Own(NamedTuple):
    """The lists of a few tokens, each of its own neurons of a block, one after the other; in memory of the chunk."""

    list_K: Ints
    h_K: Floats
    product_K: Floats
    start_N: Ints
    """Where each token's list begins, and where the last ends."""
    count_N: Ints
    sums: int
    """The address of what integer sums work in."""


@device
def _own_of(m: Chunks, chunk: int) -> _Own:
    at, places = m.scratch_CX + 4 * FFN_FLOATS * chunk, FEW_TOKENS * SUM_NEURONS + SUM_ROWS
    list_K = carray(pointer_of(at), (places,), np.int64)
    h_K = carray(pointer_of(at + 8 * places), (places,), np.float32)
    product_K = carray(pointer_of(at + 12 * places), (places,), np.float32)
    start_N = carray(pointer_of(at + 16 * places), (FEW_TOKENS + 1,), np.int64)
    count_N = carray(pointer_of(at + 16 * places + 8 * (FEW_TOKENS + 1)), (FEW_TOKENS + 1,), np.int64)
    return _Own(list_K, h_K, product_K, start_N, count_N, at + 16 * places + 16 * (FEW_TOKENS + 1))


@device
def _gather(begin: int, end: int, list_K: Ints, h_NK: Floats, own: _Own) -> int:
    """List for each of a few tokens the places [begin, end) at which h is not 0, with h; returns how many in all."""
    count = 0
    for n in range(h_NK.shape[0]):
        own.start_N[n] = count
        for k in range(begin, end):
            own.list_K[count], own.h_K[count] = list_K[k], h_NK[n, k]
            count += h_NK[n, k] != 0
        own.count_N[n] = count - own.start_N[n]
    own.start_N[h_NK.shape[0]] = count
    return count


@device
def _products(
    cfg: KernelConfig, rows: MatrixView, bias: int, inputs: int, token_N: Ints, list_K: Ints, begin: int, end: int,
    y_NK: Floats,
) -> None:  # fmt: skip
    """y ← rows · x + bias for the places [begin, end) of a list, for N tokens."""
    tokens, width = y_NK.shape
    listed, to, count = address_of(list_K) + 8 * begin, address_of(y_NK) + 4 * begin, end - begin
    vectors = inputs, input_stride(cfg.d_model), address_of(token_N), tokens
    # Of two rows of a neuron, the second is fetched with the first.
    beside = rows.stride - row_stride(rows.fmt, rows.columns)
    row_products_beside(rows, listed, count, count, *vectors, to, 4 * width, beside)
    if bias != 0:
        bias_F = vector(bias, cfg.d_ff)
        for n in range(tokens):
            for k in range(begin, end):
                y_NK[n, k] += bias_F[list_K[k]]


@device
def _own_products(
    cfg: KernelConfig, rows: MatrixView, bias: int, inputs: int, token_N: Ints, own: _Own, total: int
) -> None:
    """products ← rows · x + bias for the lists of a few tokens; with the last rows the next token's are fetched."""
    listed, to, stride = address_of(own.list_K), address_of(own.product_K), input_stride(cfg.d_model)
    beside = rows.stride - row_stride(rows.fmt, rows.columns)
    fetch_rows(rows, listed, total, rows.stride)
    for n in range(token_N.shape[0]):
        start = own.start_N[n]
        row_products_beside(
            rows, listed + 8 * start, own.count_N[n], total - start, inputs + token_N[n] * stride, stride, 0, 1,
            to + 4 * start, 0, beside,
        )  # fmt: skip
    if bias != 0:
        bias_F = vector(bias, cfg.d_ff)
        for k in range(total):
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
def _fire_chunk(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, route_weight_N: Floats, low: int,
    high: int, given: bool, chunk: int,
) -> None:  # fmt: skip
    """One chunk up to its factors, and for few tokens up to its sums. `given`: its list is there."""
    tokens, list_K = token_N.shape[0], list_of(m, chunk)
    h_NK = _numbers_of(m.h_CTK, m, chunk, tokens)
    count, named = counts_of(m)[chunk] if given else _list_range(chunk, low, high, list_K), False
    counts_of(m)[chunk] = count
    for n in range(tokens):
        named |= scored_of(m, tokens)[n] >= 0
    tally_of(m, chunk, tokens)[:] = 0
    few = tokens <= FEW_TOKENS
    sums_NP = _sums_of(cfg, m, chunk, tokens if few else 0)
    sums_NP[:] = np.float32(0)
    begin, neurons = 0, _block_neurons(cfg, w)
    while begin < count:
        end = _block_end(neurons, list_K, begin, count)
        fire = _first_block(cfg, w, m, x, token_N, select_N, chunk, begin, end, named)
        if w[weight_table.DENSE] != 0 or 2 * fire > tokens * (end - begin):
            _rest_tile(cfg, w, m, x, token_N, route_weight_N, chunk, begin, end)
            if few:
                _add_tile(_down(cfg, w), _own_of(m, chunk), list_K, begin, end, h_NK, sums_NP)
        else:
            for n in range(0, tokens, FEW_TOKENS):
                t, weight_N = token_N[n : n + FEW_TOKENS], route_weight_N[n : n + FEW_TOKENS]
                _rest_lists(cfg, w, m, x, t, weight_N, chunk, begin, end, h_NK[n : n + FEW_TOKENS], sums_NP)
        begin = end


@device
def _first_block(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, chunk: int, begin: int, end: int,
    named: bool,
) -> int:  # fmt: skip
    """h ← the activation of the neurons at the places [begin, end), 0 where a token skips one; returns how many fire.

    `named`: only those that a token's selector names.
    """
    tokens, list_K = token_N.shape[0], list_of(m, chunk)
    h_NK, tally_N3, total = _numbers_of(m.h_CTK, m, chunk, tokens), tally_of(m, chunk, tokens), 0
    wanted = tokens * (end - begin)
    if named:
        wanted = _name(cfg, m, x, begin, end, list_K, h_NK, tally_N3)
    else:
        tally_N3[:, READ] += end - begin
    if named and (2 * wanted < tokens * (end - begin) or tokens == 1):
        for n in range(0, tokens, FEW_TOKENS):
            few = token_N[n : n + FEW_TOKENS]
            _first_lists(cfg, w, m, x, few, chunk, begin, end, h_NK[n : n + FEW_TOKENS])
    else:
        up_NK = _numbers_of(m.up_CTK, m, chunk, tokens)
        _products(cfg, _first(cfg, w), w[weight_table.FIRST_BIAS], x.inputs, token_N, list_K, begin, end, up_NK)
        for n in range(tokens):
            for k in range(begin, end):
                h_NK[n, k] = up_NK[n, k] if not named or h_NK[n, k] != 0 else np.float32(0)
    for n in range(tokens):
        limit = limit_of(w) if select_N[n] != 0 else np.float32(cfg.threshold)
        fire = 0
        for k in range(begin, end):
            h = activate(cfg.activation, limit, h_NK[n, k])
            h_NK[n, k] = h
            fire += h != 0
        tally_N3[n, KEPT] += end - begin if w[weight_table.DENSE] != 0 else fire
        total += fire
    return total


@device
def _name(
    cfg: KernelConfig, m: Chunks, x: Inputs, begin: int, end: int, list_K: Ints, named_NK: Floats, tally_N3: Ints
) -> int:
    """named ← 1 where a token's selector names a neuron, or the token has none, else 0; counts what is read."""
    scored_N, total = scored_of(m, named_NK.shape[0]), 0
    for n in range(named_NK.shape[0]):
        if scored_N[n] < 0:
            named_NK[n, begin:end] = np.float32(1)
            tally_N3[n, READ] += end - begin
            total += end - begin
            continue
        read = 0
        score_F = scores_of(cfg, x, scored_N[n] + 1)[scored_N[n]]
        for k in range(begin, end):
            named = score_F[list_K[k]] > 0
            named_NK[n, k] = np.float32(named)
            read += named
        tally_N3[n, READ] += read
        total += read
    return total


@device
def _first_lists(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, chunk: int, begin: int, end: int, h_NK: Floats
) -> None:
    """h ← the products with `first` where h is not 0, for a few tokens."""
    own = _own_of(m, chunk)
    total = _gather(begin, end, list_of(m, chunk), h_NK, own)
    _own_products(cfg, _first(cfg, w), w[weight_table.FIRST_BIAS], x.inputs, token_N, own, total)
    done = 0
    for n in range(token_N.shape[0]):
        for k in range(begin, end):
            if h_NK[n, k] != 0:
                h_NK[n, k] = own.product_K[done]
                done += 1


@device
def _rest_tile(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, route_weight_N: Floats, chunk: int, begin: int,
    end: int,
) -> None:  # fmt: skip
    """h ← the factors of the rows of `down` at the places [begin, end): for most tokens of most rows."""
    tokens, list_K = token_N.shape[0], list_of(m, chunk)
    h_NK, up_NK = _numbers_of(m.h_CTK, m, chunk, tokens), _numbers_of(m.up_CTK, m, chunk, tokens)
    if cfg.rows_per_neuron == 2:
        _products(cfg, _rest(cfg, w, 0), w[weight_table.UP_BIAS], x.inputs, token_N, list_K, begin, end, up_NK)
        _multiply_up(cfg.activation == DRELU, begin, end, up_NK, h_NK)
    for n in range(tokens):
        for k in range(begin, end):
            h_NK[n, k] *= route_weight_N[n]


@device
def _rest_lists(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, route_weight_N: Floats, chunk: int, begin: int,
    end: int, h_NK: Floats, sums_NP: Floats,
) -> None:  # fmt: skip
    """The same for a few tokens, each with what fires for it; adds their sums, or writes their factors if there are
    none."""
    list_K, own, relu_up = list_of(m, chunk), _own_of(m, chunk), cfg.activation == DRELU
    total = _gather(begin, end, list_K, h_NK, own)
    if cfg.rows_per_neuron == 2:
        _own_products(cfg, _rest(cfg, w, 0), w[weight_table.UP_BIAS], x.inputs, token_N, own, total)
        for k in range(total):
            own.h_K[k] *= relu(own.product_K[k]) if relu_up else own.product_K[k]
    for n in range(token_N.shape[0]):
        for k in range(own.start_N[n], own.start_N[n] + own.count_N[n]):
            own.h_K[k] *= route_weight_N[n]
    if sums_NP.shape[0] > 0:
        _add_own(_down(cfg, w), own, sums_NP)
    else:
        done = 0
        for n in range(token_N.shape[0]):
            for k in range(begin, end):
                if h_NK[n, k] != 0:
                    h_NK[n, k] = own.h_K[done]
                    done += 1


@device
def _add_own(down: MatrixView, own: _Own, y_NP: Floats) -> None:
    """y ← y + the sums of a few tokens' own rows of a block."""
    for n in range(y_NP.shape[0]):
        start, count = own.start_N[n], 0
        for k in range(start, start + own.count_N[n]):  # those of drelu whose `up` is not positive go out
            own.list_K[start + count], own.h_K[start + count] = own.list_K[k], own.h_K[k]
            count += own.h_K[k] != 0
        if is_quantised(down.fmt):
            add_block_rows(down, own.list_K[start : start + count], own.h_K[start : start + count], y_NP[n], own.sums)
        else:
            h_K = own.product_K[: count + SUM_ROWS]
            h_K[:count], h_K[count:] = own.h_K[start : start + count], np.float32(0)
            listed, h_at, y_at = address_of(own.list_K) + 8 * start, address_of(h_K), address_of(y_NP[n])
            row_sums(down, 0, listed, count, count, h_at, 0, 1, y_at, 0)


@device
def _add_tile(down: MatrixView, own: _Own, list_K: Ints, begin: int, end: int, h_NK: Floats, y_NP: Floats) -> None:
    """y ← y + the sums of the rows at the places [begin, end) of a list, times their factors, for a few tokens."""
    tokens, count = y_NP.shape[0], end - begin
    if is_quantised(down.fmt) or count % SUM_ROWS != 0 or not _mostly(h_NK, tokens, begin, end):
        _gather(begin, end, list_K, h_NK[:tokens], own)
        _add_own(down, own, y_NP)
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
            _add_tile(_down(cfg, w), _own_of(m, chunk), list_K, begin, end, h_NK, sums_NP)
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
    neurons, own = _block_neurons(cfg, w), _own_of(m, part)
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
    _sum_tiles_of()
    for part in prange(CHUNKS):
        _sum_tiles_of(cfg, w, m, token_N, part, y_TD)


_parallel_fire, _parallel_merge = parallel(_fire), parallel(_merge)
_serial_fire, _serial_merge = device(_fire), device(_merge)


@device
def _scored(w: Ints, token_N: Ints, select_N: Ints, given: bool, m: Chunks) -> int:
    """Number the tokens whose neurons are scored, and list them; returns how many."""
    tokens, asked = token_N.shape[0], 0
    scored_N, asking_N = scored_of(m, tokens), carray(pointer_of(m.asking_T), (tokens,), np.int64)
    for n in range(tokens):
        asks = selects(w) and not given and select_N[n] != 0
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

    `given`: of the neurons [low, high), those on the chunks' lists.
    """
    tokens = token_N.shape[0]
    scored = _scored(w, token_N, select_N, given, m)
    if scored > 0:
        score(cfg, w, x_TD, carray(pointer_of(m.asking_T), (scored,), np.int64), low, high, threads, x)
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
