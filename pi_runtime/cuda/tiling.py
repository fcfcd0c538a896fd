"""How much of a matrix a program takes at once: sizes of the tiles that kernels are compiled for.

Small tiles fill a GPU's hundred and more multiprocessors even where few rows are picked; a tile of 4096 stored elements
keeps enough bytes in flight. Under the interpreter a program costs milliseconds whatever its size, so there tiles are
large. No result but the order of float32 additions depends on them.
"""

from dataclasses import dataclass

import triton

from pi_runtime.artifact.footprint import PARTS, SPLITS
from pi_runtime.cuda.matrices import Matrix


@dataclass(frozen=True)
class Tiling:
    """Rows and stored elements of a tile, for the two ways in which rows are read."""

    dot_rows: int = 4
    """Rows of a tile whose products with a vector are wanted."""
    dot_width: int = 1024
    sum_rows: int = 16
    """Rows of a tile of a weighted sum."""
    sum_width: int = 256
    splits: int = SPLITS
    """Parts that a weighted sum over rows is cut into."""
    parts: int = PARTS
    """Parts that a token's attention is cut into."""

    def dots(self, m: Matrix) -> tuple[int, int]:
        """(rows, stored elements): powers of two."""
        return self.dot_rows, min(self.dot_width, triton.next_power_of_2(m.width))

    def sums(self, m: Matrix) -> tuple[int, int]:
        # q4 has two columns in an element, and so twice the sums to keep.
        rows = self.sum_rows // 2 if m.format == "q4" else self.sum_rows
        return rows, min(self.sum_width, triton.next_power_of_2(m.width))


INTERPRETED = Tiling(dot_rows=128, dot_width=256, sum_rows=64, sum_width=256, splits=3, parts=2)
"""For the interpreter."""
