"""Lists of neurons by stream compaction: which of many numbers are not zero, in order.

A kernel that marks neurons also counts its marks tile by tile. `compact` sums the counts before each block (a prefix
sum over at most some thousands of tiles, which every program does for itself) and writes the block's own marks behind
them. Lengths stay in device memory, and the host never asks for them: grids are sized for the longest list, and
programs beyond the end stop at once.

Shape letters: N numbers, T tiles, B numbers of a block.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

BLOCK = 512


class NeuronList(NamedTuple):
    """Neurons, and how many: int32 in device memory. There are never more than the list has room for."""

    index_F: torch.Tensor
    length: torch.Tensor

    @property
    def room(self) -> int:
        """Most neurons that the list can have."""
        return len(self.index_F)

    def first(self, room: int) -> "NeuronList":
        """The same list with room for fewer neurons."""
        return NeuronList(self.index_F[:room], self.length)


def compact(
    marks_N: torch.Tensor,
    counts_T: torch.Tensor,
    tile: int,
    found: NeuronList,
    kept_N: torch.Tensor | None = None,
    *,
    low: int = 0,
    within: NeuronList | None = None,
) -> None:
    """List in `found` where `marks_N` is not zero, and copy these marks to `kept_N` if it is given.

    `counts_T`: non-zero marks of every `tile` numbers, int32. Number n stands for neuron low + n. With `within` it
    stands for the n-th neuron of that list instead, and numbers beyond the list's length are left out.
    """
    numbers, tiles = len(marks_N), triton.cdiv(len(marks_N), tile)
    assert marks_N.dtype == torch.float32
    assert counts_T.dtype == found.index_F.dtype == found.length.dtype == torch.int32
    assert found.room >= numbers
    assert len(counts_T) >= tiles
    block = max(BLOCK, tile)
    assert block % tile == 0, (block, tile)
    _compact[(triton.cdiv(numbers, block),)](
        marks_N, counts_T, within, found, kept_N, low, numbers, tiles, tile, triton.next_power_of_2(tiles), block,
        num_warps=8 if tiles > 4096 else 4,
    )  # fmt: skip


@triton.jit
def list_length(neurons, most):
    """Length of a list of neurons; without a list `most`, the number of all neurons."""
    length = most
    if neurons is not None:
        length = tl.load(neurons.length)
    return length


@triton.jit
def list_entry(neurons, n_R, mask_R):
    """[R] the n-th neuron of a list; without a list neuron n."""
    neuron_R = n_R
    if neurons is not None:
        neuron_R = tl.load(neurons.index_F + n_R, mask=mask_R, other=0)
    return neuron_R


@triton.jit
def _compact(
    marks, counts, within, found, kept, low, numbers, tiles, TILE: tl.constexpr, TILES: tl.constexpr, B: tl.constexpr
):
    block = tl.program_id(0)
    tile_T = tl.arange(0, TILES)
    counts_T = tl.load(counts + tile_T, mask=tile_T < tiles, other=0)
    before = tl.sum(tl.where(tile_T < block * (B // TILE), counts_T, 0), 0)
    if block == 0:
        tl.store(found.length, tl.sum(counts_T, 0))
    n_B = block * B + tl.arange(0, B)
    mark_B = tl.load(marks + n_B, mask=n_B < list_length(within, numbers), other=0.0)
    is_B = (mark_B != 0.0).to(tl.int32)
    place_B = before + tl.cumsum(is_B, 0) - is_B
    neuron_B = list_entry(within, n_B, is_B != 0)
    if within is None:
        neuron_B += low
    tl.store(found.index_F + place_B, neuron_B, mask=is_B != 0)
    if kept is not None:
        tl.store(kept + place_B, mark_B, mask=is_B != 0)
