"""A child process that runs what others wrote, such as chat templates and grammars, and is asked line by line.

It has no environment, bounded time and memory, and what it replies is bounded and checked: `_confined.py` says what it
is started with, and what it may do. Starting a child takes longer than most requests, so it stays for the next one.
Where the system has no `resource` module (Windows), memory is not bounded.
"""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

START_SECONDS = 60.0  # for the child's imports, which are not the fault of what it runs
REPLY_BYTES = 65536  # a reply beside its text
ESCAPE = 6  # most bytes of JSON for one byte of text: \u0000
# What a Python needs to start, and the zone of strftime_now; the rest, secrets included, is nobody's business.
KEPT_VARIABLES = ("SYSTEMROOT", "LD_LIBRARY_PATH", "TZ")
Limit = Literal["time", "memory", "output"]


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What one request to a child may take."""

    seconds: float = 2.0
    """Wall time, the start of the process not counted."""
    memory_bytes: int = 256 << 20
    """Address space of the child, Python included (about 25 MiB)."""
    output_bytes: int = 1 << 20
    """The text of a reply in UTF-8."""

    def allowed(self, limit: Limit) -> str:
        """What a limit allows, in words."""
        amounts = {"time": f"{self.seconds:g} s", "memory": f"{self.memory_bytes} bytes"}
        return f"at most {amounts.get(limit, f'{self.output_bytes} bytes')}"


class SandboxLimitError(Exception):
    """What was asked takes more than a limit."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(limit)
        self.limit: Limit = limit


class SandboxEndedError(Exception):
    """The child ended without a reply; the message is its exit status."""


class SandboxStartError(Exception):
    """There is no child: the message says why."""


class Sandbox:
    """A child and the requests to it, one at a time. It starts with the first, and anew after one that ended it.

    Closing a sandbox, or dropping the last reference, ends the process.
    """

    def __init__(
        self, program: Path, libraries: Sequence[str], limits: SandboxLimits, first: Mapping[str, Any] | None = None
    ) -> None:
        """`libraries` are the names of packages that the child needs; `first` is what each child gets before all
        else, without a reply."""
        self._program, self._libraries, self._limits, self._first = program, libraries, limits, first
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._has_first = False
        """Whether the child has got `first`."""

    def ask(self, request: Mapping[str, Any], seconds: float = math.inf) -> dict[str, Any]:
        """The reply to a request: JSON with `text`, or with `error` and `line`. It may have fewer `seconds` than usual.

        Raises SandboxLimitError, SandboxEndedError, or SandboxStartError where there is no child, ModuleNotFoundError
        for a library that is not installed, and what `json` raises for a request that is no JSON.
        """
        if seconds <= 0:
            raise SandboxLimitError("time")
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            return self._exchange(line, min(seconds, self._limits.seconds))

    def start(self) -> None:
        """Start the process now, so that the first request does not wait for it."""
        with self._lock:
            self._ready_child()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, request: bytes, seconds: float) -> dict[str, Any]:
        """Hand the child a request and return its reply. A child without one, or without memory, ends."""
        child = self._ready_child()
        if self._first is not None and not self._has_first:
            self._has_first = True
            request = json.dumps(self._first).encode() + b"\n" + request
        assert child.stdin
        assert child.stdout
        longest = ESCAPE * self._limits.output_bytes + REPLY_BYTES
        reply = None
        try:
            with _alarm(child, seconds) as late:
                with suppress(OSError):  # the child is gone: its missing reply says so
                    child.stdin.write(request)
                    child.stdin.flush()
                line = child.stdout.readline(longest + 1)
            if len(line) <= longest and not late.is_set():
                reply = _parse(line)
        finally:
            if reply is None or reply.get("limit") == "memory":
                self._end()
        if late.is_set() or child.returncode == -getattr(signal, "SIGXCPU", 0):
            raise SandboxLimitError("time")
        if len(line) > longest:
            raise SandboxLimitError("output")
        if reply is None:
            raise SandboxEndedError(f"exit status {child.returncode}")
        if "limit" in reply:
            raise SandboxLimitError(reply["limit"])
        return reply

    def _ready_child(self) -> "subprocess.Popen[bytes]":
        if self._child is not None and _has_ended(self._child):
            self._end()  # somebody else has ended it
        if self._child is None:
            self._child, self._has_first = self._started(), False
            self._finalizer = weakref.finalize(self, _end, self._child)
        return self._child

    def _started(self) -> "subprocess.Popen[bytes]":
        """A child that is ready for requests."""
        numbers = (self._limits.seconds, self._limits.memory_bytes, self._limits.output_bytes)
        folders = [str(Path(__file__).parent), *_folders(self._libraries)]
        command = [sys.executable, "-I", "-S", "-B", str(self._program), *map(str, numbers), *folders]
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxStartError(f"cannot start {sys.executable}: {error}") from None
        assert child.stdout
        with _alarm(child, START_SECONDS):
            ready = child.stdout.read(1)
        if not ready:
            _end(child)
            raise SandboxStartError(f"{sys.executable} ended with {child.returncode}")
        return child

    def _end(self) -> None:
        if self._child is not None:
            self._child = None
            self._finalizer()


def _parse(reply: bytes) -> dict[str, Any] | None:
    """Parse the child's reply. It is checked as if what it runs had written it: a sandbox can have holes."""
    try:
        value = json.loads(reply)
    except (ValueError, RecursionError):
        return None
    match value:
        case {"text": str()} | {"limit": "memory" | "output"} | {"error": str(), "line": int() | None}:
            return dict(value)
    return None


def _folders(libraries: Sequence[str]) -> list[str]:
    """Folders in which the child finds libraries, which an isolated Python does not. Nothing is imported here."""
    folders = []
    for name in libraries:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(name, name=name)
        folders.append(str(Path(spec.origin).parents[1]))
    return list(dict.fromkeys(folders))


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End a child and all that it started; nothing of it is left."""
    _kill(child)
    with suppress(OSError), child:  # what could not be written to it
        pass


@contextmanager
def _alarm(child: subprocess.Popen[bytes], seconds: float) -> Iterator[threading.Event]:
    """Kill the child after `seconds`, which ends every read and write that waits for it; the event is set then."""
    rang = threading.Event()

    def ring() -> None:
        rang.set()
        _kill(child)

    timer = threading.Timer(seconds, ring)
    timer.start()
    try:
        yield rang
    finally:
        timer.cancel()
        timer.join()


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Whether a child has ended. Where the system says so without a wait, no other process gets the child's number."""
    if child.returncode is None and hasattr(os, "waitid"):
        with suppress(ChildProcessError):  # this process ignores its children's ends
            return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return child.poll() is not None


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End the child's whole process group, unless it has been waited for: its number may be another's by then."""
    if child.returncode is not None:
        return
    with suppress(OSError):  # it has ended by itself
        if sys.platform == "win32":
            child.kill()
        else:
            os.killpg(child.pid, signal.SIGKILL)
