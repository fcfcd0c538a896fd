"""PowerInfer's objective: the most activations on the GPU (SOSP'24, section 6.3).

    max Σ_l Σ_{i on GPU in l} count_{l,i}     s.t.  Σ bytes ≤ budget,     per layer: none, or at least C_l neurons.

The objective says nothing of the dense parts. They go to the GPU first, while they fit: the head, then the attention of
each layer with cache, norms and predictor, from the first layer on. The neurons get what is left. No g groups of a
layer have more activations than the first g, so that only cuts are considered: a multiple-choice knapsack.
"""

from collections.abc import Callable, Sequence

import numpy as np

from pi_compile.cost_model import CPU, GPU, PICO, Ints
from pi_compile.machine import Machine, to_units
from pi_compile.placement.formulation import Assignment, Problem, all_cpu
from pi_compile.placement.solvers.multiple_choice_knapsack import ItemClass, solve

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
    """The knapsack, solved exactly and with ties by rule; see `multiple_choice_knapsack`."""
    return solve([ItemClass(allowed * neuron, mass) for mass in masses], free).items


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
