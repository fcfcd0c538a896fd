"""Gathered sums of a matrix's rows, each times a number (axpy): sums_s = Σ_{i in split s} h_i row_i.

The list of rows is cut into splits of whole tiles. Each row of a tile has its own running sums until the end, so the
order of additions is always the same.

Shape letters: M tokens, R rows, C stored elements, W words, D columns, N numbers in the list, S splits.
"""

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.kernels.compaction import NeuronList, list_entry, list_length
from pi_runtime.cuda.kernels.matrix import DeviceMatrix
from pi_runtime.cuda.kernels.stored_rows import (
    add_words,
    added_words,
    element_column,
    element_weights,
    nibble_mask_of,
    runs_per_word,
    stored_tile,
    upper_tile,
    values_per_element,
    word_column,
    word_minima,
    word_scales,
    word_tile,
    words_of,
)
from pi_runtime.cuda.kernels.tiling import Tiling, tile_and_token


def gathered_sums(
    m: DeviceMatrix, listed: NeuronList | None, h_MN: torch.Tensor, sums_MSD: torch.Tensor, tiling: Tiling
) -> None:
    """Sum the rows of m, or those that a token lists; h_MN[:, n] are the factors of row n, or of a list's n-th row."""
    tokens = len(h_MN)
    assert sums_MSD.shape == (tokens, tiling.splits, m.columns)
    assert sums_MSD.is_contiguous()
    first = 0
    if m.words:
        rows, words = tiling.word_sums(m)
        _gathered_axpy_words[(triton.cdiv(m.words, words) * tokens, tiling.splits)](
            m.stored, listed, h_MN, sums_MSD, tokens, h_MN.stride(0), tiling.splits, rows, tiling.sum_unroll, words
        )
        first = m.words * 4
    if first < m.width:
        rows, width = tiling.sums(m)
        _gathered_axpy[(triton.cdiv(m.width - first, width) * tokens, tiling.splits)](
            m.stored, listed, h_MN, sums_MSD, tokens, h_MN.stride(0), first, tiling.splits, rows, width
        )


@triton.jit
def _split_range(size, SPLITS: tl.constexpr, R: tl.constexpr):
    """Where this program's split of the list begins and ends."""
    split, steps = tl.program_id(1), (size + R - 1) // R
    return steps * split // SPLITS * R, tl.minimum(size, steps * (split + 1) // SPLITS * R)


@triton.jit(do_not_specialize=["tokens"])
def _gathered_axpy(m, listed, h, sums, tokens, h_stride, first, SPLITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    tile, token = tile_and_token(tokens)
    h += token * h_stride
    element_C = first + tile * C + tl.arange(0, C)
    begin, end = _split_range(list_length(listed, token, m.rows), SPLITS, R)
    VALUES: tl.constexpr = values_per_element(m.fmt)
    column_C = element_column(m, element_C, 0)
    sums_RC = tl.zeros([R, C], tl.float32)
    # For the second value of an element, where it has two.
    column2_C = element_column(m, element_C, 1)
    sums2_RC = tl.zeros([R, C], tl.float32)
    for start in range(begin, end, R):
        n_R = start + tl.arange(0, R)
        mask_R = n_R < end
        row_R = list_entry(listed, token, n_R, mask_R)
        h_R1 = tl.load(h + n_R, mask=mask_R, other=0.0)[:, None]
        stored_RC = stored_tile(m, row_R, mask_R, element_C)
        sums_RC += h_R1 * element_weights(m, stored_RC, row_R, mask_R, element_C, column_C, 0)
        if VALUES == 2:
            sums2_RC += h_R1 * element_weights(m, stored_RC, row_R, mask_R, element_C, column2_C, 1)
    out = sums + (token * SPLITS + tl.program_id(1)) * m.columns
    tl.store(out + column_C, tl.sum(sums_RC, 0), mask=(element_C < m.width) & (column_C < m.columns))
    if VALUES == 2:
        tl.store(out + column2_C, tl.sum(sums2_RC, 0), mask=(element_C < m.width) & (column2_C < m.columns))


@triton.jit(do_not_specialize=["tokens"])
def _gathered_axpy_words(
    m, listed, h, sums, tokens, h_stride,
    SPLITS: tl.constexpr, R: tl.constexpr, UNROLL: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Whole groups of block formats; the words of UNROLL tiles are on their way at once."""
    tile, token = tile_and_token(tokens)
    h += token * h_stride
    word_W = tile * W + tl.arange(0, W)
    mask_W = word_W < words_of(m)
    begin, end = _split_range(list_length(listed, token, m.rows), SPLITS, R * UNROLL)
    nibble_mask = nibble_mask_of(m)
    h_sum_RW = tl.zeros([R, W], tl.float32)
    sums_RW = (h_sum_RW, h_sum_RW, h_sum_RW, h_sum_RW, h_sum_RW, h_sum_RW, h_sum_RW, h_sum_RW)
    for start in range(begin, end, R * UNROLL):
        for step in tl.static_range(UNROLL):
            n_R = start + step * R + tl.arange(0, R)
            mask_R = n_R < end
            row_R = list_entry(listed, token, n_R, mask_R)
            mask_RW = mask_R[:, None] & mask_W[None, :]
            w_RW, upper_RW = word_tile(m, row_R, word_W, mask_RW), upper_tile(m, row_R, word_W, mask_RW)
            scale_RW = word_scales(m, row_R, word_W, mask_RW)
            h_R1 = tl.load(h + n_R, mask=mask_R, other=0.0)[:, None]
            h_RW, added_RW = scale_RW * h_R1, word_minima(m, row_R, word_W, mask_RW, scale_RW) * h_R1
            h_sum_RW, sums_RW = add_words(m, w_RW, upper_RW, h_RW, added_RW, nibble_mask, h_sum_RW, sums_RW)
    first_RW, second_RW = added_words(m, h_sum_RW, sums_RW)
    out, column_W = sums + (token * SPLITS + tl.program_id(1)) * m.columns, word_column(m, word_W)
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
