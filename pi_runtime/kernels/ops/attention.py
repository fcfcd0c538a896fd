"""Rotary positions and attention over the key-value cache.

    out = Σ_s p_s v_s / Σ_s p_s        p_s = exp(q · k_s / √E − m), m the largest so far

Positions are taken in blocks of `POSITIONS`, cut where their number says: with a larger maximum the sums so far are
scaled down. So a token's bits depend on its position alone, not on how its prompt was cut, nor on other sequences.

Shape letters: T tokens of this step; H query heads, G key-value heads, E head width, J rotary frequencies, S positions
that a cache has room for, N queries that share a head of keys, B positions of a block, A tiles. `qkv_TQ` holds each
token's H + 2G heads side by side (Q numbers). A layer's cache is (2, G, S, E), float16 or float32.
"""

import numpy as np
from numba import carray, prange

from pi_runtime.kernels.codegen.jit import device, loop_body, parallel, public, strict_device
from pi_runtime.kernels.data.matrix_view import (
    F16,
    F32,
    Floats,
    Halves,
    Ints,
    MatrixView,
    address_of,
    float_to_half,
    pointer_of,
    vector,
)
from pi_runtime.kernels.ops.row_products import row_products
from pi_runtime.kernels.ops.row_sums import row_sums

LARGEST_HALF = np.float32(65504)
"""The largest float16 number."""
POSITIONS = 32
"""Positions of a block."""
TILE_TOKENS = 16
"""Tokens of a prompt that one task takes at once."""
FIRST, COUNT, START, CACHE = range(4)
"""Columns of runs and tiles: consecutive tokens of one sequence, the first one's position, and where its cache is."""


@public
def norm_heads(eps: np.float32, weight: int, first: int, heads: int, width: int, qkv_TQ: Floats) -> None:
    """x ← x / √(mean x² + eps) · weight for each of `heads` heads from `first` on, in place."""
    w_E = vector(weight, width)
    for t in range(qkv_TQ.shape[0]):
        for h in range(first, first + heads):
            head_E = qkv_TQ[t, h * width : (h + 1) * width]
            square = np.float32(0)
            for j in range(width):
                square += head_E[j] * head_E[j]
            scale = np.float32(1) / np.sqrt(square / np.float32(width) + eps)
            for j in range(width):
                head_E[j] *= scale * w_E[j]


@public
def rotate(cos_SJ: Floats, sin_SJ: Floats, position_T: Ints, heads: int, width: int, qkv_TQ: Floats) -> None:
    """(a, b) ← (a cos − b sin, b cos + a sin): a and b are the halves of a head's first 2J numbers, for the first
    `heads` heads."""
    half = cos_SJ.shape[1]
    for t in range(qkv_TQ.shape[0]):
        cos_J, sin_J = cos_SJ[position_T[t]], sin_SJ[position_T[t]]
        for h in range(heads):
            head_E = qkv_TQ[t, h * width : (h + 1) * width]
            for j in range(half):
                a, b = head_E[j], head_E[half + j]
                head_E[j] = a * cos_J[j] - b * sin_J[j]
                head_E[half + j] = b * cos_J[j] + a * sin_J[j]


@device
def _head(fmt: int, cache: int, head: int, room: int, width: int) -> MatrixView:
    """The keys (heads 0 … G − 1) or values (G … 2G − 1) of one head in a layer's cache, a row for each position."""
    stride = width * (2 if fmt == F16 else 4)
    return MatrixView(fmt, cache + head * room * stride, 0, stride, 0, width)


@public
def store_kv(
    fmt: int, qkv_TQ: Floats, heads: int, groups: int, width: int, room: int, behind: int, run_R4: Ints
) -> None:
    """Write the tokens' keys and values into the layer's caches, limited to what float16 can hold; see `attend`."""
    for r in range(run_R4.shape[0]):
        run_4 = run_R4[r]
        for n in range(run_4[COUNT]):
            for head in range(2 * groups):
                x_E = qkv_TQ[run_4[FIRST] + n, (heads + head) * width : (heads + head + 1) * width]
                rows = _head(fmt, run_4[CACHE] + behind, head, room, width)
                at = rows.values + (run_4[START] + n) * rows.stride
                if fmt == F16:
                    half_E = carray(pointer_of(at), (width,), np.uint16)
                    for j in range(width):
                        half_E[j] = float_to_half(min(max(x_E[j], -LARGEST_HALF), LARGEST_HALF))
                else:
                    float_E = carray(pointer_of(at), (width,), np.float32)
                    for j in range(width):
                        float_E[j] = x_E[j]


@public
def tiles_of(run_R4: Ints) -> Ints:
    """The runs cut into tiles of up to `TILE_TOKENS` tokens."""
    count = 0
    for r in range(run_R4.shape[0]):
        count += (run_R4[r, COUNT] + TILE_TOKENS - 1) // TILE_TOKENS
    tile_A4 = np.empty((count, 4), np.int64)
    a = 0
    for r in range(run_R4.shape[0]):
        for first in range(0, run_R4[r, COUNT], TILE_TOKENS):
            tile_A4[a, FIRST], tile_A4[a, START] = run_R4[r, FIRST] + first, run_R4[r, START] + first
            tile_A4[a, COUNT] = min(TILE_TOKENS, run_R4[r, COUNT] - first)
            tile_A4[a, CACHE] = run_R4[r, CACHE]
            a += 1
    return tile_A4


@public
def attend(
    fmt: int, qkv_TQ: Floats, heads: int, groups: int, room: int, behind: int, tile_A4: Ints, out_TQ: Floats
) -> None:
    """out ← softmax(q kᵀ / √E) v over the positions up to each token's own.

    The layer's part of a cache lies `behind` bytes after the address in a tile, and has room for `room` positions.
    """
    _attend(fmt, qkv_TQ, heads, groups, room, behind, tile_A4, out_TQ)


@parallel
def _attend(
    fmt: int, qkv_TQ: Floats, heads: int, groups: int, room: int, behind: int, tile_A4: Ints, out_TQ: Floats
) -> None:
    _attend_tile()
    for task in prange(tile_A4.shape[0] * groups):
        _attend_tile(fmt, qkv_TQ, heads, groups, room, behind, tile_A4[task // groups], task % groups, out_TQ)


@loop_body
def _attend_tile(
    fmt: int, qkv_TQ: Floats, heads: int, groups: int, room: int, behind: int, tile_4: Ints, group: int,
    out_TQ: Floats,
) -> None:  # fmt: skip
    """The queries of one tile that share a head of keys."""
    width, shared, tokens = qkv_TQ.shape[1] // (heads + 2 * groups), heads // groups, tile_4[COUNT]
    cache, queries = tile_4[CACHE] + behind, shared * tokens
    keys, values = _head(fmt, cache, group, room, width), _head(fmt, cache, groups + group, room, width)
    query_N, scale = np.empty(queries, np.int64), np.float32(1 / np.sqrt(width))
    for n in range(queries):
        query_N[n] = (tile_4[FIRST] + n // shared) * (heads + 2 * groups) + group * shared + n % shared
    sum_NE, score_NB = np.zeros((queries, width), np.float32), np.empty((queries, POSITIONS), np.float32)
    largest_N, total_N = np.full(queries, np.float32(-np.inf)), np.zeros(queries, np.float32)
    end = tile_4[START] + tokens
    for first in range(0, end, POSITIONS):
        count = min(POSITIONS, end - first)
        row_products(
            keys, first, 0, count, address_of(qkv_TQ), 4 * width, address_of(query_N), queries, address_of(score_NB),
            4 * POSITIONS,
        )  # fmt: skip
        for n in range(queries):
            seen = min(count, tile_4[START] + n // shared + 1 - first)
            rescale = _weigh(score_NB[n], max(seen, 0), scale, largest_N[n : n + 1], total_N[n : n + 1])
            if rescale != 1:
                for j in range(width):
                    sum_NE[n, j] *= rescale
        row_sums(
            values, first, 0, count, address_of(score_NB), 4 * POSITIONS, queries, address_of(sum_NE), 4 * width
        )
    for n in range(queries):
        head = group * shared + n % shared
        out_E = out_TQ[tile_4[FIRST] + n // shared, head * width : (head + 1) * width]
        for j in range(width):
            out_E[j] = sum_NE[n, j] / total_N[n]


@strict_device
def _weigh(score_B: Floats, seen: int, scale: np.float32, largest_1: Floats, total_1: Floats) -> np.float32:
    """score ← exp(score · scale − largest) of the `seen` first positions, else 0; adds them to the total.

    Returns the factor by which a larger score scales down what was summed before.
    """
    largest = largest_1[0]
    for s in range(seen):
        score_B[s] *= scale
        largest = max(largest, score_B[s])
    for s in range(POSITIONS):
        score_B[s] = _exp(score_B[s] - largest) if s < seen else np.float32(0)
    total = np.float32(0)
    for s in range(8):
        total += (score_B[s] + score_B[8 + s]) + (score_B[16 + s] + score_B[24 + s])
    rescale = np.float32(1) if largest == largest_1[0] else _exp(largest_1[0] - largest)
    total_1[0] = total_1[0] * rescale + total
    largest_1[0] = largest
    return rescale


_LOG2E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1, _P2, _P3, _P4, _P5 = (
    np.float32(p)
    for p in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
_SMALLEST, _HALF, _ONE = np.float32(-87), np.float32(0.5), np.float32(1)


@strict_device
def _exp(x: np.float32) -> np.float32:
    """exp(x) for x ≤ 0, within two units of the last place; 0 below −87.

    The polynomial is that of Cephes' expf. Every operation is one that vector instructions have, so a loop of it is
    vectorised, with the same bits.
    """
    clamped = max(x, _SMALLEST)
    n = np.floor(clamped * _LOG2E + _HALF)
    r = clamped - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    found = (p * r * r + r + _ONE) * power
    return np.float32(0) if x < _SMALLEST else found
