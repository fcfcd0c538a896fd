"""Tasks in a folder: whoever is free claims one, and everybody goes on when all are done.

A task makes one file, which appears whole. Nothing else decides whether it is done. While somebody works on a task,

    NAME.claim-G     names the worker; made so that it can be made only once (O_EXCL, which network file systems keep)
    NAME.failed-G    says how claim G failed, with its log

lie beside it. The claim of a worker that has ended is followed by claim G + 1, which again only one can make. Claims
save work and protect nothing: a worker that was stopped, lost its claim and wakes up again makes the same file once
more. So no lock is needed, and a mistake about who is alive costs time, not bytes.
"""

import json
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pi_compile import files
from pi_compile.errors import TaskFailedError
from pi_compile.files import write_text
from pi_compile.workers.worker import PATIENCE, Worker
from pi_runtime.errors import PiError, UsageError
from pi_runtime.errors.exit_codes import code_and_message

ATTEMPTS = 3
"""Failures of a task that end the build."""
SHORTEST, LONGEST = 0.002, 0.5
"""Seconds between two looks of a worker that waits; they grow while nothing happens."""
_CLAIM, _FAILED = "claim", "failed"
NO_NEEDS: Mapping[str, Sequence[str]] = {}


class StageDoneError(Exception):
    """The stage's result is there: somebody else has finished it. Nothing is wrong."""


@dataclass
class _Listing:
    """The files of a folder at one moment."""

    files: set[str] = field(default_factory=set)
    claims: dict[str, list[int]] = field(default_factory=dict)
    """The claims of each task."""
    failed: dict[str, list[int]] = field(default_factory=dict)
    """Those that failed."""

    @classmethod
    def of(cls, folder: Path) -> "_Listing":
        found = cls()
        for name in files.names_in(folder):  # none if the stage is finished, and its folder removed
            task, _, rest = name.rpartition(".")
            kind, _, number = rest.partition("-")
            if kind == _CLAIM and number.isdecimal():
                found.claims.setdefault(task, []).append(int(number))
            elif kind == _FAILED and number.isdecimal():
                found.failed.setdefault(task, []).append(int(number))
            else:
                found.files.add(name)
        return found


class WorkFolder:
    """The folder of a stage that is under way, as one worker sees it."""

    def __init__(self, path: Path, worker: Worker, finished: Callable[[], bool] = lambda: False) -> None:
        """`finished` says whether the stage's result is there, so that nothing in the folder is needed any more."""
        self.path, self.worker, self.finished = path, worker, finished
        self._made: set[str] = set()
        # Failures of earlier runs do not count: their cause may have been removed.
        self._old = {f"{task}.{n}" for task, numbers in _Listing.of(path).failed.items() for n in numbers}
        self._failures: dict[str, int] = {}

    def run(
        self,
        tasks: Mapping[str, Callable[[], object]],
        needs: Mapping[str, Sequence[str]] = NO_NEEDS,
        on_done: Callable[[set[str]], None] = lambda _done: None,
    ) -> None:
        """Have all tasks done, by this worker and others; tasks that stand first are preferred.

        A task is the name of the file that it makes. It begins when the files that it `needs` are there. `on_done` is
        called with the names of all files, again and again. Raises what a task raises that cannot succeed, and
        TaskFailedError where one has failed three times, or in another worker; StageDoneError if the stage is finished,
        UsageError if the folder was removed.
        """
        self._run(tuple(tasks), lambda names: tasks[names[0]](), 1, needs, on_done)

    def run_shares(self, names: Sequence[str], make: Callable[[Sequence[str]], object]) -> None:
        """The same for tasks that are quicker together: `make` gets as many as are one worker's share."""
        self._run(names, make, math.ceil(len(names) / self.worker.rank.world), NO_NEEDS, lambda _done: None)

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Let nobody else hold the same name while the block runs; waits for who does.

        A process of this machine that was stopped still holds it. Raises StageDoneError if the stage is finished by
        then, UsageError if the folder was removed, and what the worker is stopped with.
        """
        pause, is_told = SHORTEST, False
        while (claim := self._claim_alone(name)) is None:
            self._check_finished()
            self.worker.check()
            if pause == LONGEST and not is_told:
                self.worker.notice(f"{self.path}: another process is at work; waiting for it")
                is_told = True
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST)
        try:
            self._check_finished()  # by who held it before
            yield
        finally:
            # Those of holders that ended go first: while the latest is there, nobody makes another.
            self._give_up(*(self._path(name, number) for number in range(_number(claim.name))), claim)

    def _claim_alone(self, name: str) -> Path | None:
        """A claim beside which no other is held.

        Two that claim on old listings may take different numbers. Each looks again after it claimed, so at least one
        sees the other, and gives its claim up.
        """
        claim = self._claim(name, _Listing.of(self.path), or_sleeps=True)
        if claim is None:
            return None
        claims = [self._path(name, number) for number in _Listing.of(self.path).claims.get(name, [])]
        if claim in claims and not any(self._held(other, or_sleeps=True) for other in claims if other != claim):
            return claim
        self._give_up(claim)
        return None

    def _give_up(self, *claims: Path) -> None:
        """Remove claims, the last of which is this worker's, unless others took it for ended and claimed anew."""
        if files.read(claims[-1]) == self.worker.name:
            for claim in claims:
                files.remove(claim)

    def _run(
        self,
        names: Sequence[str],
        make: Callable[[Sequence[str]], object],
        share: int,
        needs: Mapping[str, Sequence[str]],
        on_done: Callable[[set[str]], None],
    ) -> None:
        pause = SHORTEST
        while True:
            listing = _Listing.of(self.path)
            done = listing.files | self._made
            on_done(done)
            missing = [name for name in names if name not in done]
            if not missing:
                return
            self._check_finished()
            self._check(listing)
            self.worker.check()
            ready = (name for name in missing if done.issuperset(needs.get(name, ())))
            taken = self._claim_some(ready, listing, share)
            if taken:
                self._do(taken, make)
                pause = SHORTEST
            else:
                time.sleep(pause)
                pause = min(pause * 1.5, LONGEST, self.worker.heartbeat / 8)

    def _check_finished(self) -> None:
        """Raise StageDoneError if the stage is finished, UsageError if its folder was removed before that."""
        gone = not files.exists(self.path)  # looked at first: who finishes the stage removes the folder afterwards
        if files.tried_again(self.finished)():
            raise StageDoneError
        if gone:
            raise UsageError(
                f"{self.path}: was removed while workers were at it",
                remedy="run the command again; stages that are finished are kept",
            )

    def _claim_some(self, ready: Iterator[str], listing: _Listing, share: int) -> dict[str, Path]:
        """Up to a share of the tasks, each with the claim that this worker has made."""
        taken: dict[str, Path] = {}
        if self.worker.rank.watches:
            return taken
        for name in ready:
            claim = self._claim(name, listing)
            if claim is not None:
                taken[name] = claim
                if len(taken) == share:
                    break
        return taken

    def _claim(self, name: str, listing: _Listing, *, or_sleeps: bool = False) -> Path | None:
        claims, failed = listing.claims.get(name, []), listing.failed.get(name, [])
        latest = max(claims, default=None)
        if latest is not None and latest not in failed and self._held(self._path(name, latest), or_sleeps):
            return None
        claim = self._path(name, max((*claims, *failed), default=-1) + 1)
        if not files.make(claim, self.worker.name):  # another was quicker, or the stage is finished
            return None
        if files.exists(self.path / name):  # done since the listing
            files.remove(claim)
            return None
        return claim

    def _path(self, name: str, number: int) -> Path:
        return self.path / f"{name}.{_CLAIM}-{number}"

    def _held(self, claim: Path, or_sleeps: bool) -> bool:
        # Read anew each time: a claim that was given up may be made again under the same name.
        holder = files.read(claim)
        if holder is None:
            return True  # given up since the listing: the next one tells more
        if not holder:  # made just now, or by a worker that ended at that moment
            return not self.worker.unchanged(str(claim), holder, PATIENCE * self.worker.heartbeat)
        return self.worker.lives(holder, or_sleeps=or_sleeps)

    def _do(self, taken: Mapping[str, Path], make: Callable[[Sequence[str]], object]) -> None:
        self.worker.at(task=next(iter(taken)))
        try:
            make(tuple(taken))
            self._made.update(taken)
        except Exception as error:
            # A worker that was stopped may find that others have done the task, and cleared away what it needs.
            others_did = all(files.exists(self.path / name) for name in taken)
            if not others_did and not files.tried_again(self.finished)():
                self._failed(taken, error)
        finally:
            self.worker.at(task="")
            for claim in taken.values():
                with suppress(OSError):
                    files.remove(claim)

    def _failed(self, taken: Mapping[str, Path], error: Exception) -> None:
        """Record a failure. Raises the error where trying again is of no use."""
        final = isinstance(error, PiError)
        code, _ = code_and_message(error)
        message = str(error) if final else f"{type(error).__name__}: {error}"
        log = "".join(traceback.format_exception(error))
        record = {"worker": self.worker.name, "final": final, "exit_code": code, "message": message, "log": log}
        for name, claim in taken.items():
            write_text(self.path / f"{name}.{_FAILED}-{_number(claim.name)}", json.dumps(record, indent=1))
        if final:
            raise error
        self.worker.notice(f"{next(iter(taken))} failed and is tried again: {message}")

    def _check(self, listing: _Listing) -> None:
        """Raise TaskFailedError if another worker met an error that is final, or a task has failed too often."""
        for task, numbers in listing.failed.items():
            new = [n for n in numbers if f"{task}.{n}" not in self._old]
            if len(new) == self._failures.get(task, 0):
                continue
            self._failures[task] = len(new)
            path = self.path / f"{task}.{_FAILED}-{max(new)}"
            record = read_failure(path)
            if record["final"] or len(new) >= ATTEMPTS:
                times = "in another worker" if record["final"] else f"{len(new)} times"
                raise TaskFailedError(f"{task} failed {times}", record["message"], path, record["exit_code"])


def _number(claim: str) -> int:
    """G of the name of claim G."""
    return int(claim.rpartition("-")[2])


def failures_in(folder: Path) -> list[dict[str, Any]]:
    """The failures of each task that is not done: how many, the last one's reason, and the file with its log."""
    listing = _Listing.of(folder)
    found = []
    for task, numbers in sorted(listing.failed.items()):
        if task not in listing.files:
            log = folder / f"{task}.{_FAILED}-{max(numbers)}"
            found.append({"task": task, "times": len(numbers), "reason": read_failure(log)["message"], "log": str(log)})
    return found


def read_failure(path: Path) -> dict[str, Any]:
    """The record of a failure."""
    record = {"worker": "", "final": False, "exit_code": 1, "message": "", "log": ""}
    try:
        return {**record, **json.loads(files.read(path) or "")}
    except (ValueError, TypeError):
        return record


@contextmanager
def work_folder(scratch: "WorkFolder | Path | None") -> Iterator[WorkFolder]:
    """The folder to work in: the one given, one of that path with a worker of its own, or a temporary one."""
    if isinstance(scratch, WorkFolder):
        yield scratch
        return
    with TemporaryDirectory() as temporary:
        path = scratch or Path(temporary)
        path.mkdir(parents=True, exist_ok=True)
        with Worker(path / "workers") as worker:
            yield WorkFolder(path, worker)
