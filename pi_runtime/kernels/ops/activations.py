"""Activations by the codes of `weight_table` (see `artifact.decoder`), for a row of numbers at once.

    silu(z) = z σ(z)        σ(z) = 1 / (1 + exp(−z)), by exp(−|z|)        gelu_tanh(z) = z (1 + tanh(u)) / 2

Code is emitted over whole vectors, for LLVM calls the C library for each exponential of a loop. Each operation rounds
as written, so the bits are those of any other vectors. GELU's error function alone comes from the C library.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from pi_runtime.artifact.decoder import CLAMP, SWIGLU_SLOPE
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.intrinsics import emits
from pi_runtime.kernels.codegen.jit import device
from pi_runtime.kernels.data.matrix_view import Floats, address_of
from pi_runtime.kernels.data.weight_table import CLAMPED_SWIGLU, DRELU, GELU, GELU_TANH, RELU, RELU2, SILU
from pi_runtime.kernels.ops.reductions import constant, exp_of_negative

LANES = 16
"""Numbers of a vector."""
_CLAMP = np.float32(CLAMP)
_HALF_ROOT = math.sqrt(0.5)
_TANH_FACTOR = math.sqrt(2 / math.pi)


def _relu(b: Any, z: Any) -> Any:
    """max(z, 0); NaN stays."""
    return b.select(b.fcmp_ordered("<=", z, constant(z.type, 0)), constant(z.type, 0), z)


def _squared_relu(b: Any, z: Any) -> Any:
    above = _relu(b, z)
    return b.fmul(above, above)


def _decay(b: Any, z: Any) -> tuple[Any, Any]:
    """exp(−|z|), and 1 + that."""
    fallen = exp_of_negative(b, b.fneg(v.call(b, f"llvm.fabs.v{LANES}f32", z.type, [z])))
    return fallen, b.fadd(constant(z.type, 1), fallen)


def _sigmoid(b: Any, z: Any) -> Any:
    fallen, whole = _decay(b, z)
    below = b.fcmp_ordered("<", z, constant(z.type, 0))
    return b.fdiv(b.select(below, fallen, constant(z.type, 1)), whole)


def _silu(b: Any, z: Any) -> Any:
    return b.fmul(z, _sigmoid(b, z))


def _clamped(b: Any, z: Any) -> Any:
    cut = b.select(b.fcmp_ordered(">", z, constant(z.type, CLAMP)), constant(z.type, CLAMP), z)
    return b.fmul(cut, _sigmoid(b, b.fmul(constant(z.type, SWIGLU_SLOPE), cut)))


def _gelu_tanh(b: Any, z: Any) -> Any:
    """Its tanh is −1 from z = −5.1 down, that of C libraries and NumPy from between −5.2 and −5.4."""
    cube = b.fmul(b.fmul(b.fmul(constant(z.type, 0.044715), z), z), z)
    u = b.fmul(constant(z.type, _TANH_FACTOR), b.fadd(z, cube))
    fallen, whole = _decay(b, b.fadd(u, u))
    tanh = b.fdiv(b.fsub(constant(z.type, 1), fallen), whole)
    signed = b.select(b.fcmp_ordered("<", z, constant(z.type, 0)), b.fneg(tanh), tanh)
    return b.fmul(b.fmul(constant(z.type, 0.5), z), b.fadd(constant(z.type, 1), signed))


EMITTED: dict[int, Callable[[Any, Any], Any]] = {
    RELU: _relu,
    RELU2: _squared_relu,
    DRELU: _relu,
    SILU: _silu,
    CLAMPED_SWIGLU: _clamped,
    GELU_TANH: _gelu_tanh,
}
"""What is emitted for each code but GELU's."""


@emits(types.void(types.intp, types.float32, types.intp, types.intp))
def _activate(b: Any, activation: Any, limit: Any, address: Any, count: Any) -> None:
    place, kind, limits = v.pointer(b, address), v.vec(v.F32, LANES), v.splat(b, limit, LANES)

    def emit(of: Callable[[Any, Any], Any]) -> None:
        def strip(at: Any, left: Any) -> None:
            h = of(b, v.load_strip(b, place, at, left, kind))
            small = b.fcmp_ordered("<=", v.call(b, f"llvm.fabs.v{LANES}f32", kind, [h]), limits)
            v.store_strip(b, b.select(small, constant(kind, 0), h), place, at, left)

        v.by_strips(b, count, LANES, strip)

    v.switch(b, activation, {code: lambda of=of: emit(of) for code, of in EMITTED.items()})  # type: ignore[misc]


@emits(types.void(types.intp, types.intp, types.intp))
def _times_sigmoid(b: Any, gates: Any, address: Any, count: Any) -> None:
    gates, place, kind = v.pointer(b, gates), v.pointer(b, address), v.vec(v.F32, LANES)

    def strip(at: Any, left: Any) -> None:
        y, z = (v.load_strip(b, base, at, left, kind) for base in (place, gates))
        v.store_strip(b, b.fmul(y, _sigmoid(b, z)), place, at, left)

    v.by_strips(b, count, LANES, strip)


@device
def times_sigmoid(z_N: Floats, y_N: Floats) -> None:
    """y ← y σ(z)."""
    _times_sigmoid(address_of(z_N), address_of(y_N), y_N.shape[0])


@device
def activate(activation: int, limit: np.float32, z_K: Floats) -> None:
    """z ← a(z), or 0 where its magnitude is at most `limit`."""
    if activation == GELU:
        # In 64 bits, like the definition: near −5 the sum in 32 bits has no digits left.
        for k in range(z_K.shape[0]):
            h = np.float32(z_K[k] * (0.5 + 0.5 * math.erf(z_K[k] * _HALF_ROOT)))
            z_K[k] = np.float32(0) if abs(h) <= limit else h
    else:
        _activate(activation, limit, address_of(z_K), z_K.shape[0])


@device
def times_up(activation: int, h: np.float32, up: np.float32) -> np.float32:
    """h · up, with what the activation makes of `up`; what does not fire stays 0 whatever that is."""
    if activation == DRELU:
        up = np.float32(0) if up <= 0 else up  # NaN stays
    elif activation == CLAMPED_SWIGLU:
        up = max(min(up, _CLAMP), -_CLAMP) + np.float32(1)
    return h if h == 0 else h * up
