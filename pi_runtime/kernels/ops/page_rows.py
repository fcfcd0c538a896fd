"""Rows of a cache's pages: how the keys or values of a position are written, and packed ones are read.

Floats are stored as they are, float16 limited to its largest number. Packed rows are cut into blocks of 32 columns, of
which each has a scale s in float16:

    q8   x ≈ s · q          q in −127…127, a byte each                             s = max |x| / 127
    q4   x ≈ s · (q − 8)    q in 0…15, those of columns i and 16 + i in one byte   s = (the x that is largest) / −8

Some formats hold a head rotated, so that no column is much larger than the others, and rounding costs less:

    y = H x / √n        H₁ = (1), H₂ₙ = (Hₙ Hₙ; Hₙ −Hₙ)        (Hadamard)

for each part of n columns, the largest power of two that is left. H is symmetric and H H = n, so products of rotated
queries and keys are those of the unrotated, and sums of rotated values are rotated back by H itself.

Shape letters: E head width, B positions of a page, H half as many columns as a block has, X numbers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from pi_runtime.artifact.footprint import POSITIONS
from pi_runtime.artifact.formats import BLOCK, FORMATS
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.intrinsics import emits, widen_half, widen_halves
from pi_runtime.kernels.codegen.jit import device
from pi_runtime.kernels.data.matrix_view import (
    F16,
    Floats,
    address_of,
    float_to_half,
    half_to_float,
    is_quantised,
    pointer_of,
)

LARGEST_HALF = np.float32(65504)
"""The largest float16 number."""
_HALF, _LANES = BLOCK // 2, 8
Q4, Q8 = FORMATS["q4"].code, FORMATS["q8"].code


@emits(types.void(types.intp))
def _transform_register(b: Any, at: Any) -> None:
    """x ← H₈ x for a register's numbers at an address."""
    x = v.load(b, v.pointer(b, at), v.offset(0), v.vec(v.F32, _LANES))
    for half in (1, 2, 4):
        other = v.shuffle(b, x, x, [lane ^ half for lane in range(_LANES)])
        signs = ir.Constant(x.type, [-1.0 if lane & half else 1.0 for lane in range(_LANES)])
        x = b.fadd(other, b.fmul(x, signs))
    v.store(b, x, v.pointer(b, at), v.offset(0))


@emits(types.void(types.intp, types.intp))
def _transform_pair(b: Any, at: Any, distance: Any) -> None:
    """(x, y) ← (x + y, x − y) for registers at an address, and so many bytes behind it."""
    places = v.pointer(b, at), v.pointer(b, b.add(at, distance))
    x, y = (v.load(b, place, v.offset(0), v.vec(v.F32, _LANES)) for place in places)
    for place, value in zip(places, (b.fadd(x, y), b.fsub(x, y)), strict=True):
        v.store(b, value, place, v.offset(0))


@device
def hadamard(wanted: bool, x_E: Floats) -> None:
    """x ← H x / √n for each part of its columns, in place, where that is wanted."""
    first, width = 0, x_E.shape[0] if wanted else 0
    while first < width:
        size = 1
        while 2 * size <= width - first:
            size *= 2
        half, at = 1, address_of(x_E)
        if size >= _LANES:
            for j in range(first, first + size, _LANES):
                _transform_register(at + 4 * j)
            half = _LANES
        while half < size:
            for low in range(first, first + size, 2 * half):
                for j in range(low, low + half, min(half, _LANES)):
                    if half >= _LANES:
                        _transform_pair(at + 4 * j, 4 * half)
                    else:
                        for k in range(j, j + half):
                            x_E[k], x_E[k + half] = x_E[k] + x_E[k + half], x_E[k] - x_E[k + half]
            half *= 2
        factor = np.float32(1 / np.sqrt(size))
        for j in range(first, first + size):
            x_E[j] *= factor
        first += size


@device
def limited_hadamard(wanted: bool, x_E: Floats) -> None:
    """The same of numbers that are limited to what float16 can hold before."""
    for j in range(x_E.shape[0] if wanted else 0):
        x_E[j] = min(max(x_E[j], -LARGEST_HALF), LARGEST_HALF)
    hadamard(wanted, x_E)


@device
def _packed_nbytes(fmt: int, width: int) -> int:
    """Bytes of a position's packed numbers without their scales."""
    return (width + BLOCK - 1) // BLOCK * (_HALF if fmt == Q4 else BLOCK)


@device
def row_nbytes(fmt: int, width: int) -> int:
    """Bytes of a head's keys, or values, at one position."""
    if is_quantised(fmt):
        return _packed_nbytes(fmt, width) + (width + BLOCK - 1) // BLOCK * 2
    return width * (2 if fmt == F16 else 4)


@device
def store_keys(fmt: int, x_E: Floats, at: int, place: int) -> None:
    """Write the keys of one position: the columns of a page lie a page's positions apart."""
    if is_quantised(fmt):
        scales_at = at + POSITIONS * _packed_nbytes(fmt, x_E.shape[0]) + 2 * place
        _pack(fmt, x_E, at + place, scales_at, POSITIONS)
    else:
        _store_floats(fmt, x_E, at, place, POSITIONS)


@device
def store_row(fmt: int, x_X: Floats, at: int, stride: int, place: int) -> None:
    """Write a row of a page whose rows lie side by side."""
    if is_quantised(fmt):
        _pack(fmt, x_X, at + place * stride, at + place * stride + _packed_nbytes(fmt, x_X.shape[0]), 1)
    else:
        _store_floats(fmt, x_X, at, place * x_X.shape[0], 1)


@device
def _store_floats(fmt: int, x_E: Floats, at: int, first: int, step: int) -> None:
    width = x_E.shape[0]
    if fmt == F16:
        half_X = carray(pointer_of(at), (POSITIONS * width,), np.uint16)
        for j in range(width):
            half_X[first + j * step] = float_to_half(min(max(x_E[j], -LARGEST_HALF), LARGEST_HALF))
    else:
        float_X = carray(pointer_of(at), (POSITIONS * width,), np.float32)
        for j in range(width):
            float_X[first + j * step] = x_E[j]


@device
def _pack(fmt: int, x_E: Floats, at: int, scales_at: int, step: int) -> None:
    """Write the blocks of one position, with their scales; `step` items apart."""
    width = x_E.shape[0]
    blocks = (width + BLOCK - 1) // BLOCK
    q_X = carray(pointer_of(at), (step * BLOCK * blocks,), np.uint8)
    half_X = carray(pointer_of(scales_at), (step * blocks,), np.uint16)
    for block in range(blocks):
        low, high = block * BLOCK, min(width, (block + 1) * BLOCK)
        largest = np.float32(0)
        for j in range(low, high):
            # NaN is larger than all, so that it reaches the scale.
            if abs(x_E[j]) > abs(largest) or np.isnan(x_E[j]):
                largest = x_E[j]
        quotient = largest / np.float32(-8) if fmt == Q4 else abs(largest) / np.float32(127)
        half_X[block * step] = float_to_half(max(min(quotient, LARGEST_HALF), -LARGEST_HALF))
        scale = half_to_float(half_X[block * step])
        if fmt == Q4:
            for i in range(min(_HALF, high - low)):
                second = _rounded(x_E[low + _HALF + i], scale, -8, 7) if low + _HALF + i < high else 0
                q_X[(block * _HALF + i) * step] = _rounded(x_E[low + i], scale, -8, 7) + 8 | second + 8 << 4
        else:
            for j in range(low, high):
                q_X[j * step] = _rounded(x_E[j], scale, -127, 127)


@device
def _rounded(x: np.float32, scale: np.float32, least: int, most: int) -> int:
    """The integer nearest to x / scale within these bounds; 0 where the scale is none."""
    quotient = np.rint(x / scale) if abs(scale) > 0 else np.float32(0)
    return int(max(np.float32(least), min(np.float32(most), quotient)))


def _emit_numbers(b: Any, fmt: Any, q: Any) -> list[Any]:
    """Emit the integers of a register of bytes as float32: one register, or of q4 that of the lower halves first."""
    lanes = q.type.count
    parts = [q]
    if fmt == Q4:
        halves = b.and_(q, v.const(v.I8, lanes, 15)), b.lshr(q, v.const(v.I8, lanes, 4))
        parts = [b.sub(half, v.const(v.I8, lanes, 8)) for half in halves]
    return [b.sitofp(b.sext(part, v.vec(v.I32, lanes)), v.vec(v.F32, lanes)) for part in parts]


def _emit_unpack_keys(b: Any, fmt: int, columns: Any, scales: Any, width: Any, out: Any) -> None:
    """Emit `unpack_keys` for one format."""
    step = v.offset(_HALF if fmt == Q4 else BLOCK)
    with cgutils.for_range(b, b.udiv(b.add(width, v.offset(BLOCK - 1)), v.offset(BLOCK))) as block:
        halves = v.load(b, scales, b.mul(block.index, v.offset(2 * POSITIONS)), v.vec(v.I16, POSITIONS))
        scale, first = widen_halves(b, halves), b.mul(block.index, v.offset(BLOCK))
        left = b.sub(width, first)
        with cgutils.for_range(b, b.select(b.icmp_signed("<", left, step), left, step)) as one:
            at = b.mul(b.add(b.mul(block.index, step), one.index), v.offset(POSITIONS))
            numbers = _emit_numbers(b, fmt, v.load(b, columns, at, v.vec(v.I8, POSITIONS)))
            for part, number in enumerate(numbers):
                column = b.add(b.add(first, one.index), v.offset(_HALF * part))
                with b.if_then(b.icmp_signed("<", column, width)):
                    v.store(b, b.fmul(number, scale), out, b.mul(column, v.offset(4 * POSITIONS)))


def _emit_unpack_row(b: Any, fmt: int, row: Any, scales: Any, width: Any, out: Any) -> None:
    """Emit `unpack_rows` for one row of one format."""
    kind = v.vec(v.I8, _HALF if fmt == Q4 else BLOCK)
    whole = b.udiv(width, v.offset(BLOCK))

    def values(block: Any) -> Any:
        numbers = v.join(b, _emit_numbers(b, fmt, v.load(b, row, b.mul(block, v.offset(kind.count)), kind)))
        scale = widen_half(b, v.load(b, scales, b.mul(block, v.offset(2)), v.I16))
        return b.fmul(numbers, v.splat(b, scale, BLOCK))

    with cgutils.for_range(b, whole) as block:
        v.store(b, values(block.index), out, b.mul(block.index, v.offset(4 * BLOCK)))
    done = b.mul(whole, v.offset(BLOCK))
    with b.if_then(b.icmp_signed("<", done, width)):
        v.store_some(b, values(whole), out, b.mul(done, v.offset(4)), b.sub(width, done))


def _unpacking(emit: Callable[..., None]) -> Any:
    """What kernels call to unpack from some addresses: integers, scales, and floats."""

    @emits(types.void(types.intp, types.intp, types.intp, types.intp, types.intp))
    def unpack(b: Any, fmt: Any, packed: Any, scales: Any, width: Any, out: Any) -> None:
        places = [v.pointer(b, at) for at in (packed, scales, out)]
        v.switch(b, fmt, {code: partial(emit, b, code, *places[:2], width, places[2]) for code in (Q4, Q8)})

    return unpack


_unpack_columns, _unpack_row = _unpacking(_emit_unpack_keys), _unpacking(_emit_unpack_row)


@device
def unpack_keys(fmt: int, at: int, width: int, unpacked: int) -> None:
    """A page's packed keys as float32 at an address, column by column."""
    _unpack_columns(fmt, at, at + POSITIONS * _packed_nbytes(fmt, width), width, unpacked)


@device
def unpack_rows(fmt: int, at: int, stride: int, count: int, width: int, unpacked: int) -> None:
    """The first `count` packed rows of a page as float32 at an address, side by side."""
    nbytes = _packed_nbytes(fmt, width)
    for n in range(count):
        _unpack_row(fmt, at + n * stride, at + n * stride + nbytes, width, unpacked + 4 * n * width)
