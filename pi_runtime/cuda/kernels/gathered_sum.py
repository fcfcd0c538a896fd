"""Gathered sums of a matrix's rows, each times a number (axpy): sums_s = Σ_{i in split s} h_i row_i.

The list of rows is cut into splits of whole tiles. Each row of a tile has its own running sums until the end, so the
order of additions is always the same.

Shape letters: R rows, C stored elements, W words, D columns, N numbers in the list, S splits.
"""

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.kernels.block_formats import (
    add_words,
    added_words,
    element_column,
    element_weights,
    nibble_mask_of,
    runs_per_word,
    stored_tile,
    values_per_element,
    word_column,
    word_scales,
    word_tile,
    words_of,
)
from pi_runtime.cuda.kernels.compaction import NeuronList, list_entry, list_length
from pi_runtime.cuda.kernels.matrix import DeviceMatrix
from pi_runtime.cuda.kernels.tiling import Tiling


def gathered_sums(
    m: DeviceMatrix, listed: NeuronList | None, h_N: torch.Tensor, sums_SD: torch.Tensor, tiling: Tiling
) -> None:
    """Sum the rows of m, or the listed ones; h_N[n] is the factor of row n, or of the list's n-th row."""
    assert sums_SD.shape == (tiling.splits, m.columns)
    first = 0
    if m.words:
        rows, words = tiling.word_sums(m)
        _gathered_axpy_words[(triton.cdiv(m.words, words), tiling.splits)](
            m.stored, listed, h_N, sums_SD, tiling.splits, rows, tiling.sum_unroll, words
        )
        first = m.words * 4
    if first < m.width:
        rows, width = tiling.sums(m)
        _gathered_axpy[(triton.cdiv(m.width - first, width), tiling.splits)](
            m.stored, listed, h_N, sums_SD, first, tiling.splits, rows, width
        )


@triton.jit
def _split_range(size, SPLITS: tl.constexpr, R: tl.constexpr):
    """Where this program's split of the list begins and ends."""
    split, steps = tl.program_id(1), (size + R - 1) // R
    return steps * split // SPLITS * R, tl.minimum(size, steps * (split + 1) // SPLITS * R)


@triton.jit
def _gathered_axpy(m, listed, h, sums, first, SPLITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    element_C = first + tl.program_id(0) * C + tl.arange(0, C)
    begin, end = _split_range(list_length(listed, m.rows), SPLITS, R)
    VALUES: tl.constexpr = values_per_element(m.fmt)
    column_C = element_column(m, element_C, 0)
    sums_RC = tl.zeros([R, C], tl.float32)
    # For the second value of an element, where it has two.
    column2_C = element_column(m, element_C, 1)
    sums2_RC = tl.zeros([R, C], tl.float32)
    for start in range(begin, end, R):
        n_R = start + tl.arange(0, R)
        mask_R = n_R < end
        row_R = list_entry(listed, n_R, mask_R)
        h_R1 = tl.load(h + n_R, mask=mask_R, other=0.0)[:, None]
        stored_RC = stored_tile(m, row_R, mask_R, element_C)
        sums_RC += h_R1 * element_weights(m, stored_RC, row_R, mask_R, column_C, 0)
        if VALUES == 2:
            sums2_RC += h_R1 * element_weights(m, stored_RC, row_R, mask_R, column2_C, 1)
    out = sums + tl.program_id(1) * m.columns
    tl.store(out + column_C, tl.sum(sums_RC, 0), mask=(element_C < m.width) & (column_C < m.columns))
    if VALUES == 2:
        tl.store(out + column2_C, tl.sum(sums2_RC, 0), mask=(element_C < m.width) & (column2_C < m.columns))


@triton.jit
def _gathered_axpy_words(
    m, listed, h, sums, SPLITS: tl.constexpr, R: tl.constexpr, UNROLL: tl.constexpr, W: tl.constexpr
):
    """Whole groups of block formats; the words of UNROLL tiles are on their way at once."""
    word_W = tl.program_id(0) * W + tl.arange(0, W)
    mask_W = word_W < words_of(m)
    begin, end = _split_range(list_length(listed, m.rows), SPLITS, R * UNROLL)
    nibble_mask = nibble_mask_of(m)
    h_sum_RW = tl.zeros([R, W], tl.float32)
    sums_RW = (h_sum_RW, h_sum_RW, h_sum_RW, h_sum_RW, h_sum_RW, h_sum_RW, h_sum_RW, h_sum_RW)
    for start in range(begin, end, R * UNROLL):
        for step in tl.static_range(UNROLL):
            n_R = start + step * R + tl.arange(0, R)
            mask_R = n_R < end
            row_R = list_entry(listed, n_R, mask_R)
            mask_RW = mask_R[:, None] & mask_W[None, :]
            w_RW = word_tile(m, row_R, word_W, mask_RW)
            h_RW = word_scales(m, row_R, word_W, mask_RW)
            h_RW *= tl.load(h + n_R, mask=mask_R, other=0.0)[:, None]
            h_sum_RW, sums_RW = add_words(m, w_RW, h_RW, nibble_mask, h_sum_RW, sums_RW)
    first_RW, second_RW = added_words(m, h_sum_RW, sums_RW)
    out, column_W = sums + tl.program_id(1) * m.columns, word_column(m, word_W)
    if runs_per_word(m.fmt) == 2:
        _store_runs(out, column_W + 16, mask_W, m.columns, second_RW)
    _store_runs(out, column_W, mask_W, m.columns, first_RW)


@triton.jit
def _store_runs(out, column_W, mask_W, columns, sums_RW):
    """Store the sums of each word's run of four neighbouring columns."""
    even = tl.join(tl.sum(sums_RW[0], 0), tl.sum(sums_RW[2], 0))
    odd = tl.join(tl.sum(sums_RW[1], 0), tl.sum(sums_RW[3], 0))
    s_W4 = tl.reshape(tl.join(even, odd), [column_W.shape[0], 4])
    column_W4 = column_W[:, None] + tl.arange(0, 4)[None, :]
    tl.store(out + column_W4, s_W4, mask=mask_W[:, None] & (column_W4 < columns))
