"""The threads of parallel kernels: how they wait for work, which library runs them, and whether work goes on.

A count of this process grows with every layer of a step, and with rows that come. A step may take minutes because its
work is large. It is stuck where the count stands still. One count serves all models, because their steps take turns.
"""

import ctypes
import os
import threading
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types

from pi_runtime.kernels.codegen.intrinsics import emits

SPIN = 1_000
"""Turns that a waiting thread spins before it sleeps. libgomp's own default is milliseconds: on a machine with anything
else to do each parallel region then waits for a time slice (8 ms against 5 µs, measured)."""
SPIN_BESIDE_GPU = 100_000
"""The same while a GPU works between two regions, some tens of microseconds a layer: waking would take as long."""

ONE_AT_A_TIME = threading.RLock()
"""Held while parallel kernels run. All models of a process share numba's threads, and one of its threading layers ends
the process when two Python threads come at once."""


def start_threads(spin: int = SPIN) -> None:
    """Start numba's threads, which wait as `spin` says. Does nothing once they run.

    libgomp reads GOMP_SPINCOUNT when it is loaded, with the first thread. A user's own value is left alone, whatever it
    is, and the variable is gone again afterwards.
    """
    if "GOMP_SPINCOUNT" in os.environ:
        numba.get_num_threads()
        return
    os.environ["GOMP_SPINCOUNT"] = str(spin)
    try:
        numba.get_num_threads()
    finally:
        del os.environ["GOMP_SPINCOUNT"]


def threading_layer() -> str:
    """Name of the library behind numba's threads: `omp`, `tbb` or `workqueue` (the slow one that is always there)."""
    start_threads()
    return str(numba.threading_layer())


_COUNT, _NAME = ctypes.c_int64(0), "pi_runtime progress"
llvmlite.binding.add_symbol(_NAME, ctypes.addressof(_COUNT))


def progress_count() -> int:
    """How far the work of this process has come; a larger number than before means that it went on."""
    return _COUNT.value


def advance_progress() -> None:
    """Say that work goes on, where no kernel does."""
    _COUNT.value += 1


@emits(types.none())
def advanced(b: Any) -> Any:
    """Say in a kernel that work goes on."""
    word = ir.IntType(64)
    known = b.module.globals.get(_NAME)
    place = ir.GlobalVariable(b.module, word, _NAME) if known is None else known
    b.atomic_rmw("add", place, word(1), "monotonic")
