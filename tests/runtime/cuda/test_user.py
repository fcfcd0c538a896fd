"""`pi-run` on a GPU: its messages, its exit codes, and that it frees the GPU's memory."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.gpu_running import NEURONS, of_size
from support.paths import ROOT
from support.synthetic import random_artifact, small_decoder, stored_plan

from pi_runtime import console
from pi_runtime.artifact.reader import Artifact
from pi_runtime.commands.run import app
from pi_runtime.cuda import executor
from pi_runtime.cuda.decode.host_ops import HostOps
from pi_runtime.cuda.executor import CudaExecutor
from pi_runtime.cuda.memory import weights
from pi_runtime.cuda.memory.devices import Device, configure_libraries
from pi_runtime.cuda.memory.weights import PinnedStaging
from pi_runtime.execution import devices
from pi_runtime.execution.plan_choice import choose_plan

FREE = 1 << 20


LIMITS: list[int | None] = []
"""Limits of the GPU's memory in the order in which they were set; None where the limit was taken away."""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, gpu: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`pi-run` on a GPU of 1 MiB, with a model of which little is placed there."""
    LIMITS.clear()
    card = of_size(gpu, FREE, limit=lambda _self, nbytes: LIMITS.append(nbytes))
    monkeypatch.setattr(devices, "_gpus", lambda: 1)
    monkeypatch.setattr(devices, "gpu_driver", lambda: True)
    monkeypatch.setattr(devices, "gpu_kernels_are_cold", lambda: True)
    monkeypatch.setattr(executor, "Cuda", lambda _index: card)
    monkeypatch.setattr(executor, "measured_crossover", lambda *_: 10**6)
    plan = stored_plan((0, 64), 1 << 19, 1 << 18)
    path = random_artifact(tmp_path / "a.pi", small_decoder(d_ff=NEURONS), plans=(plan,))

    def go(*arguments: str) -> tuple[int, str, str]:
        code = console.run(app, [str(path), "-p", "abc", "-n", "2", "--ctx-size", "16", *arguments])
        return code, *capsys.readouterr()

    return go


def test_a_card_with_less_memory_free_than_the_budget(run: Run) -> None:
    code, out, err = run("--device", "cuda:0", "--vram-budget", "2GiB")
    assert (code, bool(out)) == (0, True)
    said = err.splitlines()
    assert "compiled once" in said[0]
    assert "has 1.0 MiB free, less than the budget of 2.0 GiB" in said[1]
    assert "Placement: time for 512.0 KiB" in said[2]
    assert LIMITS[-1] is None


def test_nothing_fits(run: Run) -> None:
    code, out, err = run("--device", "cuda:0", "--vram-budget", "2KiB")
    assert (code, out) == (4, "")
    assert "no stored placement fits the GPU budget with a context of 16 tokens\n  expected: at least" in err
    assert "try: --vram-budget" in err
    assert "--device cpu (without --vram-budget)" in err


def test_automatic_says_why_the_gpu_is_not_used(run: Run, gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "Cuda", lambda _index: of_size(gpu, 1000))
    code, _, err = run()
    assert code == 0
    assert "the GPU is not used" in err
    assert "1000 bytes, all that the GPU has free" in err


@pytest.mark.parametrize(
    ("place", "name"),
    [(PinnedStaging, "send"), (weights, "load"), (executor, "build_schedule"), (HostOps, "cold_sum")],
    ids=str,
)
def test_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch, place: object, name: str) -> None:
    def interrupt(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, name, interrupt)
    code, out, err = run("--device", "cuda:0")
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"
    assert LIMITS[-1] is None, "the GPU's memory is not freed"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            RuntimeError("CUDA error: unspecified launch failure\nmore"),
            "error: the GPU failed\n  found: CUDA error: unspe",
        ),
        (ValueError("a cold neuron broke"), "error: internal error: ValueError: a cold neuron broke"),
    ],
    ids=["gpu", "cpu"],
)
def test_a_fault_is_one_error(run: Run, monkeypatch: pytest.MonkeyPatch, fault: Exception, said: str) -> None:
    original, calls = HostOps.cold_sum, []

    def later(self: HostOps, layer: int) -> None:
        calls.append(layer)
        if len(calls) > 2:  # building the schedule has run it too
            raise fault
        original(self, layer)

    monkeypatch.setattr(HostOps, "cold_sum", later)
    code, _, err = run("--device", "cuda:0")
    assert code == 1
    assert said in err
    assert err.count("error: ") == said.count("error: ")
    assert "Traceback" not in err
    assert LIMITS[-1] is None


@pytest.mark.slow
def test_it_may_be_the_first_thing_that_a_process_does(tmp_path: Path, gpu: Device) -> None:
    """Kernels from the cache start no threads, so the executor has to."""
    plan = stored_plan((0, 0), 1, 1)
    path = random_artifact(tmp_path / "a.pi", small_decoder(), plans=(plan,))
    artifact = Artifact.open(path)
    CudaExecutor(artifact, "auto", 1, choose_plan(artifact, 16, 1 << 40), gpu).close()  # they are in the cache now
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from pi_runtime.artifact.reader import Artifact\n"
        "from pi_runtime.cuda.executor import CudaExecutor\n"
        "from pi_runtime.execution.plan_choice import choose_plan\n"
        "from support.gpu_interpreter import Interpreted\n"
        "artifact = Artifact.open(Path(sys.argv[1]))\n"
        "CudaExecutor(artifact, 'auto', 1, choose_plan(artifact, 16, 1 << 40), Interpreted()).close()"
    )
    roots = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(roots)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_users_own_settings_of_libraries_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    configure_libraries()
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] == "0"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:2:16:8"
