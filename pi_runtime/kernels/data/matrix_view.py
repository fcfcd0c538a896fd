"""Weights by address: where the rows of a memory-mapped matrix lie, and numbers converted to float32.

A kernel gets addresses and a format code, not a typed array, so it compiles once for all formats.
"""

# The signatures of `generate` are numba's.
# ruff: noqa: ARG001

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from pi_runtime.artifact.formats import BLOCK, FORMATS, ROW_ALIGN, WEIGHT_FORMATS
from pi_runtime.kernels.codegen import float16
from pi_runtime.kernels.codegen.jit import inner, leaf

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Halves = npt.NDArray[np.uint16]

F32, F16, BF16, Q8, Q4 = (FORMATS[name].code for name in WEIGHT_FORMATS)


@intrinsic
def pointer_of(typing_context: Any, address: Any) -> Any:
    """Integer address → pointer, for `carray`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@intrinsic
def address_of(typing_context: Any, array: Any) -> Any:
    """Where an array's numbers begin; signed as all addresses are here (numba's `ctypes.data` is not)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, arguments[0])
        return builder.ptrtoint(array.data, ir.IntType(64))

    return types.intp(array), generate


@intrinsic
def half_to_float(typing_context: Any, bits: Any) -> Any:
    """binary16 in a uint16 → float32. numba has no float16 arrays on the CPU."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return float16.widen(builder, arguments[0])

    return types.float32(types.uint16), generate


@intrinsic
def float_to_half(typing_context: Any, number: Any) -> Any:
    """float32 → binary16 in a uint16, rounded to nearest even; what is out of range becomes infinite."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return float16.narrow(builder, arguments[0])

    return types.uint16(types.float32), generate


@intrinsic
def widened(typing_context: Any, stored: Any) -> Any:
    """A float32, or a binary16 in a uint16, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if signature.args[0] == types.float32:
            return arguments[0]
        return float16.widen(builder, arguments[0])

    return (types.float32(stored), generate) if stored in (types.float32, types.uint16) else None


@intrinsic
def bfloat_to_float(typing_context: Any, bits: Any) -> Any:
    """bfloat16 in a uint16 → float32: the same bits with sixteen zeros behind them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = builder.shl(builder.zext(arguments[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def count_ones(typing_context: Any, word: Any) -> Any:
    """Bits that are set in a uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


class Matrix(NamedTuple):
    """A stored matrix, or every k-th of its rows. Addresses and bytes."""

    fmt: int
    values: int
    scales: int
    """0 where the format has none."""
    stride: int
    """From one row to the next."""
    scales_stride: int
    columns: int


@inner
def is_quantised(fmt: int) -> bool:
    return fmt in (Q8, Q4)


@leaf
def row_stride(fmt: int, columns: int) -> int:
    """Bytes from one stored row to the next, scales not counted."""
    bits = 32 if fmt == F32 else 16
    if fmt == Q8:
        bits = 8
    elif fmt == Q4:
        bits = 4
    # q4 goes by groups of 64 columns: an odd number of columns still has whole bytes.
    return ((columns * bits + 7) // 8 + ROW_ALIGN - 1) // ROW_ALIGN * ROW_ALIGN


@leaf
def scales_stride(columns: int) -> int:
    """Bytes from one row's scales to the next row's: two a block, padded to eight."""
    return (columns + 4 * BLOCK - 1) // (4 * BLOCK) * 8


@leaf
def matrix(fmt: int, values: int, scales: int, columns: int) -> Matrix:
    """A whole stored matrix."""
    return Matrix(fmt, values, scales, row_stride(fmt, columns), scales_stride(columns), columns)


@leaf
def every(m: Matrix, k: int, which: int) -> Matrix:
    """The rows `which`, `which` + k, …"""
    values, scales = m.values + which * m.stride, m.scales + which * m.scales_stride
    return Matrix(m.fmt, values, scales, k * m.stride, k * m.scales_stride, m.columns)


@leaf
def from_row(m: Matrix, first: int) -> Matrix:
    """The rows from `first` on."""
    values, scales = m.values + first * m.stride, m.scales + first * m.scales_stride
    return Matrix(m.fmt, values, scales, m.stride, m.scales_stride, m.columns)


@leaf
def vector(address: int, n: int) -> Floats:
    """n float32 at an address (norm weights, biases)."""
    return carray(pointer_of(address), (n,), np.float32)
