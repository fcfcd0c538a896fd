"""The second process of a first run compiles kernels, and nothing that lies in the working folder."""

import subprocess
from pathlib import Path

import pytest

from pi_runtime.commands import warm_up


@pytest.mark.parametrize("name", ["numpy", "llvmlite", "numba", "pi_runtime", "gc"])
def test_nothing_is_imported_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'planted')!r}, 'w')\nraise ImportError\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warm_up, "_SECOND", f"import {name}")
    monkeypatch.setattr(warm_up.os, "cpu_count", lambda: 2)
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def kept(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", kept)
    with warm_up._second_compiler():
        assert started[0].wait(120) == 0
    assert not (tmp_path / "planted").exists()
