"""Files on a network file system: a stale handle is tried again, and a server that is gone is an error."""

import errno
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi_compile import files
from pi_compile.errors import ProfileError
from pi_compile.files import check_arrays, read_arrays, write_arrays, write_text
from pi_compile.workers import StageDoneError, Worker, WorkFolder
from pi_runtime.errors import UsageError
from pi_runtime.errors.exit_codes import code_and_message
from pi_runtime.files import Replacement

Stale = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, none of which takes time."""
    made: list[float] = []
    monkeypatch.setattr(files.time, "sleep", made.append)
    return made


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> Stale:
    """Lets an operation find a stale handle so many times; returns the paths that it was called with."""

    def begin(kind: type, name: str, times: int) -> list[str]:
        operation, calls = getattr(kind, name), []

        def called(self: Any, *args: Any, **options: Any) -> Any:
            path = str(getattr(self, "target", self))
            calls.append(path)
            if len(calls) <= times:
                raise OSError(errno.ESTALE, "Stale file handle", path)
            return operation(self, *args, **options)

        monkeypatch.setattr(kind, name, called)
        return calls

    return begin


@pytest.mark.parametrize("name", ["iterdir", "open", "exists", "unlink", "read_text", "write_text", "replace"])
def test_one_stale_handle_costs_a_worker_nothing(tmp_path: Path, stale: Stale, name: str) -> None:
    folder, made = tmp_path / "work", []
    folder.mkdir()
    (folder / "a.claim-0").write_text("gone-1-0")
    calls = stale(Path, name, 1)
    with Worker(tmp_path / "workers") as worker:
        WorkFolder(folder, worker).run({"a": lambda: made.append("a") or (folder / "a").touch()})
        done = folder / "a"
        with pytest.raises(StageDoneError), WorkFolder(folder, worker, done.exists).held("run"):
            pass
        with WorkFolder(folder, worker).held("run"):
            pass
    assert made == ["a"]
    assert len(calls) > 1
    assert sorted(path.name for path in folder.iterdir()) == ["a", "a.claim-0"]
    assert list((tmp_path / "workers").iterdir()) == []


def test_a_live_worker_is_not_taken_for_ended(tmp_path: Path, stale: Stale) -> None:
    with Worker(tmp_path / "workers") as worker, Worker(tmp_path / "workers") as other:
        stale(Path, "read_text", 1)
        assert worker.lives(other.name)


def test_a_claim_without_its_text_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def opened(path: Path, *_args: Any, **_options: Any) -> Full:
        path.touch()
        return Full()

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(OSError, match="No space"):
        files.make(tmp_path / "a.claim-0", "me")
    assert list(tmp_path.iterdir()) == []


def test_arrays_and_texts_are_read_and_written_again(tmp_path: Path, stale: Stale) -> None:
    path = tmp_path / "a.npz"
    stale(Replacement, "publish", 1)
    write_arrays(path, {"x": np.arange(3)})
    stale(Replacement, "publish", 1)
    write_text(tmp_path / "a.json", "{}")
    stale(Path, "open", 1)
    assert read_arrays(path)["x"].tolist() == [0, 1, 2]
    check_arrays(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.npz"]


def test_a_server_that_is_gone_is_an_error_after_some_tries(tmp_path: Path, stale: Stale, pauses: list[float]) -> None:
    calls = stale(Path, "iterdir", 1000)
    with pytest.raises(OSError, match="Stale file handle") as found:
        files.names_in(tmp_path)
    assert len(calls) == len(files.PAUSES) + 1
    assert pauses == list(files.PAUSES)
    code, message = code_and_message(found.value)
    assert code == UsageError.exit_code
    assert message.startswith(f"error: {tmp_path}: Stale file handle\n  try: see whether the file server answers")


def test_a_stale_file_is_not_called_damaged(tmp_path: Path, stale: Stale) -> None:
    """A task that meets it is tried again; a damaged file would end all workers."""
    write_arrays(tmp_path / "a.npz", {"x": np.arange(3)})
    stale(Path, "open", 1000)
    with pytest.raises(OSError, match="Stale file handle"):
        read_arrays(tmp_path / "a.npz")


def test_other_errors_are_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    def refuse(_path: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(PermissionError):
        files.names_in(tmp_path)
    (tmp_path / "a.npz").write_bytes(b"PK damaged")
    with pytest.raises(ProfileError):
        read_arrays(tmp_path / "a.npz")
    assert pauses == []
