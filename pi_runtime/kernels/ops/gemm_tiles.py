"""GEMM tiles: a panel of rows times a few vectors at once, with all sums in registers.

A panel holds `PANEL` rows side by side, transposed, so that a vector register takes one number of each row:

    floats   out_t,r += Σ_k panel_k,r x_t,k                            float32; r < PANEL
    bytes    out_t,r += Σ_b s_b,r t_t,b Σ_{k in b} w_k,r q_t,k         four k in each 32-bit lane; integer sums exact
                                                                       q in the order of its columns

The bytes are what the artifact stores; q8 has 128 added where the processor multiplies unsigned bytes. The block sums
of the inputs take these offsets out again (see `quantised_input`).

Shape letters: T vectors, K columns, B blocks, R rows of a panel, J bytes of one vector, L lanes.
"""

# The signatures of `generate` are numba's.
# ruff: noqa: ARG001

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from pi_runtime.artifact.formats import BLOCK, FORMATS
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import public
from pi_runtime.kernels.data.matrix_view import BF16, F16, MatrixView, half_to_float, pointer_of

PANEL = 2 * ISA.lanes
"""Rows of a panel; 0 where there are no vector instructions, and this module is not used."""
FLOAT_TOKENS, BYTE_TOKENS = 6, 4
"""Vectors of one call, for floats and for bytes: as many as there are registers for the sums."""
_Q8, _Q4 = FORMATS["q8"].code, FORMATS["q4"].code


def _pointers(b: Any, arguments: Any) -> list[Any]:
    return [v.pointer(b, a) for a in arguments]


@intrinsic
def multiply_floats(
    typing_context: Any, panel: Any, step: Any, count: Any, x: Any, x_stride: Any, out: Any, out_stride: Any, left: Any
) -> Any:
    """out_t[: PANEL] += Σ_{k < count} x_t[k] panel_k for `FLOAT_TOKENS` vectors.

    Rows of the panel, vectors and results lie `step`, `x_stride` and `out_stride` bytes apart. Where only `left`
    vectors remain, the last one is taken again, and what follows its result is overwritten.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        lanes, kind = ISA.lanes, v.vec(v.F32, ISA.lanes)
        panel, step, count, first, x_stride, result, out_stride, left = arguments
        panel, x, out = v.pointer(b, panel), [], []
        for k in range(FLOAT_TOKENS):
            which = b.select(b.icmp_signed("<", v.offset(k), left), v.offset(k), b.sub(left, v.offset(1)))
            x.append(v.pointer(b, b.add(first, b.mul(which, x_stride))))
            out.append(v.pointer(b, b.add(result, b.mul(v.offset(k), out_stride))))
        halves = [v.offset(0), v.offset(4 * lanes)]
        sums = [[cgutils.alloca_once_value(b, v.load(b, o, half, kind)) for half in halves] for o in out]
        with cgutils.for_range(b, count) as loop:
            row, at = b.mul(loop.index, step), b.mul(loop.index, v.offset(4))
            w = [v.load(b, panel, b.add(row, half), kind) for half in halves]
            for x_t, into in zip(x, sums, strict=True):
                factor = v.splat(b, v.load(b, x_t, at, v.F32), lanes)
                for w_L, half in zip(w, into, strict=True):
                    b.store(v.fma(b, w_L, factor, b.load(half)), half)
        for o, into in zip(out, sums, strict=True):
            for half, total in zip(halves, into, strict=True):
                v.store(b, b.load(total), o, half)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 8), generate


def _multiply_bytes(bits: int) -> Any:
    signed = bits == 8 and not ISA.dot
    shift = 3 if bits == 4 else 7

    @intrinsic
    def multiply(
        typing_context: Any, panel: Any, scales: Any, blocks: Any, q0: Any, q1: Any, q2: Any, q3: Any,
        t0: Any, t1: Any, t2: Any, t3: Any, n0: Any, n1: Any, n2: Any, n3: Any,
        out0: Any, out1: Any, out2: Any, out3: Any,
    ) -> Any:  # fmt: skip
        """out_t[: PANEL] += the sum over `blocks`; q, t, n: a vector's bytes, scales and negative block sums."""

        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            lanes, floats, ints = ISA.lanes, v.vec(v.F32, ISA.lanes), v.vec(v.I32, ISA.lanes)
            panel, scales, blocks = v.pointer(b, arguments[0]), v.pointer(b, arguments[1]), arguments[2]
            q, t, n, out = (_pointers(b, arguments[k : k + 4]) for k in (3, 7, 11, 15))
            halves = [v.offset(0), v.offset(4 * lanes)]
            sums = [[cgutils.alloca_once_value(b, v.load(b, o, half, floats)) for half in halves] for o in out]
            with cgutils.for_range(b, blocks) as loop:
                at4, s_at = b.mul(loop.index, v.offset(4)), b.mul(loop.index, v.offset(8 * lanes))
                start = []
                for n_t in n:
                    first = v.const(v.I32, lanes, 0)
                    if not signed:
                        first = b.shl(v.splat(b, v.load(b, n_t, at4, v.I32), lanes), v.const(v.I32, lanes, shift))
                    start.append([first, first])
                found = start
                for k in range(BLOCK // 4):
                    row = b.add(b.mul(loop.index, v.offset(64 * lanes)), v.offset(8 * lanes * k))
                    w = [v.load(b, panel, b.add(row, half), v.vec(v.I8, 4 * lanes)) for half in halves]
                    column = b.add(b.mul(loop.index, v.offset(BLOCK)), v.offset(4 * k))
                    for token, q_t in enumerate(q):
                        four = v.splat(b, v.load(b, q_t, column, v.I32), lanes)
                        four = b.bitcast(four, v.vec(v.I8, 4 * lanes))
                        found[token] = [
                            v.dot_bytes(b, one, w_J, four, signed=signed)
                            for one, w_J in zip(found[token], w, strict=True)
                        ]
                s = [v.load(b, scales, b.add(s_at, half), floats) for half in halves]
                for t_t, ends, into in zip(t, found, sums, strict=True):
                    factor = v.splat(b, v.load(b, t_t, at4, v.F32), lanes)
                    for s_L, one, total in zip(s, ends, into, strict=True):
                        value = b.sitofp(b.bitcast(one, ints), floats)
                        b.store(v.fma(b, value, b.fmul(s_L, factor), b.load(total)), total)
            for o, into in zip(out, sums, strict=True):
                for half, total in zip(halves, into, strict=True):
                    v.store(b, b.load(total), o, half)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 19), generate

    return multiply


multiply_q8, multiply_q4 = _multiply_bytes(8), _multiply_bytes(4)


def _pack(columns_at_once: int, numbers: Callable[[Any, Any, Any], list[Any]], *, grouped: bool = False) -> Any:
    """Make a packer of eight rows into eight lanes of a panel.

    `numbers` gives a row's next vectors of eight lanes. Their lanes are consecutive; where `grouped`, lane b of the
    k-th vector is number 8 b + k, as in a group of blocks.
    """

    @intrinsic
    def pack(typing_context: Any, row: Any, stride: Any, last: Any, first: Any, steps: Any, panel: Any) -> Any:
        """Pack rows row, row + stride, … (the row `last` again past it), columns from `first` on, in `steps` steps."""

        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            row, stride, last, first, steps, panel = arguments
            panel = v.pointer(b, panel)
            rows = []
            for k in range(8):
                inside = b.icmp_signed("<=", v.offset(k), last)
                rows.append(v.pointer(b, b.add(row, b.mul(stride, b.select(inside, v.offset(k), last)))))
            with cgutils.for_range(b, steps) as loop:
                column = b.add(first, b.mul(loop.index, v.offset(columns_at_once)))
                found = [numbers(b, base, column) for base in rows]
                for n, eight in enumerate(zip(*found, strict=True)):
                    for k, lanes in enumerate(v.transpose(b, list(eight))):
                        at = b.mul(loop.index, v.offset(len(found[0]) * 8 * PANEL * 4))
                        place = 8 * k + n if grouped else 8 * n + k
                        v.store(b, lanes, panel, b.add(at, v.offset(place * PANEL * 4)))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), generate

    return pack


def _bytes_q8(vectors: int) -> Callable[[Any, Any, Any], list[Any]]:
    def numbers(b: Any, row: Any, column: Any) -> list[Any]:
        found = [v.load(b, row, b.add(column, v.offset(32 * k)), v.vec(v.I8, 32)) for k in range(vectors)]
        if ISA.dot:
            found = [b.xor(w_J, v.const(v.I8, 32, -128)) for w_J in found]
        return [b.bitcast(w_J, v.vec(v.I32, 8)) for w_J in found]

    return numbers


def _bytes_q4(vectors: int) -> Callable[[Any, Any, Any], list[Any]]:
    def numbers(b: Any, row: Any, column: Any) -> list[Any]:
        place = b.udiv(column, v.offset(2))
        both = [v.load(b, row, b.add(place, v.offset(32 * k)), v.vec(v.I8, 32)) for k in range(vectors)]
        low = [b.and_(w_J, v.const(v.I8, 32, 15)) for w_J in both]
        high = [b.lshr(w_J, v.const(v.I8, 32, 4)) for w_J in both]
        return [b.bitcast(w_J, v.vec(v.I32, 8)) for w_J in low + high]

    return numbers


def _floats(fmt: str) -> Callable[[Any, Any, Any], list[Any]]:
    return lambda b, row, column: [v.floats_of(b, fmt, row, column, 8)]


_pack_q8, _pack_q4 = _pack(BLOCK, _bytes_q8(1)), _pack(2 * BLOCK, _bytes_q4(1))
_group_q8, _group_q4 = _pack(8 * BLOCK, _bytes_q8(8), grouped=True), _pack(8 * BLOCK, _bytes_q4(4), grouped=True)
_pack_f32, _pack_f16, _pack_bf16 = (_pack(8, _floats(fmt)) for fmt in ("f32", "f16", "bf16"))


@public
def pack_floats(m: MatrixView, row: int, last: int, first: int, columns: int, panel: int) -> None:
    """Pack `columns` columns from `first` on (both multiples of 8, or to the row's end) of rows row … row + last."""
    address, steps = m.values + row * m.stride, (columns + 7) // 8
    for eight in range(0, PANEL, 8):
        base, to = address + min(eight, last) * m.stride, panel + 4 * eight
        if m.fmt == F16:
            _pack_f16(base, m.stride, max(last - eight, 0), first, steps, to)
        elif m.fmt == BF16:
            _pack_bf16(base, m.stride, max(last - eight, 0), first, steps, to)
        else:
            _pack_f32(base, m.stride, max(last - eight, 0), first, steps, to)


@public
def pack_bytes(m: MatrixView, row: int, last: int, first: int, blocks: int, panel: int, scales: int) -> None:
    """Pack `blocks` blocks from column `first` on of rows row … row + last: bytes into `panel`, scales [blocks, PANEL].

    All but the last call for a row take whole groups. q4 packs its last blocks in pairs, so leave room for one more.
    """
    address, groups = m.values + row * m.stride, blocks // 8
    single = blocks - 8 * groups
    for eight in range(0, PANEL, 8):
        base, left, to = address + min(eight, last) * m.stride, max(last - eight, 0), panel + 4 * eight
        behind, next_to = first + 8 * BLOCK * groups, to + groups * 64 * PANEL * 4
        if m.fmt == _Q8:
            _group_q8(base, m.stride, left, first, groups, to)
            _pack_q8(base, m.stride, left, behind, single, next_to)
        else:
            _group_q4(base, m.stride, left, first, groups, to)
            _pack_q4(base, m.stride, left, behind, (single + 1) // 2, next_to)
    s_BR = carray(pointer_of(scales), (blocks, PANEL), np.float32)
    for r in range(PANEL):
        at = m.scales + (row + min(r, last)) * m.scales_stride + first // BLOCK * 2
        s_B = carray(pointer_of(at), (blocks,), np.uint16)
        for block in range(blocks):
            s_BR[block, r] = half_to_float(s_B[block])


@public
def multiply_bytes(
    fmt: int, panel: int, scales: int, blocks: int, q_4: tuple[int, int, int, int], t_4: tuple[int, int, int, int],
    n_4: tuple[int, int, int, int], out_4: tuple[int, int, int, int],
) -> None:  # fmt: skip
    """out += one panel of a block format times four vectors; the tuples hold addresses."""
    if fmt == _Q4:
        multiply_q4(panel, scales, blocks, *q_4, *t_4, *n_4, *out_4)
    else:
        multiply_q8(panel, scales, blocks, *q_4, *t_4, *n_4, *out_4)
