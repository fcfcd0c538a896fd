"""The model of time: what a token costs on a machine, part by part, in integer picoseconds.

A decode step reads weights and cache once and computes little, so a part takes the bytes it reads ÷ the rate at which
its unit reads them, plus the launches of its operators. With the residual stream on side s = side of the layer's
attention, a cut that gives the first neurons to the GPU, and N tokens profiled,

    token   =  embedding  +  Σ_l ( attention_l + FFN_l )  +  crossings  +  head
    attention_l  =  3 launch_s + ( attention and norms ) ÷ rate_s  +  cache_s
    cache_s =  the longer of reading the cache, half full, and of what its queries compute, G of them for each head
    FFN_l   =  predictor_l  +  max( T_gpu , T_cpu )  +  hand-over, if a neuron is not on side s
    T_u     =  2 launch_u + ( rows of `first` read + rows of `rest` read ) ÷ rate_u        0 without neurons
    predictor_l  =  2 launch_s + its bytes ÷ rate_s                             on the rungs `predicted` and `sign`
    hand-over    =  T_sync + D float32 over the link, there and back
    crossing     =  T_sync + D float32, wherever two neighbours' residuals are on different sides
    head    =  launch + ( head and last norm ) ÷ rate;    on the GPU also T_sync + V float32 of logits back
    embedding    =  one row;    on the GPU also a launch

Rows read follow from the counts (`workload.rows_read`), with experts only those of the experts that a token goes to. A
matrix runs at its format's rate; where the profile has them, a predictor, all neurons of a layer, and picked ones at
their own: `first` is picked on the rungs `predicted` and `sign`, `rest` on all but `dense`. Every term is rounded up.
Left out, because small: the list of active rows in a hand-over, sampling, norms, and sums that stay in a cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pi_compile.cost_model.processors import CPU, GPU, PICO, Link, Unit, link_of, units_of
from pi_compile.cost_model.workload import Ints, Workload, rows_read
from pi_compile.machine.profile import Machine
from pi_runtime.artifact.footprint import PartBytes, kv_bytes

ATTENTION_LAUNCHES, PREDICTOR_LAUNCHES, FFN_LAUNCHES = 3, 2, 2
"""Operators of a layer: queries, keys and values, attention over the cache, its output; down and up; `first` and
`rest`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCost:
    """One layer's times; picoseconds. Tuples are by side, arrays by place in `Costs.cuts`."""

    attention: tuple[int, ...]
    predictor: tuple[int, ...]
    before: Ints
    """T_gpu for the neurons before each cut."""
    after: Ints
    """T_cpu for the neurons from each cut on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Costs:
    """What every choice costs in time; picoseconds."""

    units: tuple[Unit, ...]
    cuts: Ints
    layers: tuple[LayerCost, ...]
    handover: int
    crossing: int
    embedding: tuple[int, ...]
    head: tuple[int, ...]

    def layer_ps(self, layer: int, side: int) -> Ints:
        """Time of one layer for each cut, with attention and residual on `side`."""
        cost = self.layers[layer]
        last = len(self.cuts) - 1
        other = np.arange(last + 1) != (0 if side == CPU else last)
        ffn = np.maximum(cost.before, cost.after) + np.where(other, self.handover, 0)
        return cost.attention[side] + cost.predictor[side] + ffn


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Where the time of one layer goes; picoseconds."""

    attention: int
    predictor: int
    gpu: int
    cpu: int
    handover: int
    """0 where every neuron is on the side of the residual."""
    crossing: int
    """Of the residual, on its way in."""

    @property
    def total(self) -> int:
        return self.attention + self.predictor + max(self.gpu, self.cpu) + self.handover + self.crossing


@dataclass(frozen=True, kw_only=True)
class TokenTime:
    """Predicted time of one token; picoseconds."""

    embedding: int
    layers: tuple[LayerTime, ...]
    head: int
    """With the crossing to it."""

    @property
    def total(self) -> int:
        return self.embedding + sum(layer.total for layer in self.layers) + self.head

    @property
    def parts(self) -> dict[str, int]:
        """Where it goes. The two sides of an FFN work at once: of them the longer counts."""
        return {
            "attention": sum(layer.attention for layer in self.layers),
            "predictor": sum(layer.predictor for layer in self.layers),
            "ffn": sum(max(layer.gpu, layer.cpu) for layer in self.layers),
            "hand-over": sum(layer.handover + layer.crossing for layer in self.layers),
            "embedding and head": self.embedding + self.head,
        }

    @property
    def ns(self) -> int:
        """Rounded up to nanoseconds."""
        return -(-self.total // 1000)


def costs_of(work: Workload, machine: Machine) -> Costs:
    """Every time the program chooses among. Without a GPU there is one side."""
    units, link, parts, shape = units_of(machine), link_of(machine), work.parts(), work.shape
    residual = 4 * shape.d_model
    head_fmt = work.formats["embedding" if shape.tied_head else "head"]
    head_bytes = (parts.embedding if shape.tied_head else 0) + parts.head + parts.final_norm
    logits = [0, link.ps(4 * shape.vocab_size) if link else 0]
    row = parts.embedding_row * (2 if parts.positions else 1)
    return Costs(
        units=units,
        cuts=work.cuts(),
        layers=tuple(_layer(work, units, n, parts) for n in range(shape.n_layers)),
        handover=_round_trip(link, residual),
        crossing=link.ps(residual) if link else 0,
        embedding=tuple(u.ps(row) + (u.launch_ps if side == GPU else 0) for side, u in enumerate(units)),
        head=tuple(u.launch_ps + u.ps(head_bytes, head_fmt) + back for u, back in zip(units, logits, strict=False)),
    )


def _round_trip(link: Link | None, nbytes: int) -> int:
    """There and back, with one wait."""
    return 0 if link is None else 2 * link.ps(nbytes) - link.sync_ps


def _layer(work: Workload, units: Sequence[Unit], layer: int, parts: PartBytes) -> LayerCost:
    how = work.layers[layer]
    # The cache is half full on average while an answer fills it.
    cache = kv_bytes(work.shape, work.formats["attention"], work.context // 2)
    fmt = work.formats["attention"]
    predictor = (0,) * len(units)
    if how.picks:
        nbytes = work.routed_part(work.predictor(layer))
        predictor = tuple(
            PREDICTOR_LAUNCHES * u.launch_ps + u.ps(nbytes, work.formats["predictor"], "predictor") for u in units
        )
    first, rest = rows_read(work, layer)
    gpu = units[GPU] if len(units) > 1 else None
    return LayerCost(
        attention=tuple(
            ATTENTION_LAUNCHES * u.launch_ps
            + u.ps(parts.attention + parts.ffn_bias, fmt)
            + u.cache_ps(cache, work.shape.n_heads // work.shape.n_kv_heads)
            for u in units
        ),
        predictor=predictor,
        before=_ffn_ps(work, layer, gpu, parts, first, rest) if gpu else np.zeros(len(first), np.int64),
        after=_ffn_ps(work, layer, units[CPU], parts, first[-1] - first, rest[-1] - rest),
    )


def _ffn_ps(work: Workload, layer: int, unit: Unit, parts: PartBytes, first: Ints, rest: Ints) -> Ints:
    """T_u where so many rows of `first` and `rest` are read over all profiled tokens."""
    fmt, how = work.formats["ffn"], work.layers[layer]
    # Python's integers: the products do not fit into 64 bits.
    first_bytes = first.astype(object) * parts.first
    rest_bytes = rest.astype(object) * (parts.neuron - parts.first)
    first_ps = -(-first_bytes * PICO // (work.tokens * unit.rate(fmt, "picked" if how.picks else "neurons")))
    rest_ps = -(-rest_bytes * PICO // (work.tokens * unit.rate(fmt, "neurons" if how.rung == "dense" else "picked")))
    return np.where(first > 0, FFN_LAUNCHES * unit.launch_ps + (first_ps + rest_ps).astype(np.int64), 0)


def token_time(costs: Costs, sides: Sequence[int], cuts: Sequence[int], embedding: int, head: int) -> TokenTime:
    """The time of any placement: attention's side and the cut of each layer, and the sides of embedding and head."""
    layers, before = [], embedding
    for n, (side, cut) in enumerate(zip(sides, cuts, strict=True)):
        cost, j = costs.layers[n], int(np.searchsorted(costs.cuts, cut))
        assert costs.cuts[j] == cut, f"layer {n}: {cut} is not a cut between groups"
        whole = cut == (0 if side == CPU else costs.cuts[-1])
        layers.append(
            LayerTime(
                attention=cost.attention[side],
                predictor=cost.predictor[side],
                gpu=int(cost.before[j]),
                cpu=int(cost.after[j]),
                handover=0 if whole else costs.handover,
                crossing=costs.crossing if side != before else 0,
            )
        )
        before = side
    crossing = costs.crossing if head != before else 0
    return TokenTime(embedding=costs.embedding[embedding], layers=tuple(layers), head=costs.head[head] + crossing)
