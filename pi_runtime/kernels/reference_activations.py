"""The activations of the reference; the formulas are in `artifact/decoder.py`."""

from collections.abc import Callable, Mapping
from math import erf

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.decoder import CLAMP, SWIGLU_SLOPE

F32 = npt.NDArray[np.float32]


def _silu(z: F32) -> F32:
    with np.errstate(over="ignore"):  # exp(−z) = inf makes the right 0
        return np.asarray(z / (np.float32(1) + np.exp(-z)), np.float32)


def _gelu(z: F32) -> F32:
    return np.asarray(z * (0.5 + 0.5 * np.vectorize(erf, otypes=[np.float64])(z / np.sqrt(2))), np.float32)


def _gelu_tanh(z: F32) -> F32:
    inner = np.float32(np.sqrt(2 / np.pi)) * (z + np.float32(0.044715) * z * z * z)
    return np.asarray(np.float32(0.5) * z * (np.float32(1) + np.tanh(inner)), np.float32)


def _clamped_swiglu(z: F32) -> F32:
    cut = np.minimum(z, np.float32(CLAMP))
    with np.errstate(over="ignore"):
        return np.asarray(cut / (np.float32(1) + np.exp(-np.float32(SWIGLU_SLOPE) * cut)), np.float32)


def _relu(z: F32) -> F32:
    return np.maximum(z, np.float32(0))


ACTIVATIONS: Mapping[str, Callable[[F32], F32]] = {
    "relu": _relu,
    "relu2": lambda z: _relu(z) * _relu(z),
    "drelu": _relu,
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "clamped_swiglu": _clamped_swiglu,
}
UPS: Mapping[str, Callable[[F32], F32]] = {
    "drelu": _relu,
    "clamped_swiglu": lambda up: np.clip(up, np.float32(-CLAMP), np.float32(CLAMP)) + np.float32(1),
}
"""What an activation makes of up · x + c."""
