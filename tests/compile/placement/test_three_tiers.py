"""Placement over GPU, RAM and disk against brute force over all divisions, and the rules around it."""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from support.divided_rows import divided
from support.placeable import MUCH, machine, random_machine, random_workload, workload

from pi_compile.cost_model import CPU, GPU, Workload, row_options
from pi_compile.cost_model.row_options import RowModel
from pi_compile.machine import Disk, Machine
from pi_compile.placement import three_tiers
from pi_compile.placement.formulation import Assignment, Problem
from pi_compile.placement.stage import RAM_LADDER, Placement, ladder, place, ram_ladder
from pi_compile.placement.three_tiers import ThreeTiers
from pi_compile.results import LayerWork
from pi_runtime.artifact.buffers import workspace_bytes
from pi_runtime.artifact.rows import PIECE_NBYTES
from pi_runtime.errors import DoesNotFitError

pytestmark = pytest.mark.usefixtures("no_process")

DISK = Disk(name="d", sizes_kib=[4, 64], depths=[1, 16], read_mb_per_s=[[40.0, 200.0], [400.0, 1000.0]])
SLOW = DISK.model_copy(update={"read_mb_per_s": [[1.0, 9.0], [7.0, 80.0]]})


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers as for a run in memory: those of readers are larger than these models."""
    monkeypatch.setattr(
        three_tiers,
        "disk_workspace_bytes",
        lambda d, rank, tokens, context, _cache: workspace_bytes(d, rank, tokens, context),
    )


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a third of a layer, with a GPU of a half, so that all divisions can be tried."""
    monkeypatch.setattr(row_options, "STEPS", 3)
    monkeypatch.setattr(row_options, "STEPS_WITH_GPU", 2)


def random_model(rng: np.random.Generator) -> Workload:
    """Any rungs and formats; so many neurons that staged rows are few beside them."""
    return random_workload(rng, groups=14)


def whole_experts(rng: np.random.Generator, **shape: int) -> Workload:
    """Three experts all of whose rows are needed, some more often than others."""
    routed = rng.integers(100, 900, (2, 3))
    layers = (LayerWork(rung="dense"),) * 2
    counts = np.repeat(routed, 300, axis=1)
    return workload(counts, layers, routed=routed, n_experts=3, experts_per_token=2, **shape)


def equal_layers(work: Workload) -> Workload:
    """The workload with the first layer's counts in every layer."""
    assert work.routed is not None
    counts, routed = (np.repeat(a[:1], len(a), axis=0) for a in (work.counts, work.routed))
    return replace(work, counts=counts, routed=routed)


@pytest.mark.parametrize("pinned", [0, 1, 2, 3])
def test_experts_that_are_there_are_computed_beside_reading_others(pinned: int) -> None:
    """Two of three experts are needed, each as often as another; rows are read at the rate of long reads."""
    work = whole_experts(np.random.default_rng(0), d_model=1024)
    work = replace(work, counts=np.full_like(work.counts, 600), routed=np.full((2, 3), 600))
    model, missed = RowModel(work=work, machine=alone()), (3 - pinned) / 3
    found = divided(model, 0, 300 * pinned, 0, first=False)
    disk = 0
    for row in model.row_nbytes:
        rows = min(300, PIECE_NBYTES // row)
        disk += int(missed * 540 * model.reads.row_ps(rows * row) / rows) + model.reads.latency_ps(rows * row) * (
            missed > 0
        )
    compute, one = found.cpu_ps, disk / (2 * missed) if missed else 0
    total = (1 - missed) ** 2 * compute
    total += 2 * missed * (1 - missed) * (max(one, compute / 2) + compute / 2)
    total += missed**2 * (2 * one + compute)
    assert found.cpu_ps + found.disk_ps == pytest.approx(total, rel=1e-3)
    assert found.read == pytest.approx(missed * 540 * sum(model.row_nbytes), rel=1e-3)


def with_disk(m: Machine, disk: Disk = DISK) -> Machine:
    return m.model_copy(update={"disk": disk})


def alone(disk: Disk = DISK) -> Machine:
    return with_disk(machine(gpu=None, link=None), disk)


def persisting(work: Workload, rng: np.random.Generator) -> Workload:
    """The workload with persistence between tokens that rises with the window."""
    active = work.counts.sum(1)
    shares = np.sort(rng.random((len(active), 4)), axis=1)
    persistence = np.concatenate([active[:, None], (active[:, None] * shares).astype(np.int64)], axis=1)
    return replace(work, persistence=persistence)


def tiers(problem: Problem, vram: int = 0) -> ThreeTiers:
    assert problem.rows is not None
    return ThreeTiers(problem, problem.rows, vram)


def all_options(model: RowModel, layer: int, *, gpu: bool) -> row_options.RowOptions:
    """The options of a layer, dominated ones too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_options, "_non_dominated", lambda options: np.arange(len(options.cuts)))
        return RowModel(work=model.work, machine=model.machine).options(layer, gpu=gpu)


def brute(problem: Problem, vram: int, ram: int) -> tuple[int, int, int] | None:
    """(picoseconds, GPU bytes, RAM) of the best placement with rows on disk, by trying all."""
    best = None
    for gpu in (False, True):
        t = tiers(problem, vram if gpu else 0)
        if gpu and not t.gpu:
            continue
        layers = problem.work.decoder.n_layers
        options = [all_options(t.model, n, gpu=gpu) for n in range(layers)]
        choices = [[(int(o.cuts[i]), o.choice(i)) for i in range(len(o.cuts))] for o in options]
        sides = (CPU, GPU) if gpu else (CPU,)
        for embedding, *on, head in itertools.product(sides, repeat=layers + 2):
            for chosen in itertools.product(*choices):
                cuts, rows = zip(*chosen, strict=True)
                a = Assignment(sides=tuple(on), cuts=cuts, embedding=embedding, head=head)
                used_ram, used_vram = (sum(part.values()) for part in t.used(a, rows, ram))
                if used_vram > (vram if a.uses_gpu else 0) or used_ram > ram:
                    continue
                key = (t.time(a, rows).total, used_vram, used_ram)
                best = key if best is None else min(best, key)
    return best


def key(p: Placement) -> tuple[int, int, int]:
    return p.time.total, sum(p.gpu_bytes.values()), sum(p.ram_bytes.values())


def in_memory(problem: Problem, vram: int, ram: int) -> tuple[int, int, int] | None:
    """The best placement in memory."""
    without = Problem.of(problem.work, problem.machine.model_copy(update={"disk": None}))
    try:
        return key(place(without, vram, ram))
    except DoesNotFitError:
        return None


@pytest.mark.usefixtures("few_steps")
def test_equals_brute_force_without_a_gpu() -> None:
    """Rungs, formats, persistence, disk and budget vary; every division of both layers' rows is tried."""
    rng = np.random.default_rng(0)
    from_disk = 0
    for case in range(20):
        work = persisting(random_model(rng), rng) if case % 3 else random_model(rng)
        work = whole_experts(rng) if case % 5 == 4 else work
        problem = Problem.of(work, alone(DISK if case % 2 else SLOW))
        t = tiers(problem)
        ram = t.resident + t.least_buffers + int(rng.integers(-1000, t.all_rows))
        expected = min((b for b in (brute(problem, 0, ram), in_memory(problem, 0, ram)) if b), default=None)
        if expected is None:
            with pytest.raises(DoesNotFitError):
                place(problem, 0, ram)
            continue
        found = place(problem, 0, ram)
        assert key(found) == expected, case
        from_disk += bool(found.rows)
    assert from_disk > 12


@pytest.mark.usefixtures("few_steps")
def test_equals_brute_force_on_a_grid_of_ram_and_gpu_budgets() -> None:
    rng = np.random.default_rng(1)
    from_disk = both = 0
    for case in range(4):
        work = persisting(random_model(rng), rng) if case < 3 else equal_layers(whole_experts(rng))
        problem = Problem.of(work, with_disk(random_machine(rng), DISK if case % 2 else SLOW))
        t = tiers(problem)
        least = t.resident + t.least_buffers
        for share_v, share_r in itertools.product((25, 70), (0, 40)):
            vram = problem.sizes.all_on_gpu * share_v // 100
            ram = least - 4000 + t.all_rows * share_r // 100
            expected = min((b for b in (brute(problem, vram, ram), in_memory(problem, vram, ram)) if b), default=None)
            if expected is None:
                with pytest.raises(DoesNotFitError):
                    place(problem, vram, ram)
                continue
            found = place(problem, vram, ram)
            assert key(found) == expected, (case, share_v, share_r)
            from_disk += bool(found.rows)
            both += bool(found.rows) and found.assignment.uses_gpu
    assert from_disk > 5
    assert both > 2


@cache
def larger(gpu: bool) -> Problem:
    """Four layers on all kinds of rungs, with a disk."""
    rng = np.random.default_rng(4)
    counts = (1000 * rng.random((4, 1024)) ** 4).astype(np.int64)
    layers = (
        LayerWork(rung="gate"),
        LayerWork(rung="predicted", rank=4, read_ppm=1_400_000),
        LayerWork(rung="predicted", rank=4, read_ppm=2_500_000),
        LayerWork(rung="dense"),
    )
    work = persisting(workload(counts, layers, d_model=256), rng)
    return Problem.of(work, with_disk(machine()) if gpu else alone())


def test_more_ram_is_never_slower() -> None:
    problem = larger(gpu=False)
    t = tiers(problem)
    least = t.resident + t.least_buffers
    budgets = np.linspace(least, least + t.all_rows * 3 // 2, 40).astype(int).tolist()
    found = [place(problem, 0, ram) for ram in budgets]
    times = [p.time.total for p in found]
    assert times == sorted(times, reverse=True)
    assert not found[-1].rows
    rates = [p.hit_rate for p in found]
    assert (rates[0], rates[-1]) < (0.2, 1.1)
    for p in found:
        assert sum(p.ram_bytes.values()) <= p.ram
        assert p.bound_ns is not None
        assert p.bound_ns <= p.time.ns


def test_more_of_either_memory_is_never_slower() -> None:
    problem = larger(gpu=True)
    t = tiers(problem)
    least, most = t.resident + t.least_buffers, problem.sizes.all_on_gpu
    times = np.array(
        [
            [place(problem, most * v // 100, least + t.all_rows * r // 100).time.total for r in (0, 50, 110)]
            for v in (0, 40, 100)
        ]
    )
    assert (np.diff(times, axis=0) <= 0).all()
    assert (np.diff(times, axis=1) <= 0).all()


def test_where_all_fits_nothing_changes() -> None:
    """A disk is no reason to place otherwise where there is room for everything."""
    problem = larger(gpu=True)
    without = Problem.of(problem.work, problem.machine.model_copy(update={"disk": None}))
    vram = problem.sizes.all_on_gpu // 2
    found, expected = place(problem, vram, MUCH), place(without, vram, MUCH)
    assert (found.assignment, found.time, found.rows) == (expected.assignment, expected.time, ())


def test_persistence_makes_caches_larger_and_tokens_faster() -> None:
    problem = larger(gpu=False)
    work = replace(problem.work, layers=(LayerWork(rung="predicted", rank=4),) * 4)
    t = tiers(problem)
    ram = t.resident + t.least_buffers + t.all_rows // 4
    active = work.counts.sum(1)[:, None]
    known = {
        share: Problem.of(
            replace(work, persistence=np.concatenate([active, *[active * share // 100] * 4], axis=1)), alone()
        )
        for share in (40, 90)
    }
    one, other = (place(known[share], 0, ram) for share in (40, 90))
    assert one.time.total > other.time.total
    assert sum(r.cached for r in one.rows) < sum(r.cached for r in other.rows)


def test_the_ladder_has_plans_for_budgets_of_ram() -> None:
    problem = larger(gpu=False)
    found = ram_ladder(problem, MUCH)
    assert len(found) == len(RAM_LADDER)
    plans = [p.row_plan for p in found]
    assert [plan.ram_bytes for plan in plans] == sorted(plan.ram_bytes for plan in plans)
    assert [plan.predicted_ns for plan in plans] == sorted((plan.predicted_ns for plan in plans), reverse=True)
    for p, plan in zip(found, plans, strict=True):
        assert plan.slot_bytes == sum(row.nbytes for row in p.rows)
        assert plan.first[1:] == (False, False, False)
    assert [p.digest for p in ladder(problem, ram=MUCH)] == [p.digest for p in found]


def test_what_cannot_fit_names_the_smallest_ram_that_does() -> None:
    for gpu in (False, True):
        problem = larger(gpu)
        vram = problem.sizes.all_on_gpu // 3 if gpu else 0
        with pytest.raises(DoesNotFitError) as found:
            place(problem, vram, 1000)
        least = int(str(found.value.remedy).split()[0])
        assert place(problem, vram, least).rows
        with pytest.raises(DoesNotFitError):
            place(problem, vram, least - 1)


def test_the_digest_covers_disk_and_persistence() -> None:
    problem = larger(gpu=False)
    t = tiers(problem)
    ram = t.resident + t.least_buffers + t.all_rows // 4
    work = problem.work
    assert work.persistence is not None
    others = [
        Problem.of(replace(work, persistence=work.persistence - 1), alone()),
        Problem.of(work, alone(SLOW)),
        Problem.of(replace(work, persistence=None), alone()),
    ]
    renamed = Problem.of(work, alone(DISK.model_copy(update={"name": "other"})))
    assert place(renamed, 0, ram).digest == place(problem, 0, ram).digest
    assert len({place(p, 0, ram).digest for p in (problem, *others)}) == 4


def test_experts_have_equally_many_pinned_rows() -> None:
    rng = np.random.default_rng(2)
    counts = (300 * rng.random((2, 4 * 320)) ** 3).astype(np.int64)
    routed = np.full((2, 4), 500)
    work = workload(counts, (LayerWork(rung="predicted", rank=4),) * 2, routed=routed, n_experts=4, experts_per_token=2)
    problem = Problem.of(work, alone())
    for p in ram_ladder(problem, MUCH):
        assert all(row.pinned % 4 == 0 for row in p.rows)
