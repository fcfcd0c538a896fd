"""Models that keep a chosen share of their FFNs' rows in memory, and read the others from disk."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pi_runtime import Model, load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import read_nbytes, useful_budgets
from pi_runtime.disk.ram_plan import batch_rows, fixed_bytes, plan_for, sequence_kv_bytes
from pi_runtime.disk.reader import Reader
from pi_runtime.execution.disk_rows import DiskRows
from pi_runtime.execution.host_executor import HostExecutor
from pi_runtime.execution.ram_budget import divided_rows


def from_disk(
    path: Path, share: float, mode: str = "auto", *, threads: int = 1, context: int | None = None,
    reader: dict[str, Any] | None = None, **plan_fields: Any,
) -> Model:  # fmt: skip
    """The model with memory for this share of what all rows take; of it a sixteenth is for staged rows.

    `reader` has settings of the reader; `plan_fields` replace what the rule would choose.
    """
    found = Artifact.open(path)
    m = found.manifest
    least, whole = useful_budgets(m, fixed=0)
    plan = replace(plan_for(found, mode, max(least, int(share * whole)), fixed=0), **plan_fields)
    context = m.decoder.context_length if context is None else context
    rows = Reader(path, batch_rows(plan.staged), **{"piece": read_nbytes(m.decoder), **(reader or {})})
    kv = 64 * sequence_kv_bytes(m, context, "auto")
    return Model(found, mode, HostExecutor(divided_rows(found, mode, context, threads, "auto", plan, rows, kv)))


def within(path: Path, budget: str | None, threads: int = 1, context: int = 40, less: int = 0) -> Model:
    """A model of whole matrices in memory (None), or within the `least` budget, that for `half` of them, or for `all`,
    `less` so many bytes; with room for the keys and values of 16 sequences."""
    if budget is None:
        return load(path, device="cpu", context=context, threads=threads)
    with Artifact.open(path) as found:
        kv = 16 * sequence_kv_bytes(found.manifest, context, "auto")
        least, most = useful_budgets(found.manifest, fixed_bytes(found.manifest, context, "auto", kv))
    nbytes = {"least": least, "half": (least + most) // 2, "all": most}[budget]
    return load(path, device="cpu", context=context, threads=threads, ram_budget=nbytes - less, kv_budget=kv)


def rows_of(model: Model) -> DiskRows:
    """The rows of a model that runs within a budget of RAM."""
    assert isinstance(model.executor, HostExecutor)
    assert isinstance(model.executor.rows, DiskRows)
    return model.executor.rows


class FaultyPread:
    """A `pread` that does what `fault` says instead of reading.

    `fault` gets a function that reads at most so many bytes, and the number of the call; None lets the call read.
    """

    def __init__(self) -> None:
        self.fault: Callable[[Callable[[int], int], int], int | None] = lambda _read, _call: None
        self.calls = 0
        libc = ctypes.CDLL(None, use_errno=True)
        kind = ctypes.CFUNCTYPE(
            ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, use_errno=True
        )
        libc.pread.restype = ctypes.c_ssize_t
        libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]

        def pread(fd: int, buffer: int, count: int, offset: int) -> int:
            self.calls += 1
            answer = self.fault(lambda most: int(libc.pread(fd, buffer, min(most, count), offset)), self.calls)
            return int(libc.pread(fd, buffer, count, offset)) if answer is None else answer

        self._callback = kind(pread)
        self.address = int(ctypes.cast(self._callback, ctypes.c_void_p).value or 0)
