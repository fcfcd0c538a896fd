"""Further workers as processes of this machine, which end with the process that started them."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker

from pi_compile.workers.worker import Rank

LEAVING = 1.0
"""Seconds that the others have to leave by themselves when all is done."""
_INTERRUPTS = {signal.SIGINT}


class LocalProcesses:
    """`count` workers, this process one of them: the others `run` a function of a module, each with a rank of its own.

    Where a launcher started several processes that each start some, ranks are those of all together.
    """

    def __init__(self, run: Callable[[Rank], None], rank: Rank, count: int) -> None:
        self.rank, *others = (
            replace(rank, rank=rank.rank * count + n, world=rank.world * count, local=rank.local * count + n)
            for n in range(count)
        )
        context = multiprocessing.get_context("spawn")  # a fork would copy threads' locks
        ranks = (replace(other, launcher="local") for other in others)
        self._waiting = [context.Process(target=_run, args=(run, other), daemon=True) for other in ranks]
        self._started: list[multiprocessing.process.BaseProcess] = []

    def start(self) -> None:
        """Start the others, if they have not been started."""
        while self._waiting:
            process = self._waiting.pop(0)
            with _interrupts_held():  # of the new process too, which could only print a traceback while it imports
                process.start()
                self._started.append(process)

    def end(self) -> None:
        """End the others."""
        until = time.monotonic() + LEAVING
        for process in self._started:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()  # one that is stopped would never see a gentler signal
            process.join()


def _run(run: Callable[[Rank], None], rank: Rank) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
        run(rank)
    except KeyboardInterrupt:
        pass  # the process that started this one has it too, and says so


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while the block runs, in this thread and in processes that it starts."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # its start, with that of the first process, would let Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # what it was at is lost, as if it had been killed
