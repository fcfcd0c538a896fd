"""Either objective of placing as one mixed-integer linear program (MILP) for HiGHS: an independent proof.

Time. Variables, all between 0 and 1:

    e, h        embedding, head on the GPU
    z[l, s, j]  layer l has its attention on side s and takes cut j;  Σ z = 1 for each layer
    t[l]        the residual crosses before layer l, or before the head
    u           the GPU is used at all: then its buffers are needed
    m, m'       the matrix of a tied embedding and head is needed on the GPU, in RAM

The program minimises  Σ time of e, h, z  +  crossing · Σ t.  With side[l] = Σ_j z[l, GPU, j],

    t[l] ≥ ± (side[l] − side[l − 1]),   m ≥ e, h,   m' ≥ 1 − e, 1 − h,   u ≥ e, h, Σ z that use the GPU,
    bytes on the GPU ≤ VRAM budget,     bytes in RAM ≤ RAM budget.

Hot mass. The sides of the dense parts follow from a rule (`hot_mass`). Each layer takes one cut, none or at least C_l
neurons, so that the activations before the cuts are the most that fit.

Shape letters: S sides, J cuts of a layer.
"""

import itertools
import math

import numpy as np
import numpy.typing as npt

from pi_compile.cost_model import CPU, GPU, Costs, Ints
from pi_compile.placement.formulation import Assignment, Problem, Solution
from pi_compile.placement.greedy import hot_mass
from pi_compile.placement.solvers.mixed_integer_program import MixedIntegerProgram

Term = tuple[npt.ArrayLike, npt.ArrayLike]
"""Variables and their coefficients."""
NANO = 1000
"""Picoseconds per unit of the objective: its numbers then suit HiGHS's tolerances."""
MIB = float(1 << 20)
"""Bytes per unit of the budgets."""


def least_time(problem: Problem, vram: int, ram: int, seconds: float) -> Solution | None:
    """The assignment that HiGHS found within so many seconds, with its gap and the proven bound.

    None where the model does not fit. Raises TimeoutError where the time was up before an assignment was found.
    """
    program, costs = MixedIntegerProgram(), problem.costs
    embedding, head = (
        int(program.variables([(part[GPU] - part[CPU]) / NANO])[0]) for part in (costs.embedding, costs.head)
    )
    used = int(program.variables([0.0])[0])
    layers = [_layer(program, costs, n, used) for n in range(len(costs.layers))]
    sides = [embedding, *(z_SJ[GPU] for z_SJ in layers), head]
    for before, after in itertools.pairwise(sides):
        crosses = program.variables([costs.crossing / NANO], integer=False)
        for sign in (1.0, -1.0):
            program.row([(crosses, 1.0), (after, -sign), (before, sign)], 0.0, np.inf)
    for end in (embedding, head):
        program.row([(used, 1.0), (end, -1.0)], 0.0, np.inf)
    _budgets(program, problem, (vram, ram), embedding, head, used, layers)
    answer = program.solve(seconds, (costs.embedding[CPU] + costs.head[CPU]) / NANO)
    if answer is None:
        return None
    taken = [np.unravel_index(int(answer.values[z_SJ].argmax()), z_SJ.shape) for z_SJ in layers]
    assignment = Assignment(
        sides=tuple(int(side) for side, _ in taken),
        cuts=tuple(int(costs.cuts[j]) for _, j in taken),
        embedding=GPU if answer.values[embedding] > 0.5 else CPU,
        head=GPU if answer.values[head] > 0.5 else CPU,
    )
    return Solution(assignment=assignment, gap=answer.gap, bound_ns=math.floor(answer.bound))


def most_hot_mass(problem: Problem, vram: int, seconds: float) -> Solution:
    """The assignment with the most activations on the GPU, with its gap. Raises TimeoutError as `least_time` does."""
    gaps = []

    def cuts_within(allowed: Ints, masses: list[Ints], neuron: int, free: int) -> list[int]:
        program = MixedIntegerProgram(maximise=True)
        layers = [program.variables(mass) for mass in masses]
        for z_J in layers:
            program.row([(z_J, 1.0)], 1.0, 1.0)
        program.row([(z_J, allowed * neuron / MIB) for z_J in layers], -np.inf, free / MIB)
        answer = program.solve(seconds)
        assert answer is not None  # nothing always fits
        gaps.append(answer.gap)
        return [int(answer.values[z_J].argmax()) for z_J in layers]

    return Solution(assignment=hot_mass(problem, vram, cuts_within), gap=max(gaps, default=0.0))


def _layer(program: MixedIntegerProgram, costs: Costs, layer: int, used: int) -> Ints:
    """Add the variables z [sides, cuts] of a layer, one of which is 1."""
    times = [total / NANO for total in costs.layers[layer].total]
    z_SJ = program.variables(np.concatenate(times)).reshape(2, -1)
    program.row([(z_SJ.ravel(), 1.0)], 1.0, 1.0)
    on_gpu = np.concatenate([z_SJ[CPU, 1:], z_SJ[GPU]])
    program.row([(used, 1.0), (on_gpu, -1.0)], 0.0, np.inf)
    return z_SJ


def _budgets(
    program: MixedIntegerProgram,
    problem: Problem,
    budgets: tuple[int, int],
    embedding: int,
    head: int,
    used: int,
    layers: list[Ints],
) -> None:
    """Add one row for each memory: what is placed there and its buffers keep its budget."""
    sizes, parts = problem.sizes, problem.sizes.parts
    neurons = problem.costs.cuts * parts.neuron
    vram: list[Term] = [(used, sizes.workspace[GPU] / MIB)]
    ram: list[Term] = []
    fixed = sizes.workspace[CPU]
    for n, z_SJ in enumerate(layers):
        for side in (CPU, GPU):
            attention = sizes.attention(n)
            on_cpu = sizes.on_cpu(n, problem.costs.cuts) * parts.neuron
            on_gpu = neurons * (n not in sizes.without_ffn)
            vram.append((z_SJ[side], (on_gpu + (attention if side == GPU else 0)) / MIB))
            ram.append((z_SJ[side], (on_cpu + (attention if side == CPU else 0)) / MIB))
    matrix_and_ends = ((embedding, parts.positions), (head, parts.head + parts.final_norm))
    for end, nbytes in matrix_and_ends:
        vram.append((end, nbytes / MIB))
        ram.append((end, -nbytes / MIB))
        fixed += nbytes
    sharing = (embedding, head) if sizes.tied_head else (embedding,)
    matrix_in_vram, matrix_in_ram = (program.variables([0.0], integer=False) for _ in range(2))
    for end in sharing:
        program.row([(matrix_in_vram, 1.0), (end, -1.0)], 0.0, np.inf)
        program.row([(matrix_in_ram, 1.0), (end, 1.0)], 1.0, np.inf)
    vram.append((matrix_in_vram, parts.embedding / MIB))
    ram.append((matrix_in_ram, parts.embedding / MIB))
    program.row(vram, -np.inf, budgets[0] / MIB)
    program.row(ram, -np.inf, (budgets[1] - fixed) / MIB)
