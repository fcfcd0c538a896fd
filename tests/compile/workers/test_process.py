"""Which process a worker is: known by its number and its start, where the system tells both."""

import os
import sys
from pathlib import Path

import pytest

from pi_compile.workers import worker
from pi_compile.workers.worker import lives_here, this_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of processes")


def test_this_process_lives() -> None:
    shown = this_process()
    assert shown["started"] > 0
    assert lives_here(shown) is True


def test_the_same_number_with_another_start_is_another_process() -> None:
    shown = this_process()
    assert lives_here(shown | {"started": shown["started"] + 1}) is False


def test_a_process_that_ended_does_not_live() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    shown = this_process() | {"pid": child}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.os, "getpid", lambda: child)
        shown["started"] = this_process()["started"]
    assert lives_here(shown) is False  # a zombie, whose parent has not asked
    os.waitpid(child, 0)
    assert lives_here(shown) is False


@pytest.mark.parametrize("unknown", [{"system": ""}, {"system": "another"}, {"started": 0}, {"pid": "1"}])
def test_what_cannot_be_told(unknown: dict[str, object]) -> None:
    assert lives_here(this_process() | unknown) is None


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `/proc` of this process alone."""
    for name in ("sys", str(os.getpid())):
        (tmp_path / name).symlink_to(f"/proc/{name}")
    (tmp_path / "self").symlink_to(str(os.getpid()))
    monkeypatch.setattr(worker, "PROC", tmp_path)
    return tmp_path


def test_a_process_of_another_user_may_be_hidden(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `hidepid` /proc does not show it, and a signal is refused."""

    def kill(pid: int, _signal: int) -> None:
        raise PermissionError if pid == 1 else ProcessLookupError

    monkeypatch.setattr(worker.os, "kill", kill)
    assert lives_here(this_process()) is True
    assert lives_here(this_process() | {"pid": 1}) is None
    assert lives_here(this_process() | {"pid": 2}) is False


def test_a_proc_of_another_container_tells_nothing(proc: Path) -> None:
    shown = this_process()
    (proc / "self").unlink()
    (proc / "self").symlink_to("1")
    assert this_process()["system"] == ""
    assert lives_here(shown) is None
