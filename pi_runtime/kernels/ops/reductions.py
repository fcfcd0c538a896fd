"""Sums over one vector, and the weights of a softmax, block by block of `POSITIONS` scores.

    w_s = exp(scale · score_s − m), m the largest so far

A sum is in one order on every processor: `LANES` lanes from left to right, then added in halves.

The code is emitted over whole vectors: LLVM would leave loops of so few scores to scalar instructions. Every operation
rounds as written, so the bits are the same with any vector instructions.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from pi_runtime.artifact.footprint import POSITIONS
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.intrinsics import emits
from pi_runtime.kernels.codegen.jit import device
from pi_runtime.kernels.data.matrix_view import Floats, address_of

LOG2E = 1.44269504
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Coefficients of Cephes' expf, from the highest power on."""
SMALLEST = -87.0
"""exp of what is less counts as 0."""


def constant(kind: Any, value: float) -> Any:
    """A float32 constant, in every lane of a vector."""
    rounded = float(np.float32(value))
    return v.const(v.F32, kind.count, rounded) if isinstance(kind, ir.VectorType) else ir.Constant(kind, rounded)


def exp_of_negative(b: Any, x: Any) -> Any:
    """Emit exp(x) for x ≤ 0, within two units of the last place; NaN stays NaN."""
    kind = x.type
    lanes, name = (kind.count, f"v{kind.count}f32") if isinstance(kind, ir.VectorType) else (1, "f32")

    def c(value: float) -> Any:
        return constant(kind, value)

    clamped = b.select(b.fcmp_ordered(">", x, c(SMALLEST)), x, c(SMALLEST))
    n = v.call(b, f"llvm.floor.{name}", kind, [b.fadd(b.fmul(clamped, c(LOG2E)), c(0.5))])
    r = b.fsub(b.fsub(clamped, b.fmul(n, c(LN2_HIGH))), b.fmul(n, c(LN2_LOW)))
    p = c(POLYNOMIAL[0])
    for coefficient in (*POLYNOMIAL[1:], 1.0, 1.0):
        p = b.fadd(b.fmul(p, r), c(coefficient))
    whole = v.I32 if lanes == 1 else v.vec(v.I32, lanes)
    bias, shift = (ir.Constant(whole, k if lanes == 1 else [k] * lanes) for k in (127, 23))
    power = b.bitcast(b.shl(b.add(b.fptosi(n, whole), bias), shift), kind)
    found = b.select(b.fcmp_ordered("<", x, c(SMALLEST)), c(0.0), b.fmul(p, power))
    return b.select(b.fcmp_unordered("uno", x, x), x, found)


def _folded(b: Any, values: Any, join: Any) -> Any:
    """One value of all lanes: the upper half is joined to the lower one until a lane is left."""
    while values.type.count > 1:
        half = values.type.count // 2
        low, high = (v.shuffle(b, values, values, range(first, first + half)) for first in (0, half))
        values = join(low, high)
    return b.extract_element(values, ir.Constant(v.I32, 0))


@emits(types.float32(types.intp, types.intp, types.float32, types.intp, types.intp))
def _emit_weigh(b: Any, score: Any, seen: Any, scale: Any, largest: Any, total: Any) -> Any:
    """Emit `weigh`; scores, largest and total are addresses."""
    places = [v.pointer(b, address) for address in (score, largest, total)]
    score, start, kind = places[0], v.offset(0), v.vec(v.F32, POSITIONS)
    before, total = (v.load(b, place, start, v.F32) for place in places[1:])

    def larger(one: Any, other: Any) -> Any:
        return b.select(b.fcmp_ordered(">", one, other), one, other)

    numbers = ir.Constant(v.vec(v.I64, POSITIONS), list(range(POSITIONS)))
    counts = b.icmp_signed("<", numbers, v.splat(b, seen, POSITIONS))
    scaled = b.fmul(v.load(b, score, start, kind), v.splat(b, scale, POSITIONS))
    seen = b.select(counts, scaled, constant(kind, -np.inf))
    largest = larger(_folded(b, seen, larger), before)
    weights = exp_of_negative(b, b.fsub(scaled, v.splat(b, largest, POSITIONS)))
    weights = b.select(counts, weights, constant(kind, 0.0))
    rescale = exp_of_negative(b, b.fsub(before, largest))
    total = b.fadd(b.fmul(total, rescale), _folded(b, weights, b.fadd))
    for value, place in zip((weights, largest, total), places, strict=True):
        v.store(b, value, place, start)
    return rescale


@device
def weigh(score_B: Floats, seen: int, scale: np.float32, largest_1: Floats, total_1: Floats) -> np.float32:
    """score ← exp(score · scale − largest) of the `seen` first positions, else 0; adds them to the total.

    Returns the factor by which a larger score scales down what was summed before.
    """
    return _emit_weigh(address_of(score_B), seen, scale, address_of(largest_1), address_of(total_1))


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
