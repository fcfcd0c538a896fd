"""Neurons selected by signs: those whose row of `first` has the input's sign in most columns (SparseInfer).

agreement_i = #(columns of equal sign) − #(columns of different sign) = D − 2 #ones(signs_i xor signs(x))

Shape letters: M tokens, F neurons, D columns, R rows of a tile, W words of 64 signs, J bits of a word, T tiles.
"""

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.kernels.compaction import NeuronList, list_entry, list_length
from pi_runtime.cuda.kernels.tiling import tile_and_token

ROWS = 64
"""Rows of a program. Every program packs the input's signs for itself."""
WORDS = 16


def select_by_signs(
    signs_FW: torch.Tensor,
    columns: int,
    margin: int,
    x_MD: torch.Tensor,
    marks_MF: torch.Tensor,
    counts_MT: torch.Tensor,
    candidates: NeuronList | None = None,
) -> int:
    """Mark the rows whose agreement with x is above the margin; of a list of candidates, at their places in the list.

    Returns how many rows one number of `counts_MT` counts.
    """
    tokens, rows = marks_MF.shape
    assert signs_FW.dtype == torch.int64
    assert rows == (signs_FW.shape[0] if candidates is None else candidates.room)
    assert 64 * signs_FW.shape[1] >= columns == x_MD.shape[1]
    assert x_MD.is_contiguous()
    words = triton.cdiv(columns, 64)
    _select_by_signs[(triton.cdiv(rows, ROWS) * tokens,)](
        signs_FW, x_MD, candidates, marks_MF, counts_MT, tokens, marks_MF.stride(0), counts_MT.stride(0),
        signs_FW.stride(0), columns, words, margin, rows, ROWS, WORDS,
    )  # fmt: skip
    return ROWS


@triton.jit
def _popcount(word):
    """Number of set bits. Shifts bring in copies of the sign bit, which every mask drops."""
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    word = word + (word >> 8)
    word = word + (word >> 16)
    return (word + (word >> 32)) & 0x7F


@triton.jit(do_not_specialize=["tokens"])
def _select_by_signs(
    signs, x, candidates, marks, counts, tokens, marks_stride, counts_stride, stride, columns, words, margin, rows,
    R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    tile, token = tile_and_token(tokens)
    x += token * columns
    marks += token * marks_stride
    counts += token * counts_stride
    size = list_length(candidates, token, rows)
    if tile * R >= size:
        tl.store(counts + tile, 0)
        return
    n_R = tile * R + tl.arange(0, R)
    mask_R = n_R < size
    row_R = list_entry(candidates, token, n_R, mask_R)
    bit_J = tl.arange(0, 64)
    differ_R = tl.zeros([R], tl.int32)
    for first in range(0, words, W):
        word_W = first + tl.arange(0, W)
        column_JW = 64 * word_W[None, :] + bit_J[:, None]
        mask_JW = column_JW < columns
        x_JW = tl.load(x + column_JW, mask=mask_JW, other=0.0)
        place_JW = bit_J.to(tl.int64)[:, None]
        x_W = tl.sum((x_JW < 0.0).to(tl.int64) << place_JW, 0)
        used_W = tl.sum(mask_JW.to(tl.int64) << place_JW, 0)
        at_RW = (row_R.to(tl.int64) * stride)[:, None] + word_W[None, :]
        sign_RW = tl.load(signs + at_RW, mask=mask_R[:, None] & (word_W < words)[None, :], other=0)
        differ_R += tl.sum(_popcount((sign_RW ^ x_W[None, :]) & used_W[None, :]), 1).to(tl.int32)
    mark_R = tl.where(mask_R & (columns - 2 * differ_R > margin), 1.0, 0.0)
    tl.store(marks + n_R, mark_R, mask=mask_R)
    tl.store(counts + tile, tl.sum(mark_R, 0).to(tl.int32))
