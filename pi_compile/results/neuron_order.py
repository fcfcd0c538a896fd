"""The order of a layer's neurons: falling frequency in groups, neighbours that fire together inside bands.

A cut between GPU and CPU falls between groups of 64, so what counts is the hot mass of each prefix of whole groups.
Sorting by count maximises it. Inside a band of near-equal counts any order will do, and one in which neighbours fire
together gives longer runs of rows to read. Bands are as wide as they can be while *no* order inside them can cost
any prefix of groups more than 1 % of its mass; so the bound holds whatever the sample says.
"""

import numpy as np
import numpy.typing as npt

from pi_compile.results.activation_profile import GROUP

LOSS = 0.01
"""Largest share of a prefix's mass that co-firing may cost."""

LARGEST = 4096
"""Most neurons of a band: chaining takes their square."""

Ints = npt.NDArray[np.integer]


def neuron_order(counts: Ints, fired: npt.NDArray[np.uint8], experts: int = 1) -> npt.NDArray[np.uint32]:
    """(F,) counts and (samples, F) co-firing bits → (F,) original index of the neuron at each place.

    Of several experts, each has the neurons of its own F / experts places. Ties go to the lower index, so the order is
    a function of its inputs.
    """
    size = len(counts) // experts
    own = (slice(start, start + size) for start in range(0, len(counts), size))
    return np.concatenate([_expert_order(counts[e], fired[:, e]) + np.uint32(e.start) for e in own])


def _expert_order(counts: Ints, fired: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    order = np.argsort(-counts.astype(np.int64), kind="stable")
    falling = counts.astype(np.int64)[order]
    for start, stop in bands(falling):
        members = order[start:stop]
        order[start:stop] = members[chain(fired[:, members])]
    return order.astype(np.uint32)


def bands(falling: Ints) -> list[tuple[int, int]]:
    """Cut falling counts into the widest bands inside which any permutation keeps every group prefix within `LOSS`."""
    mass = np.concatenate([[0], np.cumsum(falling)])
    found, start, size = [], 0, len(falling)
    while start < size:
        stop = min(size, start + GROUP)  # one group has no cut inside it
        while stop < size and stop - start < LARGEST and _worst_loss(mass, start, min(size, stop + GROUP)) <= LOSS:
            stop = min(size, stop + GROUP)
        found.append((start, stop))
        start = stop
    return found


def _worst_loss(mass: Ints, start: int, stop: int) -> float:
    """Largest share of its mass that a group prefix ending inside [start, stop) can lose: the band's hottest k
    neurons exchanged for its k coldest."""
    worst = 0.0
    for cut in range((start // GROUP + 1) * GROUP, stop, GROUP):
        k = cut - start
        loss = (mass[cut] - mass[start]) - (mass[stop] - mass[stop - k])
        worst = max(worst, loss / max(int(mass[cut]), 1))
    return worst


def chain(fired: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """(samples, n) bits → an order of the n neurons, each followed by the one left that fires most alike.

    Likeness is the cosine of the two bit columns. Starts from the first; ties go to the lower index.
    """
    n = fired.shape[1]
    bits = fired.astype(np.float32)
    together = bits.T @ bits  # integers below 2²⁴: exact in float32, whatever the order of summing
    length = np.sqrt(np.maximum(np.diag(together).astype(np.float64), 1))
    left, placed = np.ones(n, bool), [0]
    left[0] = False
    for _ in range(n - 1):
        likeness = np.where(left, together[placed[-1]] / length, -1.0)
        placed.append(int(np.argmax(likeness)))
        left[placed[-1]] = False
    return np.array(placed, np.int64)
