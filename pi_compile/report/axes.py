"""Axes with numbers that are read at once: logarithmic ones without powers, and counts in thousands or millions."""

from math import floor, log10

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

_FEWEST = 3
"""Numbers that an axis has at least."""
_SCALES = ((10**9, "billion "), (10**6, "million "), (10**3, "thousand "))


def log_axis(axis: Axes, low: float, high: float, margin: float = 1.25) -> None:
    """A logarithmic y axis with plain numbers on it.

    They are 1, 2, 5 of every power of ten, the powers of a long range, or round numbers at even distances of a short
    one.
    """
    steps = (1, 2, 5) if high < 300 * low else (1,)
    low, high = low / margin, high * margin
    powers = range(floor(log10(low)) - 1, floor(log10(high)) + 2)
    ticks = [step * 10.0**power for power in powers for step in steps]
    if sum(low <= tick <= high for tick in ticks) < _FEWEST:
        even = MaxNLocator(2 * _FEWEST, steps=[1, 2, 2.5, 5, 10], min_n_ticks=_FEWEST)
        ticks = [tick for tick in even.tick_values(low, high) if low <= tick <= high]
    axis.set_yscale("log")
    axis.set_yticks(ticks, [f"{tick:,.10g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_ylim(low, high)


def count_axis(axis: Axes, what: str, most: float) -> None:
    """An x axis of a count from 0, in the unit that its largest number is easily read in."""
    scale, word = next((found for found in _SCALES if most >= found[0]), (1, ""))
    axis.set_xlim(0, most)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / scale:,.10g}")
    axis.set_xlabel(f"{word}{what}")
