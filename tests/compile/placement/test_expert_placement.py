"""Placement of experts: against brute force over cuts and sides, and the time and bytes of its cuts counted anew."""

import itertools
from dataclasses import replace
from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from support.placeable import MUCH, RUNGS, brute, machine, random_budgets, random_experts, random_machine, workload

from pi_compile.cost_model.processors import CPU, GPU, processors_of
from pi_compile.cost_model.token_time import costs_of
from pi_compile.cost_model.workload import Workload
from pi_compile.machine.profile import Machine
from pi_compile.pipeline.lock_file import lock_text
from pi_compile.pipeline.recipe_placement import Placed
from pi_compile.placement.formulation import Problem, Sizes
from pi_compile.placement.greedy import least_neurons
from pi_compile.placement.stage import Placement, ladder, place
from pi_compile.planning.baselines import Baselines
from pi_runtime.artifact.sizes import FfnBytes
from pi_runtime.errors import DoesNotFitError

pytestmark = pytest.mark.usefixtures("no_process")


@pytest.mark.parametrize("seed", range(3))
def test_equals_brute_force_over_cuts_and_sides(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for case in range(10):
        work, m = random_experts(rng, d_ff=int(rng.choice([50, 64, 100]))), random_machine(rng)
        vram, ram = random_budgets(rng, work)
        expected = brute(work, m, vram, ram)
        if expected is None:
            with pytest.raises(DoesNotFitError):
                place(Problem.of(work, m), vram, ram)
        else:
            found = place(Problem.of(work, m), vram, ram)
            assert found.assignment == expected, (seed, case)
            assert sum(found.gpu_bytes.values()) <= vram
            assert sum(found.ram_bytes.values()) <= ram


def own_cuts(work: Workload, p: Placement, layer: int) -> list[int]:
    experts = work.decoder.n_experts
    return list(p.plan.cuts[layer * experts : (layer + 1) * experts])


def ffn_ps(work: Workload, m: Machine, layer: int, cuts: list[int], side: int) -> int:
    """T of one side, neuron by neuron."""
    how, processor, d_ff = work.layers[layer], processors_of(m)[side], work.decoder.d_ff
    row = FfnBytes.of(work.decoder, work.formats)
    first = rest = neurons = 0
    assert work.routed is not None
    for e, cut in enumerate(cuts):
        for i in range(cut) if side == GPU else range(cut, d_ff):
            tokens, count = int(work.routed[layer, e]), int(work.counts[layer, e * d_ff + i])
            picked = min(tokens, ceil(Fraction(count * how.read_ppm, 10**6)))
            first += picked if how.kind.picks else tokens
            rest += tokens if how.kind.dense else count
            neurons += 1
    if not neurons or not first:
        return 0
    fmt = work.formats["ffn"]
    first_rate = processor.rate(fmt, "gather" if how.kind.picks else "neurons")
    rest_rate = processor.rate(fmt, "neurons" if how.kind.dense else "gather")
    parts = ((first * row.first, first_rate), (rest * row.rest, rest_rate))
    return 2 * processor.launch_ps + sum(ceil(Fraction(n * 10**12, work.tokens * rate)) for n, rate in parts)


def test_time_and_bytes_are_those_of_the_cuts_of_the_experts() -> None:
    rng = np.random.default_rng(4)
    split = 0
    for _ in range(30):
        work, m = random_experts(rng, d_ff=100), random_machine(rng)
        found = place(Problem.of(work, m), Sizes.of(work).all_on_gpu // 2, MUCH)
        row = FfnBytes.of(work.decoder, work.formats)
        assert found.gpu_bytes["ffn"] == sum(found.plan.cuts) * (row.first + row.rest)
        for n, (time, cut) in enumerate(zip(found.time.layers, found.assignment.cuts, strict=True)):
            each = own_cuts(work, found, n)
            assert sum(each) == cut
            assert (time.gpu, time.cpu) == tuple(ffn_ps(work, m, n, each, side) for side in (GPU, CPU))
            split += len({*each} - {0, 100}) > 0
    assert split > 10


def test_a_predictor_is_stored_for_all_experts_and_read_for_those_of_the_token() -> None:
    work = workload(np.ones((1, 4 * 64)), (RUNGS[2],), n_experts=4, experts_per_token=2)
    row = FfnBytes.of(work.decoder, work.formats)
    assert Sizes.of(work).predictor == (4 * row.predictor(3),)
    processor = processors_of(machine())[CPU]
    assert costs_of(work, machine()).layers[0].predictor[CPU] == processor.launch_ps + processor.ps(
        2 * row.predictor(3), "f16"
    )


def test_hot_mass_has_the_most_activations_of_all_cuts_of_the_experts() -> None:
    rng = np.random.default_rng(7)
    for sync_us in (0.0, 0.1):
        m = machine(sync_us)
        for _ in range(6):
            work = random_experts(rng, layers=1, d_ff=192)
            sizes, decoder = Sizes.of(work), work.decoder
            found = place(Problem.of(work, m), int(rng.integers(0, sizes.all_on_gpu)), MUCH, objective="hot-mass")
            least = least_neurons(m, work.of_routed_experts(sizes.parts.neuron))
            own, best = work.counts[0].reshape(decoder.n_experts, -1), 0
            room = found.vram - sum(found.gpu_bytes.values()) + found.gpu_bytes["ffn"]
            room -= 0 if found.assignment.uses_gpu else sizes.workspace[GPU]
            for each in itertools.product((0, 64, 128, 192), repeat=decoder.n_experts):
                if sum(each) * sizes.parts.neuron <= room and (not any(each) or sum(each) >= (least or 0)):
                    best = max(best, sum(int(own[e, :cut].sum()) for e, cut in enumerate(each)))
            assert found.activations_on_gpu == best / max(int(work.counts.sum()), 1)


def test_greedy_and_the_rivals_keep_the_budget_and_are_no_faster() -> None:
    rng = np.random.default_rng(3)
    for _ in range(8):
        work, m = random_experts(rng, layers=3, d_ff=192), random_machine(rng)
        vram = Sizes.of(work).all_on_gpu * int(rng.integers(20, 110)) // 100
        problem = Problem.of(work, m)
        best, quick = place(problem, vram, MUCH), place(problem, vram, MUCH, solver="greedy")
        mass = place(problem, vram, MUCH, objective="hot-mass")
        for found in (quick, mass):
            assert sum(found.gpu_bytes.values()) <= vram
            assert found.time.total >= best.time.total
            assert [sum(own_cuts(work, found, n)) for n in range(3)] == list(found.assignment.cuts)
        assert Baselines(work, m).powerinfer(vram).gpu_bytes <= vram
        assert Baselines(work, m).layer_split(vram).gpu_bytes <= vram


def test_an_expert_that_the_router_prefers_has_more_on_the_gpu() -> None:
    rng = np.random.default_rng(0)
    routed = np.array([[900, 100]] * 2)
    counts = (np.repeat(routed, 640, axis=1) * rng.random((2, 1280)) ** 4).astype(int)
    work = workload(counts, routed=routed, n_experts=2, experts_per_token=1)
    found = place(Problem.of(work, machine(0.01)), Sizes.of(work).all_on_gpu // 2, MUCH)
    for n in range(2):
        busy, idle = own_cuts(work, found, n)
        assert busy > idle


def test_the_digest_knows_how_tokens_were_routed() -> None:
    rng = np.random.default_rng(1)
    work = random_experts(rng)
    assert work.routed is not None
    other = replace(work, routed=work.routed + 1)
    digests = {place(Problem.of(one, machine()), 60_000, MUCH).digest for one in (work, other)}
    assert len(digests) == 2


def test_a_lock_has_the_cuts_of_the_experts() -> None:
    work = random_experts(np.random.default_rng(2))
    placements = ladder(Problem.of(work, machine()))
    text = lock_text(Placed(inputs={}, placements=placements))
    assert all(f"cuts = {own_cuts(work, p, n)}" in text for p in placements for n in range(2))
