"""A device that does its work in any order that streams and events allow.

Graphs and copies of the second stream wait in queues. `late`: a queue goes on only as far as somebody waits for it;
`early`: at once; else as far as is drawn, whenever the host asks for something. So who does not wait sees the worst
that may be there. What prompts launch on the first stream runs at once: no graph is queued then.
"""

import contextlib
import copy
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pi_runtime.cuda.memory.devices import Device, Event, Op
from pi_runtime.cuda.memory.driver_errors import translated_errors

POLICIES: tuple[str | int, ...] = ("late", "early", 0, 1, 2)
"""An integer is a seed."""


class _Queue:
    """The work of a stream that has not been done."""

    def __init__(self) -> None:
        self._waiting: deque[Op] = deque()
        self._done = 0

    @property
    def added(self) -> int:
        return self._done + len(self._waiting)

    def add(self, op: Op) -> None:
        self._waiting.append(op)

    def run_to(self, mark: int) -> None:
        """Do what was added up to a mark."""
        while self._done < mark:
            op = self._waiting.popleft()
            self._done += 1
            op()


class _Queued(TorchDispatchMode):
    """Copies within go into a queue."""

    def __init__(self, order: "_Order") -> None:
        super().__init__()
        self._order = order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = partial(func, *args, **(kwargs or {}))
        if func is not torch.ops.aten.copy_.default:
            return run()
        self._order.add(run)
        return args[0]


class _Order:
    """Two queues, of which one takes what is launched now."""

    def __init__(self, policy: str | int) -> None:
        self.follow(policy)
        self.queues = _Queue(), _Queue()
        self.current = self.queues[0]

    def follow(self, policy: str | int) -> None:
        """From now on."""
        self._policy, self._rng = policy, np.random.default_rng(policy if isinstance(policy, int) else 0)

    def add(self, op: Op) -> None:
        self.current.add(op)
        self.go_on()

    def go_on(self) -> None:
        """Do as much as the policy says."""
        for queue in self.queues:
            left = queue.added - queue._done
            some = {"late": 0, "early": left}.get(str(self._policy), int(self._rng.integers(0, left + 1)))
            queue.run_to(queue._done + some)

    def finish(self) -> None:
        for queue in self.queues:
            queue.run_to(queue.added)

    @contextlib.contextmanager
    def second(self) -> Iterator[None]:
        self.current = self.queues[1]
        try:
            with _Queued(self):
                yield
        finally:
            self.current = self.queues[0]


class _QueuedEvent:
    """A mark in a queue."""

    def __init__(self, order: _Order) -> None:
        self._order, self._queue, self._mark = order, order.current, 0

    def record(self) -> None:
        self._queue, self._mark = self._order.current, self._order.current.added

    def wait(self) -> None:
        waiting = partial(self._queue.run_to, self._mark)
        if self._order.current is self._order.queues[0]:
            waiting()
        else:
            self._order.add(waiting)

    def synchronize(self) -> None:
        self._order.go_on()
        self._queue.run_to(self._mark)


class OutOfOrder:
    """What such a device does in place of the interpreter or the emulator."""

    order: _Order
    device: torch.device

    def event(self) -> Event:
        return _QueuedEvent(self.order)

    def stream(self) -> contextlib.AbstractContextManager[None]:
        return translated_errors()

    def copy_stream(self) -> contextlib.AbstractContextManager[object]:
        return self.order.second()

    def capture(self, ops: Sequence[Op]) -> Op:
        self.synchronize()
        for op in ops:
            op()

        def replay() -> None:
            for op in ops:
                self.order.add(op)

        return replay

    def synchronize(self) -> None:
        self.order.finish()


def out_of_order(gpu: Device, policy: str | int = "late") -> Any:
    """The same device with another order of work, `order`."""
    found = copy.copy(gpu)
    found.__class__ = type("Reordering", (OutOfOrder, type(gpu)), {"order": _Order(policy)})
    return found
