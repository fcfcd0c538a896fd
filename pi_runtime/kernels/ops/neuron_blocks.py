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

from pi_runtime.artifact.footprint import CHUNKS, FEW_TOKENS, GROUP, SUM_ROWS
from pi_runtime.kernels.codegen.jit import device
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import (
    Floats,
    Ints,
    MatrixView,
    address_of,
    in_slots,
    is_quantised,
    matrix,
    strided_rows,
    vector,
)
from pi_runtime.kernels.data.neuron_chunks import (
    KEPT,
    READ,
    Chunks,
    TokenLists,
    counts_of,
    factors_of,
    list_of,
    lists_of,
    scored_of,
    spare_place,
    tally_of,
    turned,
    ups_of,
)
from pi_runtime.kernels.data.quantised_input import input_stride
from pi_runtime.kernels.data.weight_table import DRELU, KernelConfig
from pi_runtime.kernels.ops.activations import activate, times_up
from pi_runtime.kernels.ops.block_sums import add_block_rows
from pi_runtime.kernels.ops.neuron_selection import Inputs, scores_of
from pi_runtime.kernels.ops.row_products import AHEAD_NBYTES, row_products
from pi_runtime.kernels.ops.row_sums import row_sums


@device
def limit_of(cfg: KernelConfig, w: Ints, select: int) -> np.float32:
    """Magnitudes of the activation up to here count as 0: the rung's limit, or the model's own without selection."""
    return np.int32(w[weight_table.LIMIT]).view(np.float32) if select != 0 else np.float32(cfg.threshold)


@device
def first_rows(cfg: KernelConfig, w: Ints) -> MatrixView:
    """The neurons' rows of `first`."""
    rows = matrix(cfg.ffn_format, w[weight_table.FIRST], w[weight_table.FIRST_SCALES], cfg.d_model)
    return in_slots(rows, w[weight_table.FIRST_SLOTS])


@device
def up_rows(cfg: KernelConfig, w: Ints) -> MatrixView:
    """The neurons' rows of `up`; only a gated FFN has them."""
    return strided_rows(_rest_rows(cfg, w), cfg.rows_per_neuron, 0)


@device
def down_rows(cfg: KernelConfig, w: Ints) -> MatrixView:
    """The neurons' rows of `down`."""
    return strided_rows(_rest_rows(cfg, w), cfg.rows_per_neuron, cfg.rows_per_neuron - 1)


@device
def _rest_rows(cfg: KernelConfig, w: Ints) -> MatrixView:
    rest = matrix(cfg.ffn_format, w[weight_table.REST], w[weight_table.REST_SCALES], cfg.d_model)
    return in_slots(rest, w[weight_table.REST_SLOTS])


@device
def products(
    cfg: KernelConfig, rows: MatrixView, bias: int, inputs: int, token_N: Ints, list_K: Ints, begin: int, end: int,
    y_NK: Floats,
) -> None:  # fmt: skip
    """y ← rows · x + bias for the places [begin, end) of a list, for N tokens; those that follow are prefetched."""
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
    cfg: KernelConfig, rows: MatrixView, bias: int, inputs: int, token_N: Ints, own: TokenLists, block: int, known: int
) -> None:
    """products ← rows · x + bias for a block's lists. The rows that follow, up to place `known`, are fetched ahead."""
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
def list_firing(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, select_N: Ints, scored_N: Ints, named: bool,
    high: int, chunk: int, block: int, end: int, first: int,
) -> None:  # fmt: skip
    """List what fires in a block that ends at place `end`, for a few tokens: from token `first` of the call on.

    `named`: a selector names the neurons of some tokens of the call. `high` is the end of the call's neurons, or 0
    where the next chunk's rows are not to be fetched.
    """
    tokens, own = token_N.shape[0], lists_of(m, chunk)
    begin = own.block_B[block]
    listed = named and _list_named(cfg, m, x, scored_N, chunk, block, end)
    h_NK, list_K = factors_of(m, chunk, first + tokens)[first:], list_of(m, chunk)[: counts_of(m)[chunk]]
    tally_N3, fire = tally_of(m, chunk, first + tokens)[first:], own.size_2[1]
    if listed:
        last = block * FEW_TOKENS + tokens - 1
        known = _list_ahead(cfg, w, m, x, high, chunk, end, own.start_U[last] + own.count_U[last])
        _list_products(cfg, first_rows(cfg, w), w[weight_table.FIRST_BIAS], x.inputs, token_N, own, block, known)
    else:
        products(cfg, first_rows(cfg, w), w[weight_table.FIRST_BIAS], x.inputs, token_N, list_K, begin, end, h_NK)
    for n in range(tokens):
        limit, u = limit_of(cfg, w, select_N[n]), block * FEW_TOKENS + n
        start, read = fire, end - begin
        if listed:  # what fires moves to the front of the lists
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
    most_fire = w[weight_table.DENSE] != 0 or 2 * (fire - own.size_2[1]) > tokens * (end - begin)
    own.whole_B[block] = not listed and most_fire
    own.size_2[1] = fire


@device
def _list_named(cfg: KernelConfig, m: Chunks, x: Inputs, scored_N: Ints, chunk: int, block: int, end: int) -> bool:
    """List the neurons of a block that the tokens' selectors name; returns False where these are most of them."""
    tokens, list_K, own = scored_N.shape[0], list_of(m, chunk), lists_of(m, chunk)
    begin, total = own.block_B[block], own.size_2[1]
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
    own, list_K, count = lists_of(m, chunk), list_of(m, chunk), counts_of(m)[chunk]
    scored = max(0, scored_of(m, 1)[0])
    score_F, most = scores_of(cfg, x, scored + 1)[scored], total + AHEAD_NBYTES // first_rows(cfg, w).stride
    for k in range(end, count):
        if total < most and score_F[list_K[k]] > 0:
            own.list_K[total] = list_K[k]
            total += 1
    group = list_K[0] // GROUP // CHUNKS * CHUNKS + turned(chunk + 1)
    while end == count and chunk + 1 < CHUNKS and total < most and group * GROUP < high:
        for i in range(group * GROUP, min(high, (group + 1) * GROUP)):
            if total < most and score_F[i] > 0:
                own.list_K[total] = i
                total += 1
        group += CHUNKS
    return total


@device
def add_block(
    cfg: KernelConfig, w: Ints, m: Chunks, x: Inputs, token_N: Ints, route_weight_N: Floats, chunk: int, block: int,
    first: int, known: int, sums_NP: Floats,
) -> None:  # fmt: skip
    """Add a block's sums for a few tokens, from token `first` of the call on.

    Where `sums_NP` has no tokens their factors are written instead, a whole block's for every place. Rows up to place
    `known` of the lists are fetched ahead.
    """
    tokens, own, relu_up, gated = (
        token_N.shape[0],
        lists_of(m, chunk),
        cfg.activation == DRELU,
        cfg.rows_per_neuron == 2,
    )
    begin, end, list_K = own.block_B[block], own.block_B[block + 1], list_of(m, chunk)[: counts_of(m)[chunk]]
    h_NK, summed = factors_of(m, chunk, first + tokens)[first:], sums_NP.shape[0] > 0
    if own.whole_B[block]:
        up_NK = ups_of(m, chunk, tokens)
        if gated:
            products(cfg, up_rows(cfg, w), w[weight_table.UP_BIAS], x.inputs, token_N, list_K, begin, end, up_NK)
        for n in range(tokens):
            for k in range(begin, end):
                h = times_up(relu_up, h_NK[n, k], up_NK[n, k]) if gated else h_NK[n, k]
                h_NK[n, k] = h * route_weight_N[n]
        if summed:
            add_whole(down_rows(cfg, w), own, list_K, begin, end, h_NK, sums_NP)
        return
    if gated:
        _list_products(cfg, up_rows(cfg, w), w[weight_table.UP_BIAS], x.inputs, token_N, own, block, known)
    for n in range(tokens):
        u = block * FEW_TOKENS + n
        start, behind = own.start_U[u], own.start_U[u] + own.count_U[u]
        for k in range(start, behind):
            h = times_up(relu_up, own.h_K[k], own.product_K[k]) if gated else own.h_K[k]
            own.h_K[k] = h * route_weight_N[n]
        if summed:
            _add_list(down_rows(cfg, w), own, start, behind - start, relu_up, known, sums_NP[n])
        else:
            h_NK[n, begin:end] = np.float32(0)
            for k in range(start, behind):
                h_NK[n, own.place_K[k]] = own.h_K[k]


@device
def _add_list(down: MatrixView, own: TokenLists, start: int, count: int, gaps: bool, known: int, y_P: Floats) -> None:
    """y ← y + the sum of the `count` rows listed from `start` on. The rows that follow in the lists are fetched ahead.

    `gaps`: many factors are 0, and their rows are not read.
    """
    if gaps:
        last = start
        for k in range(start, start + count):
            own.list_K[last], own.h_K[last] = own.list_K[k], own.h_K[k]
            last += own.h_K[k] != 0
        count = last - start
    listed, following = address_of(own.list_K) + 8 * start, count if gaps else known - start
    if is_quantised(down.fmt):
        add_block_rows(down, listed, count, following, address_of(own.h_K) + 4 * start, y_P, own.sums)
    else:
        h_K = own.product_K[spare_place(own) :][: count + SUM_ROWS]  # the products are no longer needed
        h_K[:count], h_K[count:] = own.h_K[start : start + count], np.float32(0)
        row_sums(down, 0, listed, count, following, address_of(h_K), 0, 1, address_of(y_P), 0)


@device
def add_whole(
    down: MatrixView, own: TokenLists, list_K: Ints, begin: int, end: int, h_NK: Floats, y_NP: Floats
) -> None:
    """y ← y + the sums of the rows at the places [begin, end) of a list, times their factors, for a few tokens."""
    tokens, count = y_NP.shape[0], end - begin
    if not is_quantised(down.fmt) and count % SUM_ROWS == 0 and _mostly(h_NK, tokens, begin, end):
        listed, h_at = address_of(list_K) + 8 * begin, address_of(h_NK) + 4 * begin
        to = tokens, address_of(y_NP), 4 * y_NP.shape[1]
        row_sums(down, 0, listed, count, count, h_at, 4 * h_NK.shape[1], *to)
        return
    start = spare_place(own)
    for n in range(tokens):
        last = start
        for k in range(begin, end):
            own.list_K[last], own.h_K[last] = list_K[k], h_NK[n, k]
            last += h_NK[n, k] != 0
        _add_list(down, own, start, last - start, False, last, y_NP[n])


@device
def _mostly(h_NK: Floats, tokens: int, begin: int, end: int) -> bool:
    """Whether most factors are not 0."""
    found = 0
    for n in range(tokens):
        for k in range(begin, end):
            found += h_NK[n, k] != 0
    return 2 * found > tokens * (end - begin)
