"""Histograms with bins as narrow as bfloat16's steps: quantiles of any number of samples, in constant memory."""

import torch

Tensor = torch.Tensor
_HALF = 1 << 15
_BINS = 2 * _HALF


class ValueHistogram:
    """Weights of float32 values, summed in bins; a bin is all values with the same upper 16 bits.

    Bins are ordered by value. Relative to its values, the widest is 2⁻⁷ wide.
    """

    def __init__(self) -> None:
        self._weights = torch.zeros(_BINS, dtype=torch.float64)

    @property
    def empty(self) -> bool:
        """Whether the total weight is 0."""
        return not float(self._weights.sum()) > 0

    def add(self, values: Tensor, weights: Tensor | None = None) -> None:
        """Add float32 values of any shape, with weights of the same shape, or of 1 each."""
        found = torch.bincount(
            _bins(values.flatten()), None if weights is None else weights.flatten().double(), minlength=_BINS
        )
        self._weights += found.double().cpu()

    @property
    def total(self) -> float:
        """The total weight."""
        return float(self._weights.sum())

    def above(self, threshold: float) -> float:
        """The weight of the values above a number that `threshold` returned."""
        first = int(_bins(torch.nextafter(torch.tensor([threshold]), torch.tensor([torch.inf]))))
        return float(self._weights[first:].sum())

    def threshold(self, fraction: float) -> float:
        """The highest edge of a bin such that at most this fraction of the weight is at or below it."""
        assert not self.empty
        below = self._weights.cumsum(0)
        first = int(torch.searchsorted(below, fraction * below[-1], right=True))
        return _edge(min(first, _BINS - 1) - _HALF)


def _bins(values: Tensor) -> Tensor:
    """The bin of each float32 value."""
    bits = values.view(torch.int32) >> 16
    # A negative number's bits grow with its magnitude.
    return torch.where(bits < 0, -1 - (bits + _HALF), bits) + _HALF


def _edge(bin_index: int) -> float:
    """The float32 number just below the values of a bin; bins of positive values count from 0, others from −1 down."""
    if bin_index < 0:
        # The values of the bin run from that number, which is excluded, towards 0.
        return float(torch.tensor((-1 - bin_index + 1) << 16, dtype=torch.int32).view(torch.float32).neg())
    lower = torch.tensor(bin_index << 16, dtype=torch.int32).view(torch.float32)
    return float(torch.nextafter(lower, torch.tensor(-torch.inf)))
