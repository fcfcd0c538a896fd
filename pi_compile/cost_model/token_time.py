"""The model of time: what a token costs on a machine, part by part, in integer picoseconds.

A decode step reads weights and cache once and computes little. So a part takes the bytes it reads ÷ the rate at which
its processor reads them, plus the launches of its operators. Let s be the side of a layer's attention, where the
residual stream is, let a cut give the first neurons to the GPU, and let N tokens be profiled:

    token   =  embedding  +  Σ_l ( attention_l + FFN_l )  +  crossings  +  head
    attention_l  =  3 launch_s + ( attention and norms ) ÷ rate_s  +  cache_s
    cache_s =  the longer of reading the cache, half full, and of computing with it for the G queries that share a key
    FFN_l   =  predictor_l  +  max( T_gpu , T_cpu )  +  hand-over, if a neuron is not on side s
    T_u     =  2 launch_u + ( rows of `first` read + rows of `rest` read ) ÷ rate_u        0 without neurons
    predictor_l  =  2 launch_s + its bytes ÷ rate_s                                        on rungs that pick
    hand-over    =  T_sync + 2 · D float32 over the link, one way and back
    crossing     =  T_sync + D float32, wherever the residuals of two neighbours are on different sides
    head    =  launch + ( head and last norm ) ÷ rate;    on the GPU also T_sync + V float32 of logits back
    embedding    =  one row;    on the GPU also a launch

The rows read follow from the counts (`workload.rows_read`); with experts they are those of a token's experts. A matrix
is read at its format's rate. A predictor, all neurons of a layer, and gathered neurons have rates of their own in each
format where the machine profile has them: rungs that pick gather `first`, and all but the dense rung gather
`rest`. Every term is rounded up. Left out because small: the list of active rows in a hand-over, sampling, norms, and
sums that stay in a cache. D is the model's width, V the size of its vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pi_compile.cost_model.processors import (
    ATTENTION_LAUNCHES,
    CPU,
    GPU,
    PICO,
    PREDICTOR_LAUNCHES,
    Processor,
    accesses,
    interconnect_of,
    processors_of,
)
from pi_compile.cost_model.workload import Ints, Workload, rows_read
from pi_compile.machine import Machine
from pi_runtime.artifact.buffers import read_bytes
from pi_runtime.artifact.footprint import PartBytes


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCost:
    """One layer's times in picoseconds. Tuples are by side, arrays by cut as `Costs.cuts`."""

    attention: tuple[int, ...]
    predictor: tuple[int, ...]
    gpu_ffn: Ints
    """T_gpu for the neurons before each cut."""
    cpu_ffn: Ints
    """T_cpu for the neurons from each cut on."""
    total: tuple[Ints, ...]
    """Time of the whole layer for each cut, with attention and residual on either side."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Costs:
    """Times of all parts on either side and at every cut, in picoseconds."""

    processors: tuple[Processor, ...]
    cuts: Ints
    layers: tuple[LayerCost, ...]
    handover: int
    crossing: int
    embedding: tuple[int, ...]
    head: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """The time of one layer by part, in picoseconds."""

    attention: int
    predictor: int
    gpu: int
    cpu: int
    handover: int
    """0 where every neuron is on the side of the residual."""
    crossing: int
    """Moving the residual to this layer's side."""
    disk: int = 0
    """What the CPU waits for rows from the disk."""

    @property
    def total(self) -> int:
        return self.attention + self.predictor + max(self.gpu, self.cpu + self.disk) + self.handover + self.crossing

    @property
    def ffn(self) -> int:
        """The longer of both sides' computing."""
        return max(self.gpu, self.cpu)

    @property
    def waiting(self) -> int:
        """What the disk adds to that."""
        return max(self.gpu, self.cpu + self.disk) - self.ffn


@dataclass(frozen=True, kw_only=True)
class TokenTime:
    """Predicted time of one token, in picoseconds."""

    embedding: int
    layers: tuple[LayerTime, ...]
    head: int
    """With the crossing before it."""

    @property
    def total(self) -> int:
        return self.embedding + sum(layer.total for layer in self.layers) + self.head

    @property
    def parts(self) -> dict[str, int]:
        """Time by part. The two sides of an FFN work at the same time, so the longer one counts.

        The disk is a part where rows are read from it.
        """
        disk = sum(layer.waiting for layer in self.layers)
        return {
            "attention": sum(layer.attention for layer in self.layers),
            "predictor": sum(layer.predictor for layer in self.layers),
            "ffn": sum(layer.ffn for layer in self.layers),
            **({"disk": disk} if disk else {}),
            "hand-over": sum(layer.handover + layer.crossing for layer in self.layers),
            "embedding and head": self.embedding + self.head,
        }

    @property
    def ns(self) -> int:
        """Nanoseconds, rounded up."""
        return -(-self.total // 1000)


def costs_of(work: Workload, machine: Machine) -> Costs:
    """All times that placing chooses among. Without a GPU there is one side."""
    processors, interconnect = processors_of(machine), interconnect_of(machine)
    parts, decoder = work.parts, work.decoder
    residual = 4 * decoder.d_model
    head_fmt = work.formats["embedding" if decoder.tied_head else "head"]
    head_bytes = (parts.embedding if decoder.tied_head else 0) + parts.head + parts.final_norm
    logits = [0, interconnect.ps(4 * decoder.vocab_size) if interconnect else 0]
    row = parts.embedding_row * (2 if parts.positions else 1)
    handover = interconnect.round_trip_ps(residual) if interconnect else 0
    return Costs(
        processors=processors,
        cuts=work.cuts,
        layers=tuple(_layer(work, processors, n, parts, handover) for n in range(decoder.n_layers)),
        handover=handover,
        crossing=interconnect.ps(residual) if interconnect else 0,
        embedding=tuple(p.ps(row) + (p.launch_ps if side == GPU else 0) for side, p in enumerate(processors)),
        head=tuple(
            p.launch_ps + p.ps(head_bytes, head_fmt) + back for p, back in zip(processors, logits, strict=False)
        ),
    )


def _layer(work: Workload, processors: Sequence[Processor], layer: int, parts: PartBytes, handover: int) -> LayerCost:
    how, decoder = work.layers[layer], work.decoder
    # The cache is half full on average while an answer fills it.
    cache = read_bytes(decoder, work.formats["attention"], layer, work.context // 2)
    fmt = work.formats["attention"]
    predictor = (0,) * len(processors)
    if how.kind.picks:
        nbytes = work.of_routed_experts(work.predictor_bytes[layer])
        predictor = tuple(
            PREDICTOR_LAUNCHES * p.launch_ps + -(-nbytes * PICO // p.rate(work.formats["predictor"], "predictor"))
            for p in processors
        )
    first, rest = rows_read(work, layer)
    attention = tuple(
        ATTENTION_LAUNCHES * p.launch_ps
        + p.ps(parts.attention + parts.ffn_bias, fmt)
        + p.cache_ps(cache, decoder.n_heads // decoder.n_kv_heads)
        for p in processors
    )
    gpu = processors[GPU] if len(processors) > 1 else None
    none = np.zeros(len(first), np.int64)
    gpu_first, gpu_rest = ffn_ps(work, layer, gpu, parts, first, rest) if gpu else (none, none)
    cpu_first, cpu_rest = ffn_ps(work, layer, processors[CPU], parts, first[-1] - first, rest[-1] - rest)
    gpu_ffn, cpu_ffn = gpu_first + gpu_rest, cpu_first + cpu_rest
    total = []
    for dense, own in zip(map(sum, zip(attention, predictor, strict=True)), (0, len(first) - 1), strict=False):
        split = np.arange(len(first)) != own
        total.append(dense + np.maximum(gpu_ffn, cpu_ffn) + np.where(split, handover, 0))
    return LayerCost(attention=attention, predictor=predictor, gpu_ffn=gpu_ffn, cpu_ffn=cpu_ffn, total=tuple(total))


def ffn_ps(work: Workload, layer: int, p: Processor, parts: PartBytes, first: Ints, rest: Ints) -> tuple[Ints, Ints]:
    """The two halves of T_u for so many rows of `first` and of `rest` over all profiled tokens."""
    fmt, (first_access, rest_access) = work.formats["ffn"], accesses(work.layers[layer].kind)
    # Python's integers: the products do not fit into 64 bits.
    first_bytes = first.astype(object) * parts.first
    rest_bytes = rest.astype(object) * (parts.neuron - parts.first)
    first_ps = -(-first_bytes * PICO // (work.tokens * p.rate(fmt, first_access)))
    rest_ps = -(-rest_bytes * PICO // (work.tokens * p.rate(fmt, rest_access)))
    times = [np.where(first > 0, p.launch_ps + ps.astype(np.int64), 0) for ps in (first_ps, rest_ps)]
    return times[0], times[1]


def token_time(costs: Costs, sides: Sequence[int], cuts: Sequence[int], embedding: int, head: int) -> TokenTime:
    """The time of any placement: sides of all attention, of embedding and head, and the cut of each layer."""
    layers, before = [], embedding
    for n, (side, cut) in enumerate(zip(sides, cuts, strict=True)):
        cost, j = costs.layers[n], int(np.searchsorted(costs.cuts, cut))
        assert costs.cuts[j] == cut, f"layer {n}: {cut} is not a cut between groups"
        one_side = cut == (0 if side == CPU else costs.cuts[-1])
        layers.append(
            LayerTime(
                attention=cost.attention[side],
                predictor=cost.predictor[side],
                gpu=int(cost.gpu_ffn[j]),
                cpu=int(cost.cpu_ffn[j]),
                handover=0 if one_side else costs.handover,
                crossing=costs.crossing if side != before else 0,
            )
        )
        before = side
    crossing = costs.crossing if head != before else 0
    return TokenTime(embedding=costs.embedding[embedding], layers=tuple(layers), head=costs.head[head] + crossing)
