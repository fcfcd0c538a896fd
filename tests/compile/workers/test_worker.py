"""Who counts as alive, where nothing but its signs of life tells."""

from pathlib import Path

import pytest

from pi_compile import files
from pi_compile.workers import PATIENCE, Worker
from pi_compile.workers import worker as worker_module

HEARTBEAT = 1000.0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock says; nobody shows a sign of life by it."""
    now = [0.0]
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: now[0])
    return now


def quiet_for(worker: Worker) -> bool:
    return worker.unchanged("other", 1, PATIENCE * HEARTBEAT)


def test_a_worker_that_was_stopped_does_not_take_the_others_for_ended(tmp_path: Path, now: list[float]) -> None:
    """While a machine or the file server stands still, nobody can show a sign of life."""
    with Worker(tmp_path, heartbeat=HEARTBEAT) as worker:
        assert not quiet_for(worker)
        now[0] += 0.9 * HEARTBEAT
        worker._show()
        assert not quiet_for(worker)
        now[0] += 100 * HEARTBEAT
        worker._show()
        assert not quiet_for(worker)


def test_who_looks_seldom_sees_a_silence_too(tmp_path: Path, now: list[float]) -> None:
    """It was busy, and showed itself all the time."""
    with Worker(tmp_path, heartbeat=HEARTBEAT) as worker:
        assert not quiet_for(worker)
        for _ in range(4):
            now[0] += HEARTBEAT
            worker._show()
        assert quiet_for(worker)


def test_a_silence_of_just_so_long_is_not_yet_too_long(tmp_path: Path, now: list[float]) -> None:
    seconds = 2 * HEARTBEAT
    with Worker(tmp_path, heartbeat=HEARTBEAT) as worker:
        assert not worker.unchanged("other", 1, seconds)
        for _ in range(3):  # the first of these shows nothing that was missed
            worker._show()
        now[0] += seconds
        assert not worker.unchanged("other", 1, seconds)
        worker._show()
        worker._show()
        now[0] += 1.0
        assert worker.unchanged("other", 1, seconds)


def test_a_worker_that_cannot_show_itself_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would count it as ended from the start, and two might hold the same thing."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "replace", full)
    with pytest.raises(OSError, match="No space"), Worker(tmp_path):
        pytest.fail("begins")
