"""Mixtures of experts: which experts a token is routed to, and which of their neurons are on the GPU.

What the GPU has of a layer stands expert by expert in one array (see `Cuts`). The neurons of the K experts that the
token is routed to are listed; from there on the kernels for lists do the same as in a layer without experts.

    expert_k, route_weight_k ← the K largest of router · x, softmax over them or all   route
    rows ← neurons of these experts                                                list_expert_neurons
    h_i ← route_weight_k h_i                                                       apply_route_weights

Shape letters: M tokens, X experts of F neurons each, K of them a token, B neurons of a block.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.kernels.compaction import NeuronList
from pi_runtime.execution.plan_layout import Cuts

BLOCK = 512
"""Neurons that a program lists or weights."""


class DeviceCuts(NamedTuple):
    """`Cuts` of one layer in device memory: int32 (X)."""

    cut_X: torch.Tensor
    base_X: torch.Tensor
    d_ff: int

    @classmethod
    def of(cls, cuts: Cuts, d_ff: int, cuts_2X: torch.Tensor) -> "DeviceCuts":
        """Write the cuts into device memory, int32 (2, X)."""
        cuts_2X.copy_(torch.tensor([cuts.cut_X, cuts.base_X]))
        return cls(cuts_2X[0], cuts_2X[1], d_ff)


class Routing(NamedTuple):
    """The experts of each token in device memory, int32 (M, K), and the weight of each, float32 (M, K)."""

    expert_MK: torch.Tensor
    route_weight_MK: torch.Tensor


def route(router_MX: torch.Tensor, routing: Routing, *, normalised: bool = True) -> None:
    """Take a token's K largest values, the lower expert of equal ones first, and the softmax over them.

    Where it is not `normalised`, their part of the softmax over all.
    """
    (tokens, experts), count = router_MX.shape, routing.expert_MK.shape[1]
    assert 0 < count <= experts
    assert router_MX.is_contiguous()
    assert routing.expert_MK.dtype == torch.int32
    assert routing.route_weight_MK.dtype == torch.float32
    assert routing.route_weight_MK.shape == routing.expert_MK.shape == (tokens, count)
    _route[(tokens,)](
        router_MX, routing, experts, count, normalised, triton.next_power_of_2(experts), triton.next_power_of_2(count),
        num_warps=1,
    )  # fmt: skip


def list_expert_neurons(
    routing: Routing, cuts: DeviceCuts, found: NeuronList, rows_MF: torch.Tensor | None, *, cold: bool
) -> None:
    """List the neurons of a token's experts, one expert after the other.

    The hot ones are listed by their rows on the GPU, and in `rows_MF`, if it is given, by their rows in the whole layer
    (expert · F + neuron). The `cold` ones are listed by their rows in the whole layer. At most as many are listed
    as the list has room for.
    """
    assert rows_MF is None or (rows_MF.shape[1] >= found.room and rows_MF.dtype == torch.int32)
    tokens, slots = routing.expert_MK.shape
    stride = 0 if rows_MF is None else rows_MF.stride(0)
    _list_expert_neurons[(triton.cdiv(found.room, BLOCK), tokens)](
        routing.expert_MK, cuts, found, rows_MF, stride, slots, found.room, cold, BLOCK
    )


def apply_route_weights(listed: NeuronList, h_MF: torch.Tensor, routing: Routing, cuts: DeviceCuts) -> None:
    """h_n ← h_n · the weight of the expert that the list's n-th neuron belongs to."""
    assert h_MF.shape[1] >= listed.room
    tokens, slots = routing.expert_MK.shape
    _apply_route_weights[(triton.cdiv(listed.room, BLOCK), tokens)](
        listed, h_MF, routing, cuts, h_MF.stride(0), slots, BLOCK
    )


@triton.jit
def _route(router, routing, experts, count, NORMALISED: tl.constexpr, X: tl.constexpr, K: tl.constexpr):
    router += tl.program_id(0) * experts
    begin = tl.program_id(0) * count
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
    total = tl.sum(route_weight_K, 0)
    if not NORMALISED:
        total = tl.sum(tl.exp(value_X - tl.max(value_K, 0)), 0)
    tl.store(routing.expert_MK + begin + place_K, expert_K, mask=mask_K)
    tl.store(routing.route_weight_MK + begin + place_K, route_weight_K / total, mask=mask_K)


@triton.jit
def _list_expert_neurons(routed, cuts, found, rows, stride, slots, room, COLD: tl.constexpr, B: tl.constexpr):
    block = tl.program_id(0)
    token = tl.program_id(1)
    n_B = block * B + tl.arange(0, B)
    begin = 0
    for k in range(slots):
        expert = tl.load(routed + token * slots + k)
        size = tl.load(cuts.cut_X + expert)
        low = 0
        first = tl.load(cuts.base_X + expert)
        if COLD:
            low = size
            first = expert * cuts.d_ff + size
            size = cuts.d_ff - size
        i_B = n_B - begin
        own_B = (i_B >= 0) & (i_B < size) & (n_B < room)
        tl.store(found.index_MF + token * found.stride + n_B, first + i_B, mask=own_B)
        if rows is not None:
            tl.store(rows + token * stride + n_B, expert * cuts.d_ff + low + i_B, mask=own_B)
        begin += size
    if block == 0:
        tl.store(found.length_M + token, tl.minimum(begin, room))


@triton.jit
def _apply_route_weights(listed, h, routing, cuts, h_stride, slots, B: tl.constexpr):
    token = tl.program_id(1)
    h += token * h_stride
    n_B = tl.program_id(0) * B + tl.arange(0, B)
    mask_B = n_B < tl.load(listed.length_M + token)
    row_B = tl.load(listed.index_MF + token * listed.stride + n_B, mask=mask_B, other=0)
    route_weight_B = tl.zeros([B], tl.float32)
    for k in range(slots):
        expert = tl.load(routing.expert_MK + token * slots + k)
        low = tl.load(cuts.base_X + expert)
        own_B = (row_B >= low) & (row_B < low + tl.load(cuts.cut_X + expert))
        route_weight_B = tl.where(own_B, tl.load(routing.route_weight_MK + token * slots + k), route_weight_B)
    tl.store(h + n_B, tl.load(h + n_B, mask=mask_B, other=0.0) * route_weight_B, mask=mask_B)
