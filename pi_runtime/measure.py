"""What this machine's memory gives to the runtime's kernels."""

import time

import numba
import numpy as np
import numpy.typing as npt
from numba import prange

from pi_runtime.kernels.compiling import operator

SLICES = 256


@operator
def _read(values: npt.NDArray[np.uint64], sums: npt.NDArray[np.uint64]) -> None:
    """Sum slices of an array: as little work per byte as keeps every byte read."""
    size = values.shape[0] // sums.shape[0]
    for i in prange(sums.shape[0]):
        # A slice of its own: the compiler sees indices from 0 and makes vector loads of them.
        part = values[i * size : (i + 1) * size]
        total = np.uint64(0)
        for j in range(part.shape[0]):
            total += part[j]
        sums[i] = total


def read_bandwidth(nbytes: int, threads: int, repeats: int = 5) -> float:
    """Best sequential read rate of `repeats` passes over `nbytes` of RAM by `threads` threads, bytes per second."""
    values = np.ones(max(nbytes // 8 // SLICES, 1) * SLICES, np.uint64)
    sums = np.zeros(SLICES, np.uint64)
    numba.set_num_threads(threads)
    _read(values[: SLICES * 8], sums)  # compiles
    best = 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        _read(values, sums)
        best = max(best, values.nbytes / (time.perf_counter() - began))
        assert int(sums.sum()) == len(values)
    return best
