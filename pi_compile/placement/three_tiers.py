"""Placing over GPU, RAM and disk: which neurons have their rows in RAM, and how many a cache holds.

As in `formulation`, but a layer's options are cuts and divisions of the rows that the CPU has (`row_options`), with
their times. RAM holds what is not on the GPU alone, but of FFNs only the rows in slots, with scales and biases; and the
buffers that a run from disk has (`rows`), which are a function of the RAM budget. Without a GPU there is one
budget, RAM's, and the solver has it in its first resource. Here it is what the process leaves to the model.
"""

from dataclasses import dataclass, replace

import numpy as np

from pi_compile.cost_model import CPU, GPU, RowChoice, RowModel, RowOptions, TokenTime
from pi_compile.placement.formulation import (
    Assignment,
    Formulation,
    Problem,
    Sizes,
    Solution,
    all_cpu,
    graphs_of,
    layer_caches,
)
from pi_compile.placement.solvers.constrained_path import solve
from pi_compile.placement.solvers.layered_graph import LayeredGraph, Node, least_ram
from pi_runtime.artifact.buffers import cache_format
from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.artifact.rows import (
    PROMPT_TOKENS,
    all_rows,
    disk_workspace_bytes,
    embedding_on_disk_nbytes,
    least_row_buffers,
    row_buffers,
)


@dataclass(frozen=True)
class ThreeTiers:
    """One problem with a disk; `vram` is the GPU budget in bytes, without one nothing is placed there."""

    problem: Problem
    model: RowModel
    vram: int

    @property
    def gpu(self) -> bool:
        """Whether the GPU can take part."""
        return self.problem.has_gpu and self.vram >= self.problem.sizes.workspace[GPU]

    @property
    def _sides(self) -> tuple[int, ...]:
        return (GPU, CPU) if self.gpu else (CPU,)

    @property
    def _sizes(self) -> Sizes:
        """Bytes of what is placed; in RAM an untied embedding is some rows, and prompts take long steps."""
        work = self.problem.work
        on_disk = embedding_on_disk_nbytes(work.decoder, work.formats["embedding"])
        return replace(self.problem.sizes, embedding_on_disk=on_disk, cache=layer_caches(work, max(PROMPT_TOKENS)))

    @property
    def _workspace(self) -> int:
        """The CPU's buffers, those for rows apart."""
        work = self.problem.work
        rank = max((how.rank or 0 for how in work.layers), default=0)
        cache = cache_format(work.formats["attention"])
        return disk_workspace_bytes(work.decoder, rank, BLOCK_TOKENS, work.context, cache)

    @property
    def _both(self) -> int:
        return sum(self.model.slot_nbytes)

    @property
    def resident(self) -> int:
        """Bytes of RAM without any row, with everything on the CPU, and without buffers for rows."""
        return sum(self._parts(all_cpu(self.problem.work.decoder.n_layers), 0).values()) + self._workspace

    @property
    def least_buffers(self) -> int:
        """Bytes of the smallest buffers for rows."""
        return least_row_buffers(self.problem.work.decoder, self._both)

    @property
    def all_rows(self) -> int:
        """Bytes of slots for all rows of the model."""
        return all_rows(self.problem.work.decoder, self._both)

    def buffers(self, ram: int) -> int:
        """Bytes of the CPU's buffers with this budget of RAM."""
        room = ram - self.resident
        if room < self.least_buffers:
            return self._workspace + self.least_buffers
        return self._workspace + room - row_buffers(self.problem.work.decoder, self._both, room).left

    def block_tokens(self, ram: int) -> int:
        """Tokens of a prompt that go through a layer together with this budget of RAM."""
        room = max(ram - self.resident, self.least_buffers)
        return row_buffers(self.problem.work.decoder, self._both, room).tokens or BLOCK_TOKENS

    def solve(self, ram: int) -> Solution | None:
        """The best placement within the budgets; None where nothing fits."""
        room = ram - self.buffers(ram)
        if room < 0:
            return None
        formulation, options = self._formulated()
        path = solve([_within(graph, self._room_on_gpu, room) for graph in formulation.graphs])
        if path is None:
            return None
        assignment = formulation.assignment(path)
        rows = tuple(o.choice(i) for o, i in zip(options, path.options[1:-1], strict=True))
        assert self.time(assignment, rows).total == path.cost
        return Solution(assignment=assignment, gap=0.0, bound_ns=-(-path.bound // 1000), rows=rows)

    def least_ram(self) -> int:
        """The smallest budget of RAM with which there is a placement."""
        graphs = self._formulated()[0].graphs
        room = sum(max(int(n.ram.max()) for n in stage) for stage in graphs[0].stages)
        path = solve([_within(least_ram(graph), self._room_on_gpu, room) for graph in graphs])
        assert path is not None
        return path.cost + self._workspace + self.least_buffers

    @property
    def _room_on_gpu(self) -> int | None:
        return self.vram - self.problem.sizes.workspace[GPU] if self.gpu else None

    def _formulated(self) -> tuple[Formulation, list[RowOptions]]:
        layers = range(self.problem.work.decoder.n_layers)
        options = [self.model.options(n, gpu=self.gpu) for n in layers]
        nodes = [[self._node(n, side, options[n]) for side in self._sides] for n in layers]
        graphs, ends = graphs_of(self.problem.costs, self._sizes, self._sides, nodes)
        return Formulation(graphs, ends, self._sides, [o.cuts for o in options]), options

    def _node(self, layer: int, side: int, options: RowOptions) -> Node:
        costs, sizes, cuts = self.problem.costs, self._sizes, options.cuts
        cost, attention = costs.layers[layer], sizes.attention(layer)
        ffn = np.maximum(cost.gpu_ffn[np.searchsorted(costs.cuts, cuts)], options.cpu_ps + options.disk_ps)
        split = cuts != (0 if side == CPU else sizes.neurons)
        return Node(
            costs=cost.attention[side] + cost.predictor[side] + ffn + np.where(split, costs.handover, 0),
            vram=cuts * sizes.parts.neuron * (layer not in sizes.without_ffn) + (attention if side == GPU else 0),
            ram=sizes.on_cpu(layer, cuts) * self.model.beside_nbytes
            + options.nbytes
            + (attention if side == CPU else 0),
            preference=-side,
            stratum=int(side == GPU),
        )

    def time(self, assignment: Assignment, rows: tuple[RowChoice, ...]) -> TokenTime:
        """The predicted time of a token."""
        time = self.problem.time(assignment)
        layers = zip(time.layers, rows, strict=True)
        return replace(time, layers=tuple(replace(t, cpu=row.cpu_ps, disk=row.disk_ps) for t, row in layers))

    def used(
        self, assignment: Assignment, rows: tuple[RowChoice, ...], ram: int
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by part: (in RAM, on the GPU)."""
        _, gpu = self._sizes.used(assignment)
        return {**self._parts(assignment, sum(row.nbytes for row in rows)), "scratch": self.buffers(ram)}, gpu

    def _parts(self, assignment: Assignment, slots: int) -> dict[str, int]:
        """Bytes of RAM by part, buffers apart, with so many bytes of slots."""
        ram, _ = self._sizes.used(assignment)
        neurons = sum(int(self._sizes.on_cpu(n, np.array(cut))) for n, cut in enumerate(assignment.cuts))
        return {**ram, "ffn": neurons * self.model.beside_nbytes + slots, "scratch": 0}


def _within(graph: LayeredGraph, vram: int | None, ram: int) -> LayeredGraph:
    """The graph with budgets; without one of the GPU, RAM is the first resource."""
    if vram is not None:
        return replace(graph, vram_budget=vram, ram_budget=ram)
    stages = [[replace(n, vram=n.ram, ram=np.zeros_like(n.ram)) for n in stage] for stage in graph.stages]
    return replace(graph, stages=stages, vram_budget=ram, ram_budget=None)
