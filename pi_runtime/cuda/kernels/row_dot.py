"""Dot products of stored rows with a vector, and y = W x.

A row is read in the order in which it is stored (see `artifact.formats`). Block formats store columns out of order, so
the vector is gathered. It stays float32 (only the CPU rounds it to bytes): a product is Σ_j w_j x_j in float32, with
w = scale · q in a block format. Whole groups of blocks are read as words, what is behind them element by element (see
`stored_rows`).

Shape letters: M tokens, R rows, C stored elements, D and N columns and rows of a matrix, K experts of a token.
"""

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.kernels.matrix import DeviceMatrix
from pi_runtime.cuda.kernels.stored_rows import (
    element_column,
    element_weights,
    first_left_element,
    in_blocks,
    stored_tile,
    values_per_element,
    word_dots,
)
from pi_runtime.cuda.kernels.tiling import Tiling, tile_and_token

LEFT = tl.constexpr(64)
"""Stored elements that are read at once behind the last whole group."""


@triton.jit
def row_dots(m, row_R, mask_R, x, R: tl.constexpr, C: tl.constexpr):
    """[R] row · x. Where `mask_R` is false, the row is not read and the result is 0. C as in `Tiling.dots`."""
    if in_blocks(m.fmt):
        dot_R = word_dots(m, row_R, mask_R, x, R, C)
        if first_left_element(m) < m.width:
            dot_R += _left_dots(m, row_R, mask_R, x, R)
    else:
        sums_RC = tl.zeros([R, C], tl.float32)
        for start in range(0, m.width, C):
            element_C = start + tl.arange(0, C)
            stored_RC = stored_tile(m, row_R, mask_R, element_C)
            x_C = tl.load(x + element_C, mask=element_C < m.width, other=0.0)
            sums_RC += stored_RC.to(tl.float32) * x_C[None, :]
        dot_R = tl.sum(sums_RC, 1)
    return dot_R


@triton.jit
def _left_dots(m, row_R, mask_R, x, R: tl.constexpr):
    """[R] row · x over the blocks behind the last whole group."""
    sums_RC = tl.zeros([R, LEFT], tl.float32)
    for start in range(first_left_element(m), m.width, LEFT):
        element_C = start + tl.arange(0, LEFT)
        stored_RC = stored_tile(m, row_R, mask_R, element_C)
        for value in tl.static_range(values_per_element(m.fmt)):
            column_C = element_column(m, element_C, value)
            x_C = tl.load(x + column_C, mask=(element_C < m.width) & (column_C < m.columns), other=0.0)
            sums_RC += element_weights(m, stored_RC, row_R, mask_R, element_C, column_C, value) * x_C[None, :]
    return tl.sum(sums_RC, 1)


def linear(
    m: DeviceMatrix,
    bias: torch.Tensor | None,
    x_MD: torch.Tensor,
    y_MN: torch.Tensor,
    tiling: Tiling,
    *,
    add: bool = False,
    expert_MK: torch.Tensor | None = None,
) -> None:
    """y = W x + bias, or y ← y + W x + bias, for each token; float32 x (D) and y (N), N the rows of m.

    With `expert_MK` W is the rows of a token's experts, one expert after the other; m has N ÷ K rows for each expert.
    """
    (tokens, count), slots = y_MN.shape, 1 if expert_MK is None else expert_MK.shape[1]
    assert x_MD.shape == (tokens, m.columns), (x_MD.shape, m.columns)
    assert expert_MK is not None or count == m.rows, (y_MN.shape, m.rows)
    assert x_MD.dtype == y_MN.dtype == torch.float32
    assert bias is None or bias.shape == (count,)
    rows, width = tiling.dots(m)
    _linear[(triton.cdiv(count, rows) * tokens,)](
        m.stored, bias, x_MD, y_MN, expert_MK, tokens, x_MD.stride(0), y_MN.stride(0), count, slots, count // slots,
        add, rows, width, **tiling.dot_options(m),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _linear(
    m, bias, x, y, expert, tokens, x_stride, y_stride, rows, slots, each,
    ADD: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    tile, token = tile_and_token(tokens)
    x += token * x_stride
    y += token * y_stride
    n_R = tile * R + tl.arange(0, R)
    mask_R = n_R < rows
    row_R = n_R
    if expert is not None:
        row_R = tl.load(expert + token * slots + n_R // each, mask=mask_R, other=0) * each + n_R % each
    y_R = row_dots(m, row_R, mask_R, x, R, C)
    if bias is not None:
        y_R += tl.load(bias + n_R, mask=mask_R, other=0.0)
    if ADD:
        y_R += tl.load(y + n_R, mask=mask_R, other=0.0)
        tl.debug_barrier()  # every thread has read before any writes
    tl.store(y + n_R, y_R, mask=mask_R)
