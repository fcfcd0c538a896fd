"""Lists of neurons: which of many numbers are not zero, in order, without asking the host how many.

A kernel that marks neurons also counts its marks tile by tile. `close` then sums the counts before each block (a prefix
sum over at most some thousands of tiles, which every program does for itself) and writes its own marks behind them.
Lengths stay in device memory: grids are sized for the longest list, and programs beyond the end stop at once.
"""

import torch
import triton
import triton.language as tl

BLOCK = 512


def close(
    marks_N: torch.Tensor,
    counts_T: torch.Tensor,
    tile: int,
    low: int,
    found: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    within: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """List where `marks_N` is not zero.

    `counts_T`: marks of every `tile` numbers, int32. `found`: where the list (int32), the marks themselves (float32;
    None to drop them) and the length (int32, one number) go. Without `within` number n stands for neuron low + n; with
    it, a list and its length, for the neuron that the list has at n, and numbers beyond the length count for nothing.
    """
    index_N, kept_N, count = found
    numbers, tiles = len(marks_N), triton.cdiv(len(marks_N), tile)
    assert marks_N.dtype == torch.float32
    assert counts_T.dtype == index_N.dtype == count.dtype == torch.int32
    assert len(index_N) >= numbers
    assert len(counts_T) >= tiles
    block = max(BLOCK, tile)
    assert block % tile == 0, (block, tile)
    listed, length = (None, None) if within is None else within
    _close[(triton.cdiv(numbers, block),)](
        marks_N, counts_T, listed, length, index_N, kept_N, count, low, numbers, tiles,
        within is not None, kept_N is not None, tile, triton.next_power_of_2(tiles), block,
        num_warps=8 if tiles > 4096 else 4,
    )  # fmt: skip


@triton.jit
def _close(
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
