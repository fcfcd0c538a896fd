"""Weights by address: rows of a memory-mapped matrix, converted to float32 in registers.

A kernel gets an address and a format code, not a typed array, so it compiles once for all formats. One row holds D
numbers and is padded to 64 bytes; `row_stride` gives the distance of two rows.
"""

# The signatures of `generate` are numba's.
# ruff: noqa: ARG001

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from pi_runtime.artifact.formats import FORMATS, ROW_ALIGN
from pi_runtime.kernels.compiling import leaf

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

F32, F16, BF16 = (FORMATS[name].code for name in ("f32", "f16", "bf16"))


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """Integer address → pointer, for `carray`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@intrinsic
def _half_to_float(typing_context: Any, bits: Any) -> Any:
    """binary16 in a uint16 → float32. numba has no float16 arrays on the CPU; LLVM has the instruction."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def _bfloat_to_float(typing_context: Any, bits: Any) -> Any:
    """bfloat16 in a uint16 → float32: the same bits with sixteen zeros behind them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = builder.shl(builder.zext(arguments[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(types.uint16), generate


@leaf
def row_stride(fmt: int, columns: int) -> int:
    """Bytes from one row to the next."""
    itemsize = 4 if fmt == F32 else 2
    return (columns * itemsize + ROW_ALIGN - 1) // ROW_ALIGN * ROW_ALIGN


@leaf
def vector(address: int, n: int) -> Floats:
    """n float32 at an address (norm weights, biases)."""
    return carray(_pointer(address), (n,), np.float32)


@leaf
def row_dot(fmt: int, address: int, x_D: Floats) -> np.float32:
    """Σ_j row_j x_j."""
    n = x_D.shape[0]
    total = np.float32(0)
    if fmt == F32:
        row = carray(_pointer(address), (n,), np.float32)
        for j in range(n):
            total += row[j] * x_D[j]
    elif fmt == F16:
        half = carray(_pointer(address), (n,), np.uint16)
        for j in range(n):
            total += _half_to_float(half[j]) * x_D[j]
    else:
        brain = carray(_pointer(address), (n,), np.uint16)
        for j in range(n):
            total += _bfloat_to_float(brain[j]) * x_D[j]
    return total


@leaf
def row_add(fmt: int, address: int, scale: np.float32, y_D: Floats) -> None:
    """y ← y + scale · row."""
    n = y_D.shape[0]
    if fmt == F32:
        row = carray(_pointer(address), (n,), np.float32)
        for j in range(n):
            y_D[j] += scale * row[j]
    elif fmt == F16:
        half = carray(_pointer(address), (n,), np.uint16)
        for j in range(n):
            y_D[j] += scale * _half_to_float(half[j])
    else:
        brain = carray(_pointer(address), (n,), np.uint16)
        for j in range(n):
            y_D[j] += scale * _bfloat_to_float(brain[j])


@leaf
def row_load(fmt: int, address: int, out_D: Floats) -> None:
    """out ← row, as float32."""
    n = out_D.shape[0]
    if fmt == F32:
        row = carray(_pointer(address), (n,), np.float32)
        for j in range(n):
            out_D[j] = row[j]
    elif fmt == F16:
        half = carray(_pointer(address), (n,), np.uint16)
        for j in range(n):
            out_D[j] = _half_to_float(half[j])
    else:
        brain = carray(_pointer(address), (n,), np.uint16)
        for j in range(n):
            out_D[j] = _bfloat_to_float(brain[j])
