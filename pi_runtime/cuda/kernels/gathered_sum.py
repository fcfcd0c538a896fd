"""Weighted sums of a matrix's rows (gathered axpy): sums_s = Σ_{i in split s} h_i row_i.

The list of rows is cut into splits of whole tiles. Each row of a tile has its own running sums until the end, so the
order of additions is always the same.

Legend: R rows, C stored elements, W words, D columns, N numbers in the list, S splits.
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
    values_per_element,
    word_column,
    word_scales,
    word_tile,
    words_of,
)
from pi_runtime.cuda.kernels.compaction import NeuronList
from pi_runtime.cuda.kernels.matrix import DeviceMatrix
from pi_runtime.cuda.kernels.row_dot import listed_row, stored_tile
from pi_runtime.cuda.kernels.tiling import Tiling


def gathered_sums(
    m: DeviceMatrix, listed: NeuronList | None, h_N: torch.Tensor, sums_SD: torch.Tensor, tiling: Tiling
) -> None:
    """Sum the rows of m, or the listed ones; h_N[n] is the weight of row n, or of the list's n-th row."""
    index, count = (None, None) if listed is None else (listed.index_F, listed.count)
    first = 0
    if m.words:
        rows, words = tiling.word_sums(m)
        _gathered_axpy_words[(triton.cdiv(m.words, words), tiling.splits)](
            m.values, m.scales, index, count, h_N, sums_SD, *m.strides, m.columns, m.rows,
            m.code, listed is not None, tiling.splits, rows, tiling.sum_unroll, words,
        )  # fmt: skip
        first = m.words * 4
    if first < m.width:
        rows, width = tiling.sums(m)
        _gathered_axpy[(triton.cdiv(m.width - first, width), tiling.splits)](
            m.values, m.scales, index, count, h_N, sums_SD, *m.strides, first, m.width, m.columns, m.rows,
            m.code, listed is not None, tiling.splits, rows, width,
        )  # fmt: skip


@triton.jit
def _split_range(count, size, LISTED: tl.constexpr, SPLITS: tl.constexpr, R: tl.constexpr):
    """Where this program's split of the list begins and ends."""
    if LISTED:
        size = tl.load(count)
    split, steps = tl.program_id(1), (size + R - 1) // R
    return steps * split // SPLITS * R, tl.minimum(size, steps * (split + 1) // SPLITS * R)


@triton.jit
def _gathered_axpy(
    values, scales, index, count, h, sums, stride, scales_stride, first, width, columns, rows,
    FMT: tl.constexpr, LISTED: tl.constexpr, SPLITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    element_C = first + tl.program_id(0) * C + tl.arange(0, C)
    begin, end = _split_range(count, rows, LISTED, SPLITS, R)
    VALUES: tl.constexpr = values_per_element(FMT)
    column_C = element_column(element_C, columns, 0, FMT)
    sums_RC = tl.zeros([R, C], tl.float32)
    # Of the second value of an element, where it has two.
    column2_C = element_column(element_C, columns, 1, FMT)
    sums2_RC = tl.zeros([R, C], tl.float32)
    for start in range(begin, end, R):
        n_R = start + tl.arange(0, R)
        mask_R = n_R < end
        row_R = listed_row(index, n_R, mask_R, LISTED)
        h_R1 = tl.load(h + n_R, mask=mask_R, other=0.0)[:, None]
        stored_RC = stored_tile(values, stride, row_R, mask_R, element_C, width)
        sums_RC += h_R1 * element_weights(
            stored_RC, scales, scales_stride, row_R, mask_R, column_C, columns, 0, FMT
        )  # fmt: skip
        if VALUES == 2:
            sums2_RC += h_R1 * element_weights(
                stored_RC, scales, scales_stride, row_R, mask_R, column2_C, columns, 1, FMT
            )  # fmt: skip
    out = sums + tl.program_id(1) * columns
    tl.store(out + column_C, tl.sum(sums_RC, 0), mask=(element_C < width) & (column_C < columns))
    if VALUES == 2:
        tl.store(out + column2_C, tl.sum(sums2_RC, 0), mask=(element_C < width) & (column2_C < columns))


@triton.jit
def _gathered_axpy_words(
    values, scales, index, count, h, sums, stride, scales_stride, columns, rows,
    FMT: tl.constexpr, LISTED: tl.constexpr, SPLITS: tl.constexpr, R: tl.constexpr, UNROLL: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """Whole groups of block formats; the words of UNROLL tiles are on their way at once."""
    word_W = tl.program_id(0) * W + tl.arange(0, W)
    mask_W = word_W < words_of(columns, FMT)
    begin, end = _split_range(count, rows, LISTED, SPLITS, R * UNROLL)
    nibble_mask = nibble_mask_of(values)
    h_sum_RW = tl.zeros([R, W], tl.float32)
    s0_RW, s1_RW, s2_RW, s3_RW = h_sum_RW, h_sum_RW, h_sum_RW, h_sum_RW
    s4_RW, s5_RW, s6_RW, s7_RW = h_sum_RW, h_sum_RW, h_sum_RW, h_sum_RW
    for start in range(begin, end, R * UNROLL):
        for step in tl.static_range(UNROLL):
            n_R = start + step * R + tl.arange(0, R)
            mask_R = n_R < end
            row_R = listed_row(index, n_R, mask_R, LISTED)
            mask_RW = mask_R[:, None] & mask_W[None, :]
            w_RW = word_tile(values, stride, row_R, word_W, mask_RW)
            h_RW = word_scales(scales, scales_stride, row_R, word_W, mask_RW, FMT)
            h_RW *= tl.load(h + n_R, mask=mask_R, other=0.0)[:, None]
            h_sum_RW, s0_RW, s1_RW, s2_RW, s3_RW, s4_RW, s5_RW, s6_RW, s7_RW = add_words(
                w_RW, h_RW, nibble_mask, h_sum_RW, s0_RW, s1_RW, s2_RW, s3_RW, s4_RW, s5_RW, s6_RW, s7_RW, FMT
            )
    s0_RW, s1_RW, s2_RW, s3_RW, s4_RW, s5_RW, s6_RW, s7_RW = added_words(
        h_sum_RW, s0_RW, s1_RW, s2_RW, s3_RW, s4_RW, s5_RW, s6_RW, s7_RW, FMT
    )
    out, column_W = sums + tl.program_id(1) * columns, word_column(word_W, FMT)
    if runs_per_word(FMT) == 2:
        _store_runs(out, column_W + 16, mask_W, columns, s4_RW, s5_RW, s6_RW, s7_RW)
    _store_runs(out, column_W, mask_W, columns, s0_RW, s1_RW, s2_RW, s3_RW)


@triton.jit
def _store_runs(out, column_W, mask_W, columns, s0_RW, s1_RW, s2_RW, s3_RW):
    """Store the sums of each word's run of four neighbouring columns."""
    even = tl.join(tl.sum(s0_RW, 0), tl.sum(s2_RW, 0))
    odd = tl.join(tl.sum(s1_RW, 0), tl.sum(s3_RW, 0))
    s_W4 = tl.reshape(tl.join(even, odd), [column_W.shape[0], 4])
    column_W4 = column_W[:, None] + tl.arange(0, 4)[None, :]
    tl.store(out + column_W4, s_W4, mask=mask_W[:, None] & (column_W4 < columns))
