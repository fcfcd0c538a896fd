"""How others would place the same model on the same machine: yardsticks, timed by the same model of time.

**Layer split** (llama.cpp): whole layers on the GPU, the last ones, as many as fit with their cache; everything else on
the CPU, and nothing skipped. The head goes along only where all layers do.

**PowerInfer** (SOSP'24, and the order in which its public source fills the GPU): attention with the layer's predictor,
layer by layer; then the head; then FFN neurons of greatest hot mass, at least C_l of a layer (section 6.3). Keys and
values stay in RAM (section 8.1): attention over them is the CPU's, and a layer whose matrices are the GPU's hands over.
"""

from dataclasses import dataclass, replace

import numpy as np

from pi_compile.cost_model.processors import CPU, GPU
from pi_compile.cost_model.token_time import Costs, costs_of, token_time
from pi_compile.cost_model.workload import Ints, LayerWork, Workload
from pi_compile.machine.profile import Machine
from pi_compile.placement.formulation import Choice, Sizes
from pi_compile.placement.hot_mass import least_neurons, masses
from pi_compile.placement.solvers.multiple_choice_knapsack import Choice as Item
from pi_compile.placement.solvers.multiple_choice_knapsack import solve
from pi_runtime.artifact.footprint import kv_bytes


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A placement by another rule, and the time of a token with it."""

    choice: Choice
    gpu_bytes: int
    token_ps: int

    @property
    def tokens_per_s(self) -> float:
        return 1e12 / self.token_ps


def layer_split(work: Workload, machine: Machine, vram: int) -> Rival:
    """Whole layers, dense; `vram` bytes for weights and cache."""
    dense = replace(work, layers=(LayerWork(rung="dense"),) * work.shape.n_layers)
    sizes, layers = Sizes.of(dense), work.shape.n_layers
    one = sizes.block(0) + sizes.neurons * sizes.parts.neuron
    fitting = min(layers, vram // one) if machine.gpu is not None else 0
    head_bytes = sizes.parts.head + sizes.parts.final_norm + (sizes.parts.embedding if sizes.tied_head else 0)
    head = GPU if fitting == layers and fitting * one + head_bytes <= vram else CPU
    here = [CPU] * (layers - fitting) + [GPU] * fitting
    choice = Choice(
        sides=tuple(here), cuts=tuple(sizes.neurons if s == GPU else 0 for s in here), embedding=CPU, head=head
    )
    time = token_time(costs_of(dense, machine), choice.sides, choice.cuts, CPU, head)
    used = fitting * one + (head_bytes if head == GPU else 0)
    return Rival(choice=choice, gpu_bytes=used, token_ps=time.total)


def powerinfer(work: Workload, machine: Machine, vram: int) -> Rival:
    """Hot mass; `vram` bytes for weights."""
    # Without positions nothing of the cache is placed or timed with the attention: it is added below, on the CPU.
    weights = replace(work, context=0)
    sizes, costs = Sizes.of(weights), costs_of(weights, machine)
    left, sides = vram if machine.gpu is not None else 0, []
    for n in range(work.shape.n_layers):
        sides.append(GPU if sizes.block(n) <= left else CPU)
        left -= sizes.block(n) if sides[-1] == GPU else 0
    head_bytes = sizes.parts.head + sizes.parts.final_norm + (sizes.parts.embedding if sizes.tied_head else 0)
    head = GPU if CPU not in sides and head_bytes <= left else CPU
    left -= head_bytes if head == GPU else 0
    cuts, spent = _hot_mass(work, machine, sizes, left)
    choice = Choice(sides=tuple(sides), cuts=cuts, embedding=CPU, head=head)
    time = token_time(costs, choice.sides, choice.cuts, CPU, head).total + _cache_ps(work, costs, choice)
    used = vram - left + spent if machine.gpu is not None else 0
    return Rival(choice=choice, gpu_bytes=used, token_ps=time)


def _hot_mass(work: Workload, machine: Machine, sizes: Sizes, budget: int) -> tuple[tuple[int, ...], int]:
    """(cut of each layer, bytes) of the greatest hot mass."""
    least = least_neurons(machine, work.routed_part(sizes.parts.neuron))
    every = work.cuts()
    cuts: Ints = np.concatenate([[0], every[every >= max(least, 1)] if least is not None else every[:0]])
    found = solve([Item(cuts * sizes.parts.neuron, mass) for mass in masses(work, cuts)], budget)
    return tuple(int(cuts[j]) for j in found.picks), found.weight


def _cache_ps(work: Workload, costs: Costs, choice: Choice) -> int:
    """Attention over keys and values in RAM, half full, and the hand-overs of layers whose matrices are the GPU's."""
    nbytes = kv_bytes(work.shape, work.formats["attention"], work.context // 2)
    read = costs.units[CPU].cache_ps(nbytes, work.shape.n_heads // work.shape.n_kv_heads)
    return len(choice.sides) * read + choice.sides.count(GPU) * costs.handover
