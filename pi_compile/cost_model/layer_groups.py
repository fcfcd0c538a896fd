"""The groups of one layer's neurons in the order in which they go to the GPU, whichever expert they are of.

A cut of a layer is one cut of each of its experts: so many groups, the hottest of all experts first. Then a layer has
one number to choose, as without experts, and every expert the share of the GPU that its heat is worth. X experts of F
neurons, G = ⌈F / 64⌉ groups of one expert.
"""

import numpy as np
import numpy.typing as npt

from pi_compile.results.activation_profile import GROUP

Ints = npt.NDArray[np.int64]


def cuts(d_ff: int, experts: int) -> Ints:
    """Neurons of a layer before each place where it may be cut: 0, and every whole number of groups."""
    short = d_ff % GROUP
    sizes = [GROUP] * (experts * (d_ff // GROUP)) + ([short] * experts if short else [])
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def group_order(counts: Ints, experts: int) -> Ints:
    """(X·F,) counts in stored order → (X·G,) expert · G + group, in the order in which groups go to the GPU.

    By falling sums of counts; of equal ones the lower group, then the lower expert, so that experts that are alike have
    their share alike. The groups of an expert keep their order: one that is hotter than another before it goes with
    that one. Short groups, each the last of its expert, follow all others, so that every layer has the same cuts.
    """
    sums_XG = by_group(counts, experts)
    expert_XG, group_XG = np.indices(sums_XG.shape)
    heat_XG = np.minimum.accumulate(sums_XG, axis=1)
    short_XG = (group_XG + 1) * GROUP > counts.size // experts
    return np.lexsort([key.ravel() for key in (expert_XG, group_XG, -heat_XG, short_XG)])


def by_group(values: Ints, experts: int) -> Ints:
    """(X·F,) values of neurons in stored order → (X, G) sums of groups."""
    values_XF = values.astype(np.int64).reshape(experts, values.size // experts)
    return np.add.reduceat(values_XF, np.arange(0, values_XF.shape[1], GROUP), axis=1)


def expert_cuts(order: Ints, cut: int, d_ff: int, experts: int) -> tuple[int, ...]:
    """The cut of each expert, where a layer with this order of groups has `cut` neurons on the GPU."""
    taken = order[: int(np.searchsorted(cuts(d_ff, experts), cut))]
    each = np.bincount(taken // (len(order) // experts), minlength=experts)
    return tuple(int(n) for n in np.minimum(each * GROUP, d_ff))
