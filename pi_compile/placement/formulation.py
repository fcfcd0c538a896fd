"""The program that places all parts: what every choice costs in time and in bytes of either memory, as a chain.

The stages are the embedding, the layers and the head. A node is a side: of the embedding, of a layer's attention with
its cache, norms and predictor, of the head. A layer's options are its cuts. A step between different sides is a
crossing of the residual. A tied head is the embedding's matrix: wherever it is needed it lies, once; so there each
node also says where the embedding is.

Weight is bytes of GPU memory, load is bytes of RAM: what is not on the GPU alone.
"""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from pi_compile.cost_model.processors import CPU, GPU
from pi_compile.cost_model.token_time import Costs
from pi_compile.cost_model.workload import Ints, Workload
from pi_compile.placement.solvers.constrained_path import Chain, Node, Way
from pi_runtime.artifact.footprint import (
    DecoderSizes,
    PartBytes,
    gpu_workspace_bytes,
    kv_bytes,
    prompt_block,
    streamed_bytes,
    workspace_bytes,
)

PREFILL_TOKENS = 64
"""Tokens of one prefill call on the CPU."""
PROMPT_SHARE = 64
"""The GPU's buffers for prompts take at most this part of a model's bytes: decoding would have better use for more."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A placement: sides are `CPU` or `GPU`, the first `cuts[l]` neurons of layer l are the GPU's; see
    `layer_groups` for their order."""

    sides: tuple[int, ...]
    """Of each layer's attention, cache, norms and predictor."""
    cuts: tuple[int, ...]
    embedding: int
    head: int

    @property
    def uses_gpu(self) -> bool:
        return GPU in (*self.sides, self.embedding, self.head) or any(self.cuts)


def all_cpu(layers: int) -> Choice:
    """Nothing on the GPU."""
    return Choice(sides=(CPU,) * layers, cuts=(0,) * layers, embedding=CPU, head=CPU)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sizes:
    """Bytes of everything that is placed."""

    parts: PartBytes
    predictor: tuple[int, ...]
    """Of each layer."""
    cache: int
    """Of one layer."""
    scratch: tuple[int, int]
    """Buffers of each side; the GPU's only where it has work."""
    neurons: int
    """Of one layer."""
    group: int
    """Neurons of the first group that is placed."""
    tied_head: bool

    @classmethod
    def of(cls, work: Workload) -> "Sizes":
        shape, parts = work.shape, work.parts()
        largest = max((how.rank or 0 for how in work.layers), default=0)
        predictor = tuple(work.predictor(n) for n in range(shape.n_layers))
        return cls(
            parts=parts,
            predictor=predictor,
            cache=kv_bytes(shape, work.formats["attention"], work.context),
            scratch=(
                workspace_bytes(shape, largest, PREFILL_TOKENS, work.context),
                _gpu_scratch(shape, largest, work.context, parts, parts.total(shape) + sum(predictor)),
            ),
            neurons=shape.neurons,
            group=int(work.cuts()[1]),
            tied_head=shape.tied_head,
        )

    @property
    def everything(self) -> int:
        """All parts, each once, and the CPU's buffers: no placement needs less of both memories together."""
        return sum(self._used(all_cpu(len(self.predictor)), CPU).values())

    @property
    def least_on_gpu(self) -> int:
        """GPU memory that takes a part at all: a group of neurons, or head or embedding, with the buffers."""
        group = self.group * self.parts.neuron
        head = self.parts.head + self.parts.final_norm + (self.parts.embedding if self.tied_head else 0)
        return self.scratch[GPU] + min(group, head, self.parts.embedding + self.parts.positions)

    @property
    def all_on_gpu(self) -> int:
        """GPU memory that takes every part."""
        layers = len(self.predictor)
        every = Choice(sides=(GPU,) * layers, cuts=(self.neurons,) * layers, embedding=GPU, head=GPU)
        return sum(self._used(every, GPU).values())

    def block(self, layer: int) -> int:
        """What goes with a layer's attention."""
        return self.parts.attention + self.parts.ffn_bias + self.predictor[layer] + self.cache

    def used(self, choice: Choice) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by part: (in RAM, on the GPU)."""
        return self._used(choice, CPU), self._used(choice, GPU)

    def _used(self, choice: Choice, side: int) -> dict[str, int]:
        here = [n for n, s in enumerate(choice.sides) if s == side]
        neurons = sum(choice.cuts) if side == GPU else self.neurons * len(choice.cuts) - sum(choice.cuts)
        parts = self.parts
        matrix = parts.embedding if side in (choice.embedding, choice.head if self.tied_head else None) else 0
        return {
            "embedding": matrix + (parts.positions if choice.embedding == side else 0),
            "attention": len(here) * (parts.attention + parts.ffn_bias),
            "cache": len(here) * self.cache,
            "predictor": sum(self.predictor[n] for n in here),
            "ffn": neurons * parts.neuron,
            "head": parts.head + parts.final_norm if choice.head == side else 0,
            "scratch": self.scratch[side] if side == CPU or choice.uses_gpu else 0,
        }


def _gpu_scratch(shape: DecoderSizes, rank: int, context: int, parts: PartBytes, model: int) -> int:
    """The GPU's buffers: of a token; and of as large a block of a prompt as `PROMPT_SHARE` allows, with room for
    the cold weights that a long one brings there."""

    def needs(tokens: int) -> int:
        return gpu_workspace_bytes(shape, rank, context, tokens)

    pieces = streamed_bytes(shape, parts.neuron)
    tokens, brought = prompt_block(needs, pieces, needs(1) + model // PROMPT_SHARE)
    return needs(tokens) + brought


@dataclass(frozen=True)
class Program:
    """Everything the solver needs, and the way back from its answer."""

    cases: tuple[Chain, ...]
    """One for each side of embedding and head. Without scratch, and without budgets yet."""
    ends: tuple[tuple[int, int], ...]
    """Of each case: the sides of embedding and head."""
    sides: tuple[int, ...]
    """Of a layer's nodes."""
    cuts: Ints
    """In order of preference, as options stand in nodes of layers."""

    def within(self, capacity: int, limit: int | None) -> list[Chain]:
        """The cases, with budgets."""
        return [replace(chain, capacity=capacity, limit=limit) for chain in self.cases]

    def choice(self, way: Way) -> Choice:
        embedding, head = self.ends[way.case]
        return Choice(
            sides=tuple(self.sides[k] for k in way.nodes[1:-1]),
            cuts=tuple(int(self.cuts[o]) for o in way.options[1:-1]),
            embedding=embedding,
            head=head,
        )


def program_of(costs: Costs, sizes: Sizes) -> Program:
    """The program of minimal time. GPU before CPU, larger cuts before smaller: the order of preference of ties."""
    sides = tuple(range(len(costs.units)))[::-1]
    places = np.arange(len(costs.cuts))[::-1] if len(sides) > 1 else np.zeros(1, np.int64)
    layers = [[_layer_node(costs, sizes, n, side, places) for side in sides] for n in range(len(costs.layers))]
    between = [[costs.crossing if a != b else 0 for b in sides] for a in sides]
    ends = tuple(product(sides, sides))
    cases = []
    for embedding, head in ends:
        first = _embedding_node(costs, sizes, embedding)
        last = _head_node(costs, sizes, embedding, head)
        into = [[costs.crossing if side != embedding else 0 for side in sides]]
        out = [[costs.crossing if side != head else 0] for side in sides]
        cases.append(Chain([[first], *layers, [last]], [into, *[between] * (len(layers) - 1), out], 0))
    return Program(tuple(cases), ends, sides, costs.cuts[places])


def _layer_node(costs: Costs, sizes: Sizes, layer: int, side: int, places: Ints) -> Node:
    cuts = costs.cuts[places]
    block, neuron = sizes.block(layer), sizes.parts.neuron
    return Node(
        costs=costs.layer_ps(layer, side)[places],
        weights=cuts * neuron + (block if side == GPU else 0),
        loads=(sizes.neurons - cuts) * neuron + (block if side == CPU else 0),
        rank=-side,
        tally=int(side == GPU),
    )


def _embedding_node(costs: Costs, sizes: Sizes, side: int) -> Node:
    return _node(costs.embedding[side], sizes.parts.embedding + sizes.parts.positions, side)


def _head_node(costs: Costs, sizes: Sizes, embedding: int, side: int) -> Node:
    """A tied head needs the embedding's matrix, which is there already where the embedding is."""
    own = sizes.parts.head + sizes.parts.final_norm
    again = sizes.parts.embedding if sizes.tied_head and embedding != side else 0
    return _node(costs.head[side], own + again, side)


def _node(cost: int, nbytes: int, side: int) -> Node:
    values = (cost, nbytes if side == GPU else 0, nbytes if side == CPU else 0)
    costs, weights, loads = (np.array([v], np.int64) for v in values)
    return Node(costs=costs, weights=weights, loads=loads, rank=-side)
