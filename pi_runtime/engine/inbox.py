"""What callers bring to the engine's thread: messages, in one queue, and the wish to close."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from pi_runtime.engine.session_state import SessionState
from pi_runtime.errors import UsageError
from pi_runtime.sequence.sequence import TokenSequence


class Callback(NamedTuple):
    """Something that is to be done between two steps."""

    function: Callable[[], object]
    done: Future[None]


Message = TokenSequence | Callback | SessionState | None
"""A sequence that is to run, a call, a session that nobody will continue, or None: the engine is to end."""


class Inbox:
    """Any thread may bring something; the engine's thread waits for it and takes it.

    `forget` takes no lock, because the finalizer of a session calls it: in any thread, amid anything that it does.
    """

    def __init__(self) -> None:
        self.ended: UsageError | None = None
        """Set once nothing is taken any more: what those who bring something are told."""
        self.num_sequences = 0
        """Sequences that have not been taken, each with its further answers."""
        self._process = os.getpid()
        self._messages: SimpleQueue[Message] = SimpleQueue()
        # Guards the number of sequences, and whether they are taken.
        self._lock = threading.RLock()

    def submit(self, sequence: TokenSequence) -> None:
        """Bring a sequence. Raises UsageError once the engine has ended."""
        with self._lock:
            self._check_open()
            if isinstance(sequence.origin, SessionState):
                sequence.origin.sequence = sequence
            self.num_sequences += 1 + len(sequence.samples)
            self._messages.put(sequence)

    def call(self, function: Callable[[], object]) -> None:
        """Have something done between two steps; waits for it, and raises what it raises."""
        done: Future[None] = Future()
        with self._lock:
            self._check_open()
            self._messages.put(Callback(function, done))
        done.result()

    def forget(self, session: SessionState) -> None:
        """Bring a session that nobody will continue. A finalizer may call it."""
        self._messages.put(session)

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

    def end(self, reason: UsageError) -> list[Message]:
        """Close the inbox and take what is left in it; whoever brings something from now on is told the reason."""
        left: list[Message] = []
        with self._lock, suppress(Empty):
            self.ended = reason
            while True:
                left.append(self.take(wait=False))
        return left
