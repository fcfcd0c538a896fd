"""One block of a chunk's neurons for a few tokens: what fires, and the sum of what it adds.

`list_firing` computes the `first` rows and lists each token's own neurons that fire; `add_block` multiplies by `up` and
sums the rows of `down`. Where most tokens need most rows of the block, it is taken *whole*: products for every place,
and for the float formats sums too, in tiles of rows and tokens. Else each token takes its own list; the first one that
needs a row brings it into the cache. Either way a token's sum has the same bits: in order of its neurons for the float
formats, where a factor of 0 changes nothing, and rounded by its own neurons alone for block formats (see `block_sums`).

Shape letters: F neurons of the layer, N tokens, K places of the chunk's list or of the tokens' lists, D model width,
P padded columns.
"""

import numpy as np

from pi_runtime.artifact.footprint import CHUNKS, FEW_TOKENS, GROUP
from pi_runtime.kernels.codegen.intrinsics import input_nbytes
from pi_runtime.kernels.codegen.jit import device
from pi_runtime.kernels.data.matrix_view import (
    Floats,
    Ints,
    MatrixView,
    Vectors,
    address_of,
    listed_rows,
    vector,
)
from pi_runtime.kernels.data.weight_table import DRELU
from pi_runtime.kernels.ffn.down import add_list, add_whole, keep
from pi_runtime.kernels.ffn.memory import (
    END,
    KEPT,
    READ,
    Batch,
    Ffn,
    TokenLists,
    bit_reversed,
    down_rows,
    factors_of,
    first_rows,
    kept_of,
    list_of,
    lists_of,
    squares_of,
    tally_of,
    up_rows,
    ups_of,
    weights_of,
)
from pi_runtime.kernels.ffn.selection import scored_of, scores_of
from pi_runtime.kernels.ops.activations import activate, times_up
from pi_runtime.kernels.ops.row_products import AHEAD_NBYTES, row_products


@device
def limit_of(f: Ffn, e: Batch, n: int) -> np.float32:
    """Magnitudes of a token's activations up to here count as 0: the rung's limit, or the model's own."""
    return weights_of(e).limit if e.select_N[n] != 0 else np.float32(f.threshold)


@device
def factor(f: Ffn, h: np.float32, up: np.float32) -> np.float32:
    """a(first · x) times up · x, where the FFN is gated."""
    return times_up(f.activation, h, up) if f.gated else h


@device
def first_products(f: Ffn, e: Batch, list_K: Ints, begin: int, end: int, y_NK: Floats) -> None:
    """y ← first · x + bias for the places [begin, end) of a list."""
    _products(f, e, first_rows(f, e), weights_of(e).first_bias, list_K, begin, end, y_NK)


@device
def up_products(f: Ffn, e: Batch, list_K: Ints, begin: int, end: int, y_NK: Floats) -> None:
    """y ← up · x + bias for the places [begin, end) of a list."""
    _products(f, e, up_rows(f, e), weights_of(e).up_bias, list_K, begin, end, y_NK)


@device
def _products(f: Ffn, e: Batch, rows: MatrixView, bias: int, list_K: Ints, begin: int, end: int, y_NK: Floats) -> None:
    """y ← rows · x + bias at places of a list; the rows that follow in it are fetched ahead."""
    tokens, width = y_NK.shape
    listed = listed_rows(address_of(list_K) + 8 * begin, end - begin, list_K.shape[0] - begin)
    x = Vectors(f.inputs, input_nbytes(f.d_model), address_of(e.token_N), tokens)
    row_products(rows, listed, x, address_of(y_NK) + 4 * begin, 4 * width)
    if bias != 0:
        bias_F = vector(bias, f.d_ff)
        for n in range(tokens):
            for k in range(begin, end):
                y_NK[n, k] += bias_F[list_K[k]]


@device
def _list_products(f: Ffn, e: Batch, rows: MatrixView, bias: int, own: TokenLists, block: int, known: int) -> None:
    """products ← rows · x + bias for a block's lists. The rows that follow, up to place `known`, are fetched ahead."""
    stride, bias_F = input_nbytes(f.d_model), vector(bias, f.d_ff if bias != 0 else 0)
    for n in range(e.token_N.shape[0]):
        start, count = own.start_U[block * FEW_TOKENS + n], own.count_U[block * FEW_TOKENS + n]
        listed = listed_rows(address_of(own.list_K) + 8 * start, count, known - start)
        x = Vectors(f.inputs + e.token_N[n] * stride, stride, 0, 1)
        row_products(rows, listed, x, address_of(own.product_K) + 4 * start, 0)
        if bias != 0:
            for k in range(start, start + count):
                own.product_K[k] += bias_F[own.list_K[k]]


@device
def list_firing(f: Ffn, e: Batch, named: bool, chunk: int, block: int, end: int, done: bool) -> None:
    """List what fires in a block that ends at place `end`, for a few tokens.

    `named`: a selector names the neurons of some tokens of the batch. `done`: the products with `first` are there.
    """
    tokens, own, w = e.token_N.shape[0], lists_of(f, chunk), weights_of(e)
    begin, list_K = own.block_B[block], list_of(f, chunk)
    scored_N, h_NK = scored_of(f, e.first + tokens)[e.first :], factors_of(f, chunk, e.first + tokens)[e.first :]
    tally_N3, fire = tally_of(f, chunk, e.first + tokens)[e.first :], own.size_2[1]
    listed = named and _list_named(f, scored_N, list_K, own, block, end)
    if listed:
        last = block * FEW_TOKENS + tokens - 1
        known = _list_ahead(f, e, chunk, end, own.start_U[last] + own.count_U[last])
        _list_products(f, e, first_rows(f, e), w.first_bias, own, block, known)
    elif not done:
        first_products(f, e, list_K, begin, end, h_NK)
    for n in range(tokens):
        limit, u = limit_of(f, e, n), block * FEW_TOKENS + n
        start, read = fire, end - begin
        if listed:  # what fires moves to the front of the lists
            read = own.count_U[u]
            activate(f.activation, limit, own.product_K[own.start_U[u] : own.start_U[u] + read])
            for k in range(own.start_U[u], own.start_U[u] + read):
                h = own.product_K[k]
                own.list_K[fire], own.h_K[fire] = own.list_K[k], h
                fire += h != 0
        else:
            if scored_N[n] >= 0:
                read = _drop_unnamed(scores_of(f, scored_N[n]), list_K, begin, end, h_NK[n])
            activate(f.activation, limit, h_NK[n, begin:end])
            for k in range(begin, end):
                h = h_NK[n, k]
                own.list_K[fire], own.h_K[fire] = list_K[k], h
                fire += h != 0
        own.start_U[u], own.count_U[u] = start, fire - start
        tally_N3[n, READ] += read
        tally_N3[n, KEPT] += read if w.dense != 0 else fire - start
    most_fire = w.dense != 0 or 2 * (fire - own.size_2[1]) > tokens * (end - begin)
    own.whole_B[block] = not listed and most_fire and tokens > 1
    own.size_2[1] = fire


@device
def _list_named(f: Ffn, scored_N: Ints, list_K: Ints, own: TokenLists, block: int, end: int) -> bool:
    """List the neurons of a block that the tokens' selectors name; returns False where these are most of them."""
    tokens, begin, total = scored_N.shape[0], own.block_B[block], own.size_2[1]
    for n in range(tokens):
        u, everything, score_F = block * FEW_TOKENS + n, scored_N[n] < 0, scores_of(f, scored_N[n])
        own.start_U[u] = total
        for k in range(begin, end):
            own.list_K[total] = list_K[k]
            total += everything | (score_F[list_K[k]] > 0)  # no branch, which nobody could foresee
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
def _list_ahead(f: Ffn, e: Batch, chunk: int, end: int, total: int) -> int:
    """List the rows that will be read next behind the first `total` of a chunk's lists; returns how many it has then.

    They are those that the first token reads in the next block, or in the next chunk up to neuron `high`.
    """
    own, list_K, score_F = lists_of(f, chunk), list_of(f, chunk), scores_of(f, scored_of(f, e.first + 1)[e.first])
    count, most = list_K.shape[0], total + AHEAD_NBYTES // first_rows(f, e).stride
    for k in range(end, count):
        if total < most and score_F[list_K[k]] > 0:
            own.list_K[total] = list_K[k]
            total += 1
    group = list_K[0] // GROUP // CHUNKS * CHUNKS + bit_reversed(chunk + 1)
    while end == count and chunk + 1 < CHUNKS and total < most and group * GROUP < e.high:
        for i in range(group * GROUP, min(e.high, (group + 1) * GROUP)):
            if total < most and score_F[i] > 0:
                own.list_K[total] = i
                total += 1
        group += CHUNKS
    return total


@device
def add_block(f: Ffn, e: Batch, chunk: int, block: int, known: int, sums_NP: Floats, done: bool) -> None:
    """Add a block's sums for a few tokens. Rows up to place `known` of the lists are fetched ahead.

    Where `sums_NP` has no tokens their factors are written instead: a whole block's for every place, else those of each
    token's own rows, with the rows in `kept_of`. `done`: the products with `up` are there.
    """
    own, list_K, tokens = lists_of(f, chunk), list_of(f, chunk), e.first + e.token_N.shape[0]
    begin, end, summed = own.block_B[block], own.block_B[block + 1], sums_NP.shape[0] > 0
    h_NK, kept_NK = factors_of(f, chunk, tokens)[e.first :], kept_of(f, chunk, tokens)[e.first :]
    if own.whole_B[block]:
        _whole_factors(f, e, list_K, begin, end, ups_of(f, chunk, tokens)[e.first :], h_NK, done)
        for n in range(e.token_N.shape[0]):
            weigh_squares(f, e, chunk, n, list_K[begin:end], h_NK[n, begin:end])
        if summed:
            add_whole(down_rows(f, e), own, list_K, begin, end, h_NK, sums_NP)
        else:
            keep(begin, end, h_NK, kept_NK)
        return
    if f.gated:
        _list_products(f, e, up_rows(f, e), weights_of(e).up_bias, own, block, known)
    for n in range(e.token_N.shape[0]):
        u = block * FEW_TOKENS + n
        start, behind = own.start_U[u], own.start_U[u] + own.count_U[u]
        for k in range(start, behind):
            own.h_K[k] = factor(f, own.h_K[k], own.product_K[k]) * e.route_weight_N[n]
        weigh_squares(f, e, chunk, n, own.list_K[start:behind], own.h_K[start:behind])
        if summed:
            add_list(down_rows(f, e), own, start, behind - start, f.activation == DRELU, known, sums_NP[n])
        else:
            last = place = begin
            for k in range(start, behind):
                while list_K[place] != own.list_K[k]:
                    place += 1
                h_NK[n, last], kept_NK[n, last] = own.h_K[k], place - begin
                last += own.h_K[k] != 0
            if last < end:
                kept_NK[n, last] = END


@device
def weigh_squares(f: Ffn, e: Batch, chunk: int, n: int, list_K: Ints, h_K: Floats) -> None:
    """Where factors are normed: Σ h² of some of a token's, to those of the chunk; then h ← h · the norm's weight."""
    weight = weights_of(e).ffn_inner_norm
    if weight == 0:
        return
    squares_T, weight_F = squares_of(f, chunk, e.first + n + 1), vector(weight, f.d_ff)
    for k in range(list_K.shape[0]):
        squares_T[e.first + n] += h_K[k] * h_K[k]
        h_K[k] *= weight_F[list_K[k]]


@device
def norm_scale(f: Ffn, e: Batch, n: int) -> np.float32:
    """What a token's sum is multiplied by: 1 / √(mean h² + eps) where factors are normed, else 1."""
    w, total = weights_of(e), np.float32(0)
    if w.ffn_inner_norm == 0:
        return np.float32(1)
    for chunk in range(CHUNKS):
        total += squares_of(f, chunk, e.first + n + 1)[e.first + n]
    return np.float32(1) / np.sqrt(total / np.float32(f.d_ff) + w.norm_eps)


@device
def _whole_factors(
    f: Ffn, e: Batch, list_K: Ints, begin: int, end: int, up_NK: Floats, h_NK: Floats, done: bool
) -> None:
    """h ← h · (up · x + bias) · the route weight, at the places [begin, end) of a list."""
    if f.gated and not done:
        up_products(f, e, list_K, begin, end, up_NK)
    for n in range(e.token_N.shape[0]):
        for k in range(begin, end):
            h_NK[n, k] = factor(f, h_NK[n, k], up_NK[n, k]) * e.route_weight_N[n]
