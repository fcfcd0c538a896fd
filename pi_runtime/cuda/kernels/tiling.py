"""How much of a matrix a program takes at once: sizes of the tiles that kernels are compiled for.

Small tiles fill a GPU's hundred and more multiprocessors even where few rows are selected. A tile of 4096 stored
elements keeps enough bytes in flight. Rows of block formats are read as words of 32 bits (see `stored_rows`): a
thread takes four neighbouring words in each of eight rows, so that a number of the vector, once fetched, is used eight
times. Only the order of float32 additions depends on tiles.

A program has one tile of one token, whatever tokens are decoded with it: what it computes for a token has the same bits
in any company.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pi_runtime.artifact.footprint import ATTENTION_SPLITS, FFN_SPLITS
from pi_runtime.cuda.kernels.matrix import DeviceMatrix

WARP = 128
"""Words of a row that the threads of a warp read, four each."""
WASTE = 1.25
"""Most words that a program works on ÷ words of the row, where the row is longer than a warp's words."""
UNFUSED = {"enable_fp_fusion": False}
"""Launch option of kernels that add one product from each lane.

The product would be fused into the first sum with another lane's. Each lane would round another one, and all lanes
would store their sums, which differ in the last bit, in one place: which one stays is not specified.
"""


@dataclass(frozen=True)
class Tiling:
    """Rows and stored elements of a tile, for dot products and for gathered sums of rows."""

    dot_rows: int = 4
    """Rows of a tile of dot products."""
    dot_width: int = 1024
    word_rows: int = 8
    """Rows of a thread's dot products in block formats."""
    row_words: int = 512
    sum_rows: int = 16
    """Rows of a tile of a gathered sum."""
    sum_width: int = 256
    sum_words: int = 64
    sum_unroll: int = 4
    """Tiles of words whose loads are in flight at once."""
    splits: int = FFN_SPLITS
    """Partial sums of a gathered sum."""
    parts: int = ATTENTION_SPLITS
    """Parts of the positions that a token attends to."""

    def dots(self, m: DeviceMatrix) -> tuple[int, int]:
        """(rows, stored elements) of a tile of dot products, or (rows, words) of block formats: powers of two."""
        if m.words is None:
            return self.dot_rows, min(self.dot_width, triton.next_power_of_2(m.width))
        words = min(self.row_words, max(32, triton.next_power_of_2(m.words)))
        while words > WARP and triton.cdiv(m.words, words) * words > WASTE * m.words:
            words //= 2
        return self.word_rows * max(1, WARP // words), words

    def dot_options(self, m: DeviceMatrix) -> dict[str, int]:
        """Launch options for such a tile.

        In block formats there are as many warps as give a thread four words of a row, the same words of each of its
        rows. 168 registers suffice, and leave room for three programs of four warps; AMD's compiler has no such limit.
        """
        limit = {} if torch.version.hip else {"maxnreg": 168}
        return {} if m.words is None else {"num_warps": max(1, self.dots(m)[1] // WARP), **limit}

    def sums(self, m: DeviceMatrix) -> tuple[int, int]:
        """(rows, stored elements) of a tile of gathered sums, in float formats or behind the whole groups of blocks."""
        return self.sum_rows, min(self.sum_width, triton.next_power_of_2(m.width))

    def word_sums(self, m: DeviceMatrix) -> tuple[int, int]:
        """(rows, words) of a tile of gathered sums; a thread has four words of one row, every column its own sum."""
        words = min(self.sum_words, triton.next_power_of_2(m.words or 1))
        return self.word_rows * self.sum_words // words, words


@triton.jit
def tile_and_token(tokens):
    """A program's tile and token; programs of one tile are neighbours, so that memory is read once for all."""
    program = tl.program_id(0)
    return program // tokens, program % tokens
