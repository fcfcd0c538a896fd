"""Lists of neurons by stream compaction: which of many numbers are not zero, in order.

A kernel that marks neurons also counts its marks tile by tile. `compact` sums the counts before each block (a prefix
sum over at most some thousands of tiles, which every program does for itself) and writes the block's own marks behind
them. Lengths stay in device memory, and the host never asks for them: grids are sized for the longest list, and
programs beyond the end stop at once.

Each token has marks, counts and a list of its own. Shape letters: M tokens, N numbers, T tiles, B numbers of a block.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

BLOCK = 512


class NeuronList(NamedTuple):
    """Neurons of each token, and how many: int32 in device memory. There are never more than a list has room for."""

    index_MF: torch.Tensor
    length_M: torch.Tensor
    stride: int
    """Numbers from one token's list to the next one's."""

    @classmethod
    def of(cls, index_MF: torch.Tensor, length_M: torch.Tensor) -> "NeuronList":
        """The lists of M tokens, each with room for F neurons."""
        assert len(index_MF) == len(length_M)
        assert index_MF.dtype == length_M.dtype == torch.int32
        return cls(index_MF, length_M, index_MF.stride(0))

    @property
    def room(self) -> int:
        """Most neurons that a list can have."""
        return self.index_MF.shape[1]

    def first(self, room: int) -> "NeuronList":
        """The same lists with room for fewer neurons."""
        return NeuronList.of(self.index_MF[:, :room], self.length_M)


def compact(
    marks_MN: torch.Tensor,
    counts_MT: torch.Tensor,
    tile: int,
    found: NeuronList,
    kept_MN: torch.Tensor | None = None,
    *,
    low: int = 0,
    within: NeuronList | None = None,
) -> None:
    """List in `found` where `marks_MN` is not zero, and copy these marks to `kept_MN` if it is given.

    `counts_MT`: non-zero marks of every `tile` numbers, int32. Number n stands for neuron low + n. With `within` it
    stands for the n-th neuron of that list instead, and numbers beyond the list's length are left out.
    """
    tokens, numbers = marks_MN.shape
    tiles = triton.cdiv(numbers, tile)
    assert marks_MN.dtype == torch.float32
    assert counts_MT.dtype == torch.int32
    assert found.room >= numbers
    assert counts_MT.shape[1] >= tiles
    block = max(BLOCK, tile)
    assert block % tile == 0, (block, tile)
    strides = marks_MN.stride(0), counts_MT.stride(0), 0 if kept_MN is None else kept_MN.stride(0)
    _compact[(triton.cdiv(numbers, block), tokens)](
        marks_MN, counts_MT, within, found, kept_MN, *strides, low, numbers, tiles, tile,
        triton.next_power_of_2(tiles), block, num_warps=8 if tiles > 4096 else 4,
    )  # fmt: skip


@triton.jit
def list_length(neurons, token, most):
    """Length of a token's list of neurons; without a list `most`, the number of all neurons."""
    length = most
    if neurons is not None:
        length = tl.load(neurons.length_M + token)
    return length


@triton.jit
def list_entry(neurons, token, n_R, mask_R):
    """[R] the n-th neuron of a token's list; without a list neuron n."""
    neuron_R = n_R
    if neurons is not None:
        neuron_R = tl.load(neurons.index_MF + token * neurons.stride + n_R, mask=mask_R, other=0)
    return neuron_R


@triton.jit
def _compact(
    marks, counts, within, found, kept, marks_stride, counts_stride, kept_stride, low, numbers, tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    token = tl.program_id(1)
    tile_T = tl.arange(0, TILES)
    counts_T = tl.load(counts + token * counts_stride + tile_T, mask=tile_T < tiles, other=0)
    before = tl.sum(tl.where(tile_T < block * (B // TILE), counts_T, 0), 0)
    if block == 0:
        tl.store(found.length_M + token, tl.sum(counts_T, 0))
    n_B = block * B + tl.arange(0, B)
    mark_B = tl.load(marks + token * marks_stride + n_B, mask=n_B < list_length(within, token, numbers), other=0.0)
    is_B = (mark_B != 0.0).to(tl.int32)
    place_B = before + tl.cumsum(is_B, 0) - is_B
    neuron_B = list_entry(within, token, n_B, is_B != 0)
    if within is None:
        neuron_B += low
    tl.store(found.index_MF + token * found.stride + place_B, neuron_B, mask=is_B != 0)
    if kept is not None:
        tl.store(kept + token * kept_stride + place_B, mark_B, mask=is_B != 0)
