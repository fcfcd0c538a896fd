"""The work of running a model, on any machine: sizes, number formats, activation counts, and each layer's rung.

The order in which a layer's groups of neurons go to the GPU, and the places where a layer can be cut.

A cut of a layer gives the GPU so many of its groups, the hottest of all experts first. So a layer has one number to
choose, with experts as without, and each expert gets the share of the GPU that its activations are worth. Shapes:

    X  experts      F  neurons of one expert      G = ⌈F / 64⌉  groups of one expert
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from pi_compile.results import GROUP, MILLION, ActivationProfile, LayerWork
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import PartBytes, predictor_bytes
from pi_runtime.artifact.rungs import DENSE, PREDICTED
from pi_runtime.artifact.sizes import PARTS, array_specs, parameters

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """One model, as it is to be run."""

    decoder: Decoder
    formats: Mapping[str, str]
    """Number format of each part (see `pi_runtime.artifact.sizes`). A matrix with fewer bytes counts as its part."""
    tokens: int
    """Tokens profiled."""
    counts: Ints
    """(layers, neurons): for how many tokens each neuron fired, in stored order: expert by expert, in each the hottest
    groups first."""
    routed: Ints | None = None
    """(layers, experts): tokens that the router sent to each expert; None where each had as many."""
    persistence: Ints | None = None
    """(layers, 5): activations, and those of neurons that fired in the last 1, 2, 4, 8 tokens; None where it was not
    measured."""
    layers: tuple[LayerWork, ...]
    context: int
    """Positions the key-value cache holds."""

    @classmethod
    def of(cls, profile: ActivationProfile, formats: Mapping[str, str], context: int) -> Self:
        """A profiled model as it is to be run: with its rungs, by rule where none are trained.

        The cache has `context` positions, or all that the model has where these are fewer.
        """
        return cls(
            decoder=profile.decoder,
            formats={part: formats[part] for part in PARTS},
            tokens=profile.tokens,
            counts=profile.ordered_counts().astype(np.int64),
            routed=None if profile.routed is None else profile.routed.astype(np.int64),
            persistence=None if profile.persistence is None else profile.persistence.astype(np.int64),
            layers=profile.layers or untrained_layers(profile.decoder),
            context=min(context, profile.decoder.context_length),
        )

    @cached_property
    def cuts(self) -> Ints:
        """The possible cuts of a layer, as neurons on the GPU."""
        return cuts(self.decoder.d_ff, self.decoder.n_experts)

    @cached_property
    def group_orders(self) -> tuple[Ints, ...]:
        """The order in which the groups of each layer go to the GPU."""
        return tuple(group_order(counts, self.decoder.n_experts) for counts in self.counts)

    @cached_property
    def activations_before(self) -> tuple[Ints, ...]:
        """(cuts,) of each layer: activations of the neurons before each cut."""
        return tuple(self.sums_before(n, counts) for n, counts in enumerate(self.counts))

    @cached_property
    def counts_digest(self) -> str:
        """sha256 of the counts."""
        return hashlib.sha256(self.counts.astype("<i8").tobytes()).hexdigest()

    def expert_cuts(self, layer: int, cut: int) -> tuple[int, ...]:
        """The cut of each expert in a layer with `cut` neurons on the GPU."""
        return expert_cuts(self.group_orders[layer], cut, self.decoder.d_ff, self.decoder.n_experts)

    def sums_before(self, layer: int, values: Ints) -> Ints:
        """(cuts,) sum over the neurons before each cut, from one value a neuron in stored order."""
        sums = group_sums(values, self.decoder.n_experts).ravel()[self.group_orders[layer]]
        return np.concatenate([[0], np.cumsum(sums)])

    def activations_on_gpu(self, cuts: Sequence[int]) -> float:
        """Share of all activations that the neurons before one cut for each layer account for."""
        indices = np.searchsorted(self.cuts, cuts)
        on_gpu = sum(int(sums[j]) for sums, j in zip(self.activations_before, indices, strict=True))
        return on_gpu / max(sum(int(sums[-1]) for sums in self.activations_before), 1)

    def routed_tokens(self, layer: int) -> Ints:
        """(neurons,): how many tokens were sent to each neuron's expert."""
        if layer in self.decoder.mixer_only_layers:
            return np.zeros(self.decoder.neurons, np.int64)
        if self.routed is None:
            return np.full(self.decoder.neurons, self.of_routed_experts(self.tokens), np.int64)
        return np.repeat(self.routed[layer], self.decoder.d_ff)

    @cached_property
    def parts(self) -> PartBytes:
        """Stored bytes of each part."""
        specs = array_specs(self.decoder, self.formats, [None] * self.decoder.n_layers, profiled=False)
        return PartBytes.of(specs, self.decoder)

    @cached_property
    def predictor_bytes(self) -> tuple[int, ...]:
        """Stored bytes of each layer's predictor."""
        ranks, own = [layer.rank for layer in self.layers], self.decoder.without("mixer_only_layers")
        specs = {rank: array_specs(own, self.formats, [rank], profiled=False) for rank in set(ranks)}
        found = {rank: predictor_bytes(of_rank, 0) for rank, of_rank in specs.items()}
        without = self.decoder.mixer_only_layers
        return tuple(0 if n in without else found[rank] for n, rank in enumerate(ranks))

    def of_routed_experts(self, value: int) -> int:
        """The part of a total over all experts that belongs to the experts of one token."""
        return value * self.decoder.experts_per_token // self.decoder.n_experts


def rows_read(work: Workload, layer: int) -> tuple[Ints, Ints]:
    """Rows of `first` and rows of `rest` that are read of the neurons before each cut, over all profiled tokens.

        rung                     `first`        `rest`
        dense                    N a neuron     N a neuron
        others                   N              c
        others that pick         min(N, ρ c)    c

    c is the neuron's count and ρ is `read_ppm`; the product is rounded up for each neuron. N is the number of profiled
    tokens, with experts of those that the router sent to the neuron's expert.
    """
    every, how = work.sums_before(layer, work.routed_tokens(layer)), work.layers[layer]
    first, rest = every, every if how.kind.dense else work.activations_before[layer]
    if how.kind.picks:
        picked = -(-work.counts[layer] * how.read_ppm // MILLION)
        first = work.sums_before(layer, np.minimum(work.routed_tokens(layer), picked))
    return first, rest


PREDICTOR_SHARE = Fraction(709, 10_000)
"""Weights of all predictors ÷ weights of the model: the mean of PowerInfer's table 6 (SOSP'24)."""
RANK_STEP = 32


def untrained_layers(decoder: Decoder) -> tuple[LayerWork, ...]:
    """Rung and rank of each layer by rule.

    Without zeros in the activation every layer is dense, as is one without an FFN. With zeros every other layer has a
    low-rank predictor and reads as many rows as fire. All ranks are equal: the largest multiple of `RANK_STEP` with
    which the predictors are at most `PREDICTOR_SHARE` of the model's weights, but at least `RANK_STEP`.
    """
    if not decoder.sparse:
        return (LayerWork(rung=DENSE),) * decoder.n_layers
    per_rank = len(decoder.ffn_layers) * decoder.n_experts * (decoder.neuron_width + decoder.d_ff)
    rank = parameters(decoder) * PREDICTOR_SHARE // per_rank // RANK_STEP * RANK_STEP
    predicted, without = LayerWork(rung=PREDICTED, rank=max(int(rank), RANK_STEP)), decoder.mixer_only_layers
    return tuple(LayerWork(rung=DENSE) if n in without else predicted for n in range(decoder.n_layers))


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
