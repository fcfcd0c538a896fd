"""The order in which a layer's groups of neurons go to the GPU, and the places where a layer can be cut.

A cut of a layer gives the GPU so many of its groups, the hottest of all experts first. So a layer has one number to
choose, with experts as without, and each expert gets the share of the GPU that its activations are worth. Shapes:

    X  experts      F  neurons of one expert      G = ⌈F / 64⌉  groups of one expert
"""

import numpy as np
import numpy.typing as npt

from pi_compile.results import GROUP

Ints = npt.NDArray[np.int64]


def cuts(d_ff: int, experts: int) -> Ints:
    """(X·G + 1,) neurons of a layer before each possible cut: 0, and every whole number of groups."""
    short = d_ff % GROUP
    sizes = [GROUP] * (experts * (d_ff // GROUP)) + ([short] * experts if short else [])
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def group_order(counts: Ints, experts: int) -> Ints:
    """(X·F,) counts in stored order → (X·G,) expert · G + group, in the order in which groups go to the GPU.

    Groups are sorted by falling sums of counts, ties by group, then by expert, so that equal experts get equal shares.
    Within an expert the stored order stays: a group that is hotter than the one before it counts as hot as that one.
    The short group at the end of each expert follows all full ones, so that every layer has the same cuts.
    """
    sums_XG = group_sums(counts, experts)
    expert_XG, group_XG = np.indices(sums_XG.shape)
    heat_XG = np.minimum.accumulate(sums_XG, axis=1)
    short_XG = (group_XG + 1) * GROUP > counts.size // experts
    return np.lexsort([key.ravel() for key in (expert_XG, group_XG, -heat_XG, short_XG)])


def group_sums(values: Ints, experts: int) -> Ints:
    """(X·F,) values of neurons in stored order → (X, G) sums of groups."""
    values_XF = values.astype(np.int64).reshape(experts, values.size // experts)
    return np.add.reduceat(values_XF, np.arange(0, values_XF.shape[1], GROUP), axis=1)


def expert_cuts(order: Ints, cut: int, d_ff: int, experts: int) -> tuple[int, ...]:
    """The cut of each expert in a layer with this order of groups and `cut` neurons on the GPU."""
    on_gpu = order[: int(np.searchsorted(cuts(d_ff, experts), cut))]
    groups_X = np.bincount(on_gpu // (len(order) // experts), minlength=experts)
    return tuple(int(n) for n in np.minimum(groups_X * GROUP, d_ff))
