"""The order of a layer's neurons: by falling count, and inside bands of near-equal counts by co-firing.

A cut between GPU and CPU falls between groups of 64 neurons, so only the hot mass of each prefix of whole groups
matters, and sorting by count maximises it. Inside a band, neurons that fire together become neighbours, which gives
longer runs of rows to read. A band is as wide as possible while no order inside it can cost any prefix of groups more
than 1 % of its mass. So this bound holds whatever the sample of co-firing is.
"""

import numpy as np
import numpy.typing as npt

from pi_compile.results.activation_profile import GROUP

LOSS = 0.01
"""Largest fraction of a prefix's mass that ordering by co-firing may cost."""

LARGEST = 4096
"""Most neurons of a band: ordering by co-firing takes their square of time and memory."""

Ints = npt.NDArray[np.integer]


def order_neurons(counts: Ints, fired: npt.NDArray[np.uint8], experts: int = 1) -> npt.NDArray[np.uint32]:
    """(F,) counts and (samples, F) co-firing bits → (F,) index in the checkpoint of each stored neuron.

    An expert's neurons stay together. Ties go to the lower index, so the order is a function of its inputs.
    """
    size = len(counts) // experts
    of_experts = (slice(start, start + size) for start in range(0, len(counts), size))
    return np.concatenate([_expert_order(counts[e], fired[:, e]) + np.uint32(e.start) for e in of_experts])


def _expert_order(counts: Ints, fired: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    order = np.argsort(-counts.astype(np.int64), kind="stable")
    falling = counts.astype(np.int64)[order]
    for start, stop in bands(falling):
        members = order[start:stop]
        order[start:stop] = members[similarity_order(fired[:, members])]
    return order.astype(np.uint32)


def bands(falling: Ints) -> list[tuple[int, int]]:
    """The widest bands of falling counts inside which no order costs any prefix of groups more than `LOSS`."""
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
    """Largest fraction of its mass that a prefix of groups ending inside [start, stop) can lose.

    That is the loss if the hottest neurons of the band, up to the end of the prefix, change places with the coldest.
    """
    worst = 0.0
    for end in range((start // GROUP + 1) * GROUP, stop, GROUP):
        size = end - start
        loss = (mass[end] - mass[start]) - (mass[stop] - mass[stop - size])
        worst = max(worst, loss / max(int(mass[end]), 1))
    return worst


def similarity_order(fired: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """(samples, n) bits → an order of n neurons, in which each is followed by the most similar one of those left.

    Similarity is the cosine of the two bit columns. The order starts with the first; ties go to the lower index.
    """
    n = fired.shape[1]
    bits = fired.astype(np.float32)
    together = bits.T @ bits  # integers below 2²⁴: exact in float32, whatever the order of summing
    length = np.sqrt(np.maximum(np.diag(together).astype(np.float64), 1))
    left, placed = np.ones(n, bool), [0]
    left[0] = False
    for _ in range(n - 1):
        similarity = np.where(left, together[placed[-1]] / length, -1.0)
        placed.append(int(np.argmax(similarity)))
        left[placed[-1]] = False
    return np.array(placed, np.int64)
