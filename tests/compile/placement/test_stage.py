"""Placement against brute force over cuts and sides, and the rules around it."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.placeable import MUCH, brute, machine, random_budgets, random_machine, random_workload, workload

from pi_compile.cost_model.processors import CPU, GPU
from pi_compile.cost_model.workload import Workload
from pi_compile.errors import ProfileError
from pi_compile.machine.profile import Gpu, Machine, bundled_machines, find_machine, read_machine
from pi_compile.placement.formulation import Problem, Sizes
from pi_compile.placement.greedy import least_neurons
from pi_compile.placement.stage import ladder, place
from pi_compile.results.activation_profile import LayerWork
from pi_runtime.errors import DoesNotFitError
from pi_runtime.errors.exit_codes import flag

pytestmark = pytest.mark.usefixtures("no_process")


@pytest.mark.parametrize("seed", range(4))
def test_equals_brute_force_over_cuts_and_sides(seed: int) -> None:
    """Ranks, rungs, formats, bandwidths, crossings and both budgets vary; every placement is tried."""
    rng = np.random.default_rng(seed)
    for case in range(15):
        work, m = random_workload(rng), random_machine(rng)
        vram, ram = random_budgets(rng, work)
        expected = brute(work, m, vram, ram)
        if expected is None:
            with pytest.raises(DoesNotFitError):
                place(Problem.of(work, m), vram, ram)
        else:
            assert place(Problem.of(work, m), vram, ram).assignment == expected, (seed, case)


def test_three_layers_equal_brute_force() -> None:
    rng = np.random.default_rng(9)
    for _ in range(6):
        work, m = random_workload(rng, layers=3), random_machine(rng)
        vram = Sizes.of(work).all_on_gpu * int(rng.integers(20, 100)) // 100
        assert place(Problem.of(work, m), vram, MUCH).assignment == brute(work, m, vram, MUCH)


def test_more_budget_is_never_slower_and_greedy_never_faster() -> None:
    work = workload(np.random.default_rng(1).integers(0, 1000, (4, 640)))
    whole = Sizes.of(work).all_on_gpu
    found = [place(Problem.of(work, machine(0.05)), whole * share // 10, MUCH) for share in range(11)]
    times = [p.time.total for p in found]
    assert times == sorted(times, reverse=True)
    assert found[-1].assignment.cuts == (640,) * 4
    assert all(p.heuristic is not None and p.heuristic.total >= p.time.total for p in found)
    assert all(p.bound_ns is not None and p.bound_ns <= p.time.ns for p in found)


def test_greedy_keeps_the_budgets_and_says_its_name() -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        work, m = random_workload(rng, layers=3, groups=4), random_machine(rng)
        vram = Sizes.of(work).all_on_gpu * int(rng.integers(0, 110)) // 100
        found = place(Problem.of(work, m), vram, MUCH, solver="greedy")
        assert sum(found.gpu_bytes.values()) <= vram
        assert (found.solver, found.gap) == ("greedy", None)


def test_hot_mass_has_the_most_activations_of_all_placements_with_its_sides() -> None:
    rng = np.random.default_rng(7)
    for sync_us in (0.0, 0.3, 0.8):
        m = machine(sync_us)
        for _ in range(10):
            work = workload(rng.integers(0, 1000, (2, 64 * 3 + 20)))
            sizes = Sizes.of(work)
            vram = int(rng.integers(0, sizes.all_on_gpu))
            found = place(Problem.of(work, m), vram, MUCH, objective="hot-mass")
            least = least_neurons(m, sizes.parts.neuron)
            best = 0
            for cuts in itertools.product([int(c) for c in work.cuts], repeat=2):
                used = sizes.used(replace(found.assignment, cuts=cuts))[GPU]
                if sum(used.values()) <= vram and all(c == 0 or c >= (least or 0) for c in cuts):
                    best = max(best, sum(int(row[:c].sum()) for row, c in zip(work.counts, cuts, strict=True)))
            mass = sum(int(row[:c].sum()) for row, c in zip(work.counts, found.assignment.cuts, strict=True))
            assert mass == best
            assert sum(found.gpu_bytes.values()) <= vram


def test_time_is_no_worse_than_hot_mass() -> None:
    rng = np.random.default_rng(8)
    for _ in range(10):
        work, m = random_workload(rng, layers=3, groups=4), random_machine(rng)
        vram = Sizes.of(work).all_on_gpu * int(rng.integers(5, 100)) // 100
        problem = Problem.of(work, m)
        assert place(problem, vram, MUCH).time.total <= place(problem, vram, MUCH, objective="hot-mass").time.total


def test_bytes_by_part_are_all_bytes_once() -> None:
    """Whatever goes to the GPU leaves RAM, but for a tied matrix that is needed in both."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        work = random_workload(rng)
        sizes = Sizes.of(work)
        found = place(Problem.of(work, machine()), sizes.all_on_gpu // 2, MUCH)
        both = {name: found.gpu_bytes[name] + found.ram_bytes[name] for name in found.gpu_bytes if name != "scratch"}
        twice = work.decoder.tied_head and found.assignment.embedding != found.assignment.head
        both["embedding"] -= sizes.parts.embedding if twice else 0
        assert sum(both.values()) + sizes.workspace[CPU] == sizes.everything


def changed(work: Workload, m: Machine) -> list[tuple[Workload, Machine, int, int, str]]:
    counts = work.counts.copy()
    counts[0, 0] -= 1
    cpu = m.cpu.model_copy(update={"bandwidth_gb_per_s": 40.1})
    return [
        (replace(work, counts=counts), m, 60_000, MUCH, "time"),
        (replace(work, tokens=1001), m, 60_000, MUCH, "time"),
        (replace(work, context=17), m, 60_000, MUCH, "time"),
        (replace(work, layers=(LayerWork(rung="dense"),) * 2), m, 60_000, MUCH, "time"),
        (replace(work, formats={**work.formats, "head": "q8"}), m, 60_000, MUCH, "time"),
        (work, m.model_copy(update={"cpu": cpu}), 60_000, MUCH, "time"),
        (work, m, 60_001, MUCH, "time"),
        (work, m, 60_000, MUCH - 1, "time"),
        (work, m, 60_000, MUCH, "hot-mass"),
    ]


def test_the_digest_knows_every_input_and_no_name() -> None:
    work, m = workload(np.random.default_rng(2).integers(1, 1000, (2, 256))), machine()
    digests = {place(Problem.of(w, x), v, r, objective=o).digest for w, x, v, r, o in changed(work, m)}
    own = place(Problem.of(work, m), 60_000, MUCH).digest
    assert len(digests | {own}) == len(changed(work, m)) + 1
    renamed = m.model_copy(update={"name": "other", "source": "elsewhere"})
    assert place(Problem.of(work, renamed), 60_000, MUCH).digest == own


def test_what_does_not_fit_says_what_would() -> None:
    work = workload(np.random.default_rng(2).integers(1, 1000, (3, 256)))
    sizes = Sizes.of(work)
    vram, ram = sizes.all_on_gpu // 4, (sizes.everything + sizes.workspace[CPU]) // 2
    with pytest.raises(DoesNotFitError) as caught:
        place(Problem.of(work, machine()), vram, ram)
    error = caught.value
    assert error.exit_code == 4
    assert str(sizes.everything) in str(error.expected)
    assert f"{vram} bytes of GPU memory and {ram} bytes of RAM" in str(error.found)
    more_ram, more_vram = (int(part.split()[0]) for part in str(error.remedy).split(" or "))
    place(Problem.of(work, machine()), vram, more_ram)
    place(Problem.of(work, machine()), more_vram, ram)


def test_without_a_gpu_everything_is_on_the_cpu() -> None:
    work, m = workload(np.full((2, 128), 5)), machine(gpu=None, link=None)
    found = place(Problem.of(work, m), MUCH, MUCH)
    assert (found.assignment.uses_gpu, sum(found.gpu_bytes.values())) == (False, 0)
    assert ladder(Problem.of(work, m)) == ()
    with pytest.raises(DoesNotFitError):
        ladder(Problem.of(work, m), ram=1000)


def test_least_neurons_pays_for_the_hand_over_exactly() -> None:
    m, nbytes = machine(sync_us=50.0), 3 * 8192
    least = least_neurons(m, nbytes)
    assert least is not None
    gain = nbytes / 40e9 - nbytes / 400e9
    assert least * gain >= 50e-6 > (least - 1) * gain
    slow = machine(gpu=Gpu(name="g", vram_gib=1.0, bandwidth_gb_per_s=30.0))
    assert least_neurons(slow, nbytes) is None
    assert least_neurons(machine(gpu=None, link=None), nbytes) is None


def test_the_ladder_rises_and_takes_further_budgets() -> None:
    work = workload(np.random.default_rng(3).integers(0, 1000, (3, 640)))
    found = ladder(Problem.of(work, machine()), [100_000])
    plans = [p.plan for p in found]
    budgets = [plan.vram_bytes for plan in plans]
    assert 100_000 in budgets
    assert budgets == sorted(set(budgets))
    assert plans[-1].cuts == (640, 640, 640)
    assert plans[-1].attention == ("gpu",) * 3
    assert all(plan.used_bytes <= plan.vram_bytes for plan in plans)
    with pytest.raises(DoesNotFitError, match="100 bytes hold no part"):
        ladder(Problem.of(work, machine()), [100])


@pytest.mark.parametrize("path", sorted(bundled_machines().glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_machines_are_read_and_written_alike(path: Path, tmp_path: Path) -> None:
    found = find_machine(path.stem, tmp_path)
    (tmp_path / "again.toml").write_text(found.to_toml())
    assert find_machine("again.toml", tmp_path) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 2\nname = 1", "name: Input should be a valid string"),
        (
            'version = 2\nname = "m"\nsource = "s"\n[cpu]\ncores = 2\nbandwith_gb_per_s = 3.0',
            "did you mean bandwidth_gb_per_s",
        ),
        ("not toml", "not a machine profile"),
    ],
)
def test_a_wrong_machine_profile_names_the_key(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(text)
    with pytest.raises(ProfileError, match=message) as caught:
        read_machine(tmp_path / "m.toml")
    assert caught.value.exit_code == 3


def test_an_unknown_machine_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="pc-high, pc-low") as caught:
        find_machine("pc-medium", tmp_path)
    assert caught.value.what == "pc-medium: no such machine profile"
    assert "then --machine pc-medium.toml (or" in caught.value.message(flag)


@pytest.mark.parametrize("name", ["a.txt", "folder/a", "folder"])
def test_the_remedy_for_an_unknown_machine_ends_in_toml_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProfileError) as caught:
        find_machine(name, tmp_path)
    assert caught.value.what == f"{name}: no such machine profile"
    assert f"pi-compile machine -o {Path(name).stem}.toml, " in caught.value.message(flag)
