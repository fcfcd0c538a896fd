"""Weighted sums of a matrix's rows: sums_s = Σ_{i in part s} h_i row_i.

The list of rows is cut into parts of whole tiles, and each row of a tile has its own running sums until the end: always
the same order of additions.
"""

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.kernels.matrix import Matrix
from pi_runtime.cuda.kernels.packed_words import (
    byte,
    mask_of,
    pair,
    sums_of_pair,
    word_column,
    word_scales,
    word_tile,
    words_of,
)
from pi_runtime.cuda.kernels.row_dot import (
    Q4,
    Q8,
    column_of,
    high_place,
    picked_row,
    scale_tile,
    stored_column,
    stored_tile,
)
from pi_runtime.cuda.kernels.tiling import Tiling


def weighted_sums(
    m: Matrix,
    listed: tuple[torch.Tensor, torch.Tensor] | None,
    h_N: torch.Tensor,
    sums_SD: torch.Tensor,
    tiling: Tiling,
) -> None:
    """Sums over the rows of m, or over a list of them and its length; h_N[n] goes with row n, or the list's n-th."""
    index, count = (None, None) if listed is None else listed
    first = 0
    if m.words:
        rows, words = tiling.word_sums(m)
        _add_words[(triton.cdiv(m.words, words), tiling.splits)](
            m.values, m.scales, index, count, h_N, sums_SD, *m.strides, m.columns, m.rows,
            m.code, listed is not None, tiling.splits, rows, tiling.sum_turns, words,
        )  # fmt: skip
        first = m.words * 4
    if first < m.width:
        rows, width = tiling.sums(m)
        _add_rows[(triton.cdiv(m.width - first, width), tiling.splits)](
            m.values, m.scales, index, count, h_N, sums_SD, *m.strides, first, m.width, m.columns, m.rows,
            m.code, listed is not None, tiling.splits, rows, width,
        )  # fmt: skip


@triton.jit
def _part(count, size, LISTED: tl.constexpr, SPLITS: tl.constexpr, R: tl.constexpr):
    """First and behind the last number of the list in this program's part."""
    if LISTED:
        size = tl.load(count)
    split, steps = tl.program_id(1), (size + R - 1) // R
    return steps * split // SPLITS * R, tl.minimum(size, steps * (split + 1) // SPLITS * R)


@triton.jit
def _add_rows(
    values, scales, index, count, h, sums, stride, scales_stride, first, width, columns, rows,
    FMT: tl.constexpr, LISTED: tl.constexpr, SPLITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    element_C = first + tl.program_id(0) * C + tl.arange(0, C)
    begin, end = _part(count, rows, LISTED, SPLITS, R)
    column_C = stored_column(element_C, columns, FMT)
    upper_C = column_of(high_place(element_C, columns), columns)
    low_RC = tl.zeros([R, C], tl.float32)
    high_RC = tl.zeros([R, C], tl.float32)
    for start in range(begin, end, R):
        n_R = start + tl.arange(0, R)
        there_R = n_R < end
        row_R = picked_row(index, n_R, there_R, LISTED)
        h_R1 = tl.load(h + n_R, mask=there_R, other=0.0)[:, None]
        stored_RC = stored_tile(values, stride, row_R, there_R, element_C, width)
        if FMT == Q4:
            scale_RC = scale_tile(scales, scales_stride, row_R, there_R, column_C, columns)
            low_RC += h_R1 * (((stored_RC & 15).to(tl.int32) - 8).to(tl.float32) * scale_RC)
            scale_RC = scale_tile(scales, scales_stride, row_R, there_R, upper_C, columns)
            high_RC += h_R1 * (((stored_RC >> 4).to(tl.int32) - 8).to(tl.float32) * scale_RC)
        elif FMT == Q8:
            scale_RC = scale_tile(scales, scales_stride, row_R, there_R, column_C, columns)
            low_RC += h_R1 * (stored_RC.to(tl.float32) * scale_RC)
        else:
            low_RC += h_R1 * stored_RC.to(tl.float32)
    out = sums + tl.program_id(1) * columns
    there_C = (element_C < width) & (column_C < columns)
    tl.store(out + column_C, tl.sum(low_RC, 0), mask=there_C)
    if FMT == Q4:
        there_C = (element_C < width) & (upper_C < columns)
        tl.store(out + upper_C, tl.sum(high_RC, 0), mask=there_C)


@triton.jit
def _add_words(
    values, scales, index, count, h, sums, stride, scales_stride, columns, rows,
    FMT: tl.constexpr, LISTED: tl.constexpr, SPLITS: tl.constexpr, R: tl.constexpr, TURNS: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """Whole groups of q8 and q4; the words of TURNS tiles are on their way at once."""
    word_W = tl.program_id(0) * W + tl.arange(0, W)
    there_W = word_W < words_of(columns, FMT)
    begin, end = _part(count, rows, LISTED, SPLITS, R * TURNS)
    mask = mask_of(values)
    h_sum_RW = tl.zeros([R, W], tl.float32)
    s0_RW, s1_RW, s2_RW, s3_RW = h_sum_RW, h_sum_RW, h_sum_RW, h_sum_RW
    s4_RW, s5_RW, s6_RW, s7_RW = h_sum_RW, h_sum_RW, h_sum_RW, h_sum_RW
    for start in range(begin, end, R * TURNS):
        for turn in tl.static_range(TURNS):
            n_R = start + turn * R + tl.arange(0, R)
            there_R = n_R < end
            row_R = picked_row(index, n_R, there_R, LISTED)
            mask_RW = there_R[:, None] & there_W[None, :]
            w_RW = word_tile(values, stride, row_R, word_W, mask_RW)
            h_RW = word_scales(scales, scales_stride, row_R, word_W, mask_RW, FMT)
            h_RW *= tl.load(h + n_R, mask=there_R, other=0.0)[:, None]
            if FMT == Q4:
                h_sum_RW += h_RW
                low_RW, high_RW = pair(w_RW, 0, mask)
                s0_RW += h_RW * low_RW
                s2_RW += h_RW * high_RW
                low_RW, high_RW = pair(w_RW, 8, mask)
                s1_RW += h_RW * low_RW
                s3_RW += h_RW * high_RW
                low_RW, high_RW = pair(w_RW, 4, mask)
                s4_RW += h_RW * low_RW
                s6_RW += h_RW * high_RW
                low_RW, high_RW = pair(w_RW, 12, mask)
                s5_RW += h_RW * low_RW
                s7_RW += h_RW * high_RW
            else:
                s0_RW += h_RW * byte(w_RW, 0)
                s1_RW += h_RW * byte(w_RW, 1)
                s2_RW += h_RW * byte(w_RW, 2)
                s3_RW += h_RW * byte(w_RW, 3)
    out, column_W = sums + tl.program_id(1) * columns, word_column(word_W, FMT)
    if FMT == Q4:
        s2_RW, s0_RW = sums_of_pair(s0_RW, s2_RW, h_sum_RW)
        s3_RW, s1_RW = sums_of_pair(s1_RW, s3_RW, h_sum_RW)
        s6_RW, s4_RW = sums_of_pair(s4_RW, s6_RW, h_sum_RW)
        s7_RW, s5_RW = sums_of_pair(s5_RW, s7_RW, h_sum_RW)
        _put(out, column_W + 16, there_W, columns, s4_RW, s5_RW, s6_RW, s7_RW)
    _put(out, column_W, there_W, columns, s0_RW, s1_RW, s2_RW, s3_RW)


@triton.jit
def _put(out, column_W, there_W, columns, s0_RW, s1_RW, s2_RW, s3_RW):
    """Four neighbouring columns of each word."""
    even = tl.join(tl.sum(s0_RW, 0), tl.sum(s2_RW, 0))
    odd = tl.join(tl.sum(s1_RW, 0), tl.sum(s3_RW, 0))
    s_W4 = tl.reshape(tl.join(even, odd), [column_W.shape[0], 4])
    column_W4 = column_W[:, None] + tl.arange(0, 4)[None, :]
    tl.store(out + column_W4, s_W4, mask=there_W[:, None] & (column_W4 < columns))
