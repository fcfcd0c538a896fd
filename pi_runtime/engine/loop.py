"""The engine's thread: it takes messages from one inbox, and runs steps of the core while there is anything to run."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from pi_runtime.engine.core import Core
from pi_runtime.engine.store import PrefixStore
from pi_runtime.errors import ClosedError, PiError, UsageError
from pi_runtime.kernels.codegen.threads import progress_count
from pi_runtime.sequence.sequence import Rank, TokenSequence


class Callback(NamedTuple):
    """Something that is to be done between two steps."""

    function: Callable[[], object]
    done: Future[None]


Message = TokenSequence | Callback | None
"""A sequence that is to run, a call, or None: the engine is to end."""


class Inbox:
    """Any thread may bring something; the engine's thread waits for it and takes it."""

    def __init__(self) -> None:
        self.ended: ClosedError | None = None
        """Set once nothing is taken any more: what those who bring something are told."""
        self.num_sequences = 0
        """Sequences that have not been taken, each with its further answers."""
        self._process = os.getpid()
        self._messages: SimpleQueue[Message] = SimpleQueue()
        # Guards the number of sequences, and whether they are taken.
        self._lock = threading.RLock()

    def submit(self, sequence: TokenSequence) -> None:
        """Bring a sequence. Raises ClosedError once the engine has ended."""
        with self._lock:
            self._check_open()
            self.num_sequences += 1 + len(sequence.samples)
            self._messages.put(sequence)

    def call(self, function: Callable[[], object]) -> None:
        """Have something done between two steps; waits for it, and raises what it raises."""
        done: Future[None] = Future()
        with self._lock:
            self._check_open()
            self._messages.put(Callback(function, done))
        done.result()

    def close(self) -> None:
        """Ask the engine to end."""
        self._messages.put(None)

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                "the engine is that of another process", remedy="make one after the fork, from a model of its own"
            )
        if self.ended is not None:
            raise self.ended

    def take(self, *, wait: bool) -> Message:
        """The message that was brought first. Raises Empty where there is none and nobody is to wait.

        For the engine's thread, which puts a sequence where it is counted before it does anything that may fail.
        """
        message = self._messages.get(block=wait)
        if isinstance(message, TokenSequence):
            with self._lock:
                self.num_sequences -= 1 + len(message.samples)
        return message

    def end(self, reason: ClosedError) -> list[Message]:
        """Close the inbox and take what is left in it; whoever brings something from now on is told the reason."""
        left: list[Message] = []
        with self._lock, suppress(Empty):
            self.ended = reason
            while True:
                left.append(self.take(wait=False))
        return left


class StepWatch:
    """Says for how long the present step has made no progress.

    The thread that runs steps begins and ends it. One other looks, more often than `stalled_s` is to tell.
    """

    def __init__(self, count: Callable[[], int] = progress_count, clock: Callable[[], float] = time.monotonic) -> None:
        self._count, self._clock = count, clock
        self._began: float | None = None
        self._seen, self._moved = count(), clock()
        """The count that was seen last, and when it was first seen."""

    def begin(self) -> None:
        """Say that a step begins."""
        self._began = self._clock()

    def end(self) -> None:
        """Say that it has ended."""
        self._began = None

    @property
    def stalled_s(self) -> float:
        """Seconds since the present step began or was first seen where it is now; 0 between steps."""
        began, found, now = self._began, self._count(), self._clock()
        if found != self._seen:
            self._seen, self._moved = found, now
        return 0.0 if began is None else now - max(began, self._moved)


class Loop:
    """Runs the core in a thread of its own until it is asked to end, or anything fails."""

    def __init__(self, core: Core, store: PrefixStore) -> None:
        self._core, self._store = core, store
        self.inbox, self.watch = Inbox(), StepWatch()
        self.steps, self.busy_s = 0, 0.0
        """Steps, and the seconds in them."""
        self._close_s = 0.0
        self._thread = threading.Thread(target=self._run, name="pi-engine", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> None:
        """End the thread after its present step, and wait for that. What is kept is written to disk in so many
        seconds."""
        self._close_s = seconds
        self.inbox.close()
        self._thread.join()

    # From here on: the engine's thread.

    def _run(self) -> None:
        error: BaseException = ClosedError("the engine was closed before this answer ended")
        reason = ClosedError("the engine is closed", remedy="generate before closing it")
        try:
            while self._take_messages():
                began = time.perf_counter()
                self.watch.begin()
                self._core.step()
                self.watch.end()
                self.steps, self.busy_s = self.steps + 1, self.busy_s + time.perf_counter() - began
        except BaseException as failure:  # whatever it is, those who read streams must hear of it
            # Whoever asks next is somebody else, and the message of what is no error of ours may quote a request.
            said = f": {failure}" if isinstance(failure, PiError) else ""
            error, reason = failure, ClosedError("the engine has failed", found=f"{type(failure).__name__}{said}")
            reason.__cause__ = failure
        self._end(error, reason)

    def _take_messages(self) -> bool:
        """Take all that has arrived, after waiting for something if nothing runs; False once it is to close."""
        wait = self._core.scheduler.idle
        with suppress(Empty):
            while (message := self.inbox.take(wait=wait)) is not None:
                self._handle(message)
                wait = False
            return False
        return True

    def _handle(self, message: TokenSequence | Callback) -> None:
        if isinstance(message, TokenSequence):
            self._core.submit(message)
        else:
            try:
                message.function()
            except Exception as error:
                message.done.set_exception(error)
            else:
                message.done.set_result(None)

    def _end(self, error: BaseException, reason: ClosedError) -> None:
        """Tell everybody who still waits: those who read answers the error, the others the reason."""
        left = self.inbox.end(reason)
        unfinished = [*self._core.scheduler.clear(), *(m for m in left if isinstance(m, TokenSequence))]
        unfinished += [sample for sequence in unfinished for sample in sequence.samples]
        for sequence in unfinished:
            sequence.finish(error)
        for message in left:
            if isinstance(message, Callback):
                message.done.set_exception(reason)
        self._core.finished += sum(sequence.rank is Rank.ASKED for sequence in unfinished)
        for cache in self._core.held.values():
            cache.close()
        self._core.held.clear()
        self._store.close(self._close_s)
