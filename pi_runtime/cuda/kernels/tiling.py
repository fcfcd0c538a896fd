"""How much of a matrix a program takes at once: sizes of the tiles that kernels are compiled for.

Small tiles fill a GPU's hundred and more multiprocessors even where few rows are picked; a tile of 4096 stored elements
keeps enough bytes in flight. Rows of q8 and q4 come in words of 32 bits (see `words`): of these a thread takes four
neighbours in each of eight rows, so that a number of the vector, once fetched, is used eight times. Under the
interpreter a program costs milliseconds whatever its size, so there tiles are large. No result but the order of float32
additions depends on them.
"""

from dataclasses import dataclass

import triton

from pi_runtime.artifact.footprint import ATTENTION_SPLITS, FFN_SPLITS
from pi_runtime.cuda.kernels.matrix import Matrix

WARP = 128
"""Words of a row that the threads of a warp take, four each."""
WASTE = 1.25
"""Words that a program works on ÷ words that there are, at most, where a row is longer than a warp's words."""


@dataclass(frozen=True)
class Tiling:
    """Rows and stored elements of a tile, for the two ways in which rows are read."""

    dot_rows: int = 4
    """Rows of a tile whose products with a vector are wanted."""
    dot_width: int = 1024
    word_rows: int = 8
    """The same for rows of q8 and q4, of a thread."""
    row_words: int = 512
    sum_rows: int = 16
    """Rows of a tile of a weighted sum."""
    sum_width: int = 256
    sum_words: int = 64
    sum_turns: int = 4
    """Tiles of words whose bytes are on their way at once."""
    splits: int = FFN_SPLITS
    """Parts that a weighted sum over rows is cut into."""
    parts: int = ATTENTION_SPLITS
    """Parts that a token's attention is cut into."""

    def dots(self, m: Matrix) -> tuple[int, int]:
        """(rows, stored elements, or words of q8 and q4): powers of two."""
        if m.words is None:
            return self.dot_rows, min(self.dot_width, triton.next_power_of_2(m.width))
        words = min(self.row_words, max(32, triton.next_power_of_2(m.words)))
        while words > WARP and triton.cdiv(m.words, words) * words > WASTE * m.words:
            words //= 2
        return self.word_rows * max(1, WARP // words), words

    def dot_options(self, m: Matrix) -> dict[str, int]:
        """How such a tile is launched. Of q8 and q4 with as many warps as give a thread four words of a row, and so of
        each of its rows the same; and 168 registers, which suffice, leave room for three programs of four warps."""
        return {} if m.words is None else {"num_warps": max(1, self.dots(m)[1] // WARP), "maxnreg": 168}

    def sums(self, m: Matrix) -> tuple[int, int]:
        """(rows, stored elements) of a tile of float formats, or of what stands behind whole groups."""
        return self.sum_rows, min(self.sum_width, triton.next_power_of_2(m.width))

    def word_sums(self, m: Matrix) -> tuple[int, int]:
        """(rows, words): a thread has four words of one row, because each of their columns has a sum of its own."""
        words = min(self.sum_words, triton.next_power_of_2(m.words or 1))
        return self.word_rows * self.sum_words // words, words


INTERPRETED = Tiling(
    dot_rows=128, dot_width=256, word_rows=64, row_words=256, sum_rows=64, sum_width=256, sum_words=256, sum_turns=1,
    splits=3, parts=2,
)  # fmt: skip
"""For the interpreter."""
