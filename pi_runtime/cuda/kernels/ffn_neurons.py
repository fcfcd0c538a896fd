"""Neurons of one FFN for one token: which are predicted, which fire, and the sum of those.

    h_i = a(first_i · x + b_i) (up_i · x + c_i)         (gated; plain: without the second factor; drelu: cut off at 0)
    sums_s = Σ_{i in split s} h_i down_i                `splits` parts of the list, which `residual.merge` adds in order

A neuron's number counts from the first one in this memory. A list and its length come from device memory.

Legend: F neurons, D model width, R rank of a predictor or rows of a tile, C stored elements, T tiles, S splits.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.kernels.activations import DRELU, activate
from pi_runtime.cuda.kernels.compaction import NeuronList
from pi_runtime.cuda.kernels.gathered_sum import gathered_sums
from pi_runtime.cuda.kernels.matrix import DeviceMatrix
from pi_runtime.cuda.kernels.row_dot import listed_row, row_dots
from pi_runtime.cuda.kernels.tiling import Tiling


@dataclass(frozen=True)
class Neurons:
    """Neurons of one layer's FFN, as far as they are in this memory."""

    first: DeviceMatrix
    first_bias: torch.Tensor | None
    rest: DeviceMatrix
    """`rows_per_neuron` rows for each neuron: up and down, or fc2."""
    up_bias: torch.Tensor | None
    activation: int
    limit: float = 0.0
    """Magnitudes of the activation up to here count as 0."""

    @property
    def count(self) -> int:
        return self.first.rows

    @property
    def rows_per_neuron(self) -> int:
        return self.rest.rows // self.first.rows

    @property
    def down(self) -> DeviceMatrix:
        return self.rest.strided(self.rows_per_neuron, self.rows_per_neuron - 1)

    def slice(self, low: int, high: int) -> "Neurons":
        """The neurons [low, high)."""
        first_bias, up_bias = (None if bias is None else bias[low:high] for bias in (self.first_bias, self.up_bias))
        rest = self.rest.slice(self.rows_per_neuron * low, self.rows_per_neuron * high)
        return replace(self, first=self.first.slice(low, high), first_bias=first_bias, rest=rest, up_bias=up_bias)


def predict(
    up: DeviceMatrix,
    bias_F: torch.Tensor,
    r_R: torch.Tensor,
    marks_F: torch.Tensor,
    counts_T: torch.Tensor,
    tiling: Tiling,
) -> int:
    """Mark the neurons whose score up · r + bias is above 0.

    Returns how many neurons one number of `counts_T` counts.
    """
    assert r_R.shape == (up.columns,)
    assert bias_F.shape == marks_F.shape == (up.rows,)
    rows, width = tiling.dots(up)
    _predict[(triton.cdiv(up.rows, rows),)](
        up.values, up.scales, bias_F, r_R, marks_F, counts_T, *up.strides, up.width, up.columns, up.rows,
        up.code, rows, width, **tiling.dot_options(up),
    )  # fmt: skip
    return rows


def neuron_activations(
    n: Neurons, x_D: torch.Tensor, listed: NeuronList | None, h_F: torch.Tensor, counts_T: torch.Tensor, tiling: Tiling
) -> int:
    """h of all neurons, or of the listed ones at their places in the list.

    Returns how many neurons one number of `counts_T`, which counts non-zeros, is for.
    """
    assert x_D.shape == (n.first.columns,)
    most = n.count if listed is None else min(n.count, listed.room)
    assert len(h_F) >= most
    assert n.rest.columns == n.first.columns
    rows, width = tiling.dots(n.first)
    index, count = (None, None) if listed is None else (listed.index_F, listed.count)
    _neuron_activations[(triton.cdiv(most, rows),)](
        n.first.values, n.first.scales, n.first_bias, n.rest.values, n.rest.scales, n.up_bias, x_D, index, count,
        h_F, counts_T, *n.first.strides, *n.rest.strides, n.first.width, n.first.columns, n.count, n.limit,
        n.first.code, n.activation, n.rows_per_neuron == 2, n.first_bias is not None, n.up_bias is not None,
        listed is not None, rows, width, **tiling.dot_options(n.first),
    )  # fmt: skip
    return rows


def down_sums(n: Neurons, kept: NeuronList | None, h_F: torch.Tensor, sums_SD: torch.Tensor, tiling: Tiling) -> None:
    """sums ← the partial sums of all neurons, or of the kept ones, whose h stand in the list's order."""
    assert sums_SD.shape == (tiling.splits, n.rest.columns)
    gathered_sums(n.down, kept, h_F, sums_SD, tiling)


@triton.jit
def _predict(
    values, scales, bias, r, marks, counts, stride, scales_stride, width, columns, rows,
    FMT: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row_R = tile * R + tl.arange(0, R)
    mask_R = row_R < rows
    score_R = row_dots(values, scales, stride, scales_stride, width, columns, row_R, mask_R, r, FMT, R, C)
    score_R += tl.load(bias + row_R, mask=mask_R, other=0.0)
    mark_R = tl.where(mask_R & (score_R > 0.0), 1.0, 0.0)
    tl.store(marks + row_R, mark_R, mask=mask_R)
    tl.store(counts + tile, tl.sum(mark_R, 0).to(tl.int32))


@triton.jit
def _neuron_activations(
    first, first_scales, first_bias, rest, rest_scales, up_bias, x, index, count, h, counts,
    stride, scales_stride, rest_stride, rest_scales_stride, width, columns, neurons, limit,
    FMT: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, UP_BIASED: tl.constexpr,
    LISTED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    size = neurons
    if LISTED:
        size = tl.load(count)
    if tile * R >= size:
        tl.store(counts + tile, 0)
        return
    n_R = tile * R + tl.arange(0, R)
    mask_R = n_R < size
    row_R = listed_row(index, n_R, mask_R, LISTED)
    h_R = row_dots(first, first_scales, stride, scales_stride, width, columns, row_R, mask_R, x, FMT, R, C)
    if BIASED:
        h_R += tl.load(first_bias + row_R, mask=mask_R, other=0.0)
    h_R = tl.where(mask_R, activate(h_R, limit, ACTIVATION), 0.0)
    if GATED:
        # The second row is read only for neurons that fire.
        fires_R = h_R != 0.0
        if tl.max(fires_R.to(tl.int32), 0) > 0:
            up_R = row_dots(
                rest, rest_scales, rest_stride, rest_scales_stride, width, columns, 2 * row_R, fires_R, x, FMT, R, C
            )
            if UP_BIASED:
                up_R += tl.load(up_bias + row_R, mask=fires_R, other=0.0)
            if ACTIVATION == DRELU:
                up_R = tl.where(up_R <= 0.0, 0.0, up_R)
            h_R = h_R * up_R
    tl.store(h + n_R, h_R, mask=mask_R)
    tl.store(counts + tile, tl.sum((h_R != 0.0).to(tl.int32), 0))
