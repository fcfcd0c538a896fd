"""The dot product of one stored row with one vector, at the speed of memory.

    row · x = Σ_j w_j x_j                                    f32, f16, bf16: float32 throughout
    row · x = Σ_b s_b t_b Σ_{j in b} w_j q_j                 q8, q4: integer sums in blocks of 32, exact

The vector is a quantised input (see `quantised_input`): q its integers and t their scales. The `portable_` forms define
what the vector instructions compute, and run where there are none. Block formats are in `row_dot_blocks`. While a row
is read, a later one is prefetched.
"""

# The signatures of `generate` are numba's.
# ruff: noqa: ARG001

from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import (
    BF16,
    F16,
    F32,
    MatrixView,
    bfloat_to_float,
    half_to_float,
    is_quantised,
    pointer_of,
)
from pi_runtime.kernels.ops.row_dot_blocks import dot_blocks

AHEAD_NBYTES = 16384
"""How far ahead of the row that is read to prefetch: far enough for the memory, near enough for the second-level
cache."""


@public
def row_dot(m: MatrixView, row: int, later: int, input_at: int) -> np.float32:
    """Row `row` of m times the vector of an input; meanwhile row `later` is fetched into the second-level cache."""
    values, scales = m.values + row * m.stride, m.scales + row * m.scales_stride
    ahead = (later - row) * m.stride
    if is_quantised(m.fmt):
        prefetch(m.scales + later * m.scales_stride, m.scales_stride)
        return dot_blocks(m.fmt, values, scales, input_at, m.columns, ahead)
    if m.fmt == F16:
        return dot_f16(values, input_at, m.columns, ahead)
    if m.fmt == BF16:
        return dot_bf16(values, input_at, m.columns, ahead)
    return dot_f32(values, input_at, m.columns, ahead)


@device
def rows_ahead(m: MatrixView) -> int:
    """How many rows ahead to prefetch where rows are read in turn."""
    return (AHEAD_NBYTES + m.stride - 1) // m.stride


@intrinsic
def prefetch(typing_context: Any, address: Any, nbytes: Any) -> Any:
    """Fetch `nbytes` bytes into the second-level cache."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        base = v.pointer(b, arguments[0])
        lines = b.udiv(b.add(arguments[1], v.offset(v.LINE - 1)), v.offset(v.LINE))
        with cgutils.for_range(b, lines) as loop:
            v.prefetch(b, base, b.mul(loop.index, v.offset(v.LINE)))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


def _float_dot(fmt: str, stored_per_line: int) -> Any:
    """row · x for a float format: four sums over `ISA.lanes` columns each, then the columns that are left."""

    @intrinsic
    def dot(typing_context: Any, row: Any, input_at: Any, columns: Any, ahead: Any) -> Any:
        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            lanes = ISA.lanes
            w, x = (v.pointer(b, a) for a in arguments[:2])
            sums = [cgutils.alloca_once_value(b, v.const(v.F32, lanes, 0.0)) for _ in range(4)]

            def add(column: Any, into: Any) -> None:
                x_L = v.load(b, x, b.mul(column, v.offset(4)), v.vec(v.F32, lanes))
                b.store(v.fma(b, v.floats_of(b, fmt, w, column, lanes), x_L, b.load(into)), into)

            stored = b.and_(
                b.add(arguments[2], v.offset(stored_per_line - 1)), v.offset(-stored_per_line)
            )  # padding is zeros
            whole = b.udiv(stored, v.offset(4 * lanes))
            with cgutils.for_range(b, whole) as loop:
                first = b.mul(loop.index, v.offset(4 * lanes))
                size = 4 if fmt == "f32" else 2
                for line in range(0, 4 * lanes * size, v.LINE):
                    v.prefetch(b, w, b.add(arguments[3], b.add(b.mul(first, v.offset(size)), v.offset(line))))
                for k, into in enumerate(sums):
                    add(b.add(first, v.offset(k * lanes)), into)
            done = b.mul(whole, v.offset(4 * lanes))
            with cgutils.for_range(b, b.udiv(b.sub(stored, done), v.offset(lanes))) as loop:
                add(b.add(done, b.mul(loop.index, v.offset(lanes))), sums[0])
            return v.add_lanes(b, v.total(b, [b.load(into) for into in sums]))

        return types.float32(*[types.intp] * 4), generate

    return dot


def _portable_float(fmt: int) -> Any:
    @public
    def dot(row: int, input_at: int, columns: int, ahead: int) -> np.float32:
        x_D = carray(pointer_of(input_at), (columns,), np.float32)
        total = np.float32(0)
        if fmt == F32:
            full = carray(pointer_of(row), (columns,), np.float32)
            for j in range(columns):
                total += full[j] * x_D[j]
        elif fmt == F16:
            half = carray(pointer_of(row), (columns,), np.uint16)
            for j in range(columns):
                total += half_to_float(half[j]) * x_D[j]
        else:
            brain = carray(pointer_of(row), (columns,), np.uint16)
            for j in range(columns):
                total += bfloat_to_float(brain[j]) * x_D[j]
        return total

    return dot


portable_dot_f32, portable_dot_f16, portable_dot_bf16 = (_portable_float(fmt) for fmt in (F32, F16, BF16))

if ISA.lanes:
    dot_f32, dot_f16, dot_bf16 = _float_dot("f32", 16), _float_dot("f16", 32), _float_dot("bf16", 32)
else:
    dot_f32, dot_f16, dot_bf16 = portable_dot_f32, portable_dot_f16, portable_dot_bf16
