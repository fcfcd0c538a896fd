"""Views of stored matrices by address, and conversions of single numbers to and from float32.

A kernel gets addresses and the code of a number format instead of a typed array, so it compiles once for all formats.
Shape letters: F weight formats.
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

from pi_runtime.artifact.formats import BLOCK, FORMATS, RUN, WEIGHT_FORMATS
from pi_runtime.kernels.codegen.intrinsics import emits, narrow_half, widen_half
from pi_runtime.kernels.codegen.jit import device, public

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.int8]

F32, F16 = (FORMATS[name].code for name in ("f32", "f16"))
_WEIGHTS = [FORMATS[name] for name in WEIGHT_FORMATS]
_WITH_OFFSETS = tuple(f.code for f in _WEIGHTS if f.offset and not f.grouped)
_QUANTISED = tuple(f.code for f in _WEIGHTS if f.quantised)
_BITS_F = np.array([f.bits for f in _WEIGHTS])
"""Bits of a value, by the codes of the weight formats."""
_ALIGN_F = np.array([f.row_align for f in _WEIGHTS])
"""Bytes to a multiple of which rows are padded."""
_SCALES_F3 = np.array([f.scale_nbytes for f in _WEIGHTS])
"""Bytes of scales: of a row, of a group, and of a block."""
assert [f.code for f in _WEIGHTS] == list(range(len(_WEIGHTS)))


@intrinsic
def pointer_of(typing_context: Any, address: Any) -> Any:
    """Convert an integer address to a pointer, for `carray`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@intrinsic
def address_of(typing_context: Any, array: Any) -> Any:
    """The address of an array's first number: signed, as all addresses are here (numba's `ctypes.data` is not)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, arguments[0])
        return builder.ptrtoint(array.data, ir.IntType(64))

    return types.intp(array), generate


@emits(types.float32(types.uint16))
def half_to_float(b: Any, bits: Any) -> Any:
    """Convert binary16 in a uint16 to float32. numba has no float16 arrays on the CPU."""
    return widen_half(b, bits)


@emits(types.uint16(types.float32))
def float_to_half(b: Any, number: Any) -> Any:
    """Convert float32 to binary16 in a uint16: rounded to nearest even, infinite where it is out of range."""
    return narrow_half(b, number)


@emits(types.float32(types.float32, types.float32, types.float32))
def multiply_add(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x · y + z, rounded once, as vector instructions compute it."""
    return b.fma(x, y, z)


class MatrixView(NamedTuple):
    """A stored matrix, or rows of it at equal distances. Positions are addresses, distances are in bytes."""

    fmt: int
    """Code of the number format."""
    values: int
    scales: int
    """0 where the format has none."""
    stride: int
    """From one row to the next."""
    scales_stride: int
    """From one row's scales to the next row's."""
    columns: int
    offsets: int
    """Bytes from a block's scale to its minimum or zero; 0 where the format has none."""
    slots: int
    """The address of an int64 for each row, which says where its values are: at that many strides. 0: rows lie in
    order. Scales always do."""


class RowList(NamedTuple):
    """Rows of a matrix to go through: in turn, or from a list of their numbers."""

    first: int
    """The first of them, where there is no list."""
    listed: int
    """The address of the list, or 0."""
    rows: int
    """How many they are."""
    known: int
    """The list has so many numbers; those after the first `rows` are fetched ahead."""


class Vectors(NamedTuple):
    """Some vectors among those that lie one after the other."""

    inputs: int
    """The address of the first of all."""
    stride: int
    """Bytes from one to the next."""
    listed: int
    """The address of a list of their numbers, or 0 for all in turn."""
    tokens: int
    """How many they are."""


@device
def rows_in_turn(first: int, count: int) -> RowList:
    """So many rows from one on."""
    return RowList(first, 0, count, count)


@device
def listed_rows(listed: int, count: int, known: int) -> RowList:
    """The first rows of a list at an address."""
    return RowList(0, listed, count, known)


@device
def is_quantised(fmt: int) -> bool:
    """Whether a format stores integers in blocks with scales."""
    return fmt in _QUANTISED


@public
def row_stride(fmt: int, columns: int) -> int:
    """Bytes from one stored row to the next, scales not counted."""
    run = RUN if fmt in _QUANTISED else 1
    align = _ALIGN_F[fmt]
    return ((columns + run - 1) // run * run * _BITS_F[fmt] // 8 + align - 1) // align * align


@public
def scales_nbytes(fmt: int, columns: int) -> int:
    """Bytes of one row's scales, or of its minima or zeros, padded to a multiple of eight."""
    row, group, block = _SCALES_F3[fmt]
    return (row + columns // (8 * BLOCK) * group + (columns + BLOCK - 1) // BLOCK * block + 7) // 8 * 8


@public
def matrix(fmt: int, values: int, scales: int, columns: int) -> MatrixView:
    """The view of a whole stored matrix."""
    beside = scales_nbytes(fmt, columns)
    offsets = beside if fmt in _WITH_OFFSETS else 0
    return MatrixView(fmt, values, scales, row_stride(fmt, columns), beside + offsets, columns, offsets, 0)


@public
def in_slots(m: MatrixView, slots: int, stride: int) -> MatrixView:
    """The matrix with its rows in slots at this distance, or as it is where `slots` is 0."""
    return MatrixView(
        m.fmt, m.values, m.scales, m.stride if slots == 0 else stride, m.scales_stride, m.columns, m.offsets, slots
    )


@device
def values_of_row(m: MatrixView, row: int) -> int:
    """The address of a row's values."""
    return m.values + (integers(m.slots, row + 1)[row] if m.slots != 0 else row) * m.stride


@public
def strided_rows(m: MatrixView, step: int, first: int) -> MatrixView:
    """The rows first, first + step, first + 2 · step, …; of rows in slots, each slot has `step` rows."""
    values, scales = m.values + first * m.stride, m.scales + first * m.scales_stride
    return MatrixView(m.fmt, values, scales, step * m.stride, step * m.scales_stride, m.columns, m.offsets, m.slots)


@public
def rows_from(m: MatrixView, first: int) -> MatrixView:
    """The rows from `first` on, which lie in order."""
    values, scales = m.values + first * m.stride, m.scales + first * m.scales_stride
    return MatrixView(m.fmt, values, scales, m.stride, m.scales_stride, m.columns, m.offsets, 0)


@public
def columns_from(m: MatrixView, first: int, columns: int) -> MatrixView:
    """So many columns from `first` on, which is a multiple of 256."""
    values, scales = m.values + first * _BITS_F[m.fmt] // 8, m.scales + first // BLOCK * 2
    return MatrixView(m.fmt, values, scales, m.stride, m.scales_stride, columns, m.offsets, m.slots)


@public
def vector(address: int, n: int) -> Floats:
    """The n float32 numbers at an address."""
    return carray(pointer_of(address), (n,), np.float32)


@public
def integers(address: int, n: int) -> Ints:
    """The n int64 numbers at an address."""
    return carray(pointer_of(address), (n,), np.int64)
