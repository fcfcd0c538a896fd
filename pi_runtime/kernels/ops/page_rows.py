"""Rows of a cache's pages: how the keys or values of a position are written, and packed ones are read.

Floats are stored as they are, float16 limited to its largest number. Packed rows are cut into blocks of 32 columns, of
which each has a scale s in float16:

    q8       x ≈ s · q           q in −127…127, a byte each     s = max |x| / 127
    q5, q6   x ≈ s · (q − Q)     q in 0…2Q − 1, Q = 16 or 32    s = (the x that is largest) / −Q

The lower four bits of columns i and 16 + i lie in one byte; each upper bit in words of 32 bits, for keys one a column
with a bit for each position, for values one a block with a bit for each column.

In q5 and q6 a head is held rotated, so that no column is much larger than the others, and rounding costs less:

    y = H x / √n        H₁ = (1), H₂ₙ = (Hₙ Hₙ; Hₙ −Hₙ)        (Hadamard)

for each part of n columns, the largest power of two that is left. H is symmetric and H H = n, so products of rotated
queries and keys are those of the unrotated, and sums of rotated values are rotated back by H itself.

What the keys of a page have in common is rounded once: behind the scales stands a reference in float16, the page's
first key, rotated, but only its steady columns, which positions turn by less than 1 / 32 of a radian each, so by at
most one in a page; others count as 0. Of all keys what they have beside the reference is packed. So a page says what it
holds by itself, and the first of its keys decides it.

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
Q5, Q6, Q8 = (FORMATS[name].code for name in ("q5", "q6", "q8"))
_PLANES = {Q5: 1, Q6: 2}
"""Upper bits of formats whose integers do not fill a byte."""


@device
def unsteady(cos_SJ: Floats, sin_SJ: Floats, angles: int) -> int:
    """How many of the first `angles` columns of these tables are turned by much within a page: they fall."""
    one, found = min(1, cos_SJ.shape[0] - 1), 0
    while found < angles and POSITIONS * abs(sin_SJ[one, found]) > cos_SJ[one, found]:
        found += 1
    return found


@device
def is_rotated(fmt: int) -> bool:
    """Whether heads are held rotated."""
    return fmt in (Q5, Q6)


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
def hadamard(fmt: int, x_E: Floats) -> None:
    """x ← H x / √n for each part of its columns, in place, where the format holds heads so."""
    first, width = 0, x_E.shape[0] if is_rotated(fmt) else 0
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
def limited_hadamard(fmt: int, x_E: Floats) -> None:
    """The same of numbers that are limited to what float16 can hold before."""
    for j in range(x_E.shape[0] if is_rotated(fmt) else 0):
        x_E[j] = min(max(x_E[j], -LARGEST_HALF), LARGEST_HALF)
    hadamard(fmt, x_E)


@device
def _blocks(width: int) -> int:
    return (width + BLOCK - 1) // BLOCK


@device
def _packed_nbytes(fmt: int, width: int) -> int:
    """Bytes of a position's packed numbers without their scales."""
    return _blocks(width) * (20 if fmt == Q5 else 24 if fmt == Q6 else BLOCK)


@device
def row_nbytes(fmt: int, width: int) -> int:
    """Bytes of a head's values at one position, or of a latent."""
    if is_quantised(fmt):
        return _packed_nbytes(fmt, width) + _blocks(width) * 2
    return width * (2 if fmt == F16 else 4)


@device
def key_nbytes(fmt: int, width: int) -> int:
    """Bytes of a head's keys at one position, with its part of a page's reference."""
    return row_nbytes(fmt, width) + (_blocks(width) * 2 if is_rotated(fmt) else 0)


@device
def store_keys(fmt: int, x_E: Floats, turned: tuple[int, int], at: int, place: int) -> None:
    """Write the keys of one position: the columns of a page lie a page's positions apart. Those that are held rotated
    are rotated in place, and lose their page's reference. `turned`: J, and how many of J angles are unsteady."""
    if is_rotated(fmt):
        reference_at = at + POSITIONS * row_nbytes(fmt, x_E.shape[0])
        half_E = carray(pointer_of(reference_at), (x_E.shape[0],), np.uint16)
        if place == 0:
            _store_reference(x_E, turned, half_E)
        limited_hadamard(fmt, x_E)
        for j in range(x_E.shape[0]):
            x_E[j] -= half_to_float(half_E[j])
    if is_quantised(fmt):
        packed = POSITIONS * _packed_nbytes(fmt, x_E.shape[0])
        planes_at = at + POSITIONS * _blocks(x_E.shape[0]) * _HALF
        _pack(fmt, x_E, (at + place, planes_at, at + packed + 2 * place), POSITIONS, place)
    else:
        _store_floats(fmt, x_E, at, place, POSITIONS)


@device
def _store_reference(x_E: Floats, turned: tuple[int, int], half_E: Any) -> None:
    """Write what the keys of a page have in common, by the first of them."""
    reference_E = x_E.copy()
    for j in range(turned[1]):
        reference_E[j] = reference_E[turned[0] + j] = np.float32(0)
    limited_hadamard(Q6, reference_E)
    for j in range(x_E.shape[0]):
        half_E[j] = float_to_half(min(max(reference_E[j], -LARGEST_HALF), LARGEST_HALF))


@device
def store_row(fmt: int, x_X: Floats, at: int, stride: int, place: int) -> None:
    """Write a row of a page whose rows lie side by side."""
    if is_quantised(fmt):
        row = at + place * stride
        planes_at = row + _blocks(x_X.shape[0]) * _HALF
        _pack(fmt, x_X, (row, planes_at, row + _packed_nbytes(fmt, x_X.shape[0])), 1, 0)
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
def _pack(fmt: int, x_E: Floats, at: tuple[int, int, int], step: int, place: int) -> None:
    """Write the blocks of one position; `at`: where its bytes begin, all upper bits, and its scales. Bytes and scales
    lie `step` items apart. `place`: which bit of a column's words is the position's."""
    width = x_E.shape[0]
    blocks = _blocks(width)
    q_X = carray(pointer_of(at[0]), (step * BLOCK * blocks,), np.uint8)
    word_X = carray(pointer_of(at[1]), (2 * BLOCK * blocks,), np.uint32)
    half_X = carray(pointer_of(at[2]), (step * blocks,), np.uint16)
    planes, zero = (2, 32) if fmt == Q6 else (1, 16)
    for block in range(blocks):
        low, high = block * BLOCK, min(width, (block + 1) * BLOCK)
        largest = np.float32(0)
        for j in range(low, high):
            # NaN is larger than all, so that it reaches the scale.
            if abs(x_E[j]) > abs(largest) or np.isnan(x_E[j]):
                largest = x_E[j]
        quotient = abs(largest) / np.float32(127) if fmt == Q8 else largest / np.float32(-zero)
        half_X[block * step] = float_to_half(max(min(quotient, LARGEST_HALF), -LARGEST_HALF))
        scale = half_to_float(half_X[block * step])
        if fmt == Q8:
            for j in range(low, high):
                q_X[j * step] = _rounded(x_E[j], scale, -127, 127)
            continue
        for j in range(low, high):
            q, i = _rounded(x_E[j], scale, -zero, zero - 1) + zero, j - low
            byte = (block * _HALF + i % _HALF) * step
            q_X[byte] = q & 15 if i < _HALF else q_X[byte] & 15 | (q & 15) << 4
            first, bit = (j, place) if step > 1 else (block, i)
            for plane in range(planes):
                word = word_X[first * planes + plane] & ~(1 << bit)
                word_X[first * planes + plane] = word | (q >> 4 + plane & 1) << bit


@device
def _rounded(x: np.float32, scale: np.float32, least: int, most: int) -> int:
    """The integer nearest to x / scale within these bounds; 0 where the scale is none."""
    quotient = np.rint(x / scale) if abs(scale) > 0 else np.float32(0)
    return int(max(np.float32(least), min(np.float32(most), quotient)))


def _emit_numbers(b: Any, fmt: Any, q: Any, planes: Any, at: Any) -> Any:
    """Emit 32 integers as float32: their lower bits in a register, and upper ones in words so many bytes behind."""
    if fmt != Q8:
        for plane in range(_PLANES[fmt]):
            word = v.load(b, planes, b.add(at, v.offset(4 * plane)), v.I32)
            upper = v.const(v.I8, BLOCK, 16 << plane)
            q = b.or_(q, b.select(b.bitcast(word, v.vec(ir.IntType(1), BLOCK)), upper, v.const(v.I8, BLOCK, 0)))
        q = b.sub(q, v.const(v.I8, BLOCK, 8 << _PLANES[fmt]))
    return b.sitofp(b.sext(q, v.vec(v.I32, BLOCK)), v.vec(v.F32, BLOCK))


def _emit_halves(b: Any, q: Any) -> list[Any]:
    """Emit the lower and the upper halves of a register of bytes."""
    return [b.and_(q, v.const(v.I8, q.type.count, 15)), b.lshr(q, v.const(v.I8, q.type.count, 4))]


def _emit_unpack_keys(b: Any, fmt: int, columns: Any, width: Any, blocks: Any, out: Any) -> None:
    """Emit `unpack_keys` for one format."""
    step, bits = (BLOCK, 8) if fmt == Q8 else (_HALF, 4 + _PLANES[fmt])
    planes = b.gep(columns, [b.mul(blocks, v.offset(POSITIONS * _HALF))])
    scales = b.gep(columns, [b.mul(blocks, v.offset(POSITIONS * BLOCK * bits // 8))])
    references = b.gep(scales, [b.mul(blocks, v.offset(2 * POSITIONS))])
    with cgutils.for_range(b, blocks) as block:
        halves = v.load(b, scales, b.mul(block.index, v.offset(2 * POSITIONS)), v.vec(v.I16, POSITIONS))
        scale, first = widen_halves(b, halves), b.mul(block.index, v.offset(BLOCK))
        left = b.sub(width, first)
        most = b.select(b.icmp_signed("<", left, v.offset(step)), left, v.offset(step))
        with cgutils.for_range(b, most) as one:
            at = b.mul(b.add(b.mul(block.index, v.offset(step)), one.index), v.offset(POSITIONS))
            q = v.load(b, columns, at, v.vec(v.I8, POSITIONS))
            for part, integers in enumerate([q] if fmt == Q8 else _emit_halves(b, q)):
                column = b.add(b.add(first, one.index), v.offset(_HALF * part))
                with b.if_then(b.icmp_signed("<", column, width)):
                    word = b.mul(column, v.offset(4 * (bits - 4)))
                    x = _emit_numbers(b, fmt, integers, planes, word)
                    if fmt == Q8:
                        x = b.fmul(x, scale)
                    else:
                        reference = widen_half(b, v.load(b, references, b.mul(column, v.offset(2)), v.I16))
                        x = v.fma(b, x, scale, v.splat(b, reference, POSITIONS))
                    v.store(b, x, out, b.mul(column, v.offset(4 * POSITIONS)))


def _emit_unpack_row(b: Any, fmt: int, row: Any, width: Any, blocks: Any, out: Any) -> None:
    """Emit `unpack_rows` for one row of one format."""
    step, bits = (BLOCK, 8) if fmt == Q8 else (_HALF, 4 + _PLANES[fmt])
    planes = b.gep(row, [b.mul(blocks, v.offset(_HALF))])
    scales = b.gep(row, [b.mul(blocks, v.offset(BLOCK * bits // 8))])
    whole = b.udiv(width, v.offset(BLOCK))

    def values(block: Any) -> Any:
        q = v.load(b, row, b.mul(block, v.offset(step)), v.vec(v.I8, step))
        q = q if fmt == Q8 else v.join(b, _emit_halves(b, q))
        numbers = _emit_numbers(b, fmt, q, planes, b.mul(block, v.offset(4 * (bits - 4))))
        scale = widen_half(b, v.load(b, scales, b.mul(block, v.offset(2)), v.I16))
        return b.fmul(numbers, v.splat(b, scale, BLOCK))

    with cgutils.for_range(b, whole) as block:
        v.store(b, values(block.index), out, b.mul(block.index, v.offset(4 * BLOCK)))
    done = b.mul(whole, v.offset(BLOCK))
    with b.if_then(b.icmp_signed("<", done, width)):
        v.store_some(b, values(whole), out, b.mul(done, v.offset(4)), b.sub(width, done))


def _unpacking(emit: Callable[..., None]) -> Any:
    """What kernels call to unpack from an address, so many columns."""

    @emits(types.void(types.intp, types.intp, types.intp, types.intp))
    def unpack(b: Any, fmt: Any, packed: Any, width: Any, out: Any) -> None:
        blocks = b.udiv(b.add(width, v.offset(BLOCK - 1)), v.offset(BLOCK))
        call = v.pointer(b, packed), width, blocks, v.pointer(b, out)
        v.switch(b, fmt, {code: partial(emit, b, code, *call) for code in (Q5, Q6, Q8)})

    return unpack


_unpack_columns, _unpack_row = _unpacking(_emit_unpack_keys), _unpacking(_emit_unpack_row)


@device
def unpack_keys(fmt: int, at: int, width: int, unpacked: int) -> None:
    """A page's packed keys as float32 at an address, column by column."""
    _unpack_columns(fmt, at, width, unpacked)


@device
def unpack_rows(fmt: int, at: int, stride: int, count: int, width: int, unpacked: int) -> None:
    """The first `count` packed rows of a page as float32 at an address, side by side."""
    for n in range(count):
        _unpack_row(fmt, at + n * stride, width, unpacked + 4 * n * width)
