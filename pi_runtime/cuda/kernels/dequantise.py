"""Stored rows as numbers: embeddings, and weights for dense products of blocks of tokens."""

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.kernels.matrix import Matrix
from pi_runtime.cuda.kernels.packed_words import byte, nibble, word_column, word_scales, word_tile, words_of
from pi_runtime.cuda.kernels.row_dot import Q4, Q8, column_of, high_place, scale_tile, stored_column, stored_tile

_ROWS, _WIDTH, _WORDS = 64, 32, 32
"""Rows of a tile, and stored elements or words of them."""


def unpack(m: Matrix, rows_T: torch.Tensor | None, offset: int, y_TD: torch.Tensor, *, add: bool = False) -> None:
    """y_t = row offset + rows_T[t] of m, or row offset + t; or added to y. Any float type."""
    tokens, columns = y_TD.shape
    assert columns == m.columns
    assert y_TD.stride(1) == 1
    assert rows_T is None or rows_T.dtype == torch.int64
    first, listed, size = 0, rows_T is not None, min(_ROWS, triton.next_power_of_2(tokens))
    if m.words:
        _unpack_words[(triton.cdiv(tokens, size), triton.cdiv(m.words, _WORDS))](
            m.values, m.scales, rows_T, y_TD, offset, tokens, *m.strides, y_TD.stride(0), columns,
            m.code, listed, add, size, _WORDS,
        )  # fmt: skip
        first = m.words * 4
    if first < m.width:
        _unpack[(triton.cdiv(tokens, size), triton.cdiv(m.width - first, _WIDTH))](
            m.values, m.scales, rows_T, y_TD, offset, tokens, *m.strides, y_TD.stride(0), first, m.width, columns,
            m.code, listed, add, size, _WIDTH,
        )  # fmt: skip


@triton.jit
def _rows(rows, offset, token_R, there_R, LISTED: tl.constexpr):
    row_R = offset + token_R
    if LISTED:
        row_R = offset + tl.load(rows + token_R, mask=there_R, other=0)
    return row_R


@triton.jit
def _unpack_words(
    values, scales, rows, y, offset, tokens, stride, scales_stride, y_stride, columns,
    FMT: tl.constexpr, LISTED: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Whole groups of q8 and q4."""
    token_R = tl.program_id(0) * R + tl.arange(0, R)
    there_R = token_R < tokens
    row_R = _rows(rows, offset, token_R, there_R, LISTED)
    word_W = tl.program_id(1) * W + tl.arange(0, W)
    mask_RW = there_R[:, None] & (word_W < words_of(columns, FMT))[None, :]
    w_RW = word_tile(values, stride, row_R, word_W, mask_RW)
    scale_RW = word_scales(scales, scales_stride, row_R, word_W, mask_RW, FMT)
    at_R = token_R.to(tl.int64) * y_stride
    column_W = word_column(word_W, FMT)
    if FMT == Q4:
        q0_RW, q1_RW, q2_RW, q3_RW = nibble(w_RW, 0), nibble(w_RW, 8), nibble(w_RW, 16), nibble(w_RW, 24)
        _write_runs(y, at_R, column_W, mask_RW, columns, scale_RW, q0_RW, q1_RW, q2_RW, q3_RW, ADD)
        q0_RW, q1_RW, q2_RW, q3_RW = nibble(w_RW, 4), nibble(w_RW, 12), nibble(w_RW, 20), nibble(w_RW, 28)
        _write_runs(y, at_R, column_W + 16, mask_RW, columns, scale_RW, q0_RW, q1_RW, q2_RW, q3_RW, ADD)
    else:
        q0_RW, q1_RW, q2_RW, q3_RW = byte(w_RW, 0), byte(w_RW, 1), byte(w_RW, 2), byte(w_RW, 3)
        _write_runs(y, at_R, column_W, mask_RW, columns, scale_RW, q0_RW, q1_RW, q2_RW, q3_RW, ADD)


@triton.jit
def _write_runs(
    y, at_R, column_W, mask_RW, columns, scale_RW, q0_RW, q1_RW, q2_RW, q3_RW, ADD: tl.constexpr
):  # fmt: skip
    """Four neighbouring columns of each word."""
    w_RW4 = tl.join(tl.join(q0_RW * scale_RW, q2_RW * scale_RW), tl.join(q1_RW * scale_RW, q3_RW * scale_RW))
    w_RW4 = tl.reshape(w_RW4, [at_R.shape[0], column_W.shape[0], 4])
    column_W4 = column_W[:, None] + tl.arange(0, 4)[None, :]
    at_RW4 = y + at_R[:, None, None] + column_W4[None, :, :]
    there_RW4 = mask_RW[:, :, None] & (column_W4 < columns)[None, :, :]
    if ADD:
        w_RW4 += tl.load(at_RW4, mask=there_RW4, other=0.0).to(tl.float32)
    tl.store(at_RW4, w_RW4.to(y.dtype.element_ty), mask=there_RW4)


@triton.jit
def _unpack(
    values, scales, rows, y, offset, tokens, stride, scales_stride, y_stride, first, width, columns,
    FMT: tl.constexpr, LISTED: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    token_R = tl.program_id(0) * R + tl.arange(0, R)
    there_R = token_R < tokens
    row_R = _rows(rows, offset, token_R, there_R, LISTED)
    element_C = first + tl.program_id(1) * C + tl.arange(0, C)
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
