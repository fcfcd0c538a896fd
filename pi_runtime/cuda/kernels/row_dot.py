"""What every kernel does with stored rows: their numbers as float32, and their products with a vector.

R rows and C stored elements at a time. A row is read in the order in which it is stored (see `artifact.formats`): the
places of q8 and q4 name columns out of order, so it is the vector that is gathered. The vector stays float32 (only the
CPU rounds it to bytes), so a product is Σ_j w_j x_j in float32 with w = scale · q. Whole groups of q8 and q4 blocks are
read by `words`; what is here of these formats serves the up to seven blocks behind them, and single rows.
"""

import torch
import triton
import triton.language as tl

from pi_runtime.artifact.formats import FORMATS
from pi_runtime.cuda.kernels.matrix import Matrix
from pi_runtime.cuda.kernels.packed_words import groups_of, word_dots
from pi_runtime.cuda.kernels.tiling import Tiling

LEFT = tl.constexpr(64)
"""Stored elements that are read at once behind the last whole group."""
Q8 = tl.constexpr(FORMATS["q8"].code)
Q4 = tl.constexpr(FORMATS["q4"].code)


@triton.jit
def picked_row(index, n_R, there_R, LISTED: tl.constexpr):
    """[R] the n-th row of all, or of a list."""
    row_R = n_R
    if LISTED:
        row_R = tl.load(index + n_R, mask=there_R, other=0)
    return row_R


@triton.jit
def column_of(place, columns):
    """The column at a place of a q8 or q4 row: in groups of eight blocks fours of columns are interleaved."""
    grouped = (columns + 31) // 32 // 8 * 256
    inside = place % 256
    column = place - inside + inside % 32 // 4 * 32 + inside // 32 * 4 + inside % 4
    return tl.where(place < grouped, column, place)


@triton.jit
def low_place(byte, columns):
    """The place in the lower four bits of a q4 row's byte."""
    grouped = (columns + 31) // 32 // 8 * 128
    left = byte - grouped
    return tl.where(byte < grouped, byte // 128 * 256 + byte % 128, 2 * grouped + left // 32 * 64 + left % 32)


@triton.jit
def high_place(byte, columns):
    """The place in the upper four bits."""
    grouped = (columns + 31) // 32 // 8 * 128
    return low_place(byte, columns) + tl.where(byte < grouped, 128, 32)


@triton.jit
def stored_column(element, columns, FMT: tl.constexpr):
    """The column that stored element `element` of a row belongs to; of q4 the lower half's."""
    column = element
    if FMT == Q8:
        column = column_of(element, columns)
    if FMT == Q4:
        column = column_of(low_place(element, columns), columns)
    return column


@triton.jit
def scale_tile(scales, scales_stride, row_R, mask_R, column_C, columns):
    """[R, C] scales of these rows at these columns."""
    at_R1 = (row_R.to(tl.int64) * scales_stride)[:, None]
    mask_RC = mask_R[:, None] & (column_C < columns)[None, :]
    return tl.load(scales + at_R1 + (column_C // 32)[None, :], mask=mask_RC, other=0.0).to(tl.float32)


@triton.jit
def stored_tile(values, stride, row_R, mask_R, element_C, width):
    """[R, C] stored elements."""
    at_R1 = (row_R.to(tl.int64) * stride)[:, None]
    return tl.load(values + at_R1 + element_C[None, :], mask=mask_R[:, None] & (element_C < width)[None, :], other=0)


@triton.jit
def left_element(columns, FMT: tl.constexpr):
    """The first stored element behind the last whole group of a q8 or q4 row."""
    return groups_of(columns) * (128 if FMT == Q4 else 256)


@triton.jit
def row_dots(
    values, scales, stride, scales_stride, width, columns, row_R, mask_R, x,
    FMT: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """[R] row · x; 0 where `mask_R` is false, and such a row is not read. C as in `Tiling.dots`."""
    if FMT == Q8 or FMT == Q4:  # noqa: SIM109, PLR1714 - Triton has no sets
        found_R = word_dots(values, scales, stride, scales_stride, columns, row_R, mask_R, x, FMT, R, C)
        if left_element(columns, FMT) < width:
            found_R += _left_dots(values, scales, stride, scales_stride, width, columns, row_R, mask_R, x, FMT, R)
    else:
        sums_RC = tl.zeros([R, C], tl.float32)
        for start in range(0, width, C):
            element_C = start + tl.arange(0, C)
            stored_RC = stored_tile(values, stride, row_R, mask_R, element_C, width)
            x_C = tl.load(x + element_C, mask=element_C < width, other=0.0)
            sums_RC += stored_RC.to(tl.float32) * x_C[None, :]
        found_R = tl.sum(sums_RC, 1)
    return found_R


@triton.jit
def _left_dots(
    values, scales, stride, scales_stride, width, columns, row_R, mask_R, x, FMT: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """The same over the blocks behind the last whole group."""
    sums_RC = tl.zeros([R, LEFT], tl.float32)
    for start in range(left_element(columns, FMT), width, LEFT):
        element_C = start + tl.arange(0, LEFT)
        stored_RC = stored_tile(values, stride, row_R, mask_R, element_C, width)
        column_C = stored_column(element_C, columns, FMT)
        x_C = tl.load(x + column_C, mask=(element_C < width) & (column_C < columns), other=0.0)
        scale_RC = scale_tile(scales, scales_stride, row_R, mask_R, column_C, columns)
        if FMT == Q4:
            upper_C = column_of(high_place(element_C, columns), columns)
            x_upper_C = tl.load(x + upper_C, mask=(element_C < width) & (upper_C < columns), other=0.0)
            sums_RC += ((stored_RC & 15).to(tl.int32) - 8).to(tl.float32) * scale_RC * x_C[None, :]
            scale_RC = scale_tile(scales, scales_stride, row_R, mask_R, upper_C, columns)
            sums_RC += ((stored_RC >> 4).to(tl.int32) - 8).to(tl.float32) * scale_RC * x_upper_C[None, :]
        else:
            sums_RC += stored_RC.to(tl.float32) * scale_RC * x_C[None, :]
    return tl.sum(sums_RC, 1)


def linear(
    m: Matrix, bias: torch.Tensor | None, x_D: torch.Tensor, y_N: torch.Tensor, tiling: Tiling, *, add: bool = False
) -> None:
    """y = W x + bias, or y ← y + W x + bias; float32 x (D) and y (N), N the rows of m."""
    assert x_D.shape == (m.columns,), (x_D.shape, m.columns)
    assert y_N.shape == (m.rows,), (y_N.shape, m.rows)
    assert x_D.dtype == y_N.dtype == torch.float32
    assert bias is None or bias.shape == y_N.shape
    rows, width = tiling.dots(m)
    _linear[(triton.cdiv(m.rows, rows),)](
        m.values, m.scales, bias, x_D, y_N, *m.strides, m.width, m.columns, m.rows,
        m.code, bias is not None, add, rows, width, **tiling.dot_options(m),
    )  # fmt: skip


@triton.jit
def _linear(
    values, scales, bias, x, y, stride, scales_stride, width, columns, rows,
    FMT: tl.constexpr, BIASED: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    there_R = row_R < rows
    y_R = row_dots(values, scales, stride, scales_stride, width, columns, row_R, there_R, x, FMT, R, C)
    if BIASED:
        y_R += tl.load(bias + row_R, mask=there_R, other=0.0)
    if ADD:
        y_R += tl.load(y + row_R, mask=there_R, other=0.0)
    tl.store(y + row_R, y_R, mask=there_R)
