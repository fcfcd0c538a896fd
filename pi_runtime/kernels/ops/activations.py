"""Activations, by the codes of `weight_table`; the formulas are in `artifact/decoder.py`.

Magnitudes of a(z) up to `limit` count as 0. Several kernels compute these, for lists and for tiles. So each operation
rounds as written: else the compiler might choose another order in each.
"""

import math

import numpy as np

from pi_runtime.artifact.decoder import CLAMP, SWIGLU_SLOPE
from pi_runtime.kernels.codegen.jit import device
from pi_runtime.kernels.data.weight_table import CLAMPED_SWIGLU, DRELU, GELU, RELU, RELU2, SILU

_HALF_ROOT = math.sqrt(0.5)
_CLAMP, _SLOPE = np.float32(CLAMP), np.float32(SWIGLU_SLOPE)
_TANH_FACTOR = np.float32(math.sqrt(2 / math.pi))


@device
def relu(z: np.float32) -> np.float32:
    """max(z, 0); NaN stays."""
    return np.float32(0) if z <= 0 else z


@device
def activate(activation: int, limit: np.float32, z: np.float32) -> np.float32:
    """a(z), or 0 where its magnitude is at most `limit`."""
    h = relu(z)
    if activation == RELU2:
        h *= h
    elif activation == SILU:
        h = z / (np.float32(1) + np.exp(-z))
    elif activation == GELU:
        # In 64 bits, like the definition: near −5 the sum in 32 bits has no digits left.
        h = np.float32(z * (0.5 + 0.5 * math.erf(z * _HALF_ROOT)))
    elif activation == CLAMPED_SWIGLU:
        cut = min(z, _CLAMP)
        h = cut / (np.float32(1) + np.exp(-_SLOPE * cut))
    elif activation not in (RELU, DRELU):
        inner = _TANH_FACTOR * (z + np.float32(0.044715) * z * z * z)
        h = np.float32(0.5) * z * (np.float32(1) + np.tanh(inner))
    return np.float32(0) if abs(h) <= limit else h


@device
def times_up(activation: int, h: np.float32, up: np.float32) -> np.float32:
    """h · up, with what the activation makes of `up`; what does not fire stays 0 whatever that is."""
    if activation == DRELU:
        up = relu(up)
    elif activation == CLAMPED_SWIGLU:
        up = max(min(up, _CLAMP), -_CLAMP) + np.float32(1)
    return h if h == 0 else h * up
