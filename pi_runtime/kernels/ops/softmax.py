"""The weights of a softmax, block by block of `POSITIONS` scores.

    w_s = exp(scale · score_s − m), m the largest so far

The code is emitted over whole vectors: LLVM would leave loops of so few scores to scalar instructions. Every operation
rounds as written, so the bits are the same with any vector instructions.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

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


def _constant(kind: Any, value: float) -> Any:
    """A float32 constant, in every lane of a vector."""
    rounded = float(np.float32(value))
    return v.const(v.F32, kind.count, rounded) if isinstance(kind, ir.VectorType) else ir.Constant(kind, rounded)


def _exp(b: Any, x: Any) -> Any:
    """Emit exp(x) for x ≤ 0, within two units of the last place; NaN stays NaN."""
    kind = x.type
    lanes, name = (kind.count, f"v{kind.count}f32") if isinstance(kind, ir.VectorType) else (1, "f32")

    def c(value: float) -> Any:
        return _constant(kind, value)

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
    seen = b.select(counts, scaled, _constant(kind, -np.inf))
    largest = larger(_folded(b, seen, larger), before)
    weights = _exp(b, b.fsub(scaled, v.splat(b, largest, POSITIONS)))
    weights = b.select(counts, weights, _constant(kind, 0.0))
    rescale = _exp(b, b.fsub(before, largest))
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
