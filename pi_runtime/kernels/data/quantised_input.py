"""The input of matrix products: a vector as float32 and as quantised bytes, side by side in memory.

x has D columns, padded with zeros to P = 128 ⌈D / 128⌉, in blocks of 32 with the scale s = max |x| / 127 each:

    float32 x [P]   int8 q [P]   float32 s [P/32]   int32 −Σ q of each block [P/32], and of its first half   int8 q [P]

q = round(x / s), half to even, so that x ≈ s q. It stands there twice: in the order of stored rows (see
`artifact.formats`) for products, and in the order of the columns, from which that is made, and which becomes tiles
where AMX multiplies them (see `ops.tile_packing`). The sums turn products with unsigned bytes into products with signed
weights: Σ (u − 8) q = Σ u q − 8 Σ q for q4, and 128 instead of 8 for q8.

Shape letters: D columns, P padded columns, B blocks, J columns of one block, Q fours of bytes.
"""

from typing import Any

import numpy as np
from numba import carray, types

from pi_runtime.artifact.footprint import INPUT, PAD
from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.intrinsics import emits, padded_width
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import Floats, is_quantised, pointer_of
from pi_runtime.kernels.data.weight_formats import GROUP_COLUMNS

_TINY = 2.0**-126
"""Below the smallest normal scale 1/s would overflow: such a block counts as zeros."""


@public
def row_order_at(input_at: int, p: int) -> int:
    """Address of the bytes in the order of stored rows, for products with rows."""
    return input_at + p // PAD * INPUT.row_order


@public
def scales_at(input_at: int, p: int) -> int:
    """Address of the blocks' scales."""
    return input_at + p // PAD * INPUT.scales


@public
def block_sums_at(input_at: int, p: int) -> int:
    """Address of the blocks' negative sums."""
    return input_at + p // PAD * INPUT.block_sums


@public
def half_sums_at(input_at: int, p: int) -> int:
    """Address of the negative sums of the blocks' first halves."""
    return input_at + p // PAD * INPUT.half_sums


@public
def column_order_at(input_at: int, p: int) -> int:
    """Address of the bytes in the order of the columns."""
    return input_at + p // PAD * INPUT.column_order


@public
def prepare_input(fmt: int, x_D: Floats, input_at: int) -> None:
    """Write x as the input of products with a matrix of format `fmt`: the floats, and for block formats the bytes."""
    columns = x_D.shape[0]
    p = padded_width(columns)
    x_P = carray(pointer_of(input_at), (p,), np.float32)
    for j in range(columns):
        x_P[j] = x_D[j]
    for j in range(columns, p):
        x_P[j] = np.float32(0)
    if is_quantised(fmt):
        _quantise(p, input_at)
        _interleave((columns + BLOCK - 1) // BLOCK * BLOCK // GROUP_COLUMNS, p, input_at)


@device
def _quantise(p: int, input_at: int) -> None:
    q, scales, sums = column_order_at(input_at, p), scales_at(input_at, p), block_sums_at(input_at, p)
    halves = half_sums_at(input_at, p)
    for block in range(p // BLOCK):
        at = 4 * block
        _quantise_block(input_at + at * BLOCK, q + block * BLOCK, scales + at, sums + at, halves + at)


@emits(types.void(*[types.intp] * 5))
def _quantise_block(b: Any, x: Any, q: Any, scale_at: Any, sum_at: Any, half_at: Any) -> None:
    """Emit the bytes of a block, their scale and their negative sums: all places are addresses."""
    half, whole = BLOCK // 2, v.vec(v.I32, BLOCK // 2)
    x_2J = [v.load(b, v.pointer(b, x), v.offset(start * 4), v.vec(v.F32, half)) for start in (0, half)]
    # Magnitudes are ordered like their bits, NaN above all: so an infinite or NaN input reaches the scale.
    bits = [b.and_(b.bitcast(x_J, whole), v.const(v.I32, half, 0x7FFFFFFF)) for x_J in x_2J]
    most = b.select(b.icmp_signed(">", *bits), *bits)
    largest = v.call(b, f"llvm.vector.reduce.smax.v{half}i32", v.I32, [most])
    scale = b.fdiv(b.bitcast(largest, v.F32), v.F32(127.0))
    inverse = b.select(b.fcmp_ordered(">=", scale, v.F32(_TINY)), b.fdiv(v.F32(1.0), scale), v.F32(0.0))
    used = b.select(b.fcmp_ordered("<", scale, v.F32(_TINY)), v.F32(0.0), scale)
    negative = []
    for n, x_J in enumerate(x_2J):
        rounded = v.call(b, f"llvm.rint.v{half}f32", x_J.type, [b.fmul(x_J, v.splat(b, inverse, half))])
        q_J = b.fptosi(rounded, whole)
        v.store(b, b.trunc(q_J, v.vec(v.I8, half)), v.pointer(b, q), v.offset(n * half))
        negative.append(b.neg(v.call(b, f"llvm.vector.reduce.add.v{half}i32", v.I32, [q_J])))
    for value, at in ((used, scale_at), (b.add(*negative), sum_at), (negative[0], half_at)):
        v.store(b, value, v.pointer(b, at), v.offset(0))


@device
def _interleave(groups: int, p: int, input_at: int) -> None:
    """Copy the bytes into the order of stored rows: in each group of eight blocks, fours are transposed."""
    source, to = column_order_at(input_at, p), row_order_at(input_at, p)
    for at in range(0, groups * GROUP_COLUMNS, GROUP_COLUMNS):
        _transpose_fours(source + at, to + at)
    from_Q = carray(pointer_of(source), (p // 4,), np.int32)
    to_Q = carray(pointer_of(to), (p // 4,), np.int32)
    for n in range(groups * GROUP_COLUMNS // 4, p // 4):
        to_Q[n] = from_Q[n]


@emits(types.void(types.intp, types.intp))
def _transpose_fours(b: Any, source: Any, to: Any) -> None:
    kind, places = v.vec(v.I32, BLOCK // 4), [v.offset(block * BLOCK) for block in range(BLOCK // 4)]
    rows = [v.load(b, v.pointer(b, source), at, kind) for at in places]
    for row, at in zip(v.transpose(b, rows), places, strict=True):
        v.store(b, row, v.pointer(b, to), at)
