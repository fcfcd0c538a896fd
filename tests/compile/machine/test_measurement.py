"""`pi-compile machine`: the profile it writes is one that placing reads."""

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from pi_compile.cli.main import app
from pi_compile.machine import measurement
from pi_compile.machine.measurement import DEPTHS, SIZES_KIB, probe_disk
from pi_compile.machine.profile import Disk, read_machine
from pi_runtime import console
from pi_runtime.artifact.formats import FORMATS, ROW_FORMATS

Fails = Callable[..., str]
DISK = Disk(name="d", sizes_kib=[4, 64], depths=[1, 16], read_mb_per_s=[[40.0, 200.0], [400.0, 1000.0]])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {
        "f32": 8e9,
        "f16": 7e9,
        "bf16": 6.06e9,
        "q8": 5e9,
        "q4": 4e9,
        "q5": 3e9,
        "q6": 3.5e9,
        "q4_1": 2e9,
        "q4z": 2e9,
        "q5_1": 2e9,
    }
    monkeypatch.setattr(measurement, "most_threads", lambda: 6)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(12), raising=False)
    monkeypatch.setattr(measurement, "read_bandwidth", lambda _nbytes, threads: 20e9 - (threads - 4) ** 2 * 1e9)
    monkeypatch.setattr(measurement, "timed_matrix", lambda fmt, _nbytes, *_columns: fmt)
    probes = {"product": 1, "neuron": 0.8, "gather": 0.5, "predictor": 0.4}
    for name, share in probes.items():
        probe = partial(lambda share, fmt, threads: rates[fmt] * threads * share, share)
        monkeypatch.setattr(measurement, f"{name}_bandwidth", probe)
    monkeypatch.setattr(measurement, "product_flops", lambda _fmt, threads: threads * 10e9)
    monkeypatch.setattr(measurement, "neuron_flops", lambda _fmt, threads: threads * 7e9)
    monkeypatch.setattr(measurement, "attention_bandwidth", lambda threads: threads * 6e9)
    monkeypatch.setattr(measurement, "launch_seconds", lambda fmt, threads: threads * (1e-6 if fmt != "f32" else 1))
    monkeypatch.setattr(measurement, "_gpu", lambda: (None, None, ""))
    monkeypatch.setattr(measurement, "probe_disk", lambda _folder, _nbytes: DISK)


def test_everything_is_measured_at_the_best_number_of_threads() -> None:
    """The best number of threads is not the largest: memory is often read fastest by fewer threads than there are."""
    found = measurement.measure_machine(Path())
    assert (found.cpu.cores, found.cpu.bandwidth_gb_per_s, found.cpu.launch_us) == (12, 20.0, 4.0)
    assert found.cpu.products_gflop_per_s == 40.0
    assert set(found.cpu.format_gflop_per_s.values()) == {40.0}
    assert set(found.cpu.neurons_gflop_per_s.values()) == {28.0}
    assert found.cpu.format_gb_per_s == {
        "f32": 32.0,
        "f16": 28.0,
        "bf16": 24.2,
        "q8": 20.0,
        "q4": 16.0,
        "q5": 12.0,
        "q6": 14.0,
        "q4_1": 8.0,
        "q4z": 8.0,
        "q5_1": 8.0,
    }
    assert found.cpu.neurons_gb_per_s == {
        "f32": 25.6,
        "f16": 22.4,
        "bf16": 19.4,
        "q8": 16.0,
        "q4": 12.8,
        "q5": 9.6,
        "q6": 11.2,
        "q4_1": 6.4,
        "q4z": 6.4,
        "q5_1": 6.4,
    }
    assert found.cpu.predictor_gb_per_s == {
        "f32": 12.8,
        "f16": 11.2,
        "bf16": 9.7,
        "q8": 8.0,
        "q4": 6.4,
        "q5": 4.8,
        "q6": 5.6,
        "q4_1": 3.2,
        "q4z": 3.2,
        "q5_1": 3.2,
    }
    assert found.cpu.attention_gb_per_s == 24.0
    assert found.cpu.gather_gb_per_s == {
        "f32": 16.0,
        "f16": 14.0,
        "bf16": 12.1,
        "q8": 10.0,
        "q4": 8.0,
        "q5": 6.0,
        "q6": 7.0,
        "q4_1": 4.0,
        "q4z": 4.0,
        "q5_1": 4.0,
    }
    assert "GB/s by threads 1: 11.0, 2: 16.0, 4: 20.0, 6: 16.0; products on 4 threads" in found.source
    assert found.cpu.ram_gib > 0.1


def test_a_brief_measurement_is_of_few_bytes_and_of_formats_that_have_a_speed_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(measurement, "timed_matrix", lambda fmt, nbytes, *_columns: sizes.append(nbytes) or fmt)
    monkeypatch.setattr(measurement, "probe_disk", lambda _folder, nbytes: sizes.append(nbytes) or DISK)
    found = measurement.measure_machine(Path(), briefly=True)
    assert [*found.cpu.gather_gb_per_s] == [fmt for fmt in ROW_FORMATS if not FORMATS[fmt].timed_as]
    assert max(sizes) <= 1 << 27
    whole = measurement.measure_machine(Path())
    assert max(sizes) == 1 << 30
    assert found.cpu.gather_gb_per_s.items() < whole.cpu.gather_gb_per_s.items()


def test_the_method_and_the_day_stand_in_the_file() -> None:
    assert re.match(r"measured 20\d\d-\d\d-\d\d by pi-compile machine", measurement.measure_machine(Path()).source)


def test_the_command_writes_and_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    assert console.run(app, ["machine", "-o", str(path)]) == 0
    assert capsys.readouterr().out == path.read_text()
    assert console.run(app, ["machine", "-o", str(path), "--json"]) == 0
    written = read_machine(path)
    assert json.loads(capsys.readouterr().out) == written.model_dump()
    assert written == measurement.measure_machine(Path())
    assert (written.version, [*written.cpu.gather_gb_per_s]) == (2, [*ROW_FORMATS])


def test_the_disk_is_that_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the one that the profile is written to."""
    asked: list[Path] = []
    monkeypatch.setattr(measurement, "probe_disk", lambda folder, _nbytes: asked.append(folder) or DISK)
    (tmp_path / "models").mkdir()
    assert console.run(app, ["machine", "-o", str(tmp_path / "mine.toml")]) == 0
    assert console.run(app, ["machine", "-o", str(tmp_path / "mine.toml"), "--disk", str(tmp_path / "models")]) == 0
    assert asked == [tmp_path, tmp_path / "models"]


def test_a_disk_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "read_bandwidth", None)
    command = ("machine", "-o", tmp_path / "mine.toml", "--disk")
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        assert f"--disk {tmp_path / name}: no such folder" in fails(2, *command, tmp_path / name)
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK or path == tmp_path)
    assert "no permission to write there" in fails(2, *command, tmp_path / "closed")


@pytest.mark.parametrize(
    ("free", "probed", "reason"),
    [(1 << 28, DISK, "256.0 MiB free; 512.0 MiB are needed"), (1 << 40, None, "its file system refuses reads past")],
    ids=["small", "refused"],
)
def test_a_disk_that_cannot_be_measured_is_said(
    tmp_path: Path,
    fails: Fails,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    probed: Disk | None,
    reason: str,
) -> None:
    """And where it was asked for, it is an error."""
    monkeypatch.setattr(measurement.shutil, "disk_usage", lambda _folder: SimpleNamespace(free=free))
    monkeypatch.setattr(measurement, "probe_disk", lambda _folder, _nbytes: probed)
    path = tmp_path / "mine.toml"
    assert console.run(app, ["machine", "-o", str(path)]) == 0
    assert f"{tmp_path}: the profile has no disk: {reason}" in capsys.readouterr().err
    found = read_machine(path)
    assert found.disk is None
    assert "Disk" not in found.source
    assert reason not in found.source
    monkeypatch.setattr(measurement, "read_bandwidth", None)
    message = fails(2, "machine", "-o", path, "--disk", tmp_path)
    assert f"--disk {tmp_path}: cannot be measured\n  found: {reason}" in message


@pytest.mark.parametrize("nbytes", [1 << 24, (1 << 24) + (1 << 22) - 1], ids=["whole", "odd"])
def test_a_disk_is_measured_by_the_reader_of_a_run(tmp_path: Path, nbytes: int) -> None:
    found = probe_disk(tmp_path, nbytes, 0.01)
    if found is None:
        pytest.skip("the file system refuses reads past the page cache")
    assert (found.sizes_kib, found.depths) == ([*SIZES_KIB], [*DEPTHS])
    assert all(rate > 0 for rates in found.read_mb_per_s for rate in rates)
    assert list(tmp_path.iterdir()) == []
