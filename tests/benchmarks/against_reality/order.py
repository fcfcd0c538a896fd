"""Whether placements come in the order predicted."""

from collections.abc import Sequence
from itertools import combinations

from pi_compile.cost_model.token_time import TokenTime


def on_one_bus(alone: TokenTime, both: TokenTime) -> int:
    """Picoseconds of a token where the two sides share a memory: the FFN takes the longest of either side by itself
    (`alone`, rates of one thread) and of all bytes one after the other at what the memory gives (`both`)."""
    extra = 0
    for one, two in zip(alone.layers, both.layers, strict=True):
        extra += max(0, two.gpu + two.cpu - max(one.gpu, one.cpu))
    return alone.total + extra


def pairs_in_order(found: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """Of (predicted, measured): pairs that both put in the same order, and all pairs."""
    pairs = list(combinations(found, 2))
    return sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs), len(pairs)
