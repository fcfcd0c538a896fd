"""Stored rows as numbers: embeddings, and weights for dense products of blocks of tokens.

Legend: T tokens, R of them at once, C stored elements, W words, D columns.
"""

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.kernels.block_formats import (
    element_column,
    element_weights,
    runs_per_word,
    values_per_element,
    word_column,
    word_run,
    word_scales,
    word_tile,
    words_of,
)
from pi_runtime.cuda.kernels.matrix import DeviceMatrix
from pi_runtime.cuda.kernels.row_dot import stored_tile

_ROWS, _WIDTH, _WORDS = 64, 32, 32
"""Rows of a tile, and its width in stored elements or words."""


def dequantise_rows(
    m: DeviceMatrix, rows_T: torch.Tensor | None, offset: int, y_TD: torch.Tensor, *, add: bool = False
) -> None:
    """y_t ← row offset + rows_T[t] of m, or row offset + t without `rows_T`; with `add` it is added to y.

    y is of any float type.
    """
    tokens, columns = y_TD.shape
    assert columns == m.columns
    assert y_TD.stride(1) == 1
    assert rows_T is None or rows_T.dtype == torch.int64
    first, listed, size = 0, rows_T is not None, min(_ROWS, triton.next_power_of_2(tokens))
    if m.words:
        _dequantise_words[(triton.cdiv(tokens, size), triton.cdiv(m.words, _WORDS))](
            m.values, m.scales, rows_T, y_TD, offset, tokens, *m.strides, y_TD.stride(0), columns,
            m.code, listed, add, size, _WORDS,
        )  # fmt: skip
        first = m.words * 4
    if first < m.width:
        _dequantise[(triton.cdiv(tokens, size), triton.cdiv(m.width - first, _WIDTH))](
            m.values, m.scales, rows_T, y_TD, offset, tokens, *m.strides, y_TD.stride(0), first, m.width, columns,
            m.code, listed, add, size, _WIDTH,
        )  # fmt: skip


@triton.jit
def _source_rows(rows, offset, token_R, mask_R, LISTED: tl.constexpr):
    row_R = offset + token_R
    if LISTED:
        row_R = offset + tl.load(rows + token_R, mask=mask_R, other=0)
    return row_R


@triton.jit
def _dequantise_words(
    values, scales, rows, y, offset, tokens, stride, scales_stride, y_stride, columns,
    FMT: tl.constexpr, LISTED: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Whole groups of block formats."""
    token_R = tl.program_id(0) * R + tl.arange(0, R)
    mask_R = token_R < tokens
    row_R = _source_rows(rows, offset, token_R, mask_R, LISTED)
    word_W = tl.program_id(1) * W + tl.arange(0, W)
    mask_RW = mask_R[:, None] & (word_W < words_of(columns, FMT))[None, :]
    w_RW = word_tile(values, stride, row_R, word_W, mask_RW)
    scale_RW = word_scales(scales, scales_stride, row_R, word_W, mask_RW, FMT)
    at_R = token_R.to(tl.int64) * y_stride
    column_W = word_column(word_W, FMT)
    for run in tl.static_range(runs_per_word(FMT)):
        q0_RW, q1_RW, q2_RW, q3_RW = word_run(w_RW, run, FMT)
        _store_runs(y, at_R, column_W + 16 * run, mask_RW, columns, scale_RW, q0_RW, q1_RW, q2_RW, q3_RW, ADD)


@triton.jit
def _store_runs(
    y, at_R, column_W, mask_RW, columns, scale_RW, q0_RW, q1_RW, q2_RW, q3_RW, ADD: tl.constexpr
):  # fmt: skip
    """Store each word's run of four neighbouring columns."""
    w_RW4 = tl.join(tl.join(q0_RW * scale_RW, q2_RW * scale_RW), tl.join(q1_RW * scale_RW, q3_RW * scale_RW))
    w_RW4 = tl.reshape(w_RW4, [at_R.shape[0], column_W.shape[0], 4])
    column_W4 = column_W[:, None] + tl.arange(0, 4)[None, :]
    at_RW4 = y + at_R[:, None, None] + column_W4[None, :, :]
    mask_RW4 = mask_RW[:, :, None] & (column_W4 < columns)[None, :, :]
    if ADD:
        w_RW4 += tl.load(at_RW4, mask=mask_RW4, other=0.0).to(tl.float32)
    tl.store(at_RW4, w_RW4.to(y.dtype.element_ty), mask=mask_RW4)


@triton.jit
def _dequantise(
    values, scales, rows, y, offset, tokens, stride, scales_stride, y_stride, first, width, columns,
    FMT: tl.constexpr, LISTED: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    token_R = tl.program_id(0) * R + tl.arange(0, R)
    mask_R = token_R < tokens
    row_R = _source_rows(rows, offset, token_R, mask_R, LISTED)
    element_C = first + tl.program_id(1) * C + tl.arange(0, C)
    stored_RC = stored_tile(values, stride, row_R, mask_R, element_C, width)
    for value in tl.static_range(values_per_element(FMT)):
        column_C = element_column(element_C, columns, value, FMT)
        weight_RC = element_weights(stored_RC, scales, scales_stride, row_R, mask_R, column_C, columns, value, FMT)
        mask_C = (element_C < width) & (column_C < columns)
        _store_elements(y, y_stride, token_R, mask_R, column_C, mask_C, weight_RC, ADD)


@triton.jit
def _store_elements(y, stride, token_R, mask_R, column_C, mask_C, w_RC, ADD: tl.constexpr):
    at_RC = y + (token_R.to(tl.int64) * stride)[:, None] + column_C[None, :]
    mask_RC = mask_R[:, None] & mask_C[None, :]
    if ADD:
        w_RC += tl.load(at_RC, mask=mask_RC, other=0.0).to(tl.float32)
    tl.store(at_RC, w_RC.to(y.dtype.element_ty), mask=mask_RC)
