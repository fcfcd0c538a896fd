"""Where a plan cuts the neurons of a layer in two."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.schema import Plan


@dataclass(frozen=True)
class Cuts:
    """Of one layer: expert e's neurons [0, cut_X[e]) are the GPU's, one expert's after the other's in its memory."""

    cut_X: tuple[int, ...]
    base_X: tuple[int, ...]
    """First row of each expert among those on the GPU."""
    hot: int
    """Most neurons on the GPU that one token's experts have; 0: the layer has none there."""
    cold: int
    """Likewise on the CPU."""

    @classmethod
    def of(cls, cut_X: Sequence[int], d_ff: int, taken: int) -> "Cuts":
        by_size = sorted(cut_X)
        return cls(
            cut_X=tuple(cut_X),
            base_X=tuple(accumulate(cut_X, initial=0))[:-1],
            hot=sum(by_size[-taken:]),
            cold=taken * d_ff - sum(by_size[:taken]),
        )


def cuts_of(plan: Plan, d: Decoder) -> tuple[Cuts, ...]:
    """One a layer."""
    starts = range(0, len(plan.cuts), d.n_experts)
    return tuple(Cuts.of(plan.cuts[n : n + d.n_experts], d.d_ff, d.experts_per_token) for n in starts)
