"""The threads of parallel kernels: how they wait for work, and which library runs them."""

import os
import threading

import numba

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
