"""The first run on a GPU, tried whole on a tiny model, and what makes it stop."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.gpu_bench.measured import BEGIN, END, written_into
from support.paths import BENCHMARKS, ROOT

COMMAND = [sys.executable, str(BENCHMARKS / "gpu_first_run.py"), "--device", "cpu", "--tiny", "--out"]


@pytest.mark.slow
def test_all_steps_and_tables(tmp_path: Path, long: bool) -> None:
    if not long:
        pytest.skip("only with --long: it runs tests and the bench")
    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, check=False)
    # Under the interpreter no speed is as predicted.
    assert done.stderr.endswith("targets are missed\n"), done.stderr
    found = json.loads((tmp_path / "first_run.json").read_text())
    assert list(found) == ["machine", "tests", "memory", "batches", "timeline", "plan", "bench"]
    assert [row["together"] for row in found["batches"]["rows"]] == list(range(1, 9))
    assert {event["tid"] for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]} >= {"GPU"}
    assert {row["mode"] for row in found["plan"]["rows"]} == {"auto", "gate", "dense"}
    assert all(row["planned"] > 0 for row in found["plan"]["rows"])
    assert "ours, gate" in {row["what"] for row in found["bench"]["rows"]}
    text = (tmp_path / "measured.md").read_text()
    assert all(f"| {together} |" in text for together in range(1, 9))


@pytest.mark.slow
def test_it_stops_at_the_first_thing_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "pytest.py").write_text("raise SystemExit('1 failed')\n")
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"}
    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("WRONG: a test of the GPU tier failed"), done.stderr
    assert list(json.loads((tmp_path / "first_run.json").read_text())) == ["machine"]


def test_tables_take_the_place_of_older_ones() -> None:
    page = (ROOT / "docs/explanation/gpu.md").read_text(encoding="utf-8")
    once = written_into(page, "one\n")
    twice = written_into(once, "two\n")
    assert f"{BEGIN}\ntwo\n{END}" in twice
    assert "one\n<!--" not in twice
    assert len(page.partition(END)[2]) == len(twice.partition(END)[2])
