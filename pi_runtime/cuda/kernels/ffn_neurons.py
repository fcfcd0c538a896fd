"""Neurons of one FFN for each of some tokens: which are predicted, which fire, and the sum of those.

    h_i = a(first_i · x + b_i) (up_i · x + c_i)         (gated; plain: without the second factor; drelu: cut off at 0)
    sums_s = Σ_{i in split s} h_i down_i                `splits` parts of the list, which `residual.merge` adds in order

A neuron's number counts from the first one in this memory. A list and its length come from device memory.

Shape letters: M tokens, F neurons of the layer, N of them or of a list, D model width, K experts of a token, R rank of
a predictor or rows of a tile, C stored elements, T tiles.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from pi_runtime.artifact.decoder import ACTIVATIONS
from pi_runtime.cuda.kernels.compaction import NeuronList, list_entry, list_length
from pi_runtime.cuda.kernels.matrix import DeviceMatrix
from pi_runtime.cuda.kernels.row_dot import row_dots
from pi_runtime.cuda.kernels.tiling import Tiling, tile_and_token

CODES = {name: code for code, name in enumerate(ACTIVATIONS) if name != "clamped_swiglu"}
"""The number of each activation that a GPU computes, which kernels branch on."""
_RELU2, _SILU = tl.constexpr(CODES["relu2"]), tl.constexpr(CODES["silu"])
_GELU, _GELU_TANH = tl.constexpr(CODES["gelu"]), tl.constexpr(CODES["gelu_tanh"])
DRELU = tl.constexpr(CODES["drelu"])


@triton.jit
def _sigmoid(z):
    """1 / (1 + e⁻ᶻ), without an exponential that overflows."""
    e = tl.exp(-tl.abs(z))
    return tl.where(z >= 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def activate(z, limit, KIND: tl.constexpr):
    """a(z) (see `artifact.decoder`), and 0 where its magnitude is at most `limit`."""
    if KIND == _SILU:
        h = z * _sigmoid(z)
    elif KIND == _GELU:
        h = z * (0.5 + 0.5 * tl.erf(z * 0.7071067811865476))
    elif KIND == _GELU_TANH:
        h = z * _sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))  # (1 + tanh y) / 2 = 1 / (1 + e⁻²ʸ)
    else:
        h = tl.where(z <= 0.0, 0.0, z)  # NaN stays
        if KIND == _RELU2:
            h = h * h
    return tl.where(tl.abs(h) <= limit, 0.0, h)


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
        return self.rest[self.rows_per_neuron - 1 :: self.rows_per_neuron]

    def slice(self, low: int, high: int) -> "Neurons":
        """The neurons [low, high)."""
        first_bias, up_bias = (None if bias is None else bias[low:high] for bias in (self.first_bias, self.up_bias))
        rest = self.rest[self.rows_per_neuron * low : self.rows_per_neuron * high]
        return replace(self, first=self.first[low:high], first_bias=first_bias, rest=rest, up_bias=up_bias)


def predict(
    up: DeviceMatrix,
    bias_F: torch.Tensor,
    r_MR: torch.Tensor,
    marks_MN: torch.Tensor,
    counts_MT: torch.Tensor,
    tiling: Tiling,
    candidates: NeuronList | None = None,
    expert_MK: torch.Tensor | None = None,
    d_ff: int = 0,
) -> int:
    """Mark the neurons whose score up · r + bias is above 0; of a list of candidates, at their places in the list.

    With `expert_MK` a candidate is expert · `d_ff` + neuron, a neuron of one of the token's experts, and the k-th part
    of r is for those of expert_k. Returns how many neurons one number of `counts_MT` counts.
    """
    (tokens, most), slots = marks_MN.shape, 1 if expert_MK is None else expert_MK.shape[1]
    assert r_MR.shape == (tokens, slots * up.columns)
    assert bias_F.shape == (up.rows,)
    assert most == (up.rows if candidates is None else candidates.room)
    rows, width = tiling.dots(up)
    _predict[(triton.cdiv(most, rows) * tokens,)](
        up.stored, bias_F, r_MR, candidates, expert_MK, marks_MN, counts_MT, tokens, r_MR.stride(0),
        marks_MN.stride(0), counts_MT.stride(0), d_ff, slots, rows, width, **tiling.dot_options(up),
    )  # fmt: skip
    return rows


def neuron_activations(
    n: Neurons,
    x_MD: torch.Tensor,
    listed: NeuronList | None,
    h_MF: torch.Tensor,
    counts_MT: torch.Tensor,
    tiling: Tiling,
) -> int:
    """h of all neurons, or of the listed ones at their places in the list.

    Returns how many neurons one number of `counts_MT`, which counts non-zeros, is for.
    """
    tokens, columns = x_MD.shape
    assert columns == n.first.columns == n.rest.columns
    assert x_MD.is_contiguous()
    most = n.count if listed is None else min(n.count, listed.room)
    assert h_MF.shape[1] >= most
    rows, width = tiling.dots(n.first)
    _neuron_activations[(triton.cdiv(most, rows) * tokens,)](
        n.first.stored, n.first_bias, n.rest.stored, n.up_bias, x_MD, listed, h_MF, counts_MT, tokens, h_MF.stride(0),
        counts_MT.stride(0), n.limit, n.activation, n.rows_per_neuron == 2, rows, width, **tiling.dot_options(n.first),
    )  # fmt: skip
    return rows


@triton.jit(do_not_specialize=["tokens"])
def _predict(
    up, bias, r, candidates, expert, marks, counts, tokens, r_stride, marks_stride, counts_stride, d_ff, slots,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    tile, token = tile_and_token(tokens)
    r += token * r_stride
    marks += token * marks_stride
    counts += token * counts_stride
    size = list_length(candidates, token, up.rows)
    if tile * R >= size:
        tl.store(counts + tile, 0)
        return
    n_R = tile * R + tl.arange(0, R)
    mask_R = n_R < size
    row_R = list_entry(candidates, token, n_R, mask_R)
    score_R = tl.load(bias + row_R, mask=mask_R, other=0.0)
    if expert is None:
        score_R += row_dots(up, row_R, mask_R, r, R, C)
    else:
        for k in range(slots):
            # Few tiles have rows of two experts.
            own_R = mask_R & (row_R // d_ff == tl.load(expert + token * slots + k))
            if tl.max(own_R.to(tl.int32), 0) > 0:
                score_R += row_dots(up, row_R, own_R, r + k * up.columns, R, C)
    mark_R = tl.where(mask_R & (score_R > 0.0), 1.0, 0.0)
    tl.store(marks + n_R, mark_R, mask=mask_R)
    tl.store(counts + tile, tl.sum(mark_R, 0).to(tl.int32))


@triton.jit(do_not_specialize=["tokens"])
def _neuron_activations(
    first, first_bias, rest, up_bias, x, listed, h, counts, tokens, h_stride, counts_stride, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    tile, token = tile_and_token(tokens)
    x += token * first.columns
    h += token * h_stride
    counts += token * counts_stride
    size = list_length(listed, token, first.rows)
    if tile * R >= size:
        tl.store(counts + tile, 0)
        return
    n_R = tile * R + tl.arange(0, R)
    mask_R = n_R < size
    row_R = list_entry(listed, token, n_R, mask_R)
    h_R = row_dots(first, row_R, mask_R, x, R, C)
    if first_bias is not None:
        h_R += tl.load(first_bias + row_R, mask=mask_R, other=0.0)
    h_R = tl.where(mask_R, activate(h_R, limit, ACTIVATION), 0.0)
    if GATED:
        # The second row is read only for neurons that fire.
        fires_R = h_R != 0.0
        if tl.max(fires_R.to(tl.int32), 0) > 0:
            up_R = row_dots(rest, 2 * row_R, fires_R, x, R, C)
            if up_bias is not None:
                up_R += tl.load(up_bias + row_R, mask=fires_R, other=0.0)
            if ACTIVATION == DRELU:
                up_R = tl.where(up_R <= 0.0, 0.0, up_R)
            h_R = h_R * up_R
    tl.store(h + n_R, h_R, mask=mask_R)
    tl.store(counts + tile, tl.sum((h_R != 0.0).to(tl.int32), 0))
