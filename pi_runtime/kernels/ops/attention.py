"""Rotary positions and attention over the key-value cache.

    out = Σ_s p_s v_s / (Σ_s p_s + exp(sink − m))        p_s = exp(q · k_s / √E − m), m the largest so far

where each head has a sink, else without that summand.

Positions are taken in blocks of `POSITIONS`, cut where their number says: with a larger maximum the sums so far are
scaled down. So a token's bits depend on its position alone, not on how its prompt was cut, nor on other sequences.

The cache lies in pages, for each class of layers one for each block of positions. A sequence's table names them.

Shape letters: T tokens of this step; H query heads, G key-value heads, E head width, J rotary frequencies, S positions,
N queries that share a head of keys, B positions of a block, R runs, L layers. `qkv_TQ` holds each token's H + 2G heads
side by side (Q numbers). In a page each head has its keys (E, B) or values
(B, E), as floats or packed (see `page_rows`), which are unpacked before they are used.
"""

from typing import NamedTuple

import numpy as np
from numba import carray, prange

from pi_runtime.artifact.footprint import ATTENTION_TOKENS, CHUNKS, POSITIONS
from pi_runtime.kernels.codegen.jit import device, loop_body, parallel, public
from pi_runtime.kernels.data.matrix_view import (
    F32,
    Floats,
    Ints,
    MatrixView,
    address_of,
    is_quantised,
    pointer_of,
    rows_in_turn,
    vector,
)
from pi_runtime.kernels.ops.key_products import key_products
from pi_runtime.kernels.ops.page_rows import (
    hadamard,
    key_nbytes,
    limited_hadamard,
    row_nbytes,
    store_keys,
    store_row,
    unpack_keys,
    unpack_rows,
)
from pi_runtime.kernels.ops.reductions import squares, weigh
from pi_runtime.kernels.ops.row_sums import row_sums

FIRST, COUNT, START, TABLE = range(4)
"""Columns of runs (see `forward.Positions`)."""
STORED_ALONE = 4096
"""Numbers that one thread stores in a few microseconds: others take longer to wake."""


class LayerCache(NamedTuple):
    """Where pages hold a layer's keys and values."""

    keys: int
    """Code of the number format of keys, and of latents."""
    values: int
    """Code of the number format of values."""
    layer: int
    """Number of the layer among those of its class."""
    groups: int
    width: int
    window: int
    """Positions that a token sees, its own included; 0 for all up to its own."""
    kind: int = 0
    """Number of its class."""
    classes: int = 1
    """How many classes of layers have pages."""
    sinks: int = 0
    """Address of a number for each query head, whose exponential is added to the sum of weights; 0 for none."""
    angles: int = 0
    """Pairs of columns (j, angles + j) that positions turn."""
    unsteady: int = 0
    """So many of these, the first ones, are turned by much within a page (see `page_rows`)."""


@public
def norm_heads(eps: np.float32, weight: int, first: int, heads: int, width: int, qkv_TQ: Floats) -> None:
    """x ← x / √(mean x² + eps) · weight for each of `heads` heads from `first` on, in place."""
    w_E = vector(weight, width)
    for t in range(qkv_TQ.shape[0]):
        for h in range(first, first + heads):
            head_E = qkv_TQ[t, h * width : (h + 1) * width]
            scale = np.float32(1) / np.sqrt(squares(head_E, np.float32(0)) / np.float32(width) + eps)
            for j in range(width):
                head_E[j] *= scale * w_E[j]


@public
def rotate(cos_SJ: Floats, sin_SJ: Floats, half: int, position_T: Ints, heads: int, width: int, qkv_TQ: Floats) -> None:
    """(a, b) ← (a cos − b sin, b cos + a sin): a and b are the halves of a head's first 2J numbers, for the first
    `heads` heads. Of the tables the first `half` columns are taken, as J."""
    for t in range(qkv_TQ.shape[0]):
        cos_J, sin_J = cos_SJ[position_T[t]], sin_SJ[position_T[t]]
        for h in range(heads):
            head_E = qkv_TQ[t, h * width : (h + 1) * width]
            for j in range(half):
                a, b = head_E[j], head_E[half + j]
                head_E[j] = a * cos_J[j] - b * sin_J[j]
                head_E[half + j] = b * cos_J[j] + a * sin_J[j]


@device
def _head(cache: LayerCache, run_4: Ints, block: int, head: int) -> int:
    """Where a page holds the keys (heads 0 … G − 1) or values (G … 2G − 1) of one head."""
    page = carray(pointer_of(run_4[TABLE]), (block + 1, cache.classes), np.int64)[block, cache.kind]
    keys, values = key_nbytes(cache.keys, cache.width), row_nbytes(cache.values, cache.width)
    before = min(head, cache.groups) * keys + max(0, head - cache.groups) * values
    return page + POSITIONS * (cache.groups * cache.layer * (keys + values) + before)


@device
def _next_keys(cache: LayerCache, run_4: Ints, block: int, blocks: tuple[int, int], group: int) -> int:
    """Where the keys are that are read next: the head's next block up to the last, or the next head's first one."""
    first, last = blocks
    another = block == last and group + 1 < cache.groups
    return _head(cache, run_4, first if another else min(block + 1, last), group + another)


@public
def store_kv(cache: LayerCache, qkv_TQ: Floats, run_R4: Ints) -> None:
    """Write the tokens' keys and values into their pages, limited to what float16 can hold.

    They are rotated in place where the cache holds them so.
    """
    if 2 * qkv_TQ.shape[0] * cache.groups * cache.width > STORED_ALONE:
        _store_kv(cache, qkv_TQ, run_R4)
        return
    for task in range(run_R4.shape[0] * cache.groups):
        _store_task(cache, qkv_TQ, run_R4[task // cache.groups], task % cache.groups)


@loop_body
def _store_task(cache: LayerCache, qkv_TQ: Floats, run_4: Ints, group: int) -> None:
    """The keys and values of one head for the tokens of a run."""
    width = cache.width
    heads = qkv_TQ.shape[1] // width - 2 * cache.groups
    for n in range(run_4[COUNT]):
        block, place = divmod(run_4[START] + n, POSITIONS)
        for head in (group, cache.groups + group):
            x_E = qkv_TQ[run_4[FIRST] + n, (heads + head) * width : (heads + head + 1) * width]
            at = _head(cache, run_4, block, head)
            if head < cache.groups:
                store_keys(cache.keys, x_E, (cache.angles, cache.unsteady), at, place)
            else:
                limited_hadamard(cache.values, x_E)
                store_row(cache.values, x_E, at, row_nbytes(cache.values, width), place)


@parallel(_store_task)
def _store_kv(cache: LayerCache, qkv_TQ: Floats, run_R4: Ints) -> None:
    for task in prange(run_R4.shape[0] * cache.groups):
        _store_task(cache, qkv_TQ, run_R4[task // cache.groups], task % cache.groups)


@public
def attend(
    cache: LayerCache, qkv_TQ: Floats, run_R4: Ints, unpacked_CBE: Floats, scratch_CX: Floats, out_TQ: Floats
) -> None:
    """out ← softmax(q kᵀ / √E) v over the positions up to each token's own, or those of them in the layer's window.

    `scratch_CX`: `footprint.attention_floats` numbers for each part of the work. `unpacked_CBE`: memory for a page's
    keys or values where they are packed. Queries are rotated in place where the cache holds heads so.
    """
    _attend(cache, qkv_TQ, run_R4, unpacked_CBE, scratch_CX, out_TQ)


@device
def part_of_tasks(run_R4: Ints, groups: int, part: int) -> tuple[int, int]:
    """The tasks of a part, from which one to before which: where they are fewer than parts all threads get some."""
    tasks = 0
    for r in range(run_R4.shape[0]):
        tasks += (run_R4[r, COUNT] + ATTENTION_TOKENS - 1) // ATTENTION_TOKENS * groups
    return part * tasks // CHUNKS, (part + 1) * tasks // CHUNKS


@loop_body
def _attend_part(
    cache: LayerCache, qkv_TQ: Floats, run_R4: Ints, part: int, unpacked_BE: Floats, scratch_X: Floats, out_TQ: Floats
) -> None:
    """One of `CHUNKS` parts of the tasks: a few tokens of a run with the queries that share a head of keys."""
    task, (low, high) = 0, part_of_tasks(run_R4, cache.groups, part)
    for r in range(run_R4.shape[0]):
        run_4 = run_R4[r]
        for group in range(cache.groups):
            for first in range(0, run_4[COUNT], ATTENTION_TOKENS):
                if low <= task < high:
                    tokens = min(ATTENTION_TOKENS, run_4[COUNT] - first)
                    at = run_4[FIRST] + first, run_4[START] + first, tokens
                    _attend_tile(cache, qkv_TQ, run_4, group, at, unpacked_BE, scratch_X, out_TQ)
                task += 1


@parallel(_attend_part)
def _attend(
    cache: LayerCache, qkv_TQ: Floats, run_R4: Ints, unpacked_CBE: Floats, scratch_CX: Floats, out_TQ: Floats
) -> None:
    for part in prange(CHUNKS):
        _attend_part(cache, qkv_TQ, run_R4, part, unpacked_CBE[part], scratch_CX[part], out_TQ)


@device
def _attend_tile(
    cache: LayerCache, qkv_TQ: Floats, run_4: Ints, group: int, at: tuple[int, int, int], unpacked_BE: Floats,
    scratch_X: Floats, out_TQ: Floats,
) -> None:  # fmt: skip
    """The queries of one group of heads for some tokens of a run; `at`: the first token, its position, their number."""
    token, start, tokens = at
    width, every = cache.width, qkv_TQ.shape[1] // cache.width
    shared = out_TQ.shape[1] // width // cache.groups
    queries, end = shared * tokens, start + tokens
    # The memory holds numbers of queries, then their sums, weights, largest scores and totals.
    query_N = carray(pointer_of(address_of(scratch_X)), (queries,), np.int64)
    sum_NE = scratch_X[2 * queries : (2 + width) * queries].reshape(queries, width)
    score_NB = scratch_X[(2 + width) * queries : (2 + width + POSITIONS) * queries].reshape(queries, POSITIONS)
    behind = (2 + width + POSITIONS) * queries
    largest_N, total_N = scratch_X[behind : behind + queries], scratch_X[behind + queries : behind + 2 * queries]
    sum_NE[:], largest_N[:], total_N[:] = np.float32(0), np.float32(-np.inf), np.float32(0)
    for n in range(queries):
        query_N[n] = (token + n // shared) * every + group * shared + n % shared
        hadamard(cache.keys, qkv_TQ.reshape(-1)[query_N[n] * width : (query_N[n] + 1) * width])
    scale = np.float32(1 / np.sqrt(width))
    # A block that no token of the tile sees is not read: its page is gone.
    lowest = max(0, start + 1 - cache.window) if cache.window > 0 else 0
    for first in range(lowest // POSITIONS * POSITIONS, end, POSITIONS):
        block, count = first // POSITIONS, min(POSITIONS, end - first)
        keys, values = _head(cache, run_4, block, group), _head(cache, run_4, block, cache.groups + group)
        fmt, stride = cache.keys, row_nbytes(cache.values, width)
        if is_quantised(cache.keys):
            unpack_keys(cache.keys, keys, width, address_of(unpacked_BE))
            fmt, keys = F32, address_of(unpacked_BE)
        later = _next_keys(cache, run_4, block, (lowest // POSITIONS, (end - 1) // POSITIONS), group)
        key_products(
            fmt, keys, values, later, width, address_of(qkv_TQ), address_of(query_N), queries, address_of(score_NB)
        )
        for n in range(queries):
            seen = max(0, min(count, start + n // shared + 1 - first))
            if cache.window > 0:
                hidden = start + n // shared + 1 - cache.window - first
                if hidden >= seen:
                    score_NB[n] = np.float32(0)
                    continue
                score_NB[n, : max(0, hidden)] = np.float32(-np.inf)
            rescale = weigh(score_NB[n], seen, scale, largest_N[n : n + 1], total_N[n : n + 1])
            if rescale != 1:
                for j in range(width):
                    sum_NE[n, j] *= rescale
        if is_quantised(cache.values):
            unpack_rows(cache.values, values, stride, count, width, address_of(unpacked_BE))
            values, stride = address_of(unpacked_BE), 4 * width
        rows = MatrixView(fmt, values, 0, stride, 0, width, 0, 0)
        listed = rows_in_turn(0, count)
        row_sums(rows, listed, address_of(score_NB), 4 * POSITIONS, queries, address_of(sum_NE), 4 * width)
    for n in range(queries):
        head = group * shared + n % shared
        total = total_N[n] + _sink(cache, head, largest_N[n])
        out_E = out_TQ[token + n // shared, head * width : (head + 1) * width]
        for j in range(width):
            out_E[j] = sum_NE[n, j] / total
        hadamard(cache.values, out_E)


@device
def _sink(cache: LayerCache, head: int, largest: np.float32) -> np.float32:
    """What a head adds to the sum of weights."""
    return np.float32(0) if cache.sinks == 0 else np.exp(vector(cache.sinks, head + 1)[head] - largest)
