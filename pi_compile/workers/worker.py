"""A worker: one process that takes part in a build and shows that it is alive.

Each worker has a file in a folder that all share, and writes it anew every heartbeat, with a number that grows. Whoever
depends on a worker reads its file: a number that stays the same for longer than a heartbeat, by the reader's own clock,
means that the worker has ended. Clocks of two machines are never compared. On the machine of the reader a process that
is gone is seen at once.

The process that a worker is, as far as its machine tells which one that was.

A process is known by its number and its start, among the processes of a boot and a container. A number alone is given
again: a container that is started again has the same ones, and its namespace may have the number of the one before.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pi_compile import files


@dataclass(frozen=True)
class Rank:
    """One worker of `world`. Tasks are claimed by whoever is free: the number only says who reports and which GPU."""

    rank: int = 0
    world: int = 1
    local: int = 0
    """Number among the workers of the same machine."""
    launcher: str = ""
    """torchrun, slurm, ray or local; empty for a process that was started by hand."""
    watches: bool = False
    """Whether it claims no tasks, and only waits for the others."""

    @property
    def leads(self) -> bool:
        """Whether it shows the progress and the result of all."""
        return self.rank == 0


LONE = Rank()


def rank_of(environment: Mapping[str, str] = os.environ) -> Rank:
    """The rank that torchrun or Slurm gave this process; `LONE` where neither started it."""

    def number(name: str, default: int = 0) -> int:
        value = environment.get(name, "")
        return int(value) if value.isdecimal() else default

    if "RANK" in environment and "WORLD_SIZE" in environment:
        return Rank(number("RANK"), number("WORLD_SIZE", 1), number("LOCAL_RANK"), "torchrun")
    if "SLURM_PROCID" in environment or "SLURM_ARRAY_TASK_ID" in environment:
        # An array of jobs, each of which may have several processes.
        job = number("SLURM_ARRAY_TASK_ID") - number("SLURM_ARRAY_TASK_MIN")
        processes = number("SLURM_NTASKS", 1)
        world = number("SLURM_ARRAY_TASK_COUNT", 1) * processes
        return Rank(job * processes + number("SLURM_PROCID"), world, number("SLURM_LOCALID"), "slurm")
    return LONE


PROC = Path("/proc")
_STATE, _STARTED = 0, 19
"""Positions in `stat` of the state and the start in clock ticks, counted from behind the name."""


def this_process() -> dict[str, Any]:
    """What `lives_here` needs to know of this process."""
    pid = os.getpid()
    stat = _stat(pid)
    return {"system": _system(), "pid": pid, "started": int(stat[_STARTED]) if stat else 0}


def lives_here(shown: Mapping[str, Any]) -> bool | None:
    """Whether a process of this machine, as it showed itself, still lives.

    None where this process cannot tell: on another machine, in another container, or where the system does not say when
    a process began. Then heartbeats decide, a little later.
    """
    system, pid, started = _system(), shown.get("pid"), shown.get("started")
    if not (system and shown.get("system") == system and started and isinstance(pid, int)):
        return None
    stat = _stat(pid)
    if stat is None:
        return None if _hidden(pid) else False
    return stat[_STATE] not in "ZX" and stat[_STARTED] == str(started)  # a zombie waits for its parent to ask after it


def _system() -> str:
    """A name for the processes that this one can see: of its boot, and its container where it is in one."""
    try:
        if (PROC / "self").readlink().name != str(os.getpid()):
            return ""  # /proc shows the processes of another container
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(PROC / 'self/ns/pid').stat().st_ino}"
    except OSError:
        return ""  # not Linux


def _stat(pid: int) -> list[str] | None:
    """What the system says of a process, from its state on; None where it says nothing."""
    try:
        found = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return found if len(found) > _STARTED else None


def _hidden(pid: int) -> bool:
    """Whether a process is there that `/proc` does not show: of another user, under `hidepid`."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        pass
    return False


HEARTBEAT = 10.0
"""Seconds between two signs of life."""
PATIENCE = 1.5
"""Heartbeats without a sign of life after which a worker counts as ended."""


class Worker:
    """This process, as the other workers see it. Use it in a `with`: a worker that leaves in order removes its file."""

    def __init__(
        self,
        folder: Path,
        rank: Rank = LONE,
        *,
        build: str = "",
        heartbeat: float = HEARTBEAT,
        notice: Callable[[str], None] = lambda _line: None,
    ) -> None:
        """`folder` is shared by all; `build` is alike in the workers of one build, and no others."""
        self.folder, self.rank, self.build, self.heartbeat, self.notice = folder, rank, build, heartbeat, notice
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._beat = 0
        self._stage = _Timed("", 0)
        self._task = _Timed("", 0)
        self._done, self._total = 0, 0
        self._seen: dict[str, _Seen] = {}
        self._stopped: Exception | None = None
        self.call_help: Callable[[], None] = lambda: None
        """Is called before a stage that has to be made: starts other workers that have not been needed until then."""
        self._leaving = threading.Event()

    def __enter__(self) -> Self:
        self._remove_ended()
        self._show()
        self._thread = threading.Thread(target=self._keep_showing, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join()
        with suppress(OSError):
            files.remove(self._path(self.name))
            self._remove_ended()

    def _remove_ended(self) -> None:
        """Remove the files of processes of this machine that could not do it themselves."""
        for other in workers_in(self.folder):
            if lives_here(other) is False:
                files.remove(self._path(other["name"]))

    def at(self, *, stage: str | None = None, task: str | None = None) -> None:
        """Say what this worker does now; others see it at the next heartbeat."""
        if stage is not None and stage != self._stage.name:
            self._stage, self._done, self._total = _Timed(stage, 0), 0, 0
        if task is not None:
            self._task = _Timed(task, 0)

    def progress(self, done: int, total: int) -> None:
        """Say how much of the stage is done, by all workers together."""
        if not self._total:
            self._stage = _Timed(self._stage.name, done)
        self._done, self._total = done, total

    def lives(self, name: str, *, or_sleeps: bool = False) -> bool:
        """Whether a worker is alive, as far as this one can tell by now.

        `or_sleeps` counts a process of this machine that was stopped: it may go on at any time.
        """
        if name == self.name:
            return True
        shown = _read(self._path(name))
        here = False if shown is None else lives_here(shown)
        if shown is None or here is False or (here and or_sleeps):
            return bool(here)
        if self.unchanged(name, shown.get("beat"), PATIENCE * float(shown.get("heartbeat", self.heartbeat))):
            files.remove(self._path(name))  # it shows itself again if it only slept
            return False
        return True

    def unchanged(self, key: str, value: object, seconds: float) -> bool:
        """Whether this worker has seen the same value for that long, by its own clock.

        A time in which it did not show itself hardly counts: it was stopped, or the file server did not answer, and
        then nobody else could show themselves either.
        """
        now, last = time.monotonic(), self._seen.get(key)
        quiet = 0.0
        if last is not None and last.value == value:
            shown = (self._beat - last.beat - 1) * self.heartbeat
            quiet = last.quiet + min(now - last.time, max(seconds / 4, shown))
        self._seen[key] = _Seen(value, quiet, now, self._beat)
        return quiet > seconds

    def strangers(self) -> bool:
        """Whether a worker of another build may be at work in the same folder."""
        others = [w["name"] for w in workers_in(self.folder) if w.get("build") != self.build]
        return bool(list(filter(self.lives, others)))  # each is looked at: a later look may see that it has ended

    def stop(self, reason: Exception) -> None:
        """End this worker's waiting: `check` raises the reason from now on."""
        self._stopped = reason

    def check(self) -> None:
        """Raise what `stop` was called with."""
        if self._stopped is not None:
            raise self._stopped

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _keep_showing(self) -> None:
        while not self._leaving.wait(self.heartbeat):
            with suppress(OSError):  # the next one may succeed; until then others may do this worker's task too
                self._show()

    def _show(self) -> None:
        self._beat += 1
        shown = {
            "name": self.name,
            "beat": self._beat,
            "heartbeat": self.heartbeat,
            "build": self.build,
            "host": socket.gethostname(),
            **this_process(),
            "rank": self.rank.rank,
            "launcher": self.rank.launcher,
            "stage": self._stage.name,
            "stage_seconds": self._stage.seconds,
            "done_before": self._stage.done,
            "done": self._done,
            "total": self._total,
            "task": self._task.name,
            "task_seconds": self._task.seconds,
        }
        files.replace(self._path(self.name), json.dumps(shown))


@dataclass(frozen=True)
class _Seen:
    """A value when a worker last looked at it."""

    value: object
    quiet: float
    """Seconds for which it had been the same."""
    time: float
    beat: int
    """The looking worker's own heartbeat."""


class _Timed:
    """Something that a worker is at, and how much of all the work was done when it began."""

    def __init__(self, name: str, done: int) -> None:
        self.name, self.done, self._began = name, done, time.monotonic()

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._began, 3)


def workers_in(folder: Path) -> list[dict[str, Any]]:
    """What the workers of a folder last showed of themselves, by rank."""
    paths = [folder / name for name in files.names_in(folder) if name.endswith(".json")]
    found = [shown for shown in map(_read, paths) if shown is not None]
    return sorted(found, key=lambda shown: (shown.get("rank", 0), shown["name"]))


def silence(folder: Path, shown: Mapping[str, Any]) -> float | None:
    """Seconds since a worker of the folder gave a sign of life; None if it is a process of this machine that is gone.

    Both times are taken by the clock of the file system.
    """
    if lives_here(shown) is False:
        return None
    now = folder / f"{secrets.token_hex(8)}.now"
    try:
        now.touch()
        return max(0.0, now.stat().st_mtime - (folder / f"{shown['name']}.json").stat().st_mtime)
    except OSError:
        return None
    finally:
        files.remove(now)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return {**json.loads(files.read(path) or ""), "name": path.stem}
    except (ValueError, TypeError):
        return None
