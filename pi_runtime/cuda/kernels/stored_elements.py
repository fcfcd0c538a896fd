"""How kernels read stored rows element by element: float formats, and what lies behind a row's last whole group of
blocks, up to seven of them. A stored byte is one element there, upper bits not counted (see `artifact.formats`).

Shape letters: R rows, C stored elements.
"""

import triton
import triton.language as tl

from pi_runtime.artifact.formats import FORMATS
from pi_runtime.cuda.kernels.block_formats import (
    groups_of,
    has_offsets,
    has_zeros,
    in_blocks,
    upper_bits,
    words_per_group,
    zero_of,
)
from pi_runtime.cuda.kernels.matrix import VALUES_PER_ELEMENT

_Q8 = tl.constexpr(FORMATS["q8"].code)
_VALUES_PER_ELEMENT = {FORMATS[name].code: values for name, values in VALUES_PER_ELEMENT.items()}


@triton.constexpr_function
def values_per_element(fmt):
    """Values in one stored element."""
    return _VALUES_PER_ELEMENT[fmt]


@triton.jit
def first_left_element(m):
    """The first stored element behind the last whole group."""
    return groups_of(m.columns) * (4 * words_per_group(m.fmt))


@triton.jit
def stored_tile(m, row_R, mask_R, element_C):
    """[R, C] stored elements."""
    at_R1 = (row_R.to(tl.int64) * m.stride)[:, None]
    mask_RC = mask_R[:, None] & (element_C < m.width)[None, :]
    if upper_bits(m.fmt):
        element_C += _upper_bytes_before(m, element_C)
    return tl.load(m.elements + at_R1 + element_C[None, :], mask=mask_RC, other=0)


@triton.jit
def _upper_bytes_before(m, element):
    """Bytes with upper bits that a row has before an element."""
    grouped = groups_of(m.columns) * 128
    left = tl.maximum(element - grouped, 0)
    return (tl.minimum(element, grouped) // 128 * 32 + left // 32 * 8) * upper_bits(m.fmt)


@triton.jit
def _upper_tile(m, row_R, mask_R, element_C, VALUE: tl.constexpr):
    """[R, C] the upper bits of value VALUE of elements behind the last whole group, above four bits that are 0."""
    BITS: tl.constexpr = upper_bits(m.fmt)
    inside_C = (element_C - first_left_element(m)) % 32
    index_C = inside_C + 32 * VALUE
    at_C = element_C - inside_C + 32 + _upper_bytes_before(m, element_C) + index_C % (8 * BITS)
    at_R1 = (row_R.to(tl.int64) * m.stride)[:, None]
    mask_RC = mask_R[:, None] & (element_C < m.width)[None, :]
    stored_RC = tl.load(m.elements + at_R1 + at_C[None, :], mask=mask_RC, other=0).to(tl.int32)
    return (stored_RC >> (index_C // (8 * BITS) * BITS)[None, :] & (1 << BITS) - 1) << 4


@triton.jit
def _column_at(place, columns):
    """The column at a place of a row: in groups of eight blocks fours of columns are interleaved."""
    grouped = groups_of(columns) * 256
    inside = place % 256
    column = place - inside + inside % 32 // 4 * 32 + inside // 32 * 4 + inside % 4
    return tl.where(place < grouped, column, place)


@triton.jit
def _nibble_place(byte, columns, UPPER: tl.constexpr):
    """The place in the lower or the upper four bits of a row's byte of lower bits."""
    grouped = groups_of(columns) * 128
    left = byte - grouped
    place = tl.where(byte < grouped, byte // 128 * 256 + byte % 128, 2 * grouped + left // 32 * 64 + left % 32)
    if UPPER:
        place += tl.where(byte < grouped, 128, 32)
    return place


@triton.jit
def element_column(m, element, VALUE: tl.constexpr):
    """The column of value VALUE of a stored element of a row, in any format."""
    column = element
    if m.fmt == _Q8:
        column = _column_at(element, m.columns)
    if values_per_element(m.fmt) == 2:
        column = _column_at(_nibble_place(element, m.columns, VALUE == 1), m.columns)
    return column


@triton.jit
def element_weights(m, stored_RC, row_R, mask_R, element_C, column_C, VALUE: tl.constexpr):
    """[R, C] value VALUE of stored elements as float32, times its scale where the format has one.

    Elements of block formats are behind the last whole group.
    """
    if values_per_element(m.fmt) == 2:
        integer_RC = (stored_RC & 15).to(tl.int32) if VALUE == 0 else (stored_RC >> 4).to(tl.int32)
        if upper_bits(m.fmt):
            integer_RC += _upper_tile(m, row_R, mask_R, element_C, VALUE)
        weight_RC = (integer_RC - zero_of(m.fmt)).to(tl.float32)
    else:
        weight_RC = stored_RC.to(tl.float32)
    if in_blocks(m.fmt):
        at_R1 = (row_R.to(tl.int64) * m.scales_stride)[:, None]
        mask_RC = mask_R[:, None] & (column_C < m.columns)[None, :]
        at_RC = m.scales + at_R1 + (column_C // 32)[None, :]
        if has_offsets(m.fmt):
            offset_RC = tl.load(at_RC + m.offsets, mask=mask_RC, other=0.0).to(tl.float32)
        if has_zeros(m.fmt):
            weight_RC -= offset_RC
        weight_RC *= tl.load(at_RC, mask=mask_RC, other=0.0).to(tl.float32)
        if has_offsets(m.fmt) and not has_zeros(m.fmt):
            weight_RC += offset_RC
    return weight_RC
