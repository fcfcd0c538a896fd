"""Rotary positions and attention over the key-value cache.

T tokens of this block, the first at position `start`; H query heads, G key-value heads, E head width, S cached
positions. `qkv_TQ` holds each token's H + 2G heads side by side. The cache of a layer is (2, G, S, E): keys, values.
"""

import numpy as np
from numba import prange

from pi_runtime.kernels.compiling import leaf, operator
from pi_runtime.kernels.memory import Floats


@leaf
def rotate(cos_SE: Floats, sin_SE: Floats, start: int, heads: int, width: int, qkv_TQ: Floats) -> None:
    """(a, b) → (a cos − b sin, b cos + a sin) for the halves of the first `heads` heads, in place."""
    half = width // 2
    for t in range(qkv_TQ.shape[0]):
        cos_E, sin_E = cos_SE[start + t], sin_SE[start + t]
        for h in range(heads):
            head_E = qkv_TQ[t, h * width : (h + 1) * width]
            for j in range(half):
                a, b = head_E[j], head_E[half + j]
                head_E[j] = a * cos_E[j] - b * sin_E[j]
                head_E[half + j] = b * cos_E[j] + a * sin_E[j]


@leaf
def remember(qkv_TQ: Floats, heads: int, start: int, cache_2GSE: Floats) -> None:
    """Write this block's keys and values into the cache."""
    _, groups, _, width = cache_2GSE.shape
    for t in range(qkv_TQ.shape[0]):
        for part in range(2):
            for g in range(groups):
                column = (heads + part * groups + g) * width
                cache_2GSE[part, g, start + t, :] = qkv_TQ[t, column : column + width]


@operator
def attend(qkv_TQ: Floats, heads: int, start: int, cache_2GSE: Floats, out_TQ: Floats) -> None:
    """softmax(q kᵀ / √E) v over the positions up to each token's own. One task a (token, head)."""
    _, groups, _, width = cache_2GSE.shape
    scale = np.float32(1.0 / np.sqrt(width))
    for task in prange(qkv_TQ.shape[0] * heads):
        t, h = task // heads, task % heads
        positions = start + t + 1
        k_SE, v_SE = cache_2GSE[0, h * groups // heads], cache_2GSE[1, h * groups // heads]
        q_E, out_E = qkv_TQ[t, h * width : (h + 1) * width], out_TQ[t, h * width : (h + 1) * width]
        # One pass: when a larger score comes, what has been summed so far fades accordingly.
        largest, total = np.float32(-np.inf), np.float32(0)
        out_E[:] = np.float32(0)
        for s in range(positions):
            score = np.float32(0)
            for j in range(width):
                score += q_E[j] * k_SE[s, j]
            score *= scale
            if score > largest:
                fade = np.exp(largest - score)
                total *= fade
                for j in range(width):
                    out_E[j] *= fade
                largest = score
            p = np.exp(score - largest)
            total += p
            for j in range(width):
                out_E[j] += p * v_SE[s, j]
        for j in range(width):
            out_E[j] /= total
