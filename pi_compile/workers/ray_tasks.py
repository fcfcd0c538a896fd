"""Workers as tasks of a Ray cluster. Needs the extra `ray`; imported only when a cluster is asked for.

Ray finds free processors and GPUs and starts a process for each worker. What the workers do is a matter of the folder
that they share, as everywhere; Ray moves no data. The process that asks for them does no task itself: it shows the
progress and the result.
"""

import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from typing import Any

import ray

from pi_compile.workers.worker import Rank, Worker
from pi_runtime.errors import DoesNotFitError, Setting, UsageError

KNOCK = 10.0
"""Seconds within which a cluster must take a connection."""
LEAVING = 2.0
"""Seconds that workers have to leave by themselves when all is done."""
RETRIES = 3
"""Times that Ray starts a worker again whose process or machine was lost."""


class RayTasks:
    """Workers on a cluster: each `run`s a function with a rank of its own, on its processors, memory and GPU."""

    def __init__(self, address: str, run: Callable[[Rank], None], *, threads: int, memory: int, gpus: bool) -> None:
        """Join the cluster at `address`: `auto` or HOST:PORT. Raises UsageError where there is none."""
        # Ray tells what happens to its workers on stdout, which is for results.
        self._connection = ExitStack()
        self._connection.enter_context(redirect_stdout(sys.stderr))
        self._connection.callback(ray.shutdown)
        try:
            _knock(address)
            ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError) as error:
            remedy = "start one with `ray start --head`; docs/how-to/workers.md tells more"
            raise UsageError(
                "no cluster answers", setting=Setting("ray", address), found=error, remedy=remedy
            ) from None
        self._run, self._resources = run, {"num_cpus": threads, "num_gpus": int(gpus), "memory": memory}
        self._running: list[Any] = []
        self._ended = threading.Event()

    @property
    def room(self) -> int:
        """How many workers the whole cluster has room for. Raises DoesNotFitError where it has none."""
        found = ray.cluster_resources()
        wanted = {
            "CPU": self._resources["num_cpus"],
            "GPU": self._resources["num_gpus"],
            "memory": self._resources["memory"],
        }
        room = min(int(found.get(name, 0) // amount) for name, amount in wanted.items() if amount)
        if not room:
            raise DoesNotFitError(
                "the Ray cluster has no room for a worker",
                expected=wanted,
                found=found,
                remedy="add a machine that has, or lower [profile] threads, or set layers_at_once = 1",
            )
        return room

    def start(self, count: int, worker: Worker) -> None:
        """Start `count` workers, if they have not been started; end the waiting of `worker` if all of them fail."""
        if not self._running:
            task = ray.remote(_run).options(**self._resources, max_retries=RETRIES)
            # Ray shows a process only the GPU that it has: the first one.
            ranks = (Rank(rank=n, world=count, launcher="ray") for n in range(1, count + 1))
            self._running = [task.remote(self._run, rank) for rank in ranks]
            watch = threading.Thread(target=self._watch, args=(worker,), daemon=True)
            watch.start()
            self._connection.callback(watch.join)

    def end(self) -> None:
        """End the workers that have not left by themselves, and leave the cluster."""
        self._ended.set()
        if self._running:
            ray.wait(self._running, num_returns=len(self._running), timeout=LEAVING)
        for reference in self._running:
            ray.cancel(reference, force=True)
        self._connection.close()

    def _watch(self, worker: Worker) -> None:
        waiting = list(self._running)
        while not self._ended.is_set():
            done, waiting = ray.wait(waiting, timeout=1.0)
            for reference in done:
                try:
                    ray.get(reference)
                except ray.exceptions.RayError as error:
                    if not waiting:
                        worker.stop(error)
                        return
                else:
                    return  # it went through to the end, so all is done


def _knock(address: str) -> None:
    """Raise OSError where nothing listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), KNOCK).close()


def _run(run: Callable[[Rank], None], rank: Rank) -> None:
    run(rank)
