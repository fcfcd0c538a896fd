"""Rotary positions and attention over the key-value cache.

Shape letters: T tokens of this block, the first at position `start`; H query heads, G key-value heads, E head width, J
rotary frequencies, S cached positions. `qkv_TQ` holds each token's H + 2G heads side by side (Q numbers). A layer's
cache is (2, G, S, W): keys and values as 16-bit words, W = E for float16 or 2E for float32.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange

from pi_runtime.kernels.codegen.jit import device, parallel, public
from pi_runtime.kernels.data.matrix_view import Floats, Halves, float_to_half, vector, widened

LARGEST_HALF = np.float32(65504)
"""The largest float16 number."""


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
def rotate(cos_SJ: Floats, sin_SJ: Floats, start: int, heads: int, width: int, qkv_TQ: Floats) -> None:
    """(a, b) ← (a cos − b sin, b cos + a sin): a and b are the halves of a head's first 2J numbers, for the first
    `heads` heads."""
    half = cos_SJ.shape[1]
    for t in range(qkv_TQ.shape[0]):
        cos_J, sin_J = cos_SJ[start + t], sin_SJ[start + t]
        for h in range(heads):
            head_E = qkv_TQ[t, h * width : (h + 1) * width]
            for j in range(half):
                a, b = head_E[j], head_E[half + j]
                head_E[j] = a * cos_J[j] - b * sin_J[j]
                head_E[half + j] = b * cos_J[j] + a * sin_J[j]


@public
def store_kv(qkv_TQ: Floats, heads: int, width: int, start: int, cache_2GSW: Halves) -> None:
    """Write this block's keys and values into the cache, limited to what float16 can hold."""
    _, groups, _, words = cache_2GSW.shape
    for t in range(qkv_TQ.shape[0]):
        for part in range(2):
            for g in range(groups):
                column = (heads + part * groups + g) * width
                x_E, line_W = qkv_TQ[t, column : column + width], cache_2GSW[part, g, start + t]
                if words == width:
                    for j in range(width):
                        line_W[j] = float_to_half(min(max(x_E[j], -LARGEST_HALF), LARGEST_HALF))
                else:
                    line_E = line_W.view(np.float32)
                    for j in range(width):
                        line_E[j] = x_E[j]


@public
def attend(qkv_TQ: Floats, heads: int, start: int, cache_2GSW: Halves, out_TQ: Floats) -> None:
    """out ← softmax(q kᵀ / √E) v over the positions up to each token's own, one task for each (token, head)."""
    _attend(qkv_TQ, heads, start, cache_2GSW, out_TQ)


@parallel
def _attend(qkv_TQ: Floats, heads: int, start: int, cache_2GSW: Halves, out_TQ: Floats) -> None:
    _, groups, _, words = cache_2GSW.shape
    width = qkv_TQ.shape[1] // (heads + 2 * groups)
    for task in prange(qkv_TQ.shape[0] * heads):
        t, h = task // heads, task % heads
        positions = start + t + 1
        k_SW, v_SW = cache_2GSW[0, h * groups // heads], cache_2GSW[1, h * groups // heads]
        q_E, out_E = qkv_TQ[t, h * width : (h + 1) * width], out_TQ[t, h * width : (h + 1) * width]
        if words == width:
            _attend_head(q_E, k_SW, v_SW, positions, out_E)
        else:
            _attend_head(q_E, k_SW.view(np.float32), v_SW.view(np.float32), positions, out_E)


@device
def _attend_head(q_E: Floats, k_SE: npt.NDArray[Any], v_SE: npt.NDArray[Any], positions: int, out_E: Floats) -> None:
    """out ← softmax(q kᵀ / √E) v for one head of one token."""
    width = len(q_E)
    scale = np.float32(1.0 / np.sqrt(width))
    # One pass: when a larger score comes, the sums so far are scaled down accordingly.
    largest, total = np.float32(-np.inf), np.float32(0)
    out_E[:] = np.float32(0)
    for s in range(positions):
        score = np.float32(0)
        for j in range(width):
            score += q_E[j] * widened(k_SE[s, j])
        score *= scale
        if score > largest:
            rescale = np.exp(largest - score)
            total *= rescale
            for j in range(width):
                out_E[j] *= rescale
            largest = score
        p = np.exp(score - largest)
        total += p
        for j in range(width):
            out_E[j] += p * widened(v_SE[s, j])
    for j in range(width):
        out_E[j] /= total
