"""Tasks in a shared folder: each done once, by whoever is there; what a worker leaves behind is taken over."""

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pi_compile.errors import ProfileError, TaskFailedError
from pi_compile.workers import Rank, StageDoneError, Worker, WorkFolder, failures_in, rank_of, workers_in
from pi_compile.workers import tasks as tasks_module
from pi_compile.workers import worker as worker_module
from pi_compile.workers.worker import this_process
from pi_runtime.errors import NotMetError, UsageError

SHORT = 0.2
"""A heartbeat that a test can wait for."""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with Worker(tmp_path / "workers", heartbeat=SHORT) as worker:
        yield worker


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def writes(folder: Path, name: str, text: str = "done") -> Callable[[], object]:
    return lambda: (folder / name).write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# A worker alone.


def test_every_task_is_done_once_and_nothing_else_is_left(worker: Worker, folder: Path) -> None:
    made: list[str] = []
    tasks = {name: lambda name=name: made.append(name) or (folder / name).touch() for name in "abc"}
    seen: list[set[str]] = []
    WorkFolder(folder, worker).run(tasks, on_done=lambda done: seen.append(set(done)))
    WorkFolder(folder, worker).run(tasks)
    assert made == ["a", "b", "c"]
    assert seen == [set(), {"a"}, {"a", "b"}, {"a", "b", "c"}]
    assert names(folder) == ["a", "b", "c"]


def test_a_task_waits_for_what_it_needs(worker: Worker, folder: Path) -> None:
    """What stands first is preferred as soon as it can begin."""
    made: list[str] = []
    tasks = {name: lambda name=name: made.append(name) or (folder / name).touch() for name in ("z", "a", "b", "c")}
    WorkFolder(folder, worker).run(tasks, {"z": ["a", "b"], "b": ["a"]})
    assert made == ["a", "b", "z", "c"]


@pytest.mark.parametrize(("world", "shares"), [(1, [4]), (2, [2, 2]), (3, [2, 2]), (9, [1, 1, 1, 1])])
def test_a_share_is_done_at_once(tmp_path: Path, folder: Path, world: int, shares: list[int]) -> None:
    made: list[int] = []

    def make(some: object) -> None:
        made.append(len(some))  # type: ignore[arg-type]
        for name in some:  # type: ignore[attr-defined]
            (folder / name).touch()

    with Worker(tmp_path / "workers", Rank(world=world)) as worker:
        WorkFolder(folder, worker).run_shares(["a", "b", "c", "d"], make)
    assert made == shares


def test_a_finished_stage_needs_nothing_more(worker: Worker, folder: Path) -> None:
    with pytest.raises(StageDoneError):
        WorkFolder(folder, worker, lambda: True).run({"a": writes(folder, "a")})
    assert names(folder) == []


# Failures.


def test_a_task_may_fail_twice(worker: Worker, folder: Path) -> None:
    tries: list[int] = []
    told: list[str] = []
    worker.notice = told.append

    def flaky() -> None:
        tries.append(len(tries))
        if len(tries) < 3:
            raise OSError("the network is gone")
        (folder / "a").touch()

    WorkFolder(folder, worker).run({"a": flaky})
    assert len(tries) == 3
    assert told == ["a failed and is tried again: OSError: the network is gone"] * 2
    assert failures_in(folder) == []  # it is done


def test_a_task_that_fails_three_times_ends_the_build_and_keeps_the_rest(worker: Worker, folder: Path) -> None:
    tries: list[int] = []

    def broken() -> None:
        tries.append(1)
        raise ZeroDivisionError("in shard 7")

    work = WorkFolder(folder, worker)
    with pytest.raises(TaskFailedError, match=r"b failed 3 times\n  found: ZeroDivisionError: in shard 7") as caught:
        work.run({"a": writes(folder, "a"), "b": broken, "c": writes(folder, "c")}, {"c": ["a"]})
    assert len(tries) == 3
    assert caught.value.exit_code == 1
    (failed,) = failures_in(folder)
    assert failed | {"log": ""} == {"task": "b", "times": 3, "reason": "ZeroDivisionError: in shard 7", "log": ""}
    assert 'raise ZeroDivisionError("in shard 7")' in json.loads(Path(failed["log"]).read_text())["log"]
    assert failed["log"] in str(caught.value)
    assert (folder / "a").exists()
    # The cause may be gone: another run tries again, and the failures before it do not count.
    WorkFolder(folder, worker).run({"b": writes(folder, "b"), "c": writes(folder, "c")})


def test_an_error_of_the_user_is_not_tried_again(worker: Worker, tmp_path: Path, folder: Path) -> None:
    def refused() -> None:
        raise ProfileError("a.npz: damaged", remedy="make it again")

    with Worker(tmp_path / "workers") as second:
        other = WorkFolder(folder, second)
        with pytest.raises(ProfileError, match="damaged"):
            WorkFolder(folder, worker).run({"a": refused})
        with pytest.raises(TaskFailedError, match=r"a failed in another worker\n  found: a\.npz: damaged") as caught:
            other.run({"a": writes(folder, "a")})
    assert caught.value.exit_code == ProfileError.exit_code


def test_an_interrupted_task_is_free_again(worker: Worker, folder: Path) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        WorkFolder(folder, worker).run({"a": interrupted})
    assert names(folder) == []


def test_a_worker_can_be_told_to_wait_no_longer(tmp_path: Path, folder: Path) -> None:
    with Worker(tmp_path / "workers", Rank(watches=True), heartbeat=SHORT) as watcher:
        threading.Timer(0.05, watcher.stop, [NotMetError("nobody is left")]).start()
        with pytest.raises(NotMetError, match="nobody is left"):
            WorkFolder(folder, watcher).run({"a": writes(folder, "a")})
    assert names(folder) == []


# Several workers.


def test_workers_share_the_tasks(tmp_path: Path, folder: Path) -> None:
    made: list[tuple[int, str]] = []
    all_begin, began = threading.Barrier(4), set[int]()

    def take_part(rank: int) -> None:
        def make(name: str) -> None:
            if rank not in began:
                began.add(rank)
                all_begin.wait(60)  # until each worker has a task
            made.append((rank, name))
            (folder / name).touch()

        with Worker(tmp_path / "workers", Rank(rank, 4)) as worker:
            tasks = {str(n): lambda name=str(n): make(name) for n in range(60)}
            WorkFolder(folder, worker).run(tasks)
            assert {str(n) for n in range(60)} <= set(names(folder))

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(name) for _, name in made) == list(range(60))
    assert {rank for rank, _ in made} == set(range(4))
    assert workers_in(tmp_path / "workers") == []


def claim(folder: Path, task: str, holder: str) -> Path:
    path = folder / f"{task}.claim-0"
    path.write_text(holder)
    return path


def elsewhere(tmp_path: Path, name: str = "elsewhere-1-0", **changes: object) -> Path:
    """The file of a worker on another machine."""
    path = tmp_path / "workers" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"beat": 1, "heartbeat": SHORT, "system": "another", "pid": 1} | changes))
    return new.replace(path)  # at once, as a worker does


def test_a_worker_that_shows_itself_keeps_its_claim(tmp_path: Path, folder: Path) -> None:
    """Whatever its clock says, and however long it takes. Counted in looks, not in seconds of a busy machine."""
    claim(folder, "a", "elsewhere-1-0")
    elsewhere(tmp_path, heartbeat=1000.0)
    now, looks = [0.0], [0]

    def sleep(_seconds: float) -> None:
        now[0] += 1000 / 8
        looks[0] += 1
        if looks[0] == 80:
            (folder / "a").write_text("by the other")
        elif looks[0] % 8 == 0:  # a heartbeat later
            elsewhere(tmp_path, heartbeat=1000.0, beat=looks[0])

    with pytest.MonkeyPatch.context() as patch, Worker(tmp_path / "workers", heartbeat=1000.0) as worker:
        patch.setattr(worker_module.time, "monotonic", lambda: now[0])
        patch.setattr("pi_compile.workers.tasks.time.sleep", sleep)
        WorkFolder(folder, worker).run({"a": writes(folder, "a", "by this one")})
    assert looks[0] == 80
    assert (folder / "a").read_text() == "by the other"


def test_a_claim_is_retaken_within_two_heartbeats(tmp_path: Path, folder: Path) -> None:
    """On another machine, so that nothing but silence tells. Counted in looks, not in seconds of a busy machine."""
    claim(folder, "a", "elsewhere-1-0")
    elsewhere(tmp_path, heartbeat=1000.0)
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch, Worker(tmp_path / "workers", heartbeat=1000.0) as worker:
        patch.setattr(worker_module.time, "monotonic", lambda: now[0])
        patch.setattr("pi_compile.workers.tasks.time.sleep", lambda _s: now.__setitem__(0, now[0] + 1000 / 8))
        WorkFolder(folder, worker).run({"a": writes(folder, "a")})
        assert 1000 < now[0] <= 2000
    assert not (tmp_path / "workers" / "elsewhere-1-0.json").exists()


@pytest.mark.parametrize("left", ["no file", "an empty claim"])
def test_a_claim_of_nobody_is_retaken(worker: Worker, folder: Path, left: str) -> None:
    claim(folder, "a", "gone-1-0" if left == "no file" else "")
    WorkFolder(folder, worker).run({"a": writes(folder, "a")})
    assert (folder / "a").read_text() == "done"


HOLDS = """
    import sys, time
    from pathlib import Path
    from pi_compile.workers import WorkFolder, Worker

    folder = Path(sys.argv[1])

    def hold():
        print("holds", flush=True)
        sys.stdin.readline()
        (folder / "a").write_text("done")

    with Worker(folder.parent / "workers", heartbeat=float(sys.argv[2])) as worker:
        WorkFolder(folder, worker).run({"a": hold})
    print("left", flush=True)
"""


@pytest.fixture
def holder(folder: Path) -> Iterator[Callable[[float], subprocess.Popen[str]]]:
    """Starts a process that claims task `a` and holds it until a line comes."""
    started: list[subprocess.Popen[str]] = []

    def start(heartbeat: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(HOLDS), str(folder), str(heartbeat)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of processes")
def test_a_process_of_this_machine_that_is_gone_is_seen_at_once(
    worker: Worker, folder: Path, holder: Callable[[float], subprocess.Popen[str]]
) -> None:
    process = holder(10_000.0)
    process.kill()
    process.wait()
    WorkFolder(folder, worker).run({"a": writes(folder, "a")})  # else the test would run into its time limit
    assert (folder / "a").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_a_worker_that_wakes_after_losing_its_claim_does_no_harm(
    worker: Worker, folder: Path, holder: Callable[[float], subprocess.Popen[str]]
) -> None:
    import signal

    process = holder(SHORT)
    os.kill(process.pid, signal.SIGSTOP)
    WorkFolder(folder, worker).run({"a": writes(folder, "a")})
    for path in folder.iterdir():  # the stage goes on, and clears away
        if path.name != "a":
            path.unlink()
    os.kill(process.pid, signal.SIGCONT)
    out, _ = process.communicate("\n")
    assert (process.returncode, out) == (0, "left\n")
    assert names(folder) == ["a"]
    assert (folder / "a").read_text() == "done"


def test_a_worker_that_wakes_in_a_stage_that_is_over_does_not_fail(worker: Worker, folder: Path) -> None:
    over: list[bool] = []

    def sleep_through() -> None:
        over.append(True)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        raise FileNotFoundError("what it needs")

    with pytest.raises(StageDoneError):
        WorkFolder(folder, worker, lambda: bool(over)).run({"a": sleep_through})
    assert not folder.exists()


# One at a time.


def test_who_comes_second_waits_and_is_told(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "LONGEST", 2 * tasks_module.SHORTEST)
    told: list[str] = []
    waiting = threading.Event()
    order: list[str] = []

    def second() -> None:
        def notice(line: str) -> None:
            told.append(line)
            waiting.set()

        with Worker(tmp_path / "workers", notice=notice) as other, WorkFolder(folder, other).held("run"):
            order.append("second")

    thread = threading.Thread(target=second)
    with Worker(tmp_path / "workers") as worker, WorkFolder(folder, worker).held("run"):
        thread.start()
        assert waiting.wait(60)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]
    assert told == [f"{folder}: another process is at work; waiting for it"]
    assert names(folder) == names(tmp_path / "workers") == []


def test_who_waits_hears_that_it_is_finished(tmp_path: Path, worker: Worker, folder: Path) -> None:
    with Worker(tmp_path / "workers") as other, WorkFolder(folder, other).held("run"):
        finished = iter([False, False, True])
        with pytest.raises(StageDoneError), WorkFolder(folder, worker, lambda: next(finished)).held("run"):
            pass
    assert names(folder) == []


def test_who_waits_sees_who_holds_it_now(worker: Worker, tmp_path: Path, folder: Path) -> None:
    """The next holder's claim may have the name of the one before, who has ended."""
    waiting = WorkFolder(folder, worker)
    left = claim(folder, "run", "gone-1-0")
    assert not waiting._held(left, or_sleeps=True)
    left.unlink()
    with Worker(tmp_path / "workers") as other, WorkFolder(folder, other).held("run"):
        assert names(folder) == ["run.claim-0"]
        threading.Timer(0.05, worker.stop, [NotMetError("waited long enough")]).start()
        with pytest.raises(NotMetError, match="long enough"), waiting.held("run"):
            pass


def test_a_folder_that_somebody_removed_is_an_error(worker: Worker, folder: Path) -> None:
    work = WorkFolder(folder, worker)
    folder.rmdir()
    with pytest.raises(UsageError, match="was removed while workers were at it"):
        work.run({"a": writes(folder, "a")})
    with pytest.raises(UsageError, match="was removed while workers were at it"), work.held("run"):
        pass


def test_a_folder_that_goes_while_a_worker_looks_is_of_a_finished_stage(worker: Worker, folder: Path) -> None:
    """Others may finish the stage and remove the folder between this worker's two questions."""

    def finished() -> bool:
        if not folder.exists():
            return True
        folder.rmdir()
        return False

    with pytest.raises(StageDoneError):
        WorkFolder(folder, worker, finished).run({"a": writes(folder, "a")}, {"a": ["what nobody makes"]})


def test_what_was_held_is_free_after_an_error(worker: Worker, folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), WorkFolder(folder, worker).held("run"):
        raise ZeroDivisionError
    assert names(folder) == []


def test_what_is_finished_is_not_held_again(worker: Worker, folder: Path) -> None:
    """Who held it may have finished it since the last look."""
    claim(folder, "run", "gone-1-0")
    with pytest.raises(StageDoneError), WorkFolder(folder, worker, lambda: True).held("run"):
        pytest.fail("begins again")
    assert names(folder) == []


def test_who_claims_beside_a_new_holder_gives_up(
    worker: Worker, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another may take over between this worker's look at the old holder and its claim."""
    left = claim(folder, "run", "gone-1-0")
    worker.stop(NotMetError("waits"))
    with Worker(tmp_path / "workers") as other:
        holding = WorkFolder(folder, other).held("run")

        def lives(name: str, **options: bool) -> bool:
            if left.exists() and name == "gone-1-0":
                left.unlink()
                holding.__enter__()
                return False
            return Worker.lives(worker, name, **options)

        monkeypatch.setattr(worker, "lives", lives)
        with pytest.raises(NotMetError, match="waits"), WorkFolder(folder, worker).held("run"):
            pytest.fail("two hold it")
        assert left.read_text() == other.name
        assert names(folder) == ["run.claim-0"]
        holding.__exit__(None, None, None)


def test_who_lost_its_claim_leaves_that_of_the_next_holder(worker: Worker, folder: Path) -> None:
    with WorkFolder(folder, worker).held("run"):
        (folder / "run.claim-0").write_text("another-1-0")
    assert (folder / "run.claim-0").read_text() == "another-1-0"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of processes")
def test_a_holder_whose_number_is_another_process_now_is_taken_over(
    worker: Worker, tmp_path: Path, folder: Path
) -> None:
    """In a container that is started again numbers, boot and namespace may be the same: a wait for itself."""
    here = this_process()
    elsewhere(tmp_path, "killed-1-0", heartbeat=10_000.0, **here | {"started": here["started"] - 1})
    claim(folder, "run", "killed-1-0")
    worker.stop(NotMetError("waits"))
    with WorkFolder(folder, worker).held("run"):
        assert names(folder) == ["run.claim-0", "run.claim-1"]


@pytest.mark.parametrize("unknown", ["system", "started"])
def test_heartbeats_decide_where_a_process_is_not_known(tmp_path: Path, folder: Path, unknown: str) -> None:
    """The same number may be another process. Counted in looks, not in seconds of a busy machine."""
    elsewhere(tmp_path, "killed-1-0", heartbeat=1000.0, **this_process() | {unknown: ""})
    claim(folder, "run", "killed-1-0")
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch, Worker(tmp_path / "workers", heartbeat=1000.0) as worker:
        patch.setattr(worker_module.time, "monotonic", lambda: now[0])
        patch.setattr("pi_compile.workers.tasks.time.sleep", lambda _s: now.__setitem__(0, now[0] + 1000 / 8))
        with WorkFolder(folder, worker).held("run"):
            assert 1000 < now[0] <= 2000


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of processes")
def test_a_killed_holder_is_taken_over(
    worker: Worker, folder: Path, holder: Callable[[float], subprocess.Popen[str]]
) -> None:
    process = holder(10_000.0)
    process.kill()
    process.wait()
    with WorkFolder(folder, worker).held("a"):
        assert names(folder) == ["a.claim-0", "a.claim-1"]
    assert names(folder) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_a_stopped_holder_still_holds(
    worker: Worker, folder: Path, holder: Callable[[float], subprocess.Popen[str]]
) -> None:
    """Unlike a task, which would be done once more and do no harm."""
    import signal

    process = holder(SHORT)
    os.kill(process.pid, signal.SIGSTOP)
    threading.Timer(3 * SHORT, worker.stop, [NotMetError("waited long enough")]).start()
    with pytest.raises(NotMetError, match="long enough"), WorkFolder(folder, worker).held("a"):
        pass
    os.kill(process.pid, signal.SIGCONT)
    assert process.communicate("\n") == ("left\n", None)
    assert names(folder) == ["a"]


# What launchers say.


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, Rank()),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Rank(3, 8, 1, "torchrun")),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, Rank(2, 4, 0, "slurm")),
        (
            {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "8"},
            Rank(4, 8, 0, "slurm"),
        ),
        (
            {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
            Rank(3, 4, 0, "slurm"),
        ),
        ({"RANK": "3"}, Rank()),
    ],
    ids=["none", "torchrun", "slurm-step", "slurm-array", "array-of-steps", "not-torchrun"],
)
def test_ranks(environment: dict[str, str], rank: Rank) -> None:
    assert rank_of(environment) == rank
    assert rank_of(environment).leads == (rank.rank == 0)
