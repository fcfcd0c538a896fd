"""Which experts a token goes to, and what they ask for, for kernels that take lists of rows.

X experts of F neurons each, K taken. What the GPU has of a layer stands expert by expert in one array (see `cuts`); of
the K experts taken `members` lists the rows, and from there on lists are worked off as in a layer without experts.

    taken_k, share_k ← the K largest of router · x, softmax over them      choose
    members ← rows of the experts taken                                    members
    r_k ← down of expert taken_k · x                                       reduce
    h_i ← share_k h_i                                                      weigh
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pi_runtime.cuda.kernels.ffn_neurons import List
from pi_runtime.cuda.kernels.matrix import Matrix
from pi_runtime.cuda.kernels.row_dot import row_dots
from pi_runtime.cuda.kernels.tiling import Tiling
from pi_runtime.cuda.plan_layout import Cuts

BLOCK = 512
"""Members that a program lists or weighs."""


@dataclass(frozen=True)
class Places:
    """Where the neurons of one layer's experts are: int32 (X) in device memory, as in `Cuts`."""

    cut_X: torch.Tensor
    base_X: torch.Tensor
    d_ff: int

    @classmethod
    def of(cls, cuts: Cuts, d_ff: int, device: torch.device) -> "Places":
        def there(numbers: tuple[int, ...]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        return cls(there(cuts.cut_X), there(cuts.base_X), d_ff)


@dataclass(frozen=True)
class Taken:
    """Experts of one token in device memory, int32 (K), and the share of each, float32 (K)."""

    expert_K: torch.Tensor
    share_K: torch.Tensor

    def __post_init__(self) -> None:
        assert self.expert_K.dtype == torch.int32
        assert self.share_K.dtype == torch.float32
        assert self.expert_K.shape == self.share_K.shape

    def __len__(self) -> int:
        return len(self.expert_K)


def choose(router_X: torch.Tensor, taken: Taken) -> None:
    """The K largest values, of equal ones the lower expert's first, and the softmax of these."""
    experts, count = len(router_X), len(taken)
    assert 0 < count <= experts
    _choose[(1,)](
        router_X, taken.expert_K, taken.share_K, experts, count, triton.next_power_of_2(experts),
        triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip


def members(taken: Taken, places: Places, found: List, rows_F: torch.Tensor | None, *, cold: bool) -> None:
    """List the neurons of the experts taken, one expert after the other: those here by their rows here, and where
    `rows_F` is given by their rows in the whole layer too (expert · F + neuron); those not here (`cold`) by the latter.

    At most as many as the list has room for.
    """
    room = len(found.index_F)
    assert rows_F is None or (len(rows_F) >= room and rows_F.dtype == torch.int32)
    _members[(triton.cdiv(room, BLOCK),)](
        taken.expert_K, places.cut_X, places.base_X, found.index_F, rows_F, found.count, len(taken), places.d_ff, room,
        cold, rows_F is not None, BLOCK,
    )  # fmt: skip


def reduce(down: Matrix, taken: Taken, x_D: torch.Tensor, r_KR: torch.Tensor, tiling: Tiling) -> None:
    """r_k = down_k x, the first half of the predictors of the experts taken; `down` has R rows an expert."""
    slots, rank = r_KR.shape
    assert slots == len(taken)
    assert x_D.shape == (down.columns,)
    assert r_KR.is_contiguous()
    rows, width = tiling.dots(down)
    _reduce[(triton.cdiv(slots * rank, rows),)](
        down.values, down.scales, x_D, taken.expert_K, r_KR, *down.strides, down.width, down.columns, rank,
        slots * rank, down.code, rows, width, **tiling.dot_options(down),
    )  # fmt: skip


def predict(
    up: Matrix, bias_F: torch.Tensor, r_KR: torch.Tensor, taken: Taken, asked: List, d_ff: int, marks_F: torch.Tensor,
    counts_T: torch.Tensor, tiling: Tiling,
) -> int:  # fmt: skip
    """Mark the neurons of the list (expert · F + neuron, of experts taken) whose score up · r_k + bias is above 0, at
    their places in the list; returns how many a count is for."""
    assert r_KR.shape == (len(taken), up.columns)
    assert bias_F.shape == (up.rows,)
    assert len(marks_F) == len(asked.index_F)
    rows, width = tiling.dots(up)
    _predict[(triton.cdiv(len(marks_F), rows),)](
        up.values, up.scales, bias_F, r_KR, taken.expert_K, asked.index_F, asked.count, marks_F, counts_T, *up.strides,
        up.width, up.columns, d_ff, len(taken), up.code, rows, width, **tiling.dot_options(up),
    )  # fmt: skip
    return rows


def weigh(listed: List, h_F: torch.Tensor, taken: Taken, places: Places) -> None:
    """h_n ← h_n · the share of the expert whose row here the list has at n."""
    room = len(listed.index_F)
    assert len(h_F) >= room
    _weigh[(triton.cdiv(room, BLOCK),)](
        listed.index_F, listed.count, h_F, taken.expert_K, taken.share_K, places.cut_X, places.base_X, len(taken), BLOCK
    )


@triton.jit
def _choose(router, expert, share, experts, count, X: tl.constexpr, K: tl.constexpr):
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
    there_K = place_K < count
    share_K = tl.exp(value_K - tl.max(value_K, 0))
    tl.store(expert + place_K, expert_K, mask=there_K)
    tl.store(share + place_K, share_K / tl.sum(share_K, 0), mask=there_K)


@triton.jit
def _members(
    taken, cut, base, index, rows, count, slots, d_ff, room,
    COLD: tl.constexpr, ROWS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    n_B = block * B + tl.arange(0, B)
    begin = 0
    for k in range(slots):
        expert = tl.load(taken + k)
        size = tl.load(cut + expert)
        low = 0
        first = tl.load(base + expert)
        if COLD:
            low = size
            first = expert * d_ff + size
            size = d_ff - size
        i_B = n_B - begin
        mine_B = (i_B >= 0) & (i_B < size) & (n_B < room)
        tl.store(index + n_B, first + i_B, mask=mine_B)
        if ROWS:
            tl.store(rows + n_B, expert * d_ff + low + i_B, mask=mine_B)
        begin += size
    if block == 0:
        tl.store(count, tl.minimum(begin, room))


@triton.jit
def _reduce(
    values, scales, x, taken, y, stride, scales_stride, width, columns, rank, rows,
    FMT: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    n_R = tl.program_id(0) * R + tl.arange(0, R)
    there_R = n_R < rows
    row_R = tl.load(taken + n_R // rank, mask=there_R, other=0) * rank + n_R % rank
    y_R = row_dots(values, scales, stride, scales_stride, width, columns, row_R, there_R, x, FMT, R, C)
    tl.store(y + n_R, y_R, mask=there_R)


@triton.jit
def _predict(
    values, scales, bias, r, taken, asked, count, marks, counts, stride, scales_stride, width, columns, d_ff, slots,
    FMT: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    size = tl.load(count)
    if tile * R >= size:
        tl.store(counts + tile, 0)
        return
    n_R = tile * R + tl.arange(0, R)
    there_R = n_R < size
    row_R = tl.load(asked + n_R, mask=there_R, other=0)
    expert_R = row_R // d_ff
    score_R = tl.load(bias + row_R, mask=there_R, other=0.0)
    for k in range(slots):
        # Few tiles have rows of two experts.
        own_R = there_R & (expert_R == tl.load(taken + k))
        if tl.max(own_R.to(tl.int32), 0) > 0:
            own_r = r + k * columns
            score_R += row_dots(values, scales, stride, scales_stride, width, columns, row_R, own_R, own_r, FMT, R, C)
    mark_R = tl.where(there_R & (score_R > 0.0), 1.0, 0.0)
    tl.store(marks + n_R, mark_R, mask=there_R)
    tl.store(counts + tile, tl.sum(mark_R, 0).to(tl.int32))


@triton.jit
def _weigh(index, count, h, taken, share, cut, base, slots, B: tl.constexpr):
    n_B = tl.program_id(0) * B + tl.arange(0, B)
    there_B = n_B < tl.load(count)
    row_B = tl.load(index + n_B, mask=there_B, other=0)
    share_B = tl.zeros([B], tl.float32)
    for k in range(slots):
        expert = tl.load(taken + k)
        low = tl.load(base + expert)
        own_B = (row_B >= low) & (row_B < low + tl.load(cut + expert))
        share_B = tl.where(own_B, tl.load(share + k), share_B)
    tl.store(h + n_B, tl.load(h + n_B, mask=there_B, other=0.0) * share_B, mask=there_B)
