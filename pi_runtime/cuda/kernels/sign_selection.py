"""Neurons selected by signs: those whose row of `first` has the input's sign in most columns (SparseInfer).

agreement_i = #(columns of equal sign) − #(columns of different sign) = D − 2 #ones(signs_i xor signs(x))
"""

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.kernels.ffn_neurons import List
from pi_runtime.cuda.kernels.row_dot import picked_row

ROWS = 64
"""Rows that a program looks at: each packs the input's signs for itself."""
WORDS = 16


def agree(
    signs_FW: torch.Tensor,
    columns: int,
    margin: int,
    x_D: torch.Tensor,
    marks_F: torch.Tensor,
    counts_T: torch.Tensor,
    asked: List | None = None,
) -> int:
    """Mark the rows, or those that the list asks for at their places in it, whose agreement with x is above the margin;
    returns how many a count is for."""
    rows = len(marks_F)
    assert signs_FW.dtype == torch.int64
    assert rows == (signs_FW.shape[0] if asked is None else len(asked.index_F))
    assert 64 * signs_FW.shape[1] >= columns == len(x_D)
    words = triton.cdiv(columns, 64)
    index, count = (None, None) if asked is None else (asked.index_F, asked.count)
    _agree[(triton.cdiv(rows, ROWS),)](
        signs_FW, x_D, index, count, marks_F, counts_T, signs_FW.stride(0), columns, words, margin, rows,
        asked is not None, ROWS, WORDS,
    )  # fmt: skip
    return ROWS


@triton.jit
def _ones(word):
    """Bits that are set. Shifts bring copies of the sign from above, which every mask drops."""
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    word = word + (word >> 8)
    word = word + (word >> 16)
    return (word + (word >> 32)) & 0x7F


@triton.jit
def _agree(
    signs, x, index, count, marks, counts, stride, columns, words, margin, rows,
    LISTED: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    size = rows
    if LISTED:
        size = tl.load(count)
    if tile * R >= size:
        tl.store(counts + tile, 0)
        return
    n_R = tile * R + tl.arange(0, R)
    there_R = n_R < size
    row_R = picked_row(index, n_R, there_R, LISTED)
    bit_J = tl.arange(0, 64)
    differ_R = tl.zeros([R], tl.int32)
    for first in range(0, words, W):
        word_W = first + tl.arange(0, W)
        column_JW = 64 * word_W[None, :] + bit_J[:, None]
        there_JW = column_JW < columns
        x_JW = tl.load(x + column_JW, mask=there_JW, other=0.0)
        place_JW = bit_J.to(tl.int64)[:, None]
        x_W = tl.sum((x_JW < 0.0).to(tl.int64) << place_JW, 0)
        used_W = tl.sum(there_JW.to(tl.int64) << place_JW, 0)
        at_RW = (row_R.to(tl.int64) * stride)[:, None] + word_W[None, :]
        sign_RW = tl.load(signs + at_RW, mask=there_R[:, None] & (word_W < words)[None, :], other=0)
        differ_R += tl.sum(_ones((sign_RW ^ x_W[None, :]) & used_W[None, :]), 1).to(tl.int32)
    mark_R = tl.where(there_R & (columns - 2 * differ_R > margin), 1.0, 0.0)
    tl.store(marks + n_R, mark_R, mask=there_R)
    tl.store(counts + tile, tl.sum(mark_R, 0).to(tl.int32))
