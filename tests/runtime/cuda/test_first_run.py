"""The first run on a GPU, tried whole on a tiny model, and what makes it stop."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.gpu_bench.measured import BEGIN, END, written_into
from support.paths import BENCHMARKS, ROOT

COMMAND = [sys.executable, str(BENCHMARKS / "gpu_first_run.py"), "--tiny", "--out"]


def run(folder: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, errors, and what was found."""
    done = subprocess.run([*COMMAND, str(folder), *options], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr, json.loads((folder / "first_run.json").read_text())


@pytest.mark.slow
def test_all_steps_and_tables(tmp_path: Path, long: bool) -> None:
    """Under the interpreter, or where kernels are compiled on the emulator; neither is as fast as predicted."""
    if not long:
        pytest.skip("only with --long: it runs tests and the bench")
    where = ["--device", "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "emulator"]
    code, errors, found = run(tmp_path, *where)
    assert code == 2, errors
    steps = ["machine", "tests", "memory", "batches", "timeline", "plan"]
    assert list(found) == steps, errors  # a target is missed there
    assert errors.rstrip().splitlines()[-1].startswith("TARGET MISSED in plan: ")
    code, errors, found = run(tmp_path, *where, "--go-on", "--steps", "machine", "tests", "bench_f16")
    assert (code, list(found)) == (2, [*steps, "bench_f16"]), errors
    assert [row["together"] for row in found["batches"]["rows"]] == list(range(1, 9))
    assert {event["tid"] for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]} >= {"GPU"}
    assert {row["mode"] for row in found["plan"]["rows"]} == {"auto", "gate", "dense"}
    assert all(row["planned"] > 0 for row in found["plan"]["rows"])
    assert {row["what"] for row in found["bench_f16"]["rows"]} >= {"ours", "ours, gate", "ours, dense"}
    text = (tmp_path / "measured.md").read_text()
    assert all(f"| {together} |" in text for together in range(1, 9))
    assert "| nothing on the GPU | ours |" in text


@pytest.mark.slow
def test_it_stops_at_the_first_thing_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "pytest.py").write_text("raise SystemExit('1 failed')\n")
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"}
    command = [*COMMAND, str(tmp_path), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("WRONG: a test of the GPU tier failed"), done.stderr
    assert list(json.loads((tmp_path / "first_run.json").read_text())) == ["machine"]
    assert "Measured on Triton's interpreter" in (tmp_path / "measured.md").read_text()


def test_tables_take_the_place_of_older_ones() -> None:
    page = (ROOT / "docs/explanation/gpu.md").read_text(encoding="utf-8")
    once = written_into(page, "one\n")
    twice = written_into(once, "two\n")
    assert f"{BEGIN}\ntwo\n{END}" in twice
    assert "one\n<!--" not in twice
    assert len(page.partition(END)[2]) == len(twice.partition(END)[2])
