"""A device that does its work in any order that streams and events allow.

Graphs, kernels, copies and operations of torch wait in the queues of two streams. `late`: a queue goes on only as far
as somebody waits for it; `early`: at once; else as far as is drawn, whenever the host asks for something. So who does
not wait sees the worst that may be there. As on a GPU, the host waits for a copy to or from its memory that is not
asynchronous, and where it asks for a number.
"""

import contextlib
import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from pi_runtime.cuda.memory.devices import Device, Event, Op, translated_errors

POLICIES: tuple[str | int, ...] = ("late", "early", 0, 1, 2)
"""An integer is a seed."""
_COPY, _NUMBER = torch.ops.aten.copy_.default, torch.ops.aten._local_scalar_dense.default


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


class _Order:
    """Two queues, of which one takes what is launched now."""

    def __init__(self, policy: str | int) -> None:
        self.follow(policy)
        self.queues = _Queue(), _Queue()
        self.current = self.queues[0]
        self.running = False
        self.waits_for_copies = True
        """Whether the host waits for a copy that is not asynchronous."""

    def follow(self, policy: str | int) -> None:
        """From now on."""
        self._policy, self._rng = policy, np.random.default_rng(policy if isinstance(policy, int) else 0)

    def add(self, op: Op) -> None:
        if self.running:  # part of what is in a queue
            op()
            return
        self.current.add(op)
        self.go_on()

    def go_on(self) -> None:
        """Do as much as the policy says."""
        for queue in self.queues:
            left = queue.added - queue._done
            some = {"late": 0, "early": left}.get(str(self._policy), int(self._rng.integers(0, left + 1)))
            self.run(queue, queue._done + some)

    def run(self, queue: _Queue, mark: int) -> None:
        before, self.running = self.running, True
        try:
            queue.run_to(mark)
        finally:
            self.running = before

    def finish(self) -> None:
        for queue in self.queues:
            self.run(queue, queue.added)

    @contextlib.contextmanager
    def second(self) -> Iterator[None]:
        self.current = self.queues[1]
        try:
            yield
        finally:
            self.current = self.queues[0]


class _Queued(TorchDispatchMode):
    """Operations of torch within go into a queue; of those with new results the memory is made at once."""

    def __init__(self, order: _Order, host: "_HostMemory") -> None:
        super().__init__()
        self._order, self._host = order, host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run, order = partial(func, *args, **(kwargs or {})), self._order
        given = [a for a in args if isinstance(a, torch.Tensor)]
        if order.running or func.is_view or not given:
            return run()
        if func is _COPY:
            order.add(run)
            asynchronous = (args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)) is True
            if not asynchronous and order.waits_for_copies and any(tensor in self._host for tensor in given):
                order.run(order.current, order.current.added)
            return args[0]
        if func is _NUMBER:  # the host asks for it
            order.run(order.current, order.current.added)
            return run()
        if func._schema.is_mutable:
            order.add(run)
            return args[0]
        found = run()
        results = found if isinstance(found, tuple) else (found,)
        memory = {tensor.untyped_storage().data_ptr() for tensor in given}
        if any(result.untyped_storage().data_ptr() not in memory for result in results):
            order.add(lambda: _fill(results, run()))
        return found


def _fill(results: Sequence[torch.Tensor], found: Any) -> None:
    for result, computed in zip(results, found if isinstance(found, tuple) else (found,), strict=True):
        result.copy_(computed)


class _HostMemory:
    """What is not on the device, although all is in RAM here: pinned buffers, and NumPy's arrays."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}

    def add(self, tensor: torch.Tensor, array: np.ndarray | None = None) -> torch.Tensor:
        start = tensor.untyped_storage().data_ptr()
        self._ends[start] = start + tensor.untyped_storage().nbytes()
        if array is not None:
            weakref.finalize(array, self._ends.pop, start, None)
        return tensor

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return any(start <= tensor.data_ptr() < end for start, end in self._ends.items())


class _QueuedEvent:
    """A mark in a queue."""

    def __init__(self, order: _Order) -> None:
        self._order, self._queue, self._mark = order, order.current, 0

    def record(self) -> None:
        self._queue, self._mark = self._order.current, self._order.current.added

    def wait(self) -> None:
        self._order.add(partial(self._order.run, self._queue, self._mark))

    def synchronize(self) -> None:
        self._order.go_on()
        self._order.run(self._queue, self._mark)


class OutOfOrder:
    """What such a device does in place of the interpreter or the emulator."""

    order: _Order
    host: _HostMemory
    device: torch.device

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self.host.add(super().pinned(count, dtype))  # type: ignore[misc]

    def event(self) -> Event:
        return _QueuedEvent(self.order)

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        order, from_numpy = self.order, torch.from_numpy

        def queued(launch: Callable[..., object]) -> Callable[..., None]:
            return lambda *arguments, **named: order.add(partial(launch, *arguments, **named))

        def fetched(tensor: torch.Tensor) -> torch.Tensor:
            order.run(order.current, order.current.added)
            return tensor.clone()

        with (
            translated_errors(),
            patch.object(JITFunction, "run", queued(JITFunction.run)),
            patch.object(InterpretedFunction, "run", queued(InterpretedFunction.run)),
            patch.object(torch, "from_numpy", lambda array: self.host.add(from_numpy(array), array)),
            patch.object(torch.Tensor, "cpu", fetched),
            _Queued(order, self.host),
        ):
            yield

    def copy_stream(self) -> contextlib.AbstractContextManager[object]:
        return self.order.second()

    def capture(self, ops: Sequence[Op]) -> Op:
        self.synchronize()
        for op in ops:
            self.order.add(op)
        self.synchronize()

        def replay() -> None:
            for op in ops:
                self.order.add(op)

        return replay

    def synchronize(self) -> None:
        self.order.finish()


def out_of_order(gpu: Device, policy: str | int = "late") -> Any:
    """The same device with another order of work, `order`."""
    found = copy.copy(gpu)
    found.__class__ = type("Reordering", (OutOfOrder, type(gpu)), {"order": _Order(policy), "host": _HostMemory()})
    return found
