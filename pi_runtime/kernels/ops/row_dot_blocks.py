"""The dot product of one row of a block format with one vector: eight blocks at once share a conversion and a scaling.

    row · x = Σ_b s_b t_b (Σ_{j in b} u_j q_j − bias Σ_{j in b} q_j)

u is unsigned: the nibbles of q4 (bias 8), or the bytes of q8 plus 128 (bias 128). Where signed bytes are multiplied, q8
has no bias. In a group, lane b of a vector belongs to block b (see `artifact.formats`).

Shape letters: B blocks, J columns or bytes of one vector, P padded columns.
"""

# The signatures of `generate` are numba's.
# ruff: noqa: ARG001

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from pi_runtime.artifact.formats import BLOCK, FORMATS
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import public
from pi_runtime.kernels.data.matrix_view import half_to_float, pointer_of
from pi_runtime.kernels.data.quantised_input import padded_columns, row_order_at, scales_at
from pi_runtime.kernels.data.row_loading import GROUP_COLUMNS, integer_weight, stored_index

_BITS = {f.code: f.bits for f in FORMATS.values() if f.quantised}
"""The block formats: code → bits of a weight."""


@dataclass
class _Product:
    """Emits code for one row. Pointers to its weights w and scales s, and to the input's bytes q, scales t and negative
    block sums n."""

    b: Any
    bits: int
    w: Any
    s: Any
    q: Any
    t: Any
    n: Any

    def start(self, block: Any, count: int, lanes: int) -> Any:
        """−bias Σ q of `count` blocks, in the first of `lanes` lanes; zeros where there is no bias."""
        if self.bits == 8 and not ISA.dot:
            return v.const(v.I32, lanes, 0)
        sums = v.load(self.b, self.n, self.b.mul(block, v.offset(4)), v.vec(v.I32, count))
        sums = self.b.shl(sums, v.const(v.I32, count, 7 if self.bits == 8 else 3))
        zeros = ir.Constant(sums.type, [0] * count)
        return v.shuffle(self.b, sums, zeros, [k if k < count else count for k in range(lanes)])

    def factors(self, block: Any, count: int) -> Any:
        """s t of `count` blocks."""
        s_B = v.load(self.b, self.s, self.b.mul(block, v.offset(2)), v.vec(v.HALF, count))
        t_B = v.load(self.b, self.t, self.b.mul(block, v.offset(4)), v.vec(v.F32, count))
        return self.b.fmul(self.b.fpext(s_B, t_B.type), t_B)

    def weights(self, at: Any, size: int) -> list[Any]:
        """Vectors of `size` weights from byte `at` of the row on: one of q8, two of q4 (lower and upper nibbles)."""
        found = v.load(self.b, self.w, at, v.vec(v.I8, size))
        if self.bits == 4:
            return [self.b.and_(found, v.const(v.I8, size, 15)), self.b.lshr(found, v.const(v.I8, size, 4))]
        return [self.b.xor(found, v.const(v.I8, size, -128)) if ISA.dot else found]

    def add(self, into: Any, weights: Any, start: Any) -> Any:
        """into + weights · q, with the input's bytes from index `start` on."""
        q_J = v.load(self.b, self.q, start, weights.type)
        return v.dot_bytes(self.b, into, weights, q_J, signed=self.bits == 8)

    def group(self, index: Any, ahead: Any) -> Any:
        """The sums of a group's eight blocks as float32; the line `ahead` bytes later is prefetched."""
        b, lanes, size = self.b, ISA.lanes, 4 * ISA.lanes
        nbytes = GROUP_COLUMNS * self.bits // 8
        stored, first = b.mul(index, v.offset(nbytes)), b.mul(index, v.offset(GROUP_COLUMNS))
        for line in range(0, nbytes, v.LINE):
            v.prefetch(b, self.w, b.add(ahead, b.add(stored, v.offset(line))))
        sums = [self.start(b.mul(index, v.offset(8)), 8, lanes), v.const(v.I32, lanes, 0)]
        for k in range(nbytes // size):
            for half, w_J in enumerate(self.weights(b.add(stored, v.offset(k * size)), size)):
                which = half if self.bits == 4 else k % 2
                sums[which] = self.add(sums[which], w_J, b.add(first, v.offset(k * size + half * GROUP_COLUMNS // 2)))
        found = b.add(*sums)
        if lanes == 16:
            found = b.add(*(v.shuffle(b, found, found, range(k, k + 8)) for k in (0, 8)))
        return b.sitofp(found, v.vec(v.F32, 8))

    def single(self, block: Any, half: int, weights: Any) -> tuple[Any, Any]:
        """A block outside the groups: its sum in parts, and its scale s t in every lane."""
        b, one = self.b, self.b.add(block, v.offset(half))
        found = self.add(self.start(one, 1, 8), weights, b.mul(one, v.offset(BLOCK)))
        factors = self.factors(one, 1)
        return b.sitofp(found, v.vec(v.F32, 8)), v.shuffle(b, factors, factors, [0] * 8)


def _emit_dot(b: Any, bits: int, arguments: Any) -> Any:
    """Emit row · x for one format; `arguments` as those of `_dot_blocks` without the format."""
    w, s, x = (v.pointer(b, a) for a in arguments[:3])
    columns, ahead = arguments[3:]
    p = b.and_(b.add(columns, v.offset(127)), v.offset(-128))
    t = b.gep(x, [b.mul(p, v.offset(5))])
    product = _Product(b, bits, w, s, b.gep(x, [b.mul(p, v.offset(4))]), t, b.gep(t, [b.udiv(p, v.offset(8))]))
    total = cgutils.alloca_once_value(b, v.const(v.F32, 8, 0.0))
    blocks = b.udiv(b.add(columns, v.offset(BLOCK - 1)), v.offset(BLOCK))
    groups = b.udiv(blocks, v.offset(8))
    with cgutils.for_range(b, groups) as loop:
        value, factors = product.group(loop.index, ahead), product.factors(b.mul(loop.index, v.offset(8)), 8)
        b.store(v.fma(b, value, factors, b.load(total)), total)
    done, at_once = b.mul(groups, v.offset(8)), 8 // bits  # blocks outside the groups that share their bytes
    left = b.udiv(b.add(b.sub(blocks, done), v.offset(at_once - 1)), v.offset(at_once))
    with cgutils.for_range(b, left) as loop:
        block = b.add(done, b.mul(loop.index, v.offset(at_once)))
        at = b.udiv(b.mul(block, v.offset(BLOCK)), v.offset(at_once))
        for half, w_J in enumerate(product.weights(at, BLOCK)):
            b.store(v.fma(b, *product.single(block, half, w_J), b.load(total)), total)
    return v.add_lanes(b, b.load(total))


@intrinsic
def _dot_blocks(typing_context: Any, fmt: Any, row: Any, scales: Any, input_at: Any, columns: Any, ahead: Any) -> Any:
    """Row · x: addresses of a row, its scales and the input; `ahead` bytes later is the row to prefetch."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return v.switch(b, arguments[0], {code: partial(_emit_dot, b, n, arguments[1:]) for code, n in _BITS.items()})

    return types.float32(*[types.intp] * 6), generate


@public
def portable_dot_blocks(fmt: int, row: int, scales: int, input_at: int, columns: int, ahead: int) -> np.float32:
    """The definition of `dot_blocks` in plain loops."""
    p, blocks = padded_columns(columns), (columns + BLOCK - 1) // BLOCK
    s_B = carray(pointer_of(scales), (blocks,), np.uint16)
    q_P = carray(pointer_of(row_order_at(input_at, p)), (p,), np.int8)
    t_B = carray(pointer_of(scales_at(input_at, p)), (blocks,), np.float32)
    total = np.float32(0)
    for block in range(blocks):
        whole = np.int32(0)
        for column in range(block * BLOCK, (block + 1) * BLOCK):
            index = stored_index(column, blocks)
            whole += np.int32(integer_weight(fmt, row, index, blocks)) * np.int32(q_P[index])
        total += half_to_float(s_B[block]) * t_B[block] * np.float32(whole)
    return total


dot_blocks = _dot_blocks if ISA.lanes else portable_dot_blocks
