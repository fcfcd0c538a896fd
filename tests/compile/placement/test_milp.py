"""HiGHS solves either objective as one program, and agrees with the solvers that are exact by themselves."""

import json

import numpy as np
import pytest
from support.commands import assert_a_message
from support.paths import ROOT
from support.placeable import MUCH, machine, random_budgets, random_experts, random_machine, random_workload, workload

from pi_compile.cli.main import app
from pi_compile.placement.formulation import Problem, Sizes
from pi_compile.placement.solvers.mixed_integer_program import MixedIntegerProgram
from pi_compile.placement.stage import place
from pi_runtime import console
from pi_runtime.errors import DoesNotFitError, NotMetError

pytestmark = pytest.mark.usefixtures("no_process")


@pytest.mark.parametrize("seed", range(6))
def test_least_time_is_what_the_default_solver_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(6):
        work = random_workload(rng, layers=3, groups=4) if rng.integers(3) else random_experts(rng)
        m = random_machine(rng)
        vram, ram = random_budgets(rng, work)
        try:
            expected = place(Problem.of(work, m), vram, ram)
        except DoesNotFitError:
            with pytest.raises(DoesNotFitError):
                place(Problem.of(work, m), vram, ram, solver="highs")
            continue
        found = place(Problem.of(work, m), vram, ram, solver="highs")
        assert found.time.total == pytest.approx(expected.time.total, rel=1e-6, abs=1e3)
        assert found.gap == pytest.approx(0, abs=1e-6)
        assert found.bound_ns is not None
        assert found.bound_ns <= expected.time.ns
        assert sum(found.gpu_bytes.values()) <= vram
        assert sum(found.ram_bytes.values()) <= ram


@pytest.mark.parametrize("seed", range(3))
def test_most_hot_mass_is_what_the_knapsack_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for sync_us in (0.0, 0.3):
        work, m = workload(rng.integers(0, 1000, (3, 64 * 5 + 20))), machine(sync_us)
        vram = int(rng.integers(0, Sizes.of(work).all_on_gpu))
        expected = place(Problem.of(work, m), vram, MUCH, objective="hot-mass")
        found = place(Problem.of(work, m), vram, MUCH, objective="hot-mass", solver="highs")
        assert found.activations_on_gpu == pytest.approx(expected.activations_on_gpu, rel=1e-9)
        assert (found.assignment.sides, found.gap) == (expected.assignment.sides, pytest.approx(0, abs=1e-9))
        assert sum(found.gpu_bytes.values()) <= vram


def test_a_program_with_a_known_optimum_and_one_without_a_solution() -> None:
    program = MixedIntegerProgram(maximise=True)
    x = program.variables([5.0, 4.0, 3.0])
    program.row([(x, [2.0, 3.0, 1.0])], -np.inf, 5.0)
    answer = program.solve(10.0)
    assert answer is not None
    assert (answer.objective, answer.gap) == (pytest.approx(9.0), pytest.approx(0.0))
    assert answer.values.round().tolist() == [1, 1, 0]
    program.row([(x, 1.0)], 4.0, np.inf)
    assert program.solve(10.0) is None


def test_too_little_time_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_time(self: MixedIntegerProgram, *_: float) -> None:
        raise TimeoutError("Time limit reached")

    monkeypatch.setattr(MixedIntegerProgram, "solve", out_of_time)
    work = workload(np.random.default_rng(1).integers(0, 1000, (2, 640)))
    with pytest.raises(NotMetError, match=r"no placement in 0\.5 s") as error:
        place(Problem.of(work, machine()), Sizes.of(work).all_on_gpu, MUCH, solver="highs", seconds=0.5)
    assert_a_message(f"error: {error.value}")


@pytest.mark.parametrize(
    ("flags", "said"),
    [(("--solver", "best"), "exact, highs, greedy"), (("--solver", "highs", "--locked"), "whose ties are by rule")],
    ids=["unknown", "lock"],
)
def test_flags_that_cannot_be(flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(app, ["place", str(ROOT / "recipes" / "demo.toml"), *flags]) == 2
    assert said in capsys.readouterr().err


def test_the_command_proves_a_locked_placement(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(app, ["place", str(ROOT / "recipes" / "demo.toml"), "--solver", "highs", "--json"]) == 0
    by_highs = capsys.readouterr().out
    assert console.run(app, ["place", str(ROOT / "recipes" / "demo.toml"), "--json"]) == 0
    exact = capsys.readouterr().out
    for found, expected in zip(json.loads(by_highs)["plans"], json.loads(exact)["plans"], strict=True):
        assert found["predicted_tokens_per_s"] == pytest.approx(expected["predicted_tokens_per_s"], rel=1e-6)
        assert found["gap"] == pytest.approx(0, abs=1e-6)
