"""How many rows of a layer a token misses in memory, from counts and from persistence between tokens.

Row i is needed by a share x_i of all tokens. Whether it is needed is a chain of two states with the same correlation θ
between neighbouring tokens for all rows of a layer. So a row that is needed now was not needed by the last t tokens
with the probability

    m_i(t)  =  (1 − θ) · (1 − x_i) · (1 − (1 − θ) · x_i) ^ (t − 1)

θ is chosen so that the mean of m(t) is what was measured, for t = 1, 2, 4 and 8; longer times have the θ of 8. Without
a measurement it is 0: tokens are taken to be independent, which no real text is.

The rows that t tokens need are their *working set* (Denning, The working set model for program behavior, 1968). A cache
that keeps as many rows as the working set of t tokens misses what the last t tokens did not need. Each token adds to
its working set what it misses (Denning and Schwartz, Properties of the working-set model, 1972):

    missed(t)  =  Σ x_i · m_i(t)            set(t + 1)  =  set(t) + missed(t)            set(1)  =  Σ x_i

Between the times that are computed it is linear, and so it is from no cache on, which misses Σ x_i: a row that is found
stays until its token is done. The sums begin behind the rows that are pinned.

All of it in integers, so that it is the same on any machine: shares in 2⁻³⁰, rows in 2⁻¹⁴.

Shape letters: N rows of a layer in the order in which they are pinned, P pinned prefixes, T times, C sizes of a cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pi_compile.results import WINDOWS

Ints = npt.NDArray[np.int64]

SHARE_BITS, ROW_BITS = 30, 14
ONE = 1 << SHARE_BITS
ROW = 1 << ROW_BITS
"""One row, in the unit that rows are counted in."""
TIMES = (1, 2, 3, 4, 6, 8, *(step << n for n in range(10) for step in (12, 16)))
"""Numbers of tokens whose working sets are computed."""
_STEPS = 16
"""Bits of a correlation that are found."""


@dataclass(frozen=True, eq=False)
class MissCurves:
    """Rows that a token misses, by the rows that are pinned and the rows that the cache holds."""

    size_PT: Ints
    """Rows of a cache, rising; the first is none."""
    missed_PT: Ints
    """Rows that a token misses with that."""

    def missed(self, prefix: int, cached_C: Ints) -> Ints:
        """Rows in 2⁻¹⁴ that a token misses behind prefix number `prefix`, with so many cached."""
        size_T, missed_T = self.size_PT[prefix], self.missed_PT[prefix]
        size_C = np.minimum(cached_C * ROW, size_T[-1])
        at_C = np.searchsorted(size_T, size_C, side="left").clip(1)
        run_C = np.maximum(size_T[at_C] - size_T[at_C - 1], 1)
        saved_C = (size_C - size_T[at_C - 1]) * (missed_T[at_C - 1] - missed_T[at_C]) // run_C
        missed_C: Ints = np.where(size_C == size_T[-1], missed_T[-1], missed_T[at_C - 1] - saved_C)
        return missed_C


def shares(rows_N: Ints, tokens: int | Ints) -> Ints:
    """Share of all tokens that need each row, in 2⁻³⁰."""
    return np.minimum(rows_N, tokens).astype(np.int64) * ONE // tokens


def correlations(share_N: Ints, persistence_5: Sequence[int] | None) -> tuple[int, ...]:
    """θ in 2⁻³⁰ for each window, from activations and how many of them persisted; all 0 where nothing was measured."""
    if persistence_5 is None or not persistence_5[0]:
        return (0,) * len(WINDOWS)
    active, *persisted = persistence_5
    needed = int(share_N.sum())
    found = []
    for window, hits in zip(WINDOWS, persisted, strict=True):
        theta = 0
        for bit in range(1, _STEPS + 1):  # misses fall as the correlation rises
            tried = theta + (ONE >> bit)
            missed = int(_scaled(share_N, _not_needed(share_N, tried, window)).sum())
            if missed * active >= needed * (active - hits):
                theta = tried
        found.append(theta)
    return tuple(found)


def miss_curves(share_N: Ints, theta_4: Sequence[int], pinned_P: Ints) -> MissCurves:
    """The curves behind each pinned prefix."""
    zero = np.zeros(1, np.int64)

    def behind(value_N: Ints) -> Ints:
        """Sums of values behind each prefix, as rows in 2⁻¹⁴."""
        before = np.concatenate([zero, np.cumsum(value_N)])
        sum_P: Ints = (before[-1] - before[pinned_P]) >> (SHARE_BITS - ROW_BITS)
        return sum_P

    needed_P = behind(share_N)
    missed_TP = [needed_P]
    for t in TIMES:
        theta = theta_4[max(n for n, window in enumerate(WINDOWS) if window <= t)]
        missed_TP.append(np.minimum(missed_TP[-1], behind(_scaled(share_N, _not_needed(share_N, theta, t)))))
    size_TP = [np.zeros_like(needed_P), needed_P]
    for n in range(1, len(TIMES)):
        before_P, after_P = missed_TP[n], missed_TP[n + 1]
        run = TIMES[n] - TIMES[n - 1]  # the sum of what tokens from the one time to the other miss
        size_TP.append(size_TP[-1] + (run * (before_P + after_P) + before_P - after_P) // 2)
    # All rows that are ever needed are the largest working set.
    all_P = behind(np.where(share_N > 0, ONE, 0))
    size_TP = [np.minimum(size_P, all_P) for size_P in (*size_TP, all_P)]
    missed_TP.append(np.zeros_like(needed_P))
    return MissCurves(np.stack(size_TP, axis=1), np.stack(missed_TP, axis=1))


def _not_needed(share_N: Ints, theta: int, t: int) -> Ints:
    """m(t) in 2⁻³⁰."""
    changes = ONE - theta
    base_N = ONE - _scaled(share_N, np.int64(changes))
    found_N, power = _scaled(ONE - share_N, np.int64(changes)), t - 1
    while power:
        if power & 1:
            found_N = _scaled(found_N, base_N)
        base_N, power = _scaled(base_N, base_N), power >> 1
    return found_N


def _scaled(a_N: Ints, b_N: Ints | np.int64) -> Ints:
    """Product of shares, rounded down."""
    return (a_N * b_N) >> SHARE_BITS
