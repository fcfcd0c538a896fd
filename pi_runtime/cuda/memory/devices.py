"""Devices: memory, waiting, and a way to run the same work again and again.

`Cuda` is a GPU. Tests have a device that runs the same executor on any machine, under Triton's interpreter.
"""

import contextlib
import gc
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Protocol

import torch
import triton

from pi_runtime.artifact.buffers import Buffers
from pi_runtime.cuda.kernels.tiling import Tiling
from pi_runtime.errors import DeviceError, DoesNotFitError, PiError, Setting

_FULL = ("out of memory", "ALLOC_FAILED")
_OURS = ("CUDA", "CUBLAS")


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise the GPU's errors as PiErrors that say what happened and what to do; other errors pass."""
    try:
        yield
    except RuntimeError as error:
        translated = _translated(str(error))
        if translated is None:
            raise
        raise translated from error


def _translated(text: str) -> PiError | None:
    """The error for this text; None where the GPU has no part in it."""
    if any(word in text for word in _FULL):
        return out_of_memory(text)
    if any(word in text for word in _OURS):
        # Every later call of this process fails too.
        return PiError(
            "the GPU failed",
            found=_first_line(text),
            remedy=(
                "run again; if it comes back, ",
                Setting("device", "cpu"),
                "; the driver's own message is in the system log",
            ),
        )
    return None


def out_of_memory(found: str) -> DoesNotFitError:
    """The error for a GPU that ran out of memory in spite of the budget."""
    return DoesNotFitError(
        "the GPU ran out of memory",
        found=_first_line(found),
        remedy=(
            "a smaller ",
            Setting("vram_budget"),
            " (a smaller part of the model goes there), a smaller ",
            Setting("context"),
            ", or end other programs that use the GPU",
        ),
    )


def pinning_error(nbytes: int, error: Exception) -> DoesNotFitError:
    """The error for RAM that the driver does not lock for the GPU's copies."""
    return DoesNotFitError(
        f"{nbytes} bytes of RAM could not be pinned for copies to and from the GPU",
        found=_first_line(str(error)),
        remedy="end other programs, or raise the limit of locked memory (ulimit -l)",
    )


def device_error(index: int, error: Exception) -> DeviceError:
    """The error for a GPU that cannot be used: its driver is too old, or Triton cannot compile what starts kernels."""
    launcher = not isinstance(error, RuntimeError) or "compiler" in str(error)
    return DeviceError(
        f"cuda:{index} cannot be used" + (": Triton could not compile its launcher" if launcher else ""),
        found=_first_line(str(error)),
        remedy=(
            "install a C compiler and Python's headers (gcc, python3-dev)"
            if launcher
            else "an NVIDIA driver that suits this torch (see nvidia-smi)",
            ", or ",
            Setting("device", "cpu"),
        ),
    )


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


Op = Callable[[], object]
"""An operation with its arguments bound."""

HEADROOM = 256 << 20
"""GPU memory left to the driver, to compiled kernels and to other programs."""
LIBRARIES = 128 << 20
"""Memory beside a budget, for cuBLAS and for the allocator's rounding to whole blocks."""


class Event(Protocol):
    """A point in the device's work that the host can wait for."""

    def record(self) -> object: ...

    def wait(self) -> object:
        """Let the device wait for it, and not the host."""
        ...

    def synchronize(self) -> object: ...


class Device(Protocol):
    """What the executor asks of a device."""

    name: str
    device: torch.device
    tiling: Tiling

    def free_bytes(self) -> int:
        """Memory that may still be allocated."""
        ...

    def limit(self, nbytes: int | None) -> None:
        """Never allocate more than this beside what the process holds; None takes the limit away."""
        ...

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros in pinned RAM, which the device copies from and to by itself. Raises DoesNotFitError."""
        ...

    def event(self) -> Event: ...

    def stream(self) -> contextlib.AbstractContextManager[None]:
        """Run what is launched within on this device, in order.

        The device's own faults are raised as PiErrors, and as a DoesNotFitError where its memory ended.
        """
        ...

    def copy_stream(self) -> contextlib.AbstractContextManager[object]:
        """Run what is launched within on a second stream, beside the first; events order the two."""
        ...

    def capture(self, ops: Sequence[Op]) -> Op:
        """Run the operations once, and return them as one call. They always work in the same memory."""
        ...

    def synchronize(self) -> None: ...


def allocate(table: Buffers, device: Device) -> dict[str, torch.Tensor]:
    """The buffers of a table in the device's memory, all zeros."""
    return {
        name: torch.zeros(buffer.shape, dtype=getattr(torch, buffer.dtype), device=device.device)
        for name, buffer in table.items()
    }


def allocate_pinned(table: Buffers, device: Device) -> dict[str, torch.Tensor]:
    """The buffers of a table in pinned RAM, all zeros. Raises DoesNotFitError."""
    return {
        name: device.pinned(prod(buffer.shape), getattr(torch, buffer.dtype)).view(buffer.shape)
        for name, buffer in table.items()
    }


def configure_libraries() -> None:
    """Set what Triton and cuBLAS read from the environment, unless the user has set it.

    Call it before the first kernel is compiled and before the first dense product.
    """
    # Products and sums in one instruction, as kernels are tuned for. Triton 3.9 warns where a GPU's kernel is compiled
    # and this is unset, because its default changes in 3.10.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    # cuBLAS's workspace: 8 MiB, which budgets count, instead of 32 MiB on some GPUs. It is read with the first handle.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")


class Cuda:
    """One NVIDIA GPU: two streams of its own, and captured graphs."""

    tiling = Tiling()

    def __init__(self, index: int) -> None:
        """Open GPU `index`. Raises DeviceError if it does not answer, or Triton cannot start kernels on it."""
        configure_libraries()
        self.device = torch.device("cuda", index)
        try:
            self.name = f"cuda:{index}, {torch.cuda.get_device_name(index)}"
            self._stream, self._copy_stream = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
            triton.runtime.driver.active.get_current_target()
        except (RuntimeError, OSError, AssertionError, subprocess.SubprocessError) as error:  # as Triton and torch do
            raise device_error(index, error) from error

    def free_bytes(self) -> int:
        return max(0, int(torch.cuda.mem_get_info(self.device)[0]) - HEADROOM)

    def limit(self, nbytes: int | None) -> None:
        # Memory that is only cached for reuse does not count as held, nor does pinned RAM.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
        total = torch.cuda.get_device_properties(self.device).total_memory
        held = torch.cuda.memory_reserved(self.device)
        most = total if nbytes is None else min(total, held + nbytes + LIBRARIES)
        torch.cuda.set_per_process_memory_fraction(most / total, self.device)

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.zeros(count, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            raise pinning_error(count * dtype.itemsize, error) from error

    def event(self) -> Event:
        event: Event = torch.cuda.Event()
        return event

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        with translated_errors(), torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def copy_stream(self) -> contextlib.AbstractContextManager[object]:
        stream: contextlib.AbstractContextManager[object] = torch.cuda.stream(self._copy_stream)
        return stream

    def capture(self, ops: Sequence[Op]) -> Op:
        for op in ops:  # compiles and loads kernels, which is not allowed in a capture
            op()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph() empties caches each time, and there are two graphs a layer. No operation allocates, so
        # graphs need no memory pool to share; a shared pool cannot be used again when its last graph is gone.
        with _gc_paused():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for op in ops:
                    op()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it would only say that the capture failed
                    graph.capture_end()
                raise
            graph.capture_end()
        replay: Op = graph.replay
        return replay

    def synchronize(self) -> None:
        self._stream.synchronize()
        self._copy_stream.synchronize()


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """Collect no garbage within: freeing memory may record an event, which would become part of the capture."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
