"""`pi-compile machine`: the profile it writes is one that placing reads."""

import json
from pathlib import Path

import pytest

from pi_compile import machine
from pi_compile.cli import app
from pi_compile.machine_file import read_machine
from pi_runtime import console


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_bandwidth", lambda _nbytes, threads: 10e9 + threads * 1e9)


def test_the_best_rate_over_thread_counts_is_kept() -> None:
    found = machine.measure_machine()
    assert found.cpu.bandwidth_gb_per_s == 10.0 + found.cpu.cores
    assert f"{found.cpu.cores}: {10.0 + found.cpu.cores}" in found.source
    assert found.cpu.ram_gib > 0.1


def test_the_command_writes_and_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    assert console.run(app, ["machine", "-o", str(path)]) == 0
    assert capsys.readouterr().out == path.read_text()
    assert console.run(app, ["machine", "-o", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == read_machine(path).model_dump()
