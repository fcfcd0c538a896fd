"""Activations, by the codes of `weight_table`; the formulas are in `artifact/decoder.py`.

Magnitudes of a(z) up to `limit` count as 0. Several kernels compute these, for lists and for tiles. So each operation
rounds as written: else the compiler might choose another order in each.
"""

import math

import numpy as np

from pi_runtime.kernels.codegen.jit import device
from pi_runtime.kernels.data.weight_table import DRELU, GELU, RELU, RELU2, SILU

_HALF_ROOT = math.sqrt(0.5)
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
    elif activation not in (RELU, DRELU):
        inner = _TANH_FACTOR * (z + np.float32(0.044715) * z * z * z)
        h = np.float32(0.5) * z * (np.float32(1) + np.tanh(inner))
    return np.float32(0) if abs(h) <= limit else h


@device
def times_up(relu_up: bool, h: np.float32, up: np.float32) -> np.float32:
    """h · up, or h · max(up, 0) with `relu_up`; what does not fire stays 0 whatever `up` is."""
    return h if h == 0 else h * (relu(up) if relu_up else up)
