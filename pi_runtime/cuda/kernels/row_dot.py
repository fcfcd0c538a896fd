"""Dot products of stored rows with a vector, and y = W x.

A row is read in the order in which it is stored (see `artifact.formats`). Block formats store columns out of order, so
the vector is gathered. It stays float32 (only the CPU rounds it to bytes): a product is Σ_j w_j x_j in float32, with
w = scale · q in a block format. Whole groups of blocks are read as words, what is behind them element by element (see
`block_formats`).

Legend: R rows, C stored elements, D and N columns and rows of a matrix.
"""

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.kernels.block_formats import (
    element_column,
    element_weights,
    first_left_element,
    in_blocks,
    values_per_element,
    word_dots,
)
from pi_runtime.cuda.kernels.matrix import DeviceMatrix
from pi_runtime.cuda.kernels.tiling import Tiling

LEFT = tl.constexpr(64)
"""Stored elements that are read at once behind the last whole group."""


@triton.jit
def listed_row(index, n_R, mask_R, LISTED: tl.constexpr):
    """[R] row n, or the n-th row of a list."""
    row_R = n_R
    if LISTED:
        row_R = tl.load(index + n_R, mask=mask_R, other=0)
    return row_R


@triton.jit
def stored_tile(values, stride, row_R, mask_R, element_C, width):
    """[R, C] stored elements."""
    at_R1 = (row_R.to(tl.int64) * stride)[:, None]
    return tl.load(values + at_R1 + element_C[None, :], mask=mask_R[:, None] & (element_C < width)[None, :], other=0)


@triton.jit
def row_dots(
    values, scales, stride, scales_stride, width, columns, row_R, mask_R, x,
    FMT: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """[R] row · x. Where `mask_R` is false, the row is not read and the result is 0. C as in `Tiling.dots`."""
    if in_blocks(FMT):
        dot_R = word_dots(values, scales, stride, scales_stride, columns, row_R, mask_R, x, FMT, R, C)
        if first_left_element(columns, FMT) < width:
            dot_R += _left_dots(values, scales, stride, scales_stride, width, columns, row_R, mask_R, x, FMT, R)
    else:
        sums_RC = tl.zeros([R, C], tl.float32)
        for start in range(0, width, C):
            element_C = start + tl.arange(0, C)
            stored_RC = stored_tile(values, stride, row_R, mask_R, element_C, width)
            x_C = tl.load(x + element_C, mask=element_C < width, other=0.0)
            sums_RC += stored_RC.to(tl.float32) * x_C[None, :]
        dot_R = tl.sum(sums_RC, 1)
    return dot_R


@triton.jit
def _left_dots(
    values, scales, stride, scales_stride, width, columns, row_R, mask_R, x, FMT: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """[R] row · x over the blocks behind the last whole group."""
    sums_RC = tl.zeros([R, LEFT], tl.float32)
    for start in range(first_left_element(columns, FMT), width, LEFT):
        element_C = start + tl.arange(0, LEFT)
        stored_RC = stored_tile(values, stride, row_R, mask_R, element_C, width)
        for value in tl.static_range(values_per_element(FMT)):
            column_C = element_column(element_C, columns, value, FMT)
            x_C = tl.load(x + column_C, mask=(element_C < width) & (column_C < columns), other=0.0)
            weight_RC = element_weights(
                stored_RC, scales, scales_stride, row_R, mask_R, column_C, columns, value, FMT
            )  # fmt: skip
            sums_RC += weight_RC * x_C[None, :]
    return tl.sum(sums_RC, 1)


def linear(
    m: DeviceMatrix,
    bias: torch.Tensor | None,
    x_D: torch.Tensor,
    y_N: torch.Tensor,
    tiling: Tiling,
    *,
    add: bool = False,
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
    mask_R = row_R < rows
    y_R = row_dots(values, scales, stride, scales_stride, width, columns, row_R, mask_R, x, FMT, R, C)
    if BIASED:
        y_R += tl.load(bias + row_R, mask=mask_R, other=0.0)
    if ADD:
        y_R += tl.load(y + row_R, mask=mask_R, other=0.0)
    tl.store(y + row_R, y_R, mask=mask_R)
