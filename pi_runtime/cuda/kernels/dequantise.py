"""Stored rows as numbers: embeddings, and weights for dense products of blocks of tokens.

Shape letters: T tokens, R of them at once, C stored elements, W words, D columns.
"""

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.kernels.matrix import DeviceMatrix
from pi_runtime.cuda.kernels.stored_rows import (
    element_column,
    element_weights,
    has_offsets,
    runs_per_word,
    stored_tile,
    upper_tile,
    values_per_element,
    word_column,
    word_minima,
    word_run,
    word_scales,
    word_tile,
    words_of,
)

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
    first, size = 0, min(_ROWS, triton.next_power_of_2(tokens))
    if m.words:
        _dequantise_words[(triton.cdiv(tokens, size), triton.cdiv(m.words, _WORDS))](
            m.stored, rows_T, y_TD, offset, tokens, y_TD.stride(0), add, size, _WORDS
        )
        first = m.words * 4
    if first < m.width:
        _dequantise[(triton.cdiv(tokens, size), triton.cdiv(m.width - first, _WIDTH))](
            m.stored, rows_T, y_TD, offset, tokens, y_TD.stride(0), first, add, size, _WIDTH
        )


@triton.jit
def _source_rows(rows, offset, token_R, mask_R):
    row_R = offset + token_R
    if rows is not None:
        row_R = offset + tl.load(rows + token_R, mask=mask_R, other=0)
    return row_R


@triton.jit
def _dequantise_words(
    m, rows, y, offset, tokens, y_stride, ADD: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Whole groups of block formats."""
    token_R = tl.program_id(0) * R + tl.arange(0, R)
    mask_R = token_R < tokens
    row_R = _source_rows(rows, offset, token_R, mask_R)
    word_W = tl.program_id(1) * W + tl.arange(0, W)
    mask_RW = mask_R[:, None] & (word_W < words_of(m))[None, :]
    w_RW, upper_RW = word_tile(m, row_R, word_W, mask_RW), upper_tile(m, row_R, word_W, mask_RW)
    scale_RW = word_scales(m, row_R, word_W, mask_RW)
    minima_RW = word_minima(m, row_R, word_W, mask_RW, scale_RW)
    at_R = token_R.to(tl.int64) * y_stride
    for run in tl.static_range(runs_per_word(m.fmt)):
        # Each word's run of four neighbouring columns.
        q0_RW, q1_RW, q2_RW, q3_RW = word_run(m, w_RW, upper_RW, run)
        w_RW4 = tl.join(tl.join(q0_RW * scale_RW, q2_RW * scale_RW), tl.join(q1_RW * scale_RW, q3_RW * scale_RW))
        if has_offsets(m.fmt):
            w_RW4 += minima_RW[:, :, None, None]
        column_W4 = (word_column(m, word_W) + 16 * run)[:, None] + tl.arange(0, 4)[None, :]
        at_RW4 = y + at_R[:, None, None] + column_W4[None, :, :]
        mask_RW4 = mask_RW[:, :, None] & (column_W4 < m.columns)[None, :, :]
        _store(at_RW4, tl.reshape(w_RW4, [R, W, 4]), mask_RW4, ADD)


@triton.jit
def _dequantise(
    m, rows, y, offset, tokens, y_stride, first, ADD: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    token_R = tl.program_id(0) * R + tl.arange(0, R)
    mask_R = token_R < tokens
    row_R = _source_rows(rows, offset, token_R, mask_R)
    element_C = first + tl.program_id(1) * C + tl.arange(0, C)
    stored_RC = stored_tile(m, row_R, mask_R, element_C)
    for value in tl.static_range(values_per_element(m.fmt)):
        column_C = element_column(m, element_C, value)
        weight_RC = element_weights(m, stored_RC, row_R, mask_R, element_C, column_C, value)
        mask_RC = mask_R[:, None] & ((element_C < m.width) & (column_C < m.columns))[None, :]
        at_RC = y + (token_R.to(tl.int64) * y_stride)[:, None] + column_C[None, :]
        _store(at_RC, weight_RC, mask_RC, ADD)


@triton.jit
def _store(at, weights, mask, ADD: tl.constexpr):
    if ADD:
        weights += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.debug_barrier()  # every thread has read before any writes
    tl.store(at, weights.to(at.dtype.element_ty), mask=mask)
