"""Attention over latents (MLA): what a page holds of a position serves as key and as value of every head.

    out_h = U_h Σ_s p_s c_s        p_s = softmax(s (q'_h · c_s + r_h · k_s) / √E)        q'_h = K_hᵀ q_h

A row of a page is a latent c and the rotated numbers k behind it. The matrices K and U, which would make keys and
values of latents, are multiplied into queries and sums instead: for prompts as for single tokens, so that a token's
bits do not depend on the piece that it came in. Blocks of positions are those of `attention`.

Shape letters: T tokens of this step; H heads, E numbers of a head's query, P = 2J of them rotated, L of a latent, and
X = L + P; R runs, B positions of a block, C parts of the work. `latent_TX` holds each token's H queries of X numbers
side by side, and afterwards in their places the sums.
"""

from typing import NamedTuple

import numpy as np
from numba import carray, prange

from pi_runtime.artifact.decoder import LATENT_EPS
from pi_runtime.artifact.footprint import ATTENTION_TOKENS, CHUNKS, LATENT_HEADS, POSITIONS
from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.intrinsics import input_nbytes
from pi_runtime.kernels.codegen.jit import device, loop_body, parallel, public
from pi_runtime.kernels.data.matrix_view import (
    F32,
    Floats,
    Ints,
    MatrixView,
    Vectors,
    address_of,
    is_quantised,
    matrix,
    pointer_of,
    rows_in_turn,
    vector,
)
from pi_runtime.kernels.data.quantised_input import prepare_input
from pi_runtime.kernels.data.weight_table import KernelConfig, LayerRecord
from pi_runtime.kernels.data.workspace import Workspace
from pi_runtime.kernels.ops.attention import (
    COUNT,
    FIRST,
    START,
    TABLE,
    LayerCache,
    part_of_tasks,
)
from pi_runtime.kernels.ops.linear import linear
from pi_runtime.kernels.ops.page_rows import hadamard, limited_hadamard, row_nbytes, store_row, unpack_rows
from pi_runtime.kernels.ops.reductions import squares, weigh
from pi_runtime.kernels.ops.row_products import row_products
from pi_runtime.kernels.ops.row_sums import row_sums
from pi_runtime.kernels.ops.tile_packing import BY_TILES, lay_tiles, tile_vectors

_prepare_input = by_address(prepare_input)


class Heads(NamedTuple):
    """Where a token's heads have their numbers, in a row of as many for all of them."""

    first: int
    """The first head's first number."""
    step: int
    """From one head to the next."""


@public
def norm_latents(eps: np.float32, weight: int, width: int, first: int, x_TQ: Floats, at: int, y_TQ: Floats) -> None:
    """y ← x / √(mean x² + eps) · weight, for `width` numbers of x from `first` on, and of y from `at` on."""
    w_L = vector(weight, width)
    for t in range(x_TQ.shape[0]):
        x_L = x_TQ[t, first : first + width]
        scale = np.float32(1) / np.sqrt(squares(x_L, np.float32(0)) / np.float32(width) + eps)
        for j in range(width):
            y_TQ[t, at + j] = x_L[j] * scale * w_L[j]


@public
def rotate_apart(
    cos_SJ: Floats, sin_SJ: Floats, position_T: Ints, heads: int, x: Heads, x_TQ: Floats, y: Heads, y_TX: Floats
) -> None:
    """(a, b) → (a cos − b sin, b cos + a sin): the first halves of all heads stand before the second ones; in y both
    halves of a head stand together."""
    half = cos_SJ.shape[1]
    for t in range(x_TQ.shape[0]):
        cos_J, sin_J = cos_SJ[position_T[t]], sin_SJ[position_T[t]]
        for h in range(heads):
            from_J, to_J = x.first + h * half, y.first + h * y.step
            for j in range(half):
                a, b = x_TQ[t, from_J + j], x_TQ[t, from_J + heads * half + j]
                y_TX[t, to_J + j] = a * cos_J[j] - b * sin_J[j]
                y_TX[t, to_J + half + j] = b * cos_J[j] + a * sin_J[j]


@loop_body
def _some_heads(
    m: MatrixView, rows: int, heads: int, part: int, parts: int, x: Heads, x_TQ: Floats, inputs_at: int, y: Heads,
    y_TQ: Floats,
) -> None:  # fmt: skip
    tokens, stride = x_TQ.shape[0], input_nbytes(m.columns)
    for head in range(part, heads, parts):
        first = x.first + head * x.step
        for t in range(tokens):
            _prepare_input(m.fmt, x_TQ[t, first : first + m.columns], inputs_at + t * stride)
        if BY_TILES:
            lay_tiles(m.columns, tile_vectors(m.fmt, tokens), inputs_at)
        out = address_of(y_TQ) + 4 * (y.first + head * y.step)
        row_products(m, rows_in_turn(head * rows, rows), Vectors(inputs_at, stride, 0, tokens), out, 4 * y_TQ.shape[1])


@parallel(_some_heads)
def products_by_head(
    m: MatrixView, rows: int, heads: int, x: Heads, x_TQ: Floats, parts: int, inputs_at: int, part_nbytes: int,
    y: Heads, y_TQ: Floats,
) -> None:  # fmt: skip
    """y_h ← W_h x_h for each head h, which has `rows` rows of m; each of the parts has memory of its own for inputs."""
    for part in prange(parts):
        _some_heads(m, rows, heads, part, parts, x, x_TQ, inputs_at + part * part_nbytes, y, y_TQ)


@device
def _page(cache: LayerCache, run_4: Ints, block: int) -> int:
    """Where a page holds a layer's latents."""
    page = carray(pointer_of(run_4[TABLE]), (block + 1, cache.classes), np.int64)[block, cache.kind]
    return page + cache.layer * POSITIONS * row_nbytes(cache.keys, cache.width)


@public
def store_latents(cache: LayerCache, rank: int, first: int, x_TQ: Floats, run_R4: Ints) -> None:
    """Write the tokens' latents and rotated numbers, which begin at `first`, into their pages (see `store_kv`)."""
    for r in range(run_R4.shape[0]):
        run_4 = run_R4[r]
        for n in range(run_4[COUNT]):
            block, place = divmod(run_4[START] + n, POSITIONS)
            x_X = x_TQ[run_4[FIRST] + n, first : first + cache.width]
            limited_hadamard(cache.keys, x_X[:rank])
            limited_hadamard(cache.keys, x_X[rank:])
            store_row(cache.keys, x_X, _page(cache, run_4, block), row_nbytes(cache.keys, cache.width), place)


@loop_body
def _attend_part(
    cache: LayerCache, rank: int, scale: np.float32, run_R4: Ints, part: int, unpacked_BX: Floats, scratch_X: Floats,
    latent_TX: Floats,
) -> None:  # fmt: skip
    """One of `CHUNKS` parts of the tasks, a few tokens of a run with a few heads."""
    task, heads = 0, latent_TX.shape[1] // cache.width
    low, high = part_of_tasks(run_R4, (heads + LATENT_HEADS - 1) // LATENT_HEADS, part)
    for r in range(run_R4.shape[0]):
        run_4 = run_R4[r]
        for head in range(0, heads, LATENT_HEADS):
            for first in range(0, run_4[COUNT], ATTENTION_TOKENS):
                if low <= task < high:
                    tokens = min(ATTENTION_TOKENS, run_4[COUNT] - first)
                    at = run_4[FIRST] + first, run_4[START] + first, tokens, head
                    _attend_tile(cache, rank, scale, run_4, at, unpacked_BX, scratch_X, latent_TX)
                task += 1


@parallel(_attend_part)
def attend_latents(
    cache: LayerCache, rank: int, scale: np.float32, run_R4: Ints, unpacked_CBX: Floats, scratch_CX: Floats,
    latent_TX: Floats,
) -> None:  # fmt: skip
    """Σ_s p_s c_s in the place of each query, over the positions up to its token's own."""
    for part in prange(CHUNKS):
        _attend_part(cache, rank, scale, run_R4, part, unpacked_CBX[part], scratch_CX[part], latent_TX)


@device
def _attend_tile(
    cache: LayerCache, rank: int, scale: np.float32, run_4: Ints, at: tuple[int, int, int, int], unpacked_BX: Floats,
    scratch_X: Floats, latent_TX: Floats,
) -> None:  # fmt: skip
    """Some heads of some tokens of a run; `at`: the first token, its position, their number, the first head."""
    token, start, tokens, head = at
    heads = latent_TX.shape[1] // cache.width
    shared = min(LATENT_HEADS, heads - head)
    queries, end = shared * tokens, start + tokens
    # The memory holds numbers of queries, then their sums, weights, largest scores and totals.
    query_N = carray(pointer_of(address_of(scratch_X)), (queries,), np.int64)
    sum_NL = scratch_X[2 * queries : (2 + rank) * queries].reshape(queries, rank)
    score_NB = scratch_X[(2 + rank) * queries : (2 + rank + POSITIONS) * queries].reshape(queries, POSITIONS)
    behind = (2 + rank + POSITIONS) * queries
    largest_N, total_N = scratch_X[behind : behind + queries], scratch_X[behind + queries : behind + 2 * queries]
    sum_NL[:], largest_N[:], total_N[:] = np.float32(0), np.float32(-np.inf), np.float32(0)
    for n in range(queries):
        query_N[n] = (token + n // shared) * heads + head + n % shared
        query_X = latent_TX.reshape(-1)[query_N[n] * cache.width : (query_N[n] + 1) * cache.width]
        hadamard(cache.keys, query_X[:rank])
        hadamard(cache.keys, query_X[rank:])
    query = Vectors(address_of(latent_TX), 4 * cache.width, address_of(query_N), queries)
    for first in range(0, end, POSITIONS):
        block, count = first // POSITIONS, min(POSITIONS, end - first)
        rows, fmt, stride = _page(cache, run_4, block), cache.keys, row_nbytes(cache.keys, cache.width)
        if is_quantised(cache.keys):
            unpack_rows(cache.keys, rows, stride, count, cache.width, address_of(unpacked_BX))
            rows, fmt, stride = address_of(unpacked_BX), F32, 4 * cache.width
        keys = MatrixView(fmt, rows, 0, stride, 0, cache.width, 0, 0)
        row_products(keys, rows_in_turn(0, count), query, address_of(score_NB), 4 * POSITIONS)
        for n in range(queries):
            seen = max(0, min(count, start + n // shared + 1 - first))
            rescale = weigh(score_NB[n], seen, scale, largest_N[n : n + 1], total_N[n : n + 1])
            if rescale != 1:
                for j in range(rank):
                    sum_NL[n, j] *= rescale
        values = MatrixView(fmt, rows, 0, stride, 0, rank, 0, 0)
        listed = rows_in_turn(0, count)
        row_sums(values, listed, address_of(score_NB), 4 * POSITIONS, queries, address_of(sum_NL), 4 * rank)
    for n in range(queries):
        at_X = (head + n % shared) * cache.width
        out_L = latent_TX[token + n // shared, at_X : at_X + rank]
        for j in range(rank):
            out_L[j] = sum_NL[n, j] / total_N[n]
        hadamard(cache.keys, out_L)


_norm_latents, _rotate_apart, _store_latents = map(by_address, (norm_latents, rotate_apart, store_latents))
_EPS = np.float32(LATENT_EPS)


@public
def mix_latents(
    cfg: KernelConfig, w: LayerRecord, cache: LayerCache, cos_SJ: Floats, sin_SJ: Floats, position_T: Ints,
    run_R4: Ints, ws: Workspace,
) -> None:  # fmt: skip
    """ws.mixed_TQ ← the values of all heads, from what the layer's first matrix made in `ws.qkv_TQ`.

    See `latent_attention` of the definition, whose parts follow each other in the same order.
    """
    tokens, heads, rank, rotated = position_T.shape[0], cfg.heads, cfg.latent_rank, 2 * cos_SJ.shape[1]
    qkv_TQ, latent_TX, plain = ws.qkv_TQ[:tokens], ws.latent_TQ[:tokens], cfg.head_dim - rotated
    behind = qkv_TQ.shape[1] - cache.width
    # The latent is normed and its neighbours are rotated where they stand.
    _norm_latents(_EPS, w.k_norm, rank, behind, qkv_TQ, behind, qkv_TQ)
    own = Heads(behind + rank, rotated)
    _rotate_apart(cos_SJ, sin_SJ, position_T, 1, own, qkv_TQ, own, qkv_TQ)
    _store_latents(cache, rank, behind, qkv_TQ, run_R4)
    queries_TQ = qkv_TQ
    if cfg.query_rank > 0:
        normed_TL = _rows(ws.latent_TQ, tokens, cfg.query_rank)
        _norm_latents(_EPS, w.q_norm, cfg.query_rank, 0, qkv_TQ, 0, normed_TL)
        up = matrix(cfg.attention_format, w.q_up, w.q_up_scales, cfg.query_rank)
        queries_TQ = ws.query_TQ[:tokens]
        linear(up, queries_TQ.shape[1], 0, normed_TL, address_of(ws.inputs), queries_TQ)
    parts, inputs = min(CHUNKS, heads), address_of(ws.latent_inputs)
    part_nbytes = ws.latent_inputs.shape[0] // parts
    at, sums = Heads(0, cache.width), Heads(0, cfg.value_dim)
    k_up = matrix(cfg.attention_format, w.k_up, w.k_up_scales, plain)
    products_by_head(k_up, rank, heads, Heads(0, plain), queries_TQ, parts, inputs, part_nbytes, at, latent_TX)
    rotations = Heads(heads * plain, rotated), Heads(rank, cache.width)
    _rotate_apart(cos_SJ, sin_SJ, position_T, heads, rotations[0], queries_TQ, rotations[1], latent_TX)
    scale = np.float32(cfg.score_scale / np.sqrt(cfg.head_dim))
    attend_latents(cache, rank, scale, run_R4, ws.unpacked_CBE, ws.attention_CX, latent_TX)
    v_up = matrix(cfg.attention_format, w.v_up, w.v_up_scales, rank)
    products_by_head(v_up, cfg.value_dim, heads, at, latent_TX, parts, inputs, part_nbytes, sums, ws.mixed_TQ[:tokens])


@device
def _rows(memory_TQ: Floats, tokens: int, columns: int) -> Floats:
    """The beginning of a buffer as a matrix."""
    return memory_TQ.reshape(-1)[: tokens * columns].reshape(tokens, columns)
