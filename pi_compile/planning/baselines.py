"""Baselines: placements of the same model on the same machine by other rules, timed by the same model of time.

**Layer split** (llama.cpp): whole layers on the GPU, the last ones, as many as fit with their cache. Everything else is
on the CPU, and nothing is skipped. The head follows only where all layers fit.

**PowerInfer** (SOSP'24, and the order in which its public source fills the GPU): attention with the layer's predictor,
layer by layer; then the head; then FFN neurons of greatest hot mass, none or at least C_l of a layer (section 6.3).
Keys and values stay in RAM (section 8.1): the CPU attends over them, and a layer whose matrices are on the GPU needs a
hand-over for that.
"""

from dataclasses import dataclass, replace

from pi_compile.cost_model import CPU, DENSE, GPU, PICO, Costs, LayerWork, Workload, costs_of
from pi_compile.machine import Machine
from pi_compile.placement import Assignment, Sizes, hottest_cuts, predicted_time
from pi_runtime.artifact.buffers import kv_bytes


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A placement by another rule, and the time of a token with it."""

    assignment: Assignment
    gpu_bytes: int
    token_ps: int

    @property
    def tokens_per_s(self) -> float:
        return PICO / self.token_ps


def layer_split(work: Workload, machine: Machine, vram: int) -> Baseline:
    """Whole layers, dense; `vram` bytes for weights and cache."""
    layers = work.decoder.n_layers
    dense = replace(work, layers=(LayerWork(rung=DENSE),) * layers)
    sizes = Sizes.of(dense)
    layer = sizes.attention(0) + sizes.neurons * sizes.parts.neuron
    fitting = min(layers, vram // layer) if machine.gpu is not None else 0
    head = GPU if fitting == layers and fitting * layer + sizes.head <= vram else CPU
    sides = (CPU,) * (layers - fitting) + (GPU,) * fitting
    cuts = tuple(sizes.neurons if side == GPU else 0 for side in sides)
    assignment = Assignment(sides=sides, cuts=cuts, embedding=CPU, head=head)
    time = predicted_time(costs_of(dense, machine), assignment)
    used = fitting * layer + (sizes.head if head == GPU else 0)
    return Baseline(assignment=assignment, gpu_bytes=used, token_ps=time.total)


def powerinfer(work: Workload, machine: Machine, vram: int) -> Baseline:
    """PowerInfer's rule; `vram` bytes for weights."""
    # With no positions the cache is neither placed nor timed with the attention: it is added below, on the CPU.
    weights = replace(work, context=0)
    sizes, costs = Sizes.of(weights), costs_of(weights, machine)
    free, sides = vram if machine.gpu is not None else 0, []
    for n in range(work.decoder.n_layers):
        sides.append(GPU if sizes.attention(n) <= free else CPU)
        free -= sizes.attention(n) if sides[-1] == GPU else 0
    head = GPU if CPU not in sides and sizes.head <= free else CPU
    free -= sizes.head if head == GPU else 0
    cuts, spent = hottest_cuts(work, machine, sizes, free)
    assignment = Assignment(sides=tuple(sides), cuts=cuts, embedding=CPU, head=head)
    time = predicted_time(costs, assignment).total + _cache_ps(work, costs, assignment)
    used = vram - free + spent if machine.gpu is not None else 0
    return Baseline(assignment=assignment, gpu_bytes=used, token_ps=time)


def _cache_ps(work: Workload, costs: Costs, a: Assignment) -> int:
    """Attention over keys and values in RAM, half full, and the hand-overs of layers whose matrices are the GPU's."""
    nbytes = kv_bytes(work.decoder, work.formats["attention"], work.context // 2)
    read = costs.processors[CPU].cache_ps(nbytes, work.decoder.n_heads // work.decoder.n_kv_heads)
    return len(a.sides) * read + a.sides.count(GPU) * costs.handover
