"""Traces of the rows that tokens need, with settable persistence, and caches that are run on them."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from pi_compile.results import WINDOWS
from pi_runtime.artifact.footprint import CHUNKS
from pi_runtime.disk.kernels import neuron_cache

Trace = Sequence[np.ndarray]
"""Rows that one layer needs, token by token."""


def power_law(rows: int, density: float, power: float) -> np.ndarray:
    """Shares of tokens that need each row, the hottest first, with this mean."""
    share_N = np.arange(1, rows + 1) ** -power
    for _ in range(50):  # what is above 1 is spread over the others
        share_N = np.minimum(1, share_N * density * rows / share_N.sum())
    return share_N


def chain(share_N: np.ndarray, correlation_N: np.ndarray | float, tokens: int, seed: int = 0) -> Trace:
    """A trace with these shares, in which each row is a chain of two states with this correlation."""
    rng = np.random.default_rng(seed)
    stay_N = share_N + correlation_N * (1 - share_N)
    begin_N = share_N * (1 - correlation_N)
    needed_N, found = rng.random(len(share_N)) < share_N, []
    for _ in range(tokens):
        needed_N = rng.random(len(share_N)) < np.where(needed_N, stay_N, begin_N)
        found.append(np.flatnonzero(needed_N))
    return found


def topics(share_N: np.ndarray, tokens: int, topics: int = 6, length: int = 60, seed: int = 0) -> Trace:
    """A trace of stretches: in each, other rows are three times as likely as else, and rows persist a little."""
    rng = np.random.default_rng(seed)
    member_KN = rng.random((topics, len(share_N))) < 1 / 3
    found: list[np.ndarray] = []
    while len(found) < tokens:
        raised_N = np.where(member_KN[rng.integers(topics)], 1.8, 0.6)
        shares = np.minimum(0.98, share_N * raised_N)
        found += chain(shares, 0.3, length, int(rng.integers(1 << 30)))
    return found[:tokens]


def counts(trace: Trace, rows: int) -> np.ndarray:
    """For how many tokens each row is needed."""
    return np.bincount(np.concatenate(trace), minlength=rows).astype(np.int64)


def persistence(trace: Trace, rows: int) -> list[int]:
    """What a profile has: rows needed at tokens with eight before them, and those needed in the last 1, 2, 4, 8."""
    needed_TN = np.zeros((len(trace), rows), bool)
    for t, row_I in enumerate(trace):
        needed_TN[t, row_I] = True
    most = WINDOWS[-1]
    found = [int(needed_TN[most:].sum())]
    for window in WINDOWS:
        before = [needed_TN[most - k : len(trace) - k] for k in range(1, window + 1)]
        found.append(int((needed_TN[most:] & np.any(before, axis=0)).sum()))
    return found


def misses_lru(trace: Trace, pinned: int, room: int) -> float:
    """Rows missed by a token on average, with the first rows pinned and a cache of those that were needed last."""
    cache: OrderedDict[int, None] = OrderedDict()
    missed = counted = 0
    for t, row_I in enumerate(trace):
        rows = row_I[row_I >= pinned].tolist()
        present = [row for row in rows if row in cache]
        if 4 * t >= len(trace):  # after it is warm
            missed, counted = missed + len(rows) - len(present), counted + 1
        for row in rows:
            cache[row] = None
            cache.move_to_end(row)
        while len(cache) > room:
            cache.popitem(last=False)
    return missed / counted


def misses_clock(trace: Trace, rows: int, pinned: int, room: int) -> float:
    """The same with the runtime's own cache."""
    owner_S, references_S, turn_S = (np.zeros(1 + pinned + room + rows, np.int64) for _ in range(3))
    owner_S[:] = -1
    begin = 1 + pinned
    held = neuron_cache.rows_of(rows, begin, begin + room, 3, owner_S, references_S, turn_S)
    neuron_cache.place(held, np.arange(pinned), 1)
    row_I, slot_I = np.empty(rows, np.int64), np.empty(rows, np.int64)
    missed = counted = 0
    for t, needed_I in enumerate(trace):
        before = int(held.counts_2[neuron_cache.MISSES])
        neuron_cache.begin_turn(held, 0, needed_I, False)
        neuron_cache.obtain(held, 0, needed_I, 0, CHUNKS, True, begin + room, row_I, slot_I)
        neuron_cache.clear_staged(held, begin + room, rows)
        if 4 * t >= len(trace):
            missed, counted = missed + int(held.counts_2[neuron_cache.MISSES]) - before, counted + 1
    return missed / counted
