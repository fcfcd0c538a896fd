"""Stored rows as numbers: embeddings, and weights for dense products of blocks of tokens."""

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.matrices import Matrix
from pi_runtime.cuda.rows import Q4, Q8, column_of, high_place, scale_tile, stored_column, stored_tile

_ROWS, _WIDTH = 8, 256


def unpack(m: Matrix, rows_T: torch.Tensor | None, offset: int, y_TD: torch.Tensor, *, add: bool = False) -> None:
    """y_t = row offset + rows_T[t] of m, or row offset + t; or added to y. Any float type."""
    tokens, columns = y_TD.shape
    assert columns == m.columns
    assert y_TD.stride(1) == 1
    assert rows_T is None or rows_T.dtype == torch.int64
    _unpack[(triton.cdiv(tokens, _ROWS), triton.cdiv(m.width, _WIDTH))](
        m.values, m.scales, rows_T, y_TD, offset, tokens, *m.strides, y_TD.stride(0), m.width, columns,
        m.code, rows_T is not None, add, _ROWS, _WIDTH,
    )  # fmt: skip


@triton.jit
def _unpack(
    values, scales, rows, y, offset, tokens, stride, scales_stride, y_stride, width, columns,
    FMT: tl.constexpr, LISTED: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    token_R = tl.program_id(0) * R + tl.arange(0, R)
    there_R = token_R < tokens
    row_R = offset + token_R
    if LISTED:
        row_R = offset + tl.load(rows + token_R, mask=there_R, other=0)
    element_C = tl.program_id(1) * C + tl.arange(0, C)
    stored_RC = stored_tile(values, stride, row_R, there_R, element_C, width)
    column_C = stored_column(element_C, columns, FMT)
    low_RC = stored_RC.to(tl.float32)
    if FMT == Q8:
        low_RC = low_RC * scale_tile(scales, scales_stride, row_R, there_R, column_C, columns)
    if FMT == Q4:
        low_RC = ((stored_RC & 15).to(tl.int32) - 8).to(tl.float32)
        low_RC = low_RC * scale_tile(scales, scales_stride, row_R, there_R, column_C, columns)
    _write(y, y_stride, token_R, there_R, column_C, (element_C < width) & (column_C < columns), low_RC, ADD)
    if FMT == Q4:
        upper_C = column_of(high_place(element_C, columns), columns)
        high_RC = ((stored_RC >> 4).to(tl.int32) - 8).to(tl.float32)
        high_RC = high_RC * scale_tile(scales, scales_stride, row_R, there_R, upper_C, columns)
        _write(y, y_stride, token_R, there_R, upper_C, (element_C < width) & (upper_C < columns), high_RC, ADD)


@triton.jit
def _write(y, stride, token_R, there_R, column_C, there_C, w_RC, ADD: tl.constexpr):
    at_RC = y + (token_R.to(tl.int64) * stride)[:, None] + column_C[None, :]
    there_RC = there_R[:, None] & there_C[None, :]
    if ADD:
        w_RC += tl.load(at_RC, mask=there_RC, other=0.0).to(tl.float32)
    tl.store(at_RC, w_RC.to(y.dtype.element_ty), mask=there_RC)
