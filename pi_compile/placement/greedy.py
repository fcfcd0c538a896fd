"""Placements by rules: the greedy heuristic, and PowerInfer's objective.

The greedy heuristic is a quick placement, shown beside the optimum and used to say which budgets would fit. A step
enlarges a cut, or moves a layer's attention, the embedding or the head to the GPU. Of all steps that fit, the one that
saves most time per byte is taken next. Among steps of a layer that are nearly as good, the largest is taken.

Two starts are tried. One has everything on the CPU. The other has embedding and head on the GPU, and attention from the
last layer back as far as it fits, because no single step pays for the crossings that these save together.

PowerInfer's objective is the most activations on the GPU (SOSP'24, section 6.3):

    max Σ_l Σ_{i on GPU in l} count_{l,i}     s.t.  Σ bytes ≤ budget,     per layer: none, or at least C_l neurons.

The objective says nothing of the dense parts. They go to the GPU first, while they fit: the head, then the attention of
each layer with cache, norms and predictor, from the first layer on. The neurons get what is left. No g groups of a
layer have more activations than the first g, so that only cuts are considered: a multiple-choice knapsack.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pi_compile.cost_model import CPU, GPU, PICO, Ints
from pi_compile.machine import Machine, to_units
from pi_compile.placement.formulation import Assignment, Problem, all_cpu
from pi_compile.placement.solvers.constrained_path import most_value

_NEARLY = 0.98


@dataclass
class _Placing:
    problem: Problem
    sides: list[int]
    cuts: list[int]
    """Index of each layer's cut in `Costs.cuts`."""
    embedding: int
    head: int

    def assignment(self) -> Assignment:
        cuts = tuple(int(self.problem.costs.cuts[j]) for j in self.cuts)
        return Assignment(sides=tuple(self.sides), cuts=cuts, embedding=self.embedding, head=self.head)

    def neighbours(self, layer: int) -> tuple[int, int]:
        """Sides of the residual before and behind a layer."""
        before = self.sides[layer - 1] if layer else self.embedding
        behind = self.sides[layer + 1] if layer + 1 < len(self.sides) else self.head
        return before, behind


def greedy(problem: Problem, vram: int, ram: int | None = None) -> Assignment:
    """The better of two assignments that take at most `vram` bytes of GPU memory, buffers included.

    While RAM holds more than `ram` bytes, steps that cost time are taken too. If RAM still holds more in the end, no
    further step fitted.
    """
    sizes, layers = problem.sizes, len(problem.costs.layers)
    free = vram - sizes.workspace[GPU]
    found = [_improved(_Placing(problem, [CPU] * layers, [0] * layers, CPU, CPU), max(free, 0), ram)]
    # A tied head on the embedding's side shares its matrix.
    ends = sizes.embedding + sizes.parts.head + sizes.parts.final_norm
    if problem.has_gpu and ends <= free:
        free -= ends
        sides = [CPU] * layers
        for n in reversed(range(layers)):
            if sizes.attention(n) > free:
                break
            sides[n], free = GPU, free - sizes.attention(n)
        found.append(_improved(_Placing(problem, sides, [0] * layers, GPU, GPU), free, ram))

    def worth(a: Assignment) -> tuple[bool, int]:
        return _exceeds(problem, a, ram), problem.time(a).total

    return min(found, key=worth)


def _exceeds(problem: Problem, a: Assignment, ram: int | None) -> bool:
    """Whether an assignment takes more RAM than there is."""
    return ram is not None and problem.used(a)[1] > ram


def _improved(state: _Placing, free: int, ram: int | None) -> Assignment:
    """Take steps from a start while `free` bytes of GPU memory last."""
    layers = len(state.sides)
    if not state.problem.has_gpu or not free:
        return state.assignment()
    steps = [_step(state, n, free) for n in range(layers + 2)]
    while True:
        n = int(np.argmax([worth for worth, *_ in steps]))
        worth, nbytes, side, cut = steps[n]
        if nbytes > free:
            steps[n] = _step(state, n, free)
            continue
        if nbytes == 0 or (worth <= 0 and not _exceeds(state.problem, state.assignment(), ram)):
            return state.assignment()
        free -= nbytes
        changed = {n}
        if n >= layers or side != state.sides[n]:
            # A tied head's bytes depend on the embedding's side, and either's time on its neighbour.
            changed |= {max(0, n - 1), min(layers - 1, n + 1), 0, layers - 1, layers, layers + 1}
        if n < layers:
            state.sides[n], state.cuts[n] = side, cut
        elif n == layers:
            state.embedding = side
        else:
            state.head = side
        for k in changed:
            steps[k] = _step(state, k, free)


_NO_STEP = (-np.inf, 0, GPU, 0)


def _step(state: _Placing, n: int, free: int) -> tuple[float, int, int, int]:
    """(picoseconds saved per byte, bytes, side, index of the cut) of the best step of a layer, embedding or head."""
    if n >= len(state.sides):
        return _end_step(state, n - len(state.sides), free)
    costs, sizes, side, cut = state.problem.costs, state.problem.sizes, state.sides[n], state.cuts[n]
    best, now = _NO_STEP, _layer_time(state, n, side)[cut]
    for to in (side, GPU) if side == CPU else (side,):
        nbytes = (costs.cuts - costs.cuts[cut]) * sizes.parts.neuron + (sizes.attention(n) if to != side else 0)
        cuts = np.nonzero((nbytes > 0) & (nbytes <= free) & (costs.cuts >= costs.cuts[cut]))[0]
        if not len(cuts):
            continue
        worth = (now - _layer_time(state, n, to)[cuts]) / nbytes[cuts]
        good = worth.max()
        j = int(np.nonzero(worth >= (good * _NEARLY if good > 0 else good))[0][-1])
        best = max(best, (float(worth[j]), int(nbytes[cuts[j]]), to, int(cuts[j])))
    return best


def _layer_time(state: _Placing, n: int, side: int) -> Ints:
    """(cuts,) time of a layer on this side, with the crossings to its neighbours."""
    costs, crossings = state.problem.costs, sum(side != neighbour for neighbour in state.neighbours(n))
    return costs.layers[n].total[side] + costs.crossing * crossings


def _end_step(state: _Placing, end: int, free: int) -> tuple[float, int, int, int]:
    """The step that moves the embedding (end 0) or the head (end 1) to the GPU."""
    problem, costs = state.problem, state.problem.costs
    if (state.head if end else state.embedding) == GPU:
        return _NO_STEP
    now = state.assignment()
    moved = replace(now, head=GPU) if end else replace(now, embedding=GPU)
    workspace = problem.sizes.workspace[GPU] * (moved.uses_gpu - now.uses_gpu)
    nbytes = problem.used(moved)[0] - problem.used(now)[0] - workspace
    neighbour = state.sides[-1] if end else state.sides[0]
    times = costs.head if end else costs.embedding
    saved = times[CPU] - times[GPU] + costs.crossing * ((neighbour != CPU) - (neighbour != GPU))
    if nbytes > free:
        return _NO_STEP
    return (saved / max(nbytes, 1), nbytes, GPU, 0) if nbytes or saved > 0 else _NO_STEP


Knapsack = Callable[[Ints, list[Ints], int, int], Sequence[int]]
"""(allowed cuts, each layer's activations before them, bytes per neuron, free bytes) → index of each layer's cut."""


def least_neurons(machine: Machine, nbytes: int) -> int | None:
    """C_l: the fewest GPU neurons of `nbytes` each whose saved time exceeds the hand-over; None if that never happens.

    From C · T_GPU + T_sync ≤ C · T_CPU with T = nbytes ÷ bandwidth (PowerInfer, section 6.3):

        C = ⌈T_sync / (T_CPU − T_GPU)⌉ = ⌈T_sync · cpu · gpu / (nbytes · (gpu − cpu))⌉

    with the bandwidths cpu and gpu in bytes a second and T_sync in picoseconds; nothing is rounded but the result.
    """
    if machine.gpu is None or machine.link is None:
        return None
    cpu, gpu = (to_units(section.bandwidth_gb_per_s, 10**9) for section in (machine.cpu, machine.gpu))
    if gpu <= cpu:
        return None
    return -(-to_units(machine.link.sync_us, 10**6) * cpu * gpu // (nbytes * (gpu - cpu) * PICO))


def solve_exactly(allowed: Ints, masses: list[Ints], neuron: int, free: int) -> Sequence[int]:
    """The knapsack, solved exactly and with ties by rule; see `most_value`."""
    return most_value([(allowed * neuron, mass) for mass in masses], free)


def hot_mass(problem: Problem, vram: int, knapsack: Knapsack = solve_exactly) -> Assignment:
    """The assignment of greatest hot mass; ties prefer fewest bytes, then larger cuts of the first layers."""
    sizes, free = problem.sizes, vram - problem.sizes.workspace[GPU]
    if least_hot_neurons(problem) is None or free < 0:
        return all_cpu(problem.work.decoder.n_layers)
    head = GPU if sizes.head <= free else CPU
    free -= sizes.head if head == GPU else 0
    sides: list[int] = []
    for layer in range(problem.work.decoder.n_layers):
        # The first layer that does not fit is the last one that is tried.
        fits = sizes.attention(layer) <= free and CPU not in sides
        sides.append(GPU if fits else CPU)
        free -= sizes.attention(layer) if fits else 0
    cuts = hottest_cuts(problem, free, knapsack)
    return Assignment(sides=tuple(sides), cuts=cuts, embedding=CPU, head=head)


def hottest_cuts(problem: Problem, free: int, knapsack: Knapsack = solve_exactly) -> tuple[int, ...]:
    """The cut of each layer with the greatest hot mass in `free` bytes, each cut 0 or at least C_l neurons."""
    least, cuts = least_hot_neurons(problem), problem.work.cuts
    indices = np.nonzero((cuts == 0) | (cuts >= least if least is not None else False))[0]
    masses = [sums[indices] for sums in problem.work.activations_before]
    chosen = knapsack(cuts[indices], masses, problem.sizes.parts.neuron, free)
    return tuple(int(cuts[indices[j]]) for j in chosen)


def least_hot_neurons(problem: Problem) -> int | None:
    """C_l of a model: with experts a neuron's bytes count by the share of tokens that read it."""
    return least_neurons(problem.machine, problem.work.of_routed_experts(problem.sizes.parts.neuron))
