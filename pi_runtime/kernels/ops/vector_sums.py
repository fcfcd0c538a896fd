"""Sums over one vector, in one order on every processor: `LANES` lanes from left to right, then added in halves."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils

from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.intrinsics import emits
from pi_runtime.kernels.codegen.jit import device
from pi_runtime.kernels.data.matrix_view import Floats, address_of

LANES = 8


def _emit_sum(b: Any, address: Any, count: Any, add: Callable[[Any, Any], Any]) -> Any:
    """Emit the sum over `count` numbers; `add` adds what a register of them gives to a register of sums."""
    x, kind = v.pointer(b, address), v.vec(v.F32, LANES)
    zeros = v.const(v.F32, LANES, 0.0)
    total = cgutils.alloca_once_value(b, zeros)
    b.store(zeros, total)
    whole = b.udiv(count, v.offset(LANES))
    with cgutils.for_range(b, whole) as loop:
        b.store(add(b.load(total), v.load(b, x, b.mul(loop.index, v.offset(4 * LANES)), kind)), total)
    done = b.mul(whole, v.offset(LANES))
    with b.if_then(b.icmp_signed("<", done, count)):
        left = b.sub(count, done)
        found = add(b.load(total), v.load_some(b, x, b.mul(done, v.offset(4)), left, kind))
        b.store(b.select(v.first_lanes(b, left, LANES), found, b.load(total)), total)
    return b.extract_element(v.halves_added(b, b.load(total), LANES), v.I32(0))


@emits(types.float32(types.intp, types.intp))
def _sum(b: Any, address: Any, count: Any) -> Any:
    return _emit_sum(b, address, count, b.fadd)


@emits(types.float32(types.intp, types.intp, types.float32))
def _squares(b: Any, address: Any, count: Any, mean: Any) -> Any:
    mean_L = v.splat(b, mean, LANES)

    def add(total: Any, x_L: Any) -> Any:
        apart = b.fsub(x_L, mean_L)
        return v.fma(b, apart, apart, total)

    return _emit_sum(b, address, count, add)


@device
def total(x_D: Floats) -> np.float32:
    """Σ x."""
    return _sum(address_of(x_D), x_D.shape[0])


@device
def squares(x_D: Floats, mean: np.float32) -> np.float32:
    """Σ (x − mean)²."""
    return _squares(address_of(x_D), x_D.shape[0], mean)
