"""Sums by value, in bins as narrow as bfloat16's steps: thresholds for any amount of samples, in constant memory."""

import torch

Tensor = torch.Tensor
_HALF = 1 << 15
_BINS = 2 * _HALF


class Histogram:
    """How many float32 values, and how much weight, lie where; a bin is all values with the same upper 16 bits.

    Bins are ordered by value. The widest, relative to its values, is 2⁻⁷.
    """

    def __init__(self) -> None:
        self._weights = torch.zeros(_BINS, dtype=torch.float64)

    @property
    def empty(self) -> bool:
        """Whether nothing has any weight."""
        return not float(self._weights.sum()) > 0

    def add(self, values: Tensor, weights: Tensor | None = None) -> None:
        """Count float32 values of any shape, with weights of that shape or 1."""
        found = torch.bincount(
            _places(values.flatten()), None if weights is None else weights.flatten().double(), minlength=_BINS
        )
        self._weights += found.double().cpu()

    @property
    def total(self) -> float:
        """All weight."""
        return float(self._weights.sum())

    def above(self, threshold: float) -> float:
        """The weight of what is above a number that `threshold` gave."""
        place = int(_places(torch.nextafter(torch.tensor([threshold]), torch.tensor([torch.inf]))))
        return float(self._weights[place:].sum())

    def threshold(self, share: float) -> float:
        """The highest edge of a bin at or below which at most this share of the weight lies."""
        assert not self.empty
        below = self._weights.cumsum(0)
        first = int(torch.searchsorted(below, share * below[-1], right=True))
        return _edge(min(first, _BINS - 1) - _HALF)


def _places(values: Tensor) -> Tensor:
    """The bin of each float32 value."""
    bits = values.view(torch.int32) >> 16
    # A negative number's bits grow with its magnitude.
    return torch.where(bits < 0, -1 - (bits + _HALF), bits) + _HALF


def _edge(place: int) -> float:
    """The float32 number above which the values from bin `place` on begin."""
    if place < 0:
        # Its values run from that number, which is excluded, towards 0.
        return float(torch.tensor((-1 - place + 1) << 16, dtype=torch.int32).view(torch.float32).neg())
    lower = torch.tensor(place << 16, dtype=torch.int32).view(torch.float32)
    return float(torch.nextafter(lower, torch.tensor(-torch.inf)))
