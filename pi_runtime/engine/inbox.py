"""What callers bring to the engine's thread: requests, calls, sessions that nobody will continue, and the end."""

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

from pi_runtime.engine.stream import Request, Turns
from pi_runtime.errors import UsageError

Call = Callable[[], object]
"""Something that the engine's thread does between two steps."""


class Arrivals(NamedTuple):
    """What was brought since the last time."""

    requests: list[Request]
    calls: list[tuple[Call, Future[None]]]
    forgotten: list[Turns]


class Inbox:
    """Any thread may bring something; the engine's thread waits for it and takes it.

    `forget` takes no lock, because the finalizer of a session calls it: in any thread, amid anything that it does.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.ended: UsageError | None = None
        """Set once nothing is taken any more: what those who bring something are told."""
        self.closing = False
        self._process = os.getpid()
        self._calls: list[tuple[Call, Future[None]]] = []
        self._forgotten: deque[Turns] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()
        """Rung after each thing that is brought."""
        # Guards requests, calls and whether they are taken.
        self._lock = threading.RLock()

    def submit(self, request: Request) -> None:
        """Bring a request. Raises UsageError once the engine has ended."""
        with self._lock:
            self._check_open()
            if request.turns is not None:
                request.turns.request = request
            self.requests.append(request)
        self._bell.put(None)

    def call(self, call: Call) -> None:
        """Have something done between two steps; waits for it, and raises what it raises."""
        done: Future[None] = Future()
        with self._lock:
            self._check_open()
            self._calls.append((call, done))
        self._bell.put(None)
        done.result()

    def forget(self, turns: Turns) -> None:
        """Bring a session that nobody will continue. A finalizer may call it."""
        self._forgotten.append(turns)
        self._bell.put(None)

    def close(self) -> None:
        """Ask for the end."""
        self.closing = True
        self._bell.put(None)

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                "the engine is that of another process", remedy="make one after the fork, from a model of its own"
            )
        if self.ended is not None:
            raise self.ended

    def take(self, *, wait: bool) -> Arrivals:
        """All that was brought; with `wait` at least something, or the wish to close. For the engine's thread."""
        while wait and not (self.requests or self._calls or self._forgotten or self.closing):
            self._bell.get()
        while not self._bell.empty():
            self._bell.get()
        with self._lock:
            requests, self.requests = self.requests, []
            calls, self._calls = self._calls, []
        return Arrivals(requests, calls, [self._forgotten.popleft() for _ in range(len(self._forgotten))])

    def end(self, reason: UsageError) -> Arrivals:
        """Take what is left; whoever brings something from now on is told the reason."""
        with self._lock:
            self.ended = reason
            return self.take(wait=False)
