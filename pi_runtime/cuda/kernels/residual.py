"""The residual stream: norms, and sums added to it. One program for a token, or for a tile of a token's columns.

Shape letters: T tokens, D model width, S splits of a sum, B and C columns of a program.
"""

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.kernels.tiling import UNFUSED

COLUMNS = 128
"""Columns that a program adds to."""


def norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor | None, eps: float, y_TD: torch.Tensor
) -> None:
    """y ← norm(x), of rows that may lie apart.

    rms norm: x / √(mean x² + eps) · weight; with a bias layer norm: (x − mean) / √(var + eps) · weight + bias.
    """
    tokens, width = x_TD.shape
    assert y_TD.shape == x_TD.shape
    assert weight_D.shape == (width,)
    assert x_TD.stride(1) == y_TD.stride(1) == 1
    block = triton.next_power_of_2(width)
    warps = 8 if block > 2048 else 4
    strides = x_TD.stride(0), y_TD.stride(0)
    _norm[(tokens,)](x_TD, weight_D, bias_D, y_TD, *strides, eps, width, block, num_warps=warps, **UNFUSED)


def merge(
    x_TD: torch.Tensor,
    sums_TSD: torch.Tensor | None,
    other_TD: torch.Tensor | None = None,
    bias_D: torch.Tensor | None = None,
) -> None:
    """x ← x + Σ_s sums_s + the other sum + the bias, in that order."""
    (tokens, width), splits = x_TD.shape, 0 if sums_TSD is None else sums_TSD.shape[1]
    assert all(t is None or t.is_contiguous() for t in (x_TD, sums_TSD, other_TD))
    _merge[(triton.cdiv(width, COLUMNS), tokens)](x_TD, sums_TSD, other_TD, bias_D, width, splits, COLUMNS)


@triton.jit
def _norm(x, weight, bias, y, x_stride, y_stride, eps, width, B: tl.constexpr):
    column_B = tl.arange(0, B)
    mask_B = column_B < width
    token = tl.program_id(0).to(tl.int64)
    x_B = tl.load(x + token * x_stride + column_B, mask=mask_B, other=0.0)
    if bias is not None:
        x_B = tl.where(mask_B, x_B - tl.sum(x_B, 0) / width, 0.0)
    y_B = x_B / tl.sqrt(tl.sum(x_B * x_B, 0) / width + eps) * tl.load(weight + column_B, mask=mask_B, other=0.0)
    if bias is not None:
        y_B += tl.load(bias + column_B, mask=mask_B, other=0.0)
    tl.store(y + token * y_stride + column_B, y_B, mask=mask_B)


@triton.jit
def _merge(x, sums, other, bias, width, splits, C: tl.constexpr):
    column_C = tl.program_id(0) * C + tl.arange(0, C)
    token = tl.program_id(1)
    mask_C = column_C < width
    x_C = tl.load(x + token * width + column_C, mask=mask_C, other=0.0)
    if sums is not None:
        sum_C = tl.zeros([C], tl.float32)
        for split in range(splits):
            sum_C += tl.load(sums + (token * splits + split) * width + column_C, mask=mask_C, other=0.0)
        x_C += sum_C
    if other is not None:
        x_C += tl.load(other + token * width + column_C, mask=mask_C, other=0.0)
    if bias is not None:
        x_C += tl.load(bias + column_C, mask=mask_C, other=0.0)
    tl.store(x + token * width + column_C, x_C, mask=mask_C)
