"""What running a model asks of any machine: shape, number formats, counts, and each layer's rung."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pi_compile.cost_model import layer_groups
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import PartBytes, predictor_bytes
from pi_runtime.artifact.sizes import SIGNS, array_specs

Ints = npt.NDArray[np.int64]

MILLION = 10**6


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """How one layer's FFN is run."""

    rung: str
    """`dense`, `gate`, `predicted` or `sign`."""
    rank: int | None = None
    """Of its predictor, None where it has none."""
    read_ppm: int = MILLION
    """On the rungs `predicted` and `sign`: neurons whose `first` is read ÷ neurons that fire, in millionths."""

    @property
    def picks(self) -> bool:
        """Whether a predictor picks the rows of `first`."""
        return self.rung in ("predicted", "sign")

    @property
    def predictor(self) -> int | None:
        """Rank of the predictor that is stored, `SIGNS`, or None."""
        return SIGNS if self.rung == "sign" else self.rank


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """One model, as it is to be run."""

    shape: Decoder
    formats: Mapping[str, str]
    """Of every part (see `pi_runtime.artifact.sizes`)."""
    tokens: int
    """Tokens profiled."""
    counts: Ints
    """(layers, neurons): tokens for which the neuron at each place fired, in stored order: expert by expert, in each
    the hottest groups first."""
    routed: Ints | None = None
    """(layers, experts): tokens that the router sent to each expert; None where each had as many."""
    layers: tuple[LayerWork, ...]
    context: int
    """Positions the key-value cache holds."""

    def cuts(self) -> Ints:
        """Where a layer may be cut, as neurons on the GPU; see `layer_groups`."""
        return layer_groups.cuts(self.shape.d_ff, self.shape.n_experts)

    def expert_cuts(self, layer: int, cut: int) -> tuple[int, ...]:
        """The cut of each expert, where a layer has `cut` neurons on the GPU."""
        shape = self.shape
        order = layer_groups.group_order(self.counts[layer], shape.n_experts)
        return layer_groups.expert_cuts(order, cut, shape.d_ff, shape.n_experts)

    def before(self, layer: int, values: Ints) -> Ints:
        """Of a value of each neuron, in stored order, the sum over the neurons before each cut."""
        order = layer_groups.group_order(self.counts[layer], self.shape.n_experts)
        sums = layer_groups.by_group(values, self.shape.n_experts).ravel()[order]
        return np.concatenate([[0], np.cumsum(sums)])

    def hot(self, cuts: Sequence[int]) -> int:
        """Activations of the neurons on the GPU."""
        places = np.searchsorted(self.cuts(), cuts)
        return sum(
            int(self.before(n, counts)[j]) for n, (counts, j) in enumerate(zip(self.counts, places, strict=True))
        )

    def looked_at(self, layer: int) -> Ints:
        """(neurons,): tokens for which each neuron's expert was asked."""
        shape = self.shape
        if self.routed is None:
            return np.full(shape.neurons, self.routed_part(self.tokens), np.int64)
        return np.repeat(self.routed[layer], shape.d_ff)

    def parts(self) -> PartBytes:
        """Stored bytes of every part."""
        specs = array_specs(self.shape, self.formats, [None], profiled=False)
        return PartBytes.of(specs, self.shape.vocab_size, self.shape.neurons)

    def predictor(self, layer: int) -> int:
        """Stored bytes of one layer's predictor."""
        specs = array_specs(self.shape, self.formats, [self.layers[layer].predictor], profiled=False)
        return predictor_bytes(specs, 0)

    def routed_part(self, value: int) -> int:
        """Of something of all experts, what a token's experts have of it."""
        return value * self.shape.experts_per_token // self.shape.n_experts


def rows_read(work: Workload, layer: int) -> tuple[Ints, Ints]:
    """Neurons before each cut whose `first`, and whose `rest`, is read, summed over the profiled tokens.

        dense       N a neuron        N a neuron
        gate        N                 c
        predicted   min(N, ρ c)       c                 sign likewise

    with the neuron's count c and ρ = `read_ppm`; rounded up per neuron, in integers. N: the tokens profiled, or with
    experts those that the router sent to the neuron's.
    """
    c, every, how = work.counts[layer], work.looked_at(layer), work.layers[layer]
    first = np.minimum(every, -(-c * how.read_ppm // MILLION)) if how.picks else every
    rest = every if how.rung == "dense" else c
    return work.before(layer, first), work.before(layer, rest)
