"""What `pi-compile status` says of a build, from the files of its workers alone."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.documents import assert_as_documented

pytest.importorskip("torch")

from pi_compile.cli.main import app
from pi_compile.cli.rendering import status_text
from pi_compile.errors import TaskFailedError
from pi_compile.pipeline.status import build_status
from pi_compile.workers import Rank, Worker, WorkFolder
from pi_runtime import console

Fails = Callable[..., str]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    from pi_compile.recipe import default_recipe

    (tmp_path / "a.toml").write_text(default_recipe("model").to_toml())
    folder = tmp_path / ".pi-build" / "a"
    folder.mkdir(parents=True)
    return folder


def test_before_a_build(store: Path, tmp_path: Path) -> None:
    found = build_status(tmp_path / "a.toml")
    assert set(found["stages"].values()) == {"waiting"}
    assert (found["done"], found["eta_seconds"], found["workers"], found["failed"]) == (None, None, [], [])
    assert status_text(found) == "stages  corpus waiting, profile waiting, train waiting, pack waiting"


def test_a_worker_at_its_task(store: Path, tmp_path: Path) -> None:
    (store / "corpus-1.npz").touch()
    work = store / "profile-2.work"
    work.mkdir()
    with Worker(store / "workers", Rank(3, 8, launcher="slurm")) as worker:
        worker.at(stage="profile", task="layers-0-shard-7.npz")
        worker.progress(10, 40)
        worker.progress(20, 40)
        worker._show()
        found = build_status(tmp_path / "a.toml")
    assert_as_documented("status", found)
    assert found["stages"] == {"corpus": "done", "profile": "begun", "train": "waiting", "pack": "waiting"}
    assert found["done"] == 0.5
    assert found["eta_seconds"] >= 0
    (row,) = found["workers"]
    assert (row["rank"], row["launcher"], row["stage"], row["task"]) == (3, "slurm", "profile", "layers-0-shard-7.npz")
    assert 0 <= row["silent_seconds"] < 60
    text = status_text(found)
    assert "this stage  50% done, about " in text
    assert "layers-0-shard-7.npz" in text


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_build_is_watched_to_its_end(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    made = iter(("corpus-1.npz", "profile-1.npz", "train-1.npz", "packed-1.json"))
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        (store / next(made)).touch()

    monkeypatch.setattr(time, "sleep", sleep)
    assert console.run(app, ["status", str(tmp_path / "a.toml"), "--watch", "7"]) == 0
    assert waited == [7.0] * 4
    out = capsys.readouterr().out
    assert out.count("\x1b[2J") == (4 if is_terminal else 0)
    assert [told.count("done") for told in out.split("stages")[1:]] == [0, 1, 2, 3, 4]


def test_a_worker_that_is_gone(store: Path, tmp_path: Path) -> None:
    worker = Worker(store / "workers")
    worker._show()
    path = next((store / "workers").glob("*.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": 2**22 + 1}))
    found = build_status(tmp_path / "a.toml")
    assert found["workers"][0]["silent_seconds"] is None
    assert "ended" in status_text(found)


def show(store: Path, name: str, silent: float = 0, **changes: object) -> None:
    """Write what a worker of another machine showed some seconds ago."""
    worker = Worker(store / "workers", heartbeat=10.0)
    worker.name = name
    worker._show()
    path = store / "workers" / f"{name}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"system": "another"} | changes))
    then = path.stat().st_mtime - silent
    os.utime(path, (then, then))


def test_what_a_worker_of_another_machine_knew_when_it_ended_does_not_count(store: Path, tmp_path: Path) -> None:
    show(store, "ended", silent=60, stage="profile", total=10, done=9, stage_seconds=1.0)
    assert build_status(tmp_path / "a.toml")["done"] is None
    show(store, "alive", silent=10, stage="profile", total=10, done=2, stage_seconds=1.0)
    found = build_status(tmp_path / "a.toml")
    assert (found["done"], found["eta_seconds"]) == (0.2, 4.0)
    assert len(found["workers"]) == 2


def test_workers_of_two_stages_are_not_mixed(store: Path, tmp_path: Path) -> None:
    show(store, "first", stage="profile", total=10, done=9, stage_seconds=1.0)
    show(store, "second", stage="train", total=10, done=5, stage_seconds=5.0)
    found = build_status(tmp_path / "a.toml")
    assert (found["done"], found["eta_seconds"]) == (0.5, 5.0)


def test_a_failed_task_is_named_with_its_log(store: Path, tmp_path: Path) -> None:
    work = store / "profile-2.work"
    work.mkdir()
    with Worker(store / "workers") as worker, pytest.raises(TaskFailedError):
        WorkFolder(work, worker).run({"layers-0-shard-7.npz": lambda: 1 // 0})
    found = build_status(tmp_path / "a.toml")
    (failed,) = found["failed"]
    assert (failed["stage"], failed["task"], failed["times"]) == ("profile", "layers-0-shard-7.npz", 3)
    assert failed["reason"].startswith("ZeroDivisionError: ")
    assert "1 // 0" in json.loads(Path(failed["log"]).read_text())["log"]
    assert failed["log"] in status_text(found)


def test_no_recipe(tmp_path: Path, fails: Fails) -> None:
    assert "no such recipe" in fails(3, "status", tmp_path / "a.toml")
