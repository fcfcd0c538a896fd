"""Lists of neurons by stream compaction: which of many numbers are not zero, in order.

A kernel that marks neurons also counts its marks tile by tile. `compact` sums the counts before each block (a prefix
sum over at most some thousands of tiles, which every program does for itself) and writes the block's own marks behind
them. Lengths stay in device memory, and the host never asks for them: grids are sized for the longest list, and
programs beyond the end stop at once.

Legend: N numbers, T tiles, B numbers of a block.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 512


@dataclass(frozen=True)
class NeuronList:
    """Neurons, and how many: int32 in device memory. There are never more than the list has room for."""

    index_F: torch.Tensor
    count: torch.Tensor

    def __post_init__(self) -> None:
        assert self.index_F.dtype == self.count.dtype == torch.int32

    @property
    def room(self) -> int:
        """Most neurons that the list can have."""
        return len(self.index_F)

    def first(self, room: int) -> "NeuronList":
        """The same list with room for fewer neurons."""
        return NeuronList(self.index_F[:room], self.count)


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
    assert counts_T.dtype == torch.int32
    assert found.room >= numbers
    assert len(counts_T) >= tiles
    block = max(BLOCK, tile)
    assert block % tile == 0, (block, tile)
    listed, length = (None, None) if within is None else (within.index_F, within.count)
    _compact[(triton.cdiv(numbers, block),)](
        marks_N, counts_T, listed, length, found.index_F, kept_N, found.count, low, numbers, tiles,
        within is not None, kept_N is not None, tile, triton.next_power_of_2(tiles), block,
        num_warps=8 if tiles > 4096 else 4,
    )  # fmt: skip


@triton.jit
def _compact(
    marks, counts, listed, length, index, kept, count, low, numbers, tiles,
    LISTED: tl.constexpr, KEPT: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    tile_T = tl.arange(0, TILES)
    counts_T = tl.load(counts + tile_T, mask=tile_T < tiles, other=0)
    before = tl.sum(tl.where(tile_T < block * (B // TILE), counts_T, 0), 0)
    if block == 0:
        tl.store(count, tl.sum(counts_T, 0))
    n_B = block * B + tl.arange(0, B)
    size = numbers
    if LISTED:
        size = tl.load(length)
    mark_B = tl.load(marks + n_B, mask=n_B < size, other=0.0)
    is_B = (mark_B != 0.0).to(tl.int32)
    place_B = before + tl.cumsum(is_B, 0) - is_B
    neuron_B = low + n_B
    if LISTED:
        neuron_B = tl.load(listed + n_B, mask=is_B != 0, other=0)
    tl.store(index + place_B, neuron_B, mask=is_B != 0)
    if KEPT:
        tl.store(kept + place_B, mark_B, mask=is_B != 0)
