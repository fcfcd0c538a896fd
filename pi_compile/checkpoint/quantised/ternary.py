"""BitNet's matrices: −1, 0 and 1 times one scale, packed by four rows, or rounded from master weights.

Sources: transformers (`integrations/bitnet.py`). Shape letters: N rows (outputs), K columns (inputs).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pi_compile.checkpoint.tensors import FORMATS as STORED
from pi_compile.checkpoint.tensors import Array, Index, Values, as_float32
from pi_runtime.artifact.formats import BLOCK, FORMATS, Format


@dataclass(frozen=True, eq=False)
class TernaryMatrix:
    """A matrix [N, K] of −1, 0 and 1 times one scale, of which some rows are read at a time, as float32."""

    shape: tuple[int, int]
    ternary: Callable[[Index], Array]
    """The integers of some rows, int8."""
    scale: np.float32
    nbytes: int
    bits = 2
    is_permuted = False

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Index, /) -> Values:
        return self.ternary(rows).astype(np.float32, order="C") * self.scale

    @property
    def grids(self) -> tuple[str, ...]:
        """q4, the smallest with these integers, where binary16 has the scale."""
        return ("q4",) if np.float32(np.float16(self.scale)) == self.scale and self.shape[1] % BLOCK == 0 else ()

    def on_grid(self, fmt: Format, rows: Index, /) -> tuple[Array, Array] | None:
        """Integers, and the scale for each block."""
        if fmt.name not in self.grids:
            return None
        q = self.ternary(rows)
        return q, np.full((len(q), q.shape[1] // BLOCK), self.scale, np.float16)

    @property
    def turned(self) -> "TernaryMatrix":
        """Its columns as rows."""
        return replace(self, shape=self.shape[::-1], ternary=lambda columns: self.ternary(slice(None))[:, columns].T)


def packed(words: Array, scale: np.float32) -> TernaryMatrix:
    """Words [N/4, K] of bytes: row i N/4 + j plus 1 is in bits 2 i and 2 i + 1 of row j."""
    quarter, columns = words.shape

    def rows(index: Index) -> Array:
        row = np.arange(4 * quarter)[index]
        shift = (2 * (row // quarter)).astype(np.uint8)[:, None]
        found: Array = (words[row % quarter] >> shift & np.uint8(3)).view(np.int8) - np.int8(1)
        return found

    return TernaryMatrix((4 * quarter, columns), rows, np.float32(scale), words.nbytes + 2)


def rounded(weights: Array) -> TernaryMatrix:
    """Master weights w, as they are used: the nearest of −1, 0, 1 to w ÷ mean |w|, times that mean in their format."""
    parts = (as_float32(weights[start : start + 256]) for start in range(0, len(weights), 256))
    mean = np.float32(sum(float(np.abs(part).sum(dtype=np.float64)) for part in parts) / weights.size)
    inverse, fmt = np.float32(1) / max(mean, np.float32(1e-5)), FORMATS[STORED[weights.dtype]]
    return TernaryMatrix(
        (weights.shape[0], weights.shape[1]),
        lambda rows: np.clip(np.rint(as_float32(weights[rows]) * inverse), -1, 1).astype(np.int8),
        fmt.decode(fmt.encode(np.array([1], np.float32) / inverse), 1)[0],
        weights.nbytes,
    )
