"""Baselines: placements of the same model on the same machine by other rules, timed by the same model of time.

**Layer split** (llama.cpp): whole layers on the GPU, the last ones, as many as fit with their cache. Everything else is
on the CPU, and nothing is skipped. The head follows only where all layers fit.

**PowerInfer** (SOSP'24, and the order in which its public source fills the GPU): attention with the layer's predictor,
layer by layer; then the head; then FFN neurons of greatest hot mass, none or at least C_l of a layer (section 6.3).
Keys and values stay in RAM (section 8.1): the CPU attends over them, and a layer whose matrices are on the GPU needs a
hand-over for that.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from pi_compile.cost_model import CPU, GPU, PICO, Costs, Workload
from pi_compile.machine import Machine
from pi_compile.placement import Assignment, Problem, hottest_cuts
from pi_compile.results import LayerWork
from pi_runtime.artifact.buffers import read_bytes
from pi_runtime.artifact.rungs import DENSE


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A placement by another rule, and the time of a token with it."""

    assignment: Assignment
    gpu_bytes: int
    ram_bytes: int
    token_ps: int

    @property
    def tokens_per_s(self) -> float:
        return PICO / self.token_ps


@dataclass(frozen=True)
class Baselines:
    """The baselines of one model on one machine, for any number of budgets."""

    work: Workload
    machine: Machine

    @cached_property
    def _dense(self) -> Problem:
        """The model with nothing skipped."""
        layers = (LayerWork(rung=DENSE),) * self.work.decoder.n_layers
        return Problem.of(replace(self.work, layers=layers), self.machine)

    @cached_property
    def _without_cache(self) -> Problem:
        """The model with no positions: its cache is neither placed nor timed with the attention."""
        return Problem.of(replace(self.work, context=0), self.machine)

    def layer_split(self, vram: int) -> Baseline:
        """Whole layers, dense; `vram` bytes for weights and cache."""
        sizes, layers = self._dense.sizes, self.work.decoder.n_layers
        layer = sizes.attention(0) + sizes.neurons * sizes.parts.neuron
        fitting = min(layers, vram // layer) if self._dense.has_gpu else 0
        head = GPU if fitting == layers and fitting * layer + sizes.head <= vram else CPU
        sides = (CPU,) * (layers - fitting) + (GPU,) * fitting
        cuts = tuple(sizes.neurons if side == GPU else 0 for side in sides)
        assignment = Assignment(sides=sides, cuts=cuts, embedding=CPU, head=head)
        used = fitting * layer + (sizes.head if head == GPU else 0)
        _, ram = self._dense.used(assignment)
        time = self._dense.time(assignment).total
        return Baseline(assignment=assignment, gpu_bytes=used, ram_bytes=ram, token_ps=time)

    def powerinfer(self, vram: int) -> Baseline:
        """PowerInfer's rule; `vram` bytes for weights."""
        problem, sizes = self._without_cache, self._without_cache.sizes
        vram = free = vram if problem.has_gpu else 0
        sides = []
        for n in range(self.work.decoder.n_layers):
            sides.append(GPU if sizes.attention(n) <= free else CPU)
            free -= sizes.attention(n) if sides[-1] == GPU else 0
        head = GPU if CPU not in sides and sizes.head <= free else CPU
        free -= sizes.head if head == GPU else 0
        cuts = hottest_cuts(problem, free)
        assignment = Assignment(sides=tuple(sides), cuts=cuts, embedding=CPU, head=head)
        time = problem.time(assignment).total + _cache_ps(self.work, problem.costs, assignment)
        used = vram - free + sum(cuts) * sizes.parts.neuron
        _, ram = problem.used(assignment)
        return Baseline(assignment=assignment, gpu_bytes=used, ram_bytes=ram, token_ps=time)


def _cache_ps(work: Workload, costs: Costs, a: Assignment) -> int:
    """Attention over keys and values in RAM, half full, and the hand-overs of layers whose matrices are the GPU's."""
    d = work.decoder
    seen = (read_bytes(d, work.formats["attention"], n, work.context // 2) for n in range(len(a.sides)))
    read = sum(costs.processors[CPU].cache_ps(nbytes, d.n_heads // d.n_kv_heads) for nbytes in seen)
    return read + a.sides.count(GPU) * costs.handover
