"""Mixtures of experts: which experts a token is routed to, and which of their neurons are on the GPU.

What the GPU has of a layer stands expert by expert in one array (see `Cuts`). Of the K experts that the token is routed
to the rows are listed; from there on the kernels for lists do the same as in a layer without experts.

    expert_k, route_weight_k ← the K largest of router · x, softmax over them      route
    rows ← neurons of these experts                                                list_expert_neurons
    r_k ← down of expert_k · x                                                     predictor_down
    marks ← up_i · r_k + bias_i > 0                                                predict_listed
    h_i ← route_weight_k h_i                                                       apply_route_weights

Legend: X experts of F neurons each, K of them a token, R rank of a predictor or rows of a tile, B neurons of a block,
D model width, T tiles.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.kernels.compaction import NeuronList
from pi_runtime.cuda.kernels.matrix import DeviceMatrix
from pi_runtime.cuda.kernels.row_dot import row_dots
from pi_runtime.cuda.kernels.tiling import Tiling
from pi_runtime.execution.plan_layout import Cuts

BLOCK = 512
"""Neurons that a program lists or weights."""


@dataclass(frozen=True)
class DeviceCuts:
    """`Cuts` of one layer in device memory: int32 (X)."""

    cut_X: torch.Tensor
    base_X: torch.Tensor
    d_ff: int

    @classmethod
    def of(cls, cuts: Cuts, d_ff: int, cuts_2X: torch.Tensor) -> "DeviceCuts":
        """Write the cuts into device memory, int32 (2, X)."""
        cuts_2X.copy_(torch.tensor([cuts.cut_X, cuts.base_X]))
        return cls(cuts_2X[0], cuts_2X[1], d_ff)


@dataclass(frozen=True)
class Routing:
    """The experts of one token in device memory, int32 (K), and the weight of each, float32 (K)."""

    expert_K: torch.Tensor
    route_weight_K: torch.Tensor

    def __post_init__(self) -> None:
        assert self.expert_K.dtype == torch.int32
        assert self.route_weight_K.dtype == torch.float32
        assert self.expert_K.shape == self.route_weight_K.shape

    def __len__(self) -> int:
        return len(self.expert_K)


def route(router_X: torch.Tensor, routing: Routing) -> None:
    """Take the K largest values, the lower expert of equal ones first, and the softmax over them."""
    experts, count = len(router_X), len(routing)
    assert 0 < count <= experts
    _route[(1,)](
        router_X, routing.expert_K, routing.route_weight_K, experts, count, triton.next_power_of_2(experts),
        triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip


def list_expert_neurons(
    routing: Routing, cuts: DeviceCuts, found: NeuronList, rows_F: torch.Tensor | None, *, cold: bool
) -> None:
    """List the neurons of the token's experts, one expert after the other.

    The hot ones are listed by their rows on the GPU, and in `rows_F`, if it is given, by their rows in the whole layer
    (expert · F + neuron). The `cold` ones are listed by their rows in the whole layer. At most as many are listed
    as the list has room for.
    """
    assert rows_F is None or (len(rows_F) >= found.room and rows_F.dtype == torch.int32)
    _list_expert_neurons[(triton.cdiv(found.room, BLOCK),)](
        routing.expert_K, cuts.cut_X, cuts.base_X, found.index_F, rows_F, found.count, len(routing), cuts.d_ff,
        found.room, cold, rows_F is not None, BLOCK,
    )  # fmt: skip


def predictor_down(down: DeviceMatrix, routing: Routing, x_D: torch.Tensor, r_KR: torch.Tensor, tiling: Tiling) -> None:
    """r_k = down_k x, the first half of the predictors of the token's experts; `down` has R rows for each expert."""
    slots, rank = r_KR.shape
    assert slots == len(routing)
    assert x_D.shape == (down.columns,)
    assert r_KR.is_contiguous()
    rows, width = tiling.dots(down)
    _predictor_down[(triton.cdiv(slots * rank, rows),)](
        down.values, down.scales, x_D, routing.expert_K, r_KR, *down.strides, down.width, down.columns, rank,
        slots * rank, down.code, rows, width, **tiling.dot_options(down),
    )  # fmt: skip


def predict_listed(
    up: DeviceMatrix, bias_F: torch.Tensor, r_KR: torch.Tensor, routing: Routing, candidates: NeuronList, d_ff: int,
    marks_F: torch.Tensor, counts_T: torch.Tensor, tiling: Tiling,
) -> int:  # fmt: skip
    """Mark the candidates whose score up · r_k + bias is above 0, at their places in the list.

    A candidate is expert · F + neuron, of one of the token's experts. Returns how many candidates one number of
    `counts_T` counts.
    """
    assert r_KR.shape == (len(routing), up.columns)
    assert bias_F.shape == (up.rows,)
    assert len(marks_F) == candidates.room
    rows, width = tiling.dots(up)
    _predict_listed[(triton.cdiv(len(marks_F), rows),)](
        up.values, up.scales, bias_F, r_KR, routing.expert_K, candidates.index_F, candidates.count, marks_F, counts_T,
        *up.strides, up.width, up.columns, d_ff, len(routing), up.code, rows, width, **tiling.dot_options(up),
    )  # fmt: skip
    return rows


def apply_route_weights(listed: NeuronList, h_F: torch.Tensor, routing: Routing, cuts: DeviceCuts) -> None:
    """h_n ← h_n · the weight of the expert that the list's n-th neuron belongs to."""
    assert len(h_F) >= listed.room
    _apply_route_weights[(triton.cdiv(listed.room, BLOCK),)](
        listed.index_F, listed.count, h_F, routing.expert_K, routing.route_weight_K, cuts.cut_X, cuts.base_X,
        len(routing), BLOCK,
    )  # fmt: skip


@triton.jit
def _route(router, expert, route_weight, experts, count, X: tl.constexpr, K: tl.constexpr):
    expert_X = tl.arange(0, X)
    place_K = tl.arange(0, K)
    free_X = expert_X < experts
    value_X = tl.load(router + expert_X, mask=free_X, other=-float("inf"))
    expert_K = tl.zeros([K], tl.int32)
    value_K = tl.full([K], -float("inf"), tl.float32)
    for k in range(count):
        most = tl.max(tl.where(free_X, value_X, -float("inf")), 0)
        best = tl.min(tl.where(free_X & (value_X == most), expert_X, X), 0)
        best = tl.minimum(best, experts - 1)  # where none is equal: values that are no numbers
        free_X = free_X & (expert_X != best)
        expert_K = tl.where(place_K == k, best, expert_K)
        value_K = tl.where(place_K == k, most, value_K)
    mask_K = place_K < count
    route_weight_K = tl.exp(value_K - tl.max(value_K, 0))
    tl.store(expert + place_K, expert_K, mask=mask_K)
    tl.store(route_weight + place_K, route_weight_K / tl.sum(route_weight_K, 0), mask=mask_K)


@triton.jit
def _list_expert_neurons(
    routed, cut, base, index, rows, count, slots, d_ff, room,
    COLD: tl.constexpr, ROWS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    n_B = block * B + tl.arange(0, B)
    begin = 0
    for k in range(slots):
        expert = tl.load(routed + k)
        size = tl.load(cut + expert)
        low = 0
        first = tl.load(base + expert)
        if COLD:
            low = size
            first = expert * d_ff + size
            size = d_ff - size
        i_B = n_B - begin
        own_B = (i_B >= 0) & (i_B < size) & (n_B < room)
        tl.store(index + n_B, first + i_B, mask=own_B)
        if ROWS:
            tl.store(rows + n_B, expert * d_ff + low + i_B, mask=own_B)
        begin += size
    if block == 0:
        tl.store(count, tl.minimum(begin, room))


@triton.jit
def _predictor_down(
    values, scales, x, routed, y, stride, scales_stride, width, columns, rank, rows,
    FMT: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    n_R = tl.program_id(0) * R + tl.arange(0, R)
    mask_R = n_R < rows
    row_R = tl.load(routed + n_R // rank, mask=mask_R, other=0) * rank + n_R % rank
    y_R = row_dots(values, scales, stride, scales_stride, width, columns, row_R, mask_R, x, FMT, R, C)
    tl.store(y + n_R, y_R, mask=mask_R)


@triton.jit
def _predict_listed(
    values, scales, bias, r, routed, candidates, count, marks, counts, stride, scales_stride, width, columns, d_ff,
    slots, FMT: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    size = tl.load(count)
    if tile * R >= size:
        tl.store(counts + tile, 0)
        return
    n_R = tile * R + tl.arange(0, R)
    mask_R = n_R < size
    row_R = tl.load(candidates + n_R, mask=mask_R, other=0)
    expert_R = row_R // d_ff
    score_R = tl.load(bias + row_R, mask=mask_R, other=0.0)
    for k in range(slots):
        # Few tiles have rows of two experts.
        own_R = mask_R & (expert_R == tl.load(routed + k))
        if tl.max(own_R.to(tl.int32), 0) > 0:
            own_r = r + k * columns
            score_R += row_dots(values, scales, stride, scales_stride, width, columns, row_R, own_R, own_r, FMT, R, C)
    mark_R = tl.where(mask_R & (score_R > 0.0), 1.0, 0.0)
    tl.store(marks + n_R, mark_R, mask=mask_R)
    tl.store(counts + tile, tl.sum(mark_R, 0).to(tl.int32))


@triton.jit
def _apply_route_weights(index, count, h, routed, route_weight, cut, base, slots, B: tl.constexpr):
    n_B = tl.program_id(0) * B + tl.arange(0, B)
    mask_B = n_B < tl.load(count)
    row_B = tl.load(index + n_B, mask=mask_B, other=0)
    route_weight_B = tl.zeros([B], tl.float32)
    for k in range(slots):
        expert = tl.load(routed + k)
        low = tl.load(base + expert)
        own_B = (row_B >= low) & (row_B < low + tl.load(cut + expert))
        route_weight_B = tl.where(own_B, tl.load(route_weight + k), route_weight_B)
    tl.store(h + n_B, tl.load(h + n_B, mask=mask_B, other=0.0) * route_weight_B, mask=mask_B)
