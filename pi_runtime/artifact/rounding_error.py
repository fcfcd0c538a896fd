"""How far stored values are from those that they were made of."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from pi_runtime.artifact.formats import Array


@dataclass(frozen=True)
class RoundingError:
    """The distance of stored values ŵ from the values w; errors of several arrays add up.

    The last bits depend on the machine.
    """

    squares: float = 0.0
    """Σ (w − ŵ)²."""
    of: float = 0.0
    """Σ w²."""
    largest: float = 0.0
    """max |w − ŵ|."""

    @classmethod
    def between(cls, values: Array, stored: Array) -> Self:
        error = values - stored
        squares, of = (float(np.square(x).sum(dtype=np.float64)) for x in (error, values))
        return cls(squares, of, float(np.abs(error, out=error).max(initial=0)))

    def __add__(self, other: "RoundingError") -> "RoundingError":
        return RoundingError(self.squares + other.squares, self.of + other.of, max(self.largest, other.largest))

    @property
    def relative(self) -> float:
        """√(Σ (w − ŵ)² / Σ w²), 0 where all values are 0."""
        return float(np.sqrt(self.squares / self.of)) if self.of else 0.0
