"""What running a model asks of any machine: shape, number formats, counts, and each layer's rung."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pi_compile.activations import GROUP
from pi_compile.shapes import ModelShape, shape_specs
from pi_runtime.artifact.footprint import PartBytes, predictor_bytes

Ints = npt.NDArray[np.int64]

MILLION = 10**6


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """How one layer's FFN is run."""

    rung: str
    """`dense`, `gate` or `predicted`."""
    rank: int | None = None
    """Of its predictor, None where it has none."""
    read_ppm: int = MILLION
    """On the predicted rung: neurons whose `first` is read ÷ neurons that fire, in millionths."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """One model, as it is to be run."""

    shape: ModelShape
    formats: Mapping[str, str]
    """Of every part (see `pi_runtime.artifact.sizes`)."""
    tokens: int
    """Tokens profiled."""
    counts: Ints
    """(layers, neurons): tokens for which the neuron at each place fired, in stored order: hottest groups first."""
    layers: tuple[LayerWork, ...]
    context: int
    """Positions the key-value cache holds."""
    kv_itemsize: int = 4
    """Bytes of one number in it."""

    def cuts(self) -> Ints:
        """Where a layer may be cut: 0, and every whole number of groups; the last group may be short."""
        every = self.shape.neurons
        return np.array([*range(0, every, GROUP), every], np.int64)

    def parts(self) -> PartBytes:
        """Stored bytes of every part."""
        specs = shape_specs(self.shape, self.formats, [None], profiled=False)
        return PartBytes.of(specs, self.shape.vocab_size, self.shape.neurons)

    def predictor(self, layer: int) -> int:
        """Stored bytes of one layer's predictor."""
        if self.layers[layer].rank is None:
            return 0
        return predictor_bytes(shape_specs(self.shape, self.formats, [self.layers[layer].rank], profiled=False), 0)

    def routed(self, value: int) -> int:
        """Of something of all experts, what a token's experts have of it."""
        return value * self.shape.experts_per_token // self.shape.n_experts


def rows_read(work: Workload, layer: int) -> tuple[Ints, Ints]:
    """Neurons before each cut whose `first`, and whose `rest`, is read, summed over the profiled tokens.

        dense       N a neuron        N a neuron
        gate        N                 c
        predicted   min(N, ρ c)       c

    with the neuron's count c over N tokens and ρ = `read_ppm`; rounded up per neuron, in integers. Of several experts
    only those that the router takes are looked at: N is then their share of it.
    """
    c, n, how = work.counts[layer], work.routed(work.tokens), work.layers[layer]
    every = np.full(len(c), n, np.int64)
    first = np.minimum(n, -(-c * how.read_ppm // MILLION)) if how.rung == "predicted" else every
    rest = every if how.rung == "dense" else c
    return _before(first, work.cuts()), _before(rest, work.cuts())


def _before(values: Ints, cuts: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(values)])[cuts]
