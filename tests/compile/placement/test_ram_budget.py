"""A budget of RAM means the same where it is solved for and where it is run within."""

from pathlib import Path

import numpy as np
import pytest
from support.placeable import MUCH, machine, workload
from support.synthetic import random_artifact

from pi_compile.machine import Disk
from pi_compile.placement.formulation import Problem, all_cpu
from pi_compile.placement.stage import place, ram_ladder
from pi_compile.placement.three_tiers import ThreeTiers
from pi_compile.results import LayerWork
from pi_runtime.artifact import rows
from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import PROCESS_NBYTES, slot_nbytes
from pi_runtime.artifact.schema import RowPlan
from pi_runtime.disk.ram_plan import fixed_bytes, plan_for, sequence_kv_bytes
from pi_runtime.errors import DoesNotFitError
from pi_runtime.execution.plan_choice import choose_plan
from pi_runtime.execution.ram_budget import own_kv_bytes, ram_fixed_bytes

CONTEXT = 64
DISK = Disk(name="d", sizes_kib=[4, 64], depths=[1, 16], read_mb_per_s=[[40.0, 200.0], [400.0, 1000.0]])
PREDICTED, GATE, DENSE = LayerWork(rung="predicted", rank=4), LayerWork(rung="gate"), LayerWork(rung="dense")


def division(plan: RowPlan) -> tuple[object, ...]:
    return plan.pinned, plan.cached, plan.first


@pytest.mark.parametrize(
    ("name", "experts", "layers"),
    [
        ("f16", 1, (PREDICTED, GATE)),
        ("f32", 1, (PREDICTED, PREDICTED)),
        ("q8", 4, (GATE, PREDICTED)),
        ("f16", 4, (DENSE, DENSE)),
    ],
)
def test_a_plan_is_chosen_at_the_budget_that_it_was_solved_for(
    tmp_path: Path, name: str, experts: int, layers: tuple[LayerWork, ...]
) -> None:
    counts = (1000 * np.random.default_rng(0).random((2, 16384)) ** 4).astype(np.int64)
    shape = {"n_experts": experts, "experts_per_token": min(experts, 2), "d_model": 256}
    routed = None if experts == 1 else np.full((2, experts), 500)
    formats = dict.fromkeys(("embedding", "attention", "ffn", "head", "predictor"), name)
    work = workload(counts, layers, context=CONTEXT, formats=formats, routed=routed, **shape)
    placements = ram_ladder(Problem.of(work, machine(gpu=None, link=None, disk=DISK)), MUCH)
    plans = tuple(p.row_plan for p in placements)
    assert sum(plan.slot_bytes > 0 for plan in plans) >= 2
    ranks = [layer.rank for layer in layers]
    path = random_artifact(tmp_path / "a.pi", work.decoder, format=name, ranks=ranks, profiled=True, row_plans=plans)
    with Artifact.open(path) as artifact:
        m = artifact.manifest
        fixed = fixed_bytes(m, CONTEXT, "auto", sequence_kv_bytes(m, CONTEXT, "auto"))
        for plan in plans:
            taken = plan_for(artifact, "auto", plan.ram_bytes, fixed).stored
            assert taken is not None
            assert division(taken) == division(plan)
            if layers == (DENSE, DENSE):  # whole experts
                assert all(pinned % work.decoder.d_ff == 0 for pinned in plan.pinned)
        with pytest.raises(DoesNotFitError):
            plan_for(artifact, "auto", plans[0].ram_bytes - 4096, fixed)


@pytest.mark.parametrize(("family", "experts", "name"), [("llama", 1, "q8"), ("opt", 1, "f16"), ("llama", 4, "f16")])
def test_a_plan_for_both_budgets_runs_within_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, experts: int, name: str
) -> None:
    """Bytes are the same to the byte; readers' buffers, which are larger than this model, are small."""
    monkeypatch.setattr(rows, "WORKERS", 2)
    counts = (1000 * np.random.default_rng(0).random((2, 16384)) ** 4).astype(np.int64)
    shape = {"n_experts": experts, "experts_per_token": min(experts, 2), "d_model": 256, "family": family}
    routed = None if experts == 1 else np.full((2, experts), 500)
    formats = dict.fromkeys(("embedding", "attention", "ffn", "head", "predictor"), name)
    layers = (GATE, PREDICTED) if family == "llama" else (PREDICTED, PREDICTED)
    work = workload(counts, layers, context=CONTEXT, formats=formats, routed=routed, **shape)
    problem = Problem.of(work, machine(disk=DISK))
    vram = problem.sizes.workspace[1] + (problem.sizes.all_on_gpu - problem.sizes.workspace[1]) // 5
    cold = ThreeTiers(problem, problem.rows, vram)
    ram = PROCESS_NBYTES + cold.resident + cold.least_buffers + cold.all_rows // 12
    found = place(problem, vram, ram)
    assert found.rows
    assert any(found.assignment.cuts)
    ranks = [layer.rank for layer in layers]
    path = random_artifact(tmp_path / "a.pi", work.decoder, format=name, ranks=ranks, profiled=True, plans=[found.plan])
    with Artifact.open(path) as artifact:
        m = artifact.manifest
        taken = choose_plan(artifact, CONTEXT, vram)
        assert taken.total <= vram
        assert taken.weights + taken.cache <= sum(found.gpu_bytes.values())
        fixed = ram_fixed_bytes(m, taken, "auto", own_kv_bytes(m, taken, "auto"))
        stored = sum(n for part, n in found.ram_bytes.items() if part != "scratch")
        rank = max(layer.rank or 0 for layer in layers)
        workspace = rows.disk_workspace_bytes(work.decoder, rank, BLOCK_TOKENS, CONTEXT, "f16")
        assert fixed == PROCESS_NBYTES + stored - sum(row.nbytes for row in found.rows) + workspace
        division = plan_for(artifact, "auto", ram, fixed, taken.plan)
        assert division.stored == found.plan.rows
        assert [s.pinned for s in division.rest_L] == [row.pinned for row in found.rows]
        kept = sum(division.slots(array) * nbytes for array, nbytes in slot_nbytes(work.decoder, name).items())
        assert fixed + kept <= ram
        least = fixed + sum(row.nbytes for row in found.rows)
        assert plan_for(artifact, "auto", least - 4096, fixed, taken.plan).stored is None


def test_the_process_counts() -> None:
    work = workload(np.full((2, 128), 5))
    problem = Problem.of(work, machine(gpu=None, link=None))
    _, everything = problem.used(all_cpu(2))
    found = place(problem, 0, everything + PROCESS_NBYTES)
    assert sum(found.ram_by_part.values()) == found.ram
    assert found.ram_by_part.keys() == found.gpu_by_part.keys()
    with pytest.raises(DoesNotFitError):
        place(problem, 0, everything + PROCESS_NBYTES - 1)
