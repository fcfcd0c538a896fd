"""What the executor asks of a device: memory, waiting, and a way to run the same work again and again.

`Cuda` is a GPU. `Interpreted` is torch's CPU device with kernels under Triton's interpreter: the same executor runs on
any machine, step by step instead of side by side, for tests.
"""

import contextlib
import gc
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import triton

from pi_runtime.cuda.kernels.tiling import INTERPRETED, Tiling
from pi_runtime.cuda.memory.driver_errors import in_words_of_a_user, no_device, not_pinned

Op = Callable[[], object]
"""Something to be done, with everything it needs bound to it."""

HEADROOM = 256 << 20
"""GPU memory left to the driver, to compiled kernels and to whatever else draws on the card."""
LIBRARIES = 128 << 20
"""What cuBLAS and the allocator's rounding to whole blocks may take beside a budget."""


class Event(Protocol):
    """A point in the device's work that the host can wait for."""

    def record(self) -> object: ...

    def wait(self) -> object:
        """Let the device wait, and not the host."""
        ...

    def synchronize(self) -> object: ...


class Device(Protocol):
    """Where the GPU's side of a run is."""

    name: str
    device: torch.device
    tiling: Tiling

    def free_bytes(self) -> int:
        """Memory that may still be taken."""
        ...

    def limit(self, nbytes: int | None) -> None:
        """Never take more than this beside what this process has; None takes the limit away."""
        ...

    def held_bytes(self) -> int:
        """Memory that this process has taken through torch."""
        ...

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros in RAM that the device can copy from and to by itself. Raises DoesNotFitError."""
        ...

    def event(self) -> Event: ...

    def at_work(self) -> contextlib.AbstractContextManager[None]:
        """What is launched within goes to this device, in order. Its own faults are PiErrors, and a DoesNotFitError
        where its memory ended."""
        ...

    def copying(self) -> contextlib.AbstractContextManager[object]:
        """What is launched within runs beside the rest, in order among itself; events keep them apart."""
        ...

    def replayable(self, ops: Sequence[Op]) -> Op:
        """Do the operations once, and return them as one call. They always work in the same memory."""
        ...

    def synchronize(self) -> None: ...


class Cuda:
    """One NVIDIA GPU: a stream of our own, and captured graphs."""

    tiling = Tiling()

    def __init__(self, index: int) -> None:
        """Raises DeviceError for a GPU that does not answer, or that Triton cannot start kernels on."""
        self.device = torch.device("cuda", index)
        try:
            self.name = f"cuda:{index}, {torch.cuda.get_device_name(index)}"
            self._stream, self._copies = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
            triton.runtime.driver.active.get_current_target()
        except (RuntimeError, OSError, AssertionError, subprocess.SubprocessError) as error:  # as Triton and torch do
            raise no_device(index, error) from error

    def free_bytes(self) -> int:
        return max(0, int(torch.cuda.mem_get_info(self.device)[0]) - HEADROOM)

    def limit(self, nbytes: int | None) -> None:
        # What is only kept for reuse is not held, pinned RAM neither.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
        total = torch.cuda.get_device_properties(self.device).total_memory
        most = total if nbytes is None else min(total, self.held_bytes() + nbytes + LIBRARIES)
        torch.cuda.set_per_process_memory_fraction(most / total, self.device)

    def held_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self.device))

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.zeros(count, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            raise not_pinned(count * dtype.itemsize, error) from error

    def event(self) -> Event:
        event: Event = torch.cuda.Event()
        return event

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        with in_words_of_a_user(), torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def copying(self) -> contextlib.AbstractContextManager[object]:
        stream: contextlib.AbstractContextManager[object] = torch.cuda.stream(self._copies)
        return stream

    def replayable(self, ops: Sequence[Op]) -> Op:
        for op in ops:  # compiles kernels and loads them, which a capture must not
            op()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(), which empties caches each time: there are two graphs a layer. No operation allocates,
        # so none needs a pool to share; one that is shared cannot be used again when its last graph is gone.
        with _uncollected():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for op in ops:
                    op()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture's own end would only say that it failed
                    graph.capture_end()
                raise
            graph.capture_end()
        replay: Op = graph.replay
        return replay

    def synchronize(self) -> None:
        self._stream.synchronize()
        self._copies.synchronize()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected within: freed memory may record an event, which a capture would take for its own."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class _Done:
    """An event of a device that is never ahead."""

    def record(self) -> None:
        pass

    wait = synchronize = record


class Interpreted:
    """Triton's interpreter on torch's CPU device, with as much memory as it is said to have."""

    name, tiling = "Triton's interpreter", INTERPRETED

    def __init__(self, memory: int = 1 << 40) -> None:
        assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before Triton is imported"
        self.device = torch.device("cpu")
        self._memory = memory

    def free_bytes(self) -> int:
        return self._memory

    def limit(self, nbytes: int | None) -> None:
        pass

    def held_bytes(self) -> int:
        return 0

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def event(self) -> Event:
        return _Done()

    def at_work(self) -> contextlib.AbstractContextManager[None]:
        return in_words_of_a_user()

    def copying(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def replayable(self, ops: Sequence[Op]) -> Op:
        def replay() -> None:
            for op in ops:
                op()

        replay()
        return replay

    def synchronize(self) -> None:
        pass
