"""The engine's thread: it takes messages, and runs the core's steps as long as there is anything to run."""

import threading
import time
from contextlib import suppress
from queue import Empty

from pi_runtime.engine.caches import EngineCaches
from pi_runtime.engine.core import Core
from pi_runtime.engine.inbox import Callback, Inbox
from pi_runtime.engine.session_state import SessionState
from pi_runtime.engine.step_watch import StepWatch
from pi_runtime.errors import UsageError
from pi_runtime.sequence.sequence import TokenSequence


class Loop:
    """Runs the core in a thread of its own until it is asked to end, or anything fails."""

    def __init__(self, core: Core, caches: EngineCaches) -> None:
        self._core, self._caches = core, caches
        self.inbox, self.watch = Inbox(), StepWatch()
        self.busy_s = 0.0
        """Seconds in steps."""
        self._thread = threading.Thread(target=self._run, name="pi-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread after its present step, and wait for that."""
        self.inbox.close()
        self._thread.join()

    # From here on: the engine's thread.

    def _run(self) -> None:
        error: BaseException = UsageError("the engine was closed before this answer ended")
        reason = UsageError("the engine is closed", remedy="generate before closing it")
        try:
            while self._take_messages():
                began = time.perf_counter()
                self.watch.begin()
                self._core.step()
                self.watch.end()
                self.busy_s += time.perf_counter() - began
        except BaseException as failure:  # whatever it is, those who read streams must hear of it
            error, reason = failure, UsageError("the engine has failed", found=f"{type(failure).__name__}: {failure}")
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

    def _handle(self, message: TokenSequence | Callback | SessionState) -> None:
        if isinstance(message, TokenSequence):
            self._core.submit(message)
        elif isinstance(message, SessionState):
            self._core.leave_session(message, reason="cancelled")
            self._caches.forget(message)
        else:
            try:
                message.function()
            except Exception as error:
                message.done.set_exception(error)
            else:
                message.done.set_result(None)

    def _end(self, error: BaseException, reason: UsageError) -> None:
        """Tell everybody who still waits: those who read answers the error, the others the reason."""
        left = self.inbox.end(reason)
        unfinished = [*self._core.scheduler.clear(), *(m for m in left if isinstance(m, TokenSequence))]
        unfinished += [sample for sequence in unfinished for sample in sequence.samples]
        for sequence in unfinished:
            sequence.finish(error)
        for message in left:
            if isinstance(message, Callback):
                message.done.set_exception(reason)
        self._core.finished += len(unfinished)
        self._caches.close()
