"""Activations, by the codes of `weight_table`; the formulas are in `artifact/decoder.py`.

N neurons, of one token or of several. Magnitudes of a(z) up to `limit` count as 0.
"""

import math

import numpy as np

from pi_runtime.kernels.codegen.jit import device
from pi_runtime.kernels.data.matrix_view import Floats
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
def activate_all(activation: int, limit: np.float32, h_N: Floats) -> None:
    """h ← a(h)."""
    if activation in (RELU, DRELU) and limit == 0:
        for n in range(h_N.shape[0]):
            h_N[n] = relu(h_N[n])
        return
    for n in range(h_N.shape[0]):
        h_N[n] = activate(activation, limit, h_N[n])


@device
def multiply_up(relu_up: bool, limit: np.float32, h_N: Floats, up_N: Floats) -> int:
    """h ← h · up, or h · max(up, 0) with `relu_up`; returns how many are not 0. Then drops those whose h was at most
    `limit`."""
    fire = 0
    for n in range(h_N.shape[0]):
        a, up = h_N[n], up_N[n]
        h = a * (relu(up) if relu_up else up)
        fire += h != 0
        h_N[n] = np.float32(0) if abs(a) <= limit else h
    return fire


@device
def drop_small(limit: np.float32, h_N: Floats) -> int:
    """h ← 0 where its magnitude is at most `limit`; returns how many were not 0."""
    fire = 0
    for n in range(h_N.shape[0]):
        h = h_N[n]
        fire += h != 0
        h_N[n] = np.float32(0) if abs(h) <= limit else h
    return fire
