"""Placing as a constrained shortest path: time and bytes of every part on either side, as layered graphs.

The stages are the embedding, the layers and the head. A node says on which side a part is: the embedding; a layer's
attention with its cache, norms and predictor; the head. A layer's options are its cuts. An arc between different sides
costs a crossing of the residual. A tied head needs the embedding's matrix on its own side too, where it counts once. So
there is one graph for each pair of sides of embedding and head.

VRAM is bytes of GPU memory. RAM is bytes of all that is not on the GPU alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

import numpy as np

from pi_compile.cost_model import CPU, GPU, Costs, Ints, RowChoice, RowModel, TokenTime, Workload, costs_of, token_time
from pi_compile.machine import Machine
from pi_compile.placement.solvers.layered_graph import LayeredGraph, Node, ShortestPath
from pi_runtime.artifact.buffers import cache_format, workspace_bytes
from pi_runtime.artifact.footprint import BLOCK_TOKENS, PartBytes
from pi_runtime.artifact.gpu_buffers import (
    decoded_together,
    gpu_workspace_bytes,
    prompt_block,
    streamed_bytes,
    weight_padding,
)
from pi_runtime.artifact.layer_classes import layer_nbytes
from pi_runtime.artifact.sizes import array_specs

PROMPT_SHARE = 64
"""The GPU's buffers for prompts take at most this part of a model's bytes: decoding would have better use for more."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The side of every part, `CPU` or `GPU`, and the cut of every layer.

    The names of the fields are part of every lock's digest.
    """

    sides: tuple[int, ...]
    """Side of each layer's attention, cache, norms and predictor."""
    cuts: tuple[int, ...]
    """Neurons of each layer on the GPU; see `workload` for their order."""
    embedding: int
    head: int

    @property
    def uses_gpu(self) -> bool:
        return GPU in (*self.sides, self.embedding, self.head) or any(self.cuts)


@dataclass(frozen=True, kw_only=True)
class Solution:
    """An assignment that a solver found, and what is proven of it."""

    assignment: Assignment
    gap: float | None = None
    """Distance from the proven bound, relative to the objective; None where nothing is proven of the time."""
    bound_ns: int | None = None
    """Proven lower bound of the time."""
    rows: tuple[RowChoice, ...] = ()
    """The division of each layer's rows where some are on disk; () where all are in memory."""


def all_cpu(layers: int) -> Assignment:
    """The assignment with nothing on the GPU."""
    return Assignment(sides=(CPU,) * layers, cuts=(0,) * layers, embedding=CPU, head=CPU)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sizes:
    """Bytes of everything that is placed."""

    parts: PartBytes
    predictor: tuple[int, ...]
    """Predictor of each layer."""
    cache: tuple[int, ...]
    """Key-value cache of each layer."""
    workspace: tuple[int, int]
    """Buffers of each side; the GPU's are needed only where it has work."""
    neurons: int
    """Number of neurons of one layer."""
    group: int
    """Number of neurons of the first group that is placed."""
    tied_head: bool
    without_ffn: frozenset[int] = frozenset()
    """Layers that have no neurons."""
    embedding_on_disk: int = 0
    """Bytes of the embedding that the CPU reads when tokens come."""

    @classmethod
    def of(cls, work: Workload) -> "Sizes":
        decoder, parts = work.decoder, work.parts
        largest_rank = max((how.rank or 0 for how in work.layers), default=0)
        predictor = work.predictor_bytes
        return cls(
            parts=parts,
            predictor=predictor,
            cache=layer_caches(work, BLOCK_TOKENS),
            workspace=(
                workspace_bytes(decoder, largest_rank, BLOCK_TOKENS, work.context),
                _gpu_workspace(work, largest_rank, parts.total(decoder) + sum(predictor)),
            ),
            neurons=decoder.neurons,
            group=int(work.cuts[1]),
            tied_head=decoder.tied_head,
            without_ffn=frozenset(decoder.mixer_only_layers),
        )

    @property
    def everything(self) -> int:
        """All parts, each once, and the CPU's buffers: no placement needs less of both memories together."""
        return sum(self._used(all_cpu(len(self.predictor)), CPU).values())

    @property
    def least_on_gpu(self) -> int:
        """GPU memory for the smallest part, with the buffers: a group of neurons, the head or the embedding."""
        group = self.group * self.parts.neuron
        return self.workspace[GPU] + min(group, self.head, self.embedding)

    @property
    def all_on_gpu(self) -> int:
        """GPU memory that takes every part."""
        layers = len(self.predictor)
        every = Assignment(sides=(GPU,) * layers, cuts=(self.neurons,) * layers, embedding=GPU, head=GPU)
        return sum(self._used(every, GPU).values())

    @property
    def embedding(self) -> int:
        """The embedding with its positions."""
        return self.parts.embedding + self.parts.positions

    @property
    def head(self) -> int:
        """The head with the last norm, on a side where the embedding is not: a tied head needs its matrix too."""
        return self.parts.head + self.parts.final_norm + (self.parts.embedding if self.tied_head else 0)

    def attention(self, layer: int) -> int:
        """A layer's attention and what goes with it: cache, norms and predictor."""
        return self.parts.attention + self.parts.ffn_bias + self.predictor[layer] + self.cache[layer]

    def on_cpu(self, layer: int, cuts: Ints) -> Ints:
        """Neurons of a layer behind its cuts."""
        return cuts * 0 if layer in self.without_ffn else self.neurons - cuts

    def used(self, a: Assignment) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by part: (in RAM, on the GPU)."""
        return self._used(a, CPU), self._used(a, GPU)

    def _used(self, a: Assignment, side: int) -> dict[str, int]:
        layers = [n for n, s in enumerate(a.sides) if s == side]
        cuts = [cut for n, cut in enumerate(a.cuts) if n not in self.without_ffn]
        neurons = sum(cuts) if side == GPU else self.neurons * len(cuts) - sum(cuts)
        parts = self.parts
        matrix = parts.embedding if side in (a.embedding, a.head if self.tied_head else None) else 0
        matrix -= self.embedding_on_disk if matrix and side == CPU else 0
        return {
            "embedding": matrix + (parts.positions if a.embedding == side else 0),
            "attention": len(layers) * (parts.attention + parts.ffn_bias),
            "cache": sum(self.cache[n] for n in layers),
            "predictor": sum(self.predictor[n] for n in layers),
            "ffn": neurons * parts.neuron,
            "head": parts.head + parts.final_norm if a.head == side else 0,
            # The key is part of every lock and every stored plan.
            "scratch": self.workspace[side] if side == CPU or a.uses_gpu else 0,
        }


def layer_caches(work: Workload, step: int) -> tuple[int, ...]:
    """Bytes of each layer's keys and values for a whole context, if a step brings at most `step` positions."""
    return layer_nbytes(work.decoder, cache_format(work.formats["attention"]), work.context, step)


def _gpu_workspace(work: Workload, rank: int, model: int) -> int:
    """The GPU's buffers for decoding and for blocks of a prompt, and the padding between its weights.

    Blocks are as large as `PROMPT_SHARE` allows, together with the room for cold weights that long prompts bring to the
    GPU; then as many tokens are decoded together.
    """

    decoder = work.decoder
    specs = array_specs(decoder, work.formats, [how.rank for how in work.layers], profiled=False)

    def needs(batch: int, tokens: int) -> int:
        return gpu_workspace_bytes(decoder, rank, work.context, batch, tokens)

    room = needs(1, 1) + model // PROMPT_SHARE
    tokens, streamed = prompt_block(partial(needs, 1), streamed_bytes(specs, decoder), room)
    batch = decoded_together(lambda batch: needs(batch, tokens) + streamed, room)
    return weight_padding(specs) + needs(batch, tokens) + streamed


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """One model on one machine, with the times and bytes that placements are chosen by: made once for all budgets."""

    work: Workload
    machine: Machine
    costs: Costs
    sizes: Sizes

    @classmethod
    def of(cls, work: Workload, machine: Machine) -> "Problem":
        return cls(work=work, machine=machine, costs=costs_of(work, machine), sizes=Sizes.of(work))

    @property
    def has_gpu(self) -> bool:
        return len(self.costs.processors) > 1

    @cached_property
    def formulation(self) -> "Formulation":
        """The graphs of least time, with all in memory."""
        return _formulate(self.costs, self.sizes)

    @cached_property
    def rows(self) -> RowModel | None:
        """The choices of rows on disk; None where the machine has none."""
        return None if self.machine.disk is None else RowModel(work=self.work, machine=self.machine)

    def time(self, a: Assignment) -> TokenTime:
        """The predicted time of a token with this assignment."""
        return token_time(self.costs, a.sides, a.cuts, a.embedding, a.head)

    def used(self, a: Assignment) -> tuple[int, int]:
        """Bytes of (GPU memory, RAM)."""
        ram, gpu = self.sizes.used(a)
        return sum(gpu.values()), sum(ram.values())


@dataclass(frozen=True)
class Formulation:
    """The graphs that the solver takes, and the way back from its path to an assignment."""

    graphs: tuple[LayeredGraph, ...]
    """One for each pair of sides of embedding and head; without the buffers' bytes, and without budgets yet."""
    ends: tuple[tuple[int, int], ...]
    """Sides of embedding and head in each graph."""
    sides: tuple[int, ...]
    """Sides of the nodes of a layer."""
    cuts: Sequence[Ints]
    """The cut of each option of each layer's nodes, in order of preference."""

    def within(self, vram: int, ram: int | None) -> list[LayeredGraph]:
        """The graphs, with budgets."""
        return [replace(graph, vram_budget=vram, ram_budget=ram) for graph in self.graphs]

    def assignment(self, path: ShortestPath) -> Assignment:
        embedding, head = self.ends[path.graph]
        return Assignment(
            sides=tuple(self.sides[k] for k in path.nodes[1:-1]),
            cuts=tuple(int(cuts[o]) for cuts, o in zip(self.cuts, path.options[1:-1], strict=True)),
            embedding=embedding,
            head=head,
        )


def _formulate(costs: Costs, sizes: Sizes) -> Formulation:
    """The problem of least time. Ties prefer the GPU to the CPU, and larger cuts to smaller ones."""
    sides = tuple(range(len(costs.processors)))[::-1]
    indices = np.arange(len(costs.cuts))[::-1] if len(sides) > 1 else np.zeros(1, np.int64)
    layers = [[_layer_node(costs, sizes, n, side, indices) for side in sides] for n in range(len(costs.layers))]
    graphs, ends = graphs_of(costs, sizes, sides, layers)
    return Formulation(graphs, ends, sides, [costs.cuts[indices]] * len(layers))


def graphs_of(
    costs: Costs, sizes: Sizes, sides: Sequence[int], layers: Sequence[Sequence[Node]]
) -> tuple[tuple[LayeredGraph, ...], tuple[tuple[int, int], ...]]:
    """The graphs around the layers' nodes, and the sides of embedding and head in each of them."""
    between = [[costs.crossing if a != b else 0 for b in sides] for a in sides]
    ends = tuple(product(sides, sides))
    graphs = []
    for embedding, head in ends:
        on_disk = sizes.embedding_on_disk if embedding == CPU else 0
        first = _end_node(costs.embedding[embedding], sizes.embedding - on_disk, embedding)
        # A head beside the embedding shares its matrix, if it is tied.
        shared = sizes.parts.embedding if sizes.tied_head and embedding == head else 0
        last = _end_node(costs.head[head], sizes.head - shared, head)
        into = [[costs.crossing if side != embedding else 0 for side in sides]]
        out = [[costs.crossing if side != head else 0] for side in sides]
        graphs.append(LayeredGraph([[first], *layers, [last]], [into, *[between] * (len(layers) - 1), out], 0))
    return tuple(graphs), ends


def _layer_node(costs: Costs, sizes: Sizes, layer: int, side: int, indices: Ints) -> Node:
    cuts = costs.cuts[indices]
    attention, neuron = sizes.attention(layer), sizes.parts.neuron
    on_gpu = cuts * (layer not in sizes.without_ffn)
    return Node(
        costs=costs.layers[layer].total[side][indices],
        vram=on_gpu * neuron + (attention if side == GPU else 0),
        ram=sizes.on_cpu(layer, cuts) * neuron + (attention if side == CPU else 0),
        preference=-side,
        stratum=int(side == GPU),
    )


def _end_node(cost: int, nbytes: int, side: int) -> Node:
    values = (cost, nbytes if side == GPU else 0, nbytes if side == CPU else 0)
    costs, vram, ram = (np.array([v], np.int64) for v in values)
    return Node(costs=costs, vram=vram, ram=ram, preference=-side)
