"""What this machine's memory gives to the runtime's kernels."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numba
import numpy as np
import numpy.typing as npt
from numba import prange

from pi_runtime.artifact.footprint import record_nbytes
from pi_runtime.artifact.formats import FORMATS, Array
from pi_runtime.artifact.sizes import ArraySpec
from pi_runtime.kernels.compiling import leaf, operator
from pi_runtime.kernels.linear import linear
from pi_runtime.kernels.memory import Floats, Ints, Matrix, matrix
from pi_runtime.kernels.operand import prepare
from pi_runtime.kernels.rows import row_dot, rows_ahead

SLICES = 256
COLUMNS = 4096
"""Width of the matrices that products are timed with."""
PICKED = 10
"""One row in so many is picked where rows are gathered."""
MEASURED: tuple[Literal["f32", "f16", "bf16", "q8", "q4"], ...] = ("f32", "f16", "bf16", "q8", "q4")
"""Formats that the kernels multiply with."""
# Positive numbers: 1 in binary16, small ones as bfloat16 and, twice, as binary32; 1 as q8, and twice 9 − 8 as q4.
_WORDS = {"f32": 0x3C00, "f16": 0x3C00, "bf16": 0x3C00, "q8": 0x0101, "q4": 0x9999}
_ROWS = 64


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


@operator
def _picked(m: Matrix, idx_K: Ints, x_D: Floats, record: int, y_K: Floats) -> None:
    """y = W[idx] x: the rows that a sparse FFN reads, in stored order."""
    prepare(m.fmt, x_D, record)
    count, ahead = idx_K.shape[0], rows_ahead(m)
    for block in prange((count + _ROWS - 1) // _ROWS):
        for k in range(block * _ROWS, min(count, (block + 1) * _ROWS)):
            y_K[k] = row_dot(m, idx_K[k], idx_K[min(k + ahead, count - 1)], record)


@leaf
def _launches(times: int, m: Matrix, x_TD: Floats, records: int, y_TN: Floats) -> None:
    for _ in range(times):
        linear(m, y_TN.shape[1], 0, x_TD, records, y_TN)


@dataclass(frozen=True)
class _Weights:
    """A matrix of positive numbers in memory."""

    values: Array
    scales: Array | None
    kernel: Matrix

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def __len__(self) -> int:
        return len(self.values)


def most_threads() -> int:
    """Threads that kernels may run on."""
    return int(numba.config.NUMBA_NUM_THREADS)


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


def product_bandwidth(fmt: str, nbytes: int, threads: int, repeats: int = 5) -> float:
    """Stored bytes a second at which a matrix of `nbytes` in this format is multiplied with one vector; the best of
    `repeats`."""
    w = _weights(fmt, nbytes)
    return w.nbytes / _product(w, len(w), 1, threads, repeats)


def gather_bandwidth(fmt: str, nbytes: int, threads: int, repeats: int = 5) -> float:
    """The same where only one row in `PICKED`, drawn at random, is read: stored bytes of those rows a second."""
    w = _weights(fmt, nbytes)
    drawn = np.random.default_rng(0).permutation(len(w))[: max(len(w) // PICKED, 1)]
    idx_K = np.sort(drawn).astype(np.int64)
    x_D, y_K = np.ones(COLUMNS, np.float32), np.empty(len(idx_K), np.float32)
    record = np.empty(record_nbytes(COLUMNS), np.uint8)
    seconds = _best(lambda: _picked(w.kernel, idx_K, x_D, record.ctypes.data, y_K), threads, repeats)
    assert np.all(y_K > 0)
    return len(idx_K) * w.nbytes / len(w) / seconds


def product_flops(fmt: str, threads: int, tokens: int = 64, rows: int = 1024, repeats: int = 3) -> float:
    """Operations a second of a matrix times many vectors at once, as in prefill; an addition and a multiplication are
    two."""
    w = _weights(fmt, rows * ArraySpec(fmt, (1, COLUMNS)).nbytes_with_scales)
    return 2 * tokens * rows * COLUMNS / _product(w, rows, tokens, threads, repeats)


def launch_seconds(threads: int, times: int = 1000) -> float:
    """Time to start one operator on `threads` threads: a product too small to take any itself."""
    w, records = _weights("f32", 1), np.empty(record_nbytes(16), np.uint8)
    x_TD, y_TN = np.ones((1, 16), np.float32), np.empty((1, len(w)), np.float32)
    return _best(lambda: _launches(times, w.kernel, x_TD, records.ctypes.data, y_TN), threads, 5) / times


def _product(w: _Weights, rows: int, tokens: int, threads: int, repeats: int) -> float:
    """Best seconds of `rows` rows times `tokens` vectors."""
    x_TD, y_TN = np.ones((tokens, COLUMNS), np.float32), np.empty((tokens, rows), np.float32)
    records = np.empty(tokens * record_nbytes(COLUMNS), np.uint8)
    seconds = _best(lambda: linear(w.kernel, rows, 0, x_TD, records.ctypes.data, y_TN), threads, repeats)
    assert np.all(y_TN > 0)
    return seconds


def _weights(fmt: str, nbytes: int) -> _Weights:
    row = ArraySpec(fmt, (1, COLUMNS))
    rows, stored = max(nbytes // row.nbytes_with_scales, 1), FORMATS[fmt]
    values = np.full((rows, row.nbytes // 2), _WORDS[fmt], np.uint16)
    scales = None if row.scales is None else np.ones((rows, row.scales.nbytes // 2), np.float16)
    address = 0 if scales is None else scales.ctypes.data
    return _Weights(values, scales, Matrix(*matrix(stored.code, values.ctypes.data, address, COLUMNS)))


def _best(work: Callable[[], None], threads: int, repeats: int) -> float:
    numba.set_num_threads(threads)
    work()  # compiles, and starts the threads
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
