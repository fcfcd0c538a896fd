"""The product of one q8 or q4 row with one vector: integer sums, a conversion and a scale for eight blocks at once.

    row · x = Σ_b s_b t_b (Σ_{j in b} u_j q_j − bias Σ_{j in b} q_j)

with u the nibbles of q4 (bias 8), or the bytes of q8 and 128 (bias 128); where signed bytes are multiplied, q8 has no
bias. Lane b of a vector of a group belongs to block b (see `artifact.formats`).
"""

# The signatures of `generate` are numba's.
# ruff: noqa: ARG001

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import leaf
from pi_runtime.kernels.data.matrix_view import Q4, Q8, half_to_float, pointer_of
from pi_runtime.kernels.data.quantised_input import bytes_at, padded, scales_at
from pi_runtime.kernels.data.row_loading import GROUP_COLUMNS, place_of, weight_of


@dataclass
class _Product:
    """Emits code for one row: pointers to its weights and scales, and to the vector's bytes, scales and block sums."""

    b: Any
    bits: int
    w: Any
    s: Any
    q: Any
    t: Any
    n: Any

    def start(self, block: Any, count: int, lanes: int) -> Any:
        """−bias Σ q of `count` blocks in the first of `lanes` lanes; zeros where there is no bias."""
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
        """`size` bytes from byte `at` of the row on; of q4 their lower and their upper halves."""
        found = v.load(self.b, self.w, at, v.vec(v.I8, size))
        if self.bits == 4:
            return [self.b.and_(found, v.const(v.I8, size, 15)), self.b.lshr(found, v.const(v.I8, size, 4))]
        return [self.b.xor(found, v.const(v.I8, size, -128)) if ISA.dot else found]

    def add(self, into: Any, weights: Any, place: Any) -> Any:
        q_J = v.load(self.b, self.q, place, weights.type)
        return v.dot_bytes(self.b, into, weights, q_J, signed=self.bits == 8)

    def group(self, index: Any, ahead: Any) -> Any:
        """One group's eight block sums as float32; its line `ahead` bytes later is asked for."""
        b, lanes, size = self.b, ISA.lanes, 4 * ISA.lanes
        nbytes = GROUP_COLUMNS * self.bits // 8
        stored, place = b.mul(index, v.offset(nbytes)), b.mul(index, v.offset(GROUP_COLUMNS))
        for line in range(0, nbytes, v.LINE):
            v.prefetch(b, self.w, b.add(ahead, b.add(stored, v.offset(line))))
        sums = [self.start(b.mul(index, v.offset(8)), 8, lanes), v.const(v.I32, lanes, 0)]
        for k in range(nbytes // size):
            for half, w_J in enumerate(self.weights(b.add(stored, v.offset(k * size)), size)):
                which = half if self.bits == 4 else k % 2
                sums[which] = self.add(sums[which], w_J, b.add(place, v.offset(k * size + half * GROUP_COLUMNS // 2)))
        found = b.add(*sums)
        if lanes == 16:
            found = b.add(*(v.shuffle(b, found, found, range(k, k + 8)) for k in (0, 8)))
        return b.sitofp(found, v.vec(v.F32, 8))

    def single(self, block: Any, half: int, weights: Any) -> tuple[Any, Any]:
        """A block outside the groups: its sum in parts, and its factor in every lane."""
        b, one = self.b, self.b.add(block, v.offset(half))
        found = self.add(self.start(one, 1, 8), weights, b.mul(one, v.offset(BLOCK)))
        factors = self.factors(one, 1)
        return b.sitofp(found, v.vec(v.F32, 8)), v.shuffle(b, factors, factors, [0] * 8)


def _dot(bits: int) -> Any:
    at_once = 8 // bits
    """Blocks outside the groups that share their bytes."""

    @intrinsic
    def dot(typing_context: Any, row: Any, scales: Any, record: Any, columns: Any, ahead: Any) -> Any:
        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            w, s, x = (v.pointer(b, a) for a in arguments[:3])
            p = b.and_(b.add(arguments[3], v.offset(127)), v.offset(-128))
            t = b.gep(x, [b.mul(p, v.offset(5))])
            product = _Product(b, bits, w, s, b.gep(x, [b.mul(p, v.offset(4))]), t, b.gep(t, [b.udiv(p, v.offset(8))]))
            total = cgutils.alloca_once_value(b, v.const(v.F32, 8, 0.0))
            blocks = b.udiv(b.add(arguments[3], v.offset(BLOCK - 1)), v.offset(BLOCK))
            groups = b.udiv(blocks, v.offset(8))
            with cgutils.for_range(b, groups) as loop:
                value, factors = (
                    product.group(loop.index, arguments[4]),
                    product.factors(b.mul(loop.index, v.offset(8)), 8),
                )
                b.store(v.fma(b, value, factors, b.load(total)), total)
            done = b.mul(groups, v.offset(8))
            left = b.udiv(b.add(b.sub(blocks, done), v.offset(at_once - 1)), v.offset(at_once))
            with cgutils.for_range(b, left) as loop:
                block = b.add(done, b.mul(loop.index, v.offset(at_once)))
                for half, w_J in enumerate(
                    product.weights(b.udiv(b.mul(block, v.offset(BLOCK)), v.offset(at_once)), BLOCK)
                ):
                    b.store(v.fma(b, *product.single(block, half, w_J), b.load(total)), total)
            return v.add_lanes(b, b.load(total))

        return types.float32(*[types.intp] * 5), generate

    return dot


def _portable(fmt: int) -> Any:
    @leaf
    def dot(row: int, scales: int, record: int, columns: int, ahead: int) -> np.float32:
        p, blocks = padded(columns), (columns + BLOCK - 1) // BLOCK
        s_B = carray(pointer_of(scales), (blocks,), np.uint16)
        q_P = carray(pointer_of(bytes_at(record, p)), (p,), np.int8)
        t_B = carray(pointer_of(scales_at(record, p)), (blocks,), np.float32)
        total = np.float32(0)
        for block in range(blocks):
            whole = np.int32(0)
            for column in range(block * BLOCK, (block + 1) * BLOCK):
                place = place_of(column, blocks)
                whole += np.int32(weight_of(fmt, row, place, blocks)) * np.int32(q_P[place])
            total += half_to_float(s_B[block]) * t_B[block] * np.float32(whole)
        return total

    return dot


portable_dot_q8, portable_dot_q4 = _portable(Q8), _portable(Q4)

dot_q8, dot_q4 = (_dot(8), _dot(4)) if ISA.lanes else (portable_dot_q8, portable_dot_q4)
