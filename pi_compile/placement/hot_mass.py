"""PowerInfer's objective: the most activations on the GPU (SOSP'24, section 6.3).

    max Σ_l Σ_{i on GPU in l} count_{l,i}     s.t.  Σ bytes ≤ budget,     per layer: none, or at least C_l neurons.

It says nothing of the dense parts. They go to the GPU first, while they fit: the head, then the layers' attention
with cache, norms and predictor from the first layer on; the neurons have what is left. Of all sets of g groups of a
layer the first g have the most activations, so that only cuts are considered: a multiple-choice knapsack
(`knapsack`).
"""

import numpy as np

from pi_compile.cost_model.processors import CPU, GPU
from pi_compile.cost_model.workload import Ints, Workload
from pi_compile.machine.profile import Machine, to_units
from pi_compile.placement.formulation import Choice, Sizes, all_cpu

_PICO = 10**12


def least_neurons(machine: Machine, nbytes: int) -> int | None:
    """C_l: the fewest neurons of `nbytes` each for which the GPU pays for its hand-over; None where it never does.

    From C · T_GPU + T_sync ≤ C · T_CPU with T = nbytes ÷ bandwidth (PowerInfer, section 6.3):

        C = ⌈T_sync / (T_CPU − T_GPU)⌉ = ⌈T_sync · cpu · gpu / (nbytes · (gpu − cpu))⌉

    with the bandwidths cpu and gpu in bytes a second and T_sync in picoseconds; nothing is rounded but the result.
    """
    if machine.gpu is None or machine.link is None:
        return None
    cpu, gpu = (to_units(unit.bandwidth_gb_per_s, 10**9) for unit in (machine.cpu, machine.gpu))
    if gpu <= cpu:
        return None
    return -(-to_units(machine.link.sync_us, 10**6) * cpu * gpu // (nbytes * (gpu - cpu) * _PICO))


def hot_mass(work: Workload, machine: Machine, sizes: Sizes, vram: int) -> Choice:
    """The placement of greatest hot mass; of equal ones the least bytes, then the larger first layers."""
    from pi_compile.placement.solvers.multiple_choice_knapsack import Choice as Options  # noqa: PLC0415  HiGHS is needed here only
    from pi_compile.placement.solvers.multiple_choice_knapsack import solve  # noqa: PLC0415

    nothing = all_cpu(work.shape.n_layers)
    # Of several experts a neuron is read for its share of the tokens only.
    least = least_neurons(machine, work.routed_part(sizes.parts.neuron))
    left = vram - sizes.scratch[GPU]
    if least is None or left < 0:
        return nothing
    head = CPU
    matrix = sizes.parts.head + sizes.parts.final_norm + (sizes.parts.embedding if sizes.tied_head else 0)
    if matrix <= left:
        head, left = GPU, left - matrix
    sides = []
    for layer in range(work.shape.n_layers):
        # Layers are taken from the first on: one that does not fit is the last that is tried.
        fits = sizes.block(layer) <= left and CPU not in sides
        sides.append(GPU if fits else CPU)
        left -= sizes.block(layer) if fits else 0
    cuts = work.cuts()
    cuts = np.concatenate([[0], cuts[(cuts > 0) & (cuts >= least)]])
    found = solve([Options(cuts * sizes.parts.neuron, mass) for mass in masses(work, cuts)], left)
    return Choice(sides=tuple(sides), cuts=tuple(int(cuts[j]) for j in found.picks), embedding=CPU, head=head)


def masses(work: Workload, cuts: Ints) -> list[Ints]:
    """Activations of the neurons before each of these cuts, for every layer."""
    places = np.searchsorted(work.cuts(), cuts)
    return [work.before(n, counts)[places] for n, counts in enumerate(work.counts)]
