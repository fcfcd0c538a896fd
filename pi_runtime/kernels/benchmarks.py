"""What this machine's memory gives to the runtime's kernels."""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numba
import numpy as np
import numpy.typing as npt
from numba import prange

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import record_nbytes
from pi_runtime.artifact.formats import BLOCK, FORMATS, Array
from pi_runtime.artifact.layout import ALIGN_LARGE
from pi_runtime.artifact.sizes import PARTS, ArraySpec
from pi_runtime.kernels import ffn
from pi_runtime.kernels.codegen.jit import leaf, threaded
from pi_runtime.kernels.codegen.threads import start_threads
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import Floats, Ints, Matrix, from_row, matrix
from pi_runtime.kernels.data.workspace import buffers
from pi_runtime.kernels.ops.attention import attend
from pi_runtime.kernels.ops.linear import ROWS, linear
from pi_runtime.kernels.split_ffn import addresses, cold_sum

SLICES = 256
COLUMNS = 4096
"""Width of the matrices that products are timed with."""
PICKED = 10
"""One neuron in so many is picked where they are gathered."""
RANK = 512
"""Of the predictor that is timed."""
TASKS, WIDTH, POSITIONS = 16, 64, 2048
"""Attention that is timed: queries a thread, and the size of a head of keys."""
MEASURED: tuple[Literal["f32", "f16", "bf16", "q8", "q4"], ...] = ("f32", "f16", "bf16", "q8", "q4")
"""Formats that the kernels multiply with."""
# Positive numbers: 1 in binary16, small ones as bfloat16 and, twice, as binary32; 1 as q8, and twice 9 − 8 as q4.
_WORDS = {"f32": 0x3C00, "f16": 0x3C00, "bf16": 0x3C00, "q8": 0x0101, "q4": 0x9999}
_NEVER = np.float32(-1e30)


@threaded
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


@leaf
def _in_slices(m: Matrix, rows: int, slices: int, x_TD: Floats, records: int, y_TN: Floats) -> None:
    """y = W x for one vector, by `slices` operators of `rows` rows each."""
    for k in range(slices):
        y_1R = y_TN[0, k * rows : (k + 1) * rows].reshape(1, rows)
        linear(from_row(m, k * rows), rows, 0, x_TD, records, y_1R)


@dataclass(frozen=True)
class Weights:
    """A matrix of positive numbers in memory, to be read at any time."""

    fmt: str
    values: Array
    scales: Array | None
    kernel: Matrix

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def columns(self) -> int:
        return int(self.kernel.columns)

    @property
    def row_nbytes(self) -> int:
        return self.nbytes // len(self)

    def __len__(self) -> int:
        return len(self.values)


class _Layer:
    """A gated FFN in the runtime's own terms: the first rows of `w` are `first`, those behind them `rest`, and `up` the
    predictor's; all numbers are positive, so that every neuron fires, and is named unless its bias forbids it."""

    def __init__(self, w: Weights, up: Weights, rank: int, neurons: int) -> None:
        self.neurons = neurons
        self.all_F, self.none_F = np.zeros(neurons, np.float32), np.full(neurons, _NEVER, np.float32)
        self._weights = w, up
        first, rest = from_row(w.kernel, 0), from_row(w.kernel, neurons)
        self._shape = weight_table.shape_of(_gated(w.columns, neurons), dict.fromkeys(PARTS, w.fmt))
        self._buffers = buffers(self._shape, 1, rank, tokens=1)
        self._x_D, self._row = np.ones(w.columns, np.float32), np.zeros(weight_table.MARGIN + 1, np.int64)
        for at, scales_at, m in (
            (weight_table.FIRST, weight_table.FIRST_SCALES, first),
            (weight_table.REST, weight_table.REST_SCALES, rest),
            (weight_table.PREDICTOR_DOWN, weight_table.PREDICTOR_DOWN_SCALES, first),
            (weight_table.PREDICTOR_UP, weight_table.PREDICTOR_UP_SCALES, up.kernel),
        ):
            self._row[at], self._row[scales_at] = m.values, m.scales
        self._row[weight_table.RANK] = rank
        self._addresses, self._sum_D = addresses(self._shape, self._buffers), np.zeros(w.columns, np.float32)

    def only(self, named: Ints) -> Floats:
        """Biases by which the predictor names just these."""
        bias_F = self.none_F.copy()
        bias_F[named] = 0
        return bias_F

    def run(self, rung: int, bias_F: Floats) -> tuple[int, int]:
        """One token: rows of `first` read, and neurons kept."""
        self._row[weight_table.RUNG], self._row[weight_table.PREDICTOR_BIAS] = rung, bias_F.ctypes.data
        read, kept = ffn.step(self._shape, self._row, self._x_D, 0, self.neurons, np.float32(1), False, self._buffers)
        return read, kept

    def nothing(self) -> None:
        """The sum of no neurons."""
        cold_sum(self._addresses, self._row, self._x_D, 0, 0, True, self._sum_D)


def _gated(width: int, neurons: int) -> Decoder:
    """A decoder with such an FFN; of no use otherwise."""
    return Decoder(
        family="measured",
        vocab_size=1,
        d_model=width,
        d_embedding=width,
        n_layers=1,
        n_heads=1,
        n_kv_heads=1,
        head_dim=1,
        d_ff=neurons,
        context_length=1,
        norm="rms",
        norm_eps=1.0,
        positions="learned",
        ffn="gated",
        activation="relu",
        tied_head=True,
        qkv_bias=False,
        out_bias=False,
        ffn_bias=False,
    )


def most_threads() -> int:
    """Threads that kernels may run on."""
    return int(numba.config.NUMBA_NUM_THREADS)


def read_bandwidth(nbytes: int, threads: int, repeats: int = 5) -> float:
    """Best sequential read rate of `repeats` passes over `nbytes` of RAM by `threads` threads, bytes per second."""
    values = np.ones(max(nbytes // 8 // SLICES, 1) * SLICES, np.uint64)
    sums = np.zeros(SLICES, np.uint64)
    start_threads()
    numba.set_num_threads(threads)
    _read(values[: SLICES * 8], sums)  # compiles
    best = 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        _read(values, sums)
        best = max(best, values.nbytes / (time.perf_counter() - began))
        assert int(sums.sum()) == len(values)
    return best


def weights(fmt: str, nbytes: int, columns: int = COLUMNS, rows: int = 1) -> Weights:
    """A matrix of about `nbytes` bytes, and at least so many rows."""
    row = ArraySpec(fmt, (1, columns))
    rows, stored = max(nbytes // row.nbytes_with_scales, rows), FORMATS[fmt]
    values = _filled((rows, row.nbytes // 2), np.uint16, _WORDS[fmt])
    scales = None if row.scales is None else _filled((rows, row.scales.nbytes // 2), np.float16, 1)
    address = 0 if scales is None else scales.ctypes.data
    return Weights(fmt, values, scales, Matrix(*matrix(stored.code, values.ctypes.data, address, columns)))


def _filled(shape: tuple[int, int], dtype: npt.DTypeLike, value: float) -> Array:
    """An array that starts where one of an artifact may: vector loads across cache lines would be slower."""
    room = np.empty(math.prod(shape) * np.dtype(dtype).itemsize + ALIGN_LARGE, np.uint8)
    start = -room.ctypes.data % ALIGN_LARGE
    values = room[start : start + room.nbytes - ALIGN_LARGE].view(dtype).reshape(shape)
    values[:] = value
    return values


def product_bandwidth(w: Weights, threads: int, repeats: int = 5) -> float:
    """Stored bytes a second at which a matrix is multiplied with one vector; the best of `repeats`."""
    return w.nbytes / _product(w, len(w), 1, threads, repeats)


def neuron_bandwidth(w: Weights, threads: int, repeats: int = 5) -> float:
    """Stored bytes a second at which an FFN reads all its neurons: rows of `w`, three a neuron; best of `repeats`."""
    layer = _Layer(w, w, rank=1, neurons=len(w) // 3)
    return (
        layer.neurons * 3 * w.row_nbytes / _best(partial(layer.run, weight_table.DENSE, layer.all_F), threads, repeats)
    )


def gather_bandwidth(w: Weights, threads: int, repeats: int = 5) -> float:
    """The same where a predictor names one neuron in `PICKED`, at random: stored bytes of those neurons a second; the
    median of `repeats`.

    What naming none takes, predictor and launches, is taken off. Other neurons each time, so that no cache holds them.
    """
    neurons = len(w) // 3
    layer = _Layer(w, weights(w.fmt, 1, BLOCK, neurons), BLOCK, neurons)
    parts = np.array_split(np.random.default_rng(0).permutation(neurons), PICKED)
    picks = itertools.cycle([layer.only(part) for part in parts])
    none, some, found = partial(layer.run, weight_table.PREDICTED, layer.none_F), 0.0, []
    for _ in range(repeats):
        some = _best(lambda: layer.run(weight_table.PREDICTED, next(picks)), threads, 1)
        found.append(some - _best(none, threads, 1))
    # On a busy machine a difference may be anything.
    return neurons * 3 * w.row_nbytes / PICKED / max(statistics.median(found), some / PICKED)


def cold_seconds(w: Weights, threads: int, repeats: int = 5) -> float:
    """What the CPU takes for its neurons of one layer beside a GPU when none of them is named: three operators,
    the last of which adds up what the threads have summed."""
    layer = _Layer(w, w, rank=1, neurons=len(w) // 3)
    return _best(layer.nothing, threads, repeats)


def predictor_bandwidth(up: Weights, threads: int, repeats: int = 5) -> float:
    """Stored bytes a second at which a predictor is read that names none: of its rank are the columns of `up`."""
    layer = _Layer(weights(up.fmt, 1, COLUMNS, up.columns), up, up.columns, len(up))
    return up.nbytes / _best(partial(layer.run, weight_table.PREDICTED, layer.none_F), threads, repeats)


def launch_seconds(w: Weights, threads: int, repeats: int = 5) -> float:
    """What starting one operator takes, its threads' waking and waiting included: what a product takes longer in slices
    than at once, by slice; the median of `repeats`.

    In a loop of empty operators no thread would fall asleep, and a launch would seem to take next to nothing.
    """
    rows = min(4 * ROWS * threads, len(w) // 2)
    slices = len(w) // rows
    x_TD, y_TN = np.ones((1, w.columns), np.float32), np.empty((1, slices * rows), np.float32)
    records = np.empty(record_nbytes(w.columns), np.uint8).ctypes

    def seconds(at_once: int) -> float:
        work = partial(_in_slices, w.kernel, rows * at_once, slices // at_once, x_TD, records.data, y_TN)
        return _best(work, threads, 1)

    return max(0.0, statistics.median(seconds(1) - seconds(slices) for _ in range(repeats)) / (slices - 1))


def attention_bandwidth(threads: int, repeats: int = 5) -> float:
    """Bytes of float16 keys and values a second, counted once for each query, that attention works through where they
    are in a cache: `TASKS` queries a thread of `WIDTH` numbers share one head of `POSITIONS`."""
    heads = TASKS * threads
    cache_2GSE = np.ones((2, 1, POSITIONS, WIDTH), np.float16)
    qkv_TQ, out_TQ = np.ones((1, (heads + 2) * WIDTH), np.float32), np.empty((1, heads * WIDTH), np.float32)
    seconds = _best(lambda: attend(qkv_TQ, heads, POSITIONS - 1, cache_2GSE.view(np.uint16), out_TQ), threads, repeats)
    assert np.allclose(out_TQ, 1)
    return heads * cache_2GSE.nbytes / seconds


def product_flops(fmt: str, threads: int, tokens: int = 64, rows: int = 1024, repeats: int = 3) -> float:
    """Operations a second of a matrix times many vectors at once, as in prefill; an addition and a multiplication are
    two."""
    w = weights(fmt, rows * ArraySpec(fmt, (1, COLUMNS)).nbytes_with_scales)
    return 2 * tokens * rows * COLUMNS / _product(w, rows, tokens, threads, repeats)


def _product(w: Weights, rows: int, tokens: int, threads: int, repeats: int) -> float:
    """Best seconds of `rows` rows times `tokens` vectors."""
    x_TD, y_TN = np.ones((tokens, w.columns), np.float32), np.empty((tokens, rows), np.float32)
    records = np.empty(tokens * record_nbytes(w.columns), np.uint8)
    seconds = _best(lambda: linear(w.kernel, rows, 0, x_TD, records.ctypes.data, y_TN), threads, repeats)
    assert np.all(y_TN > 0)
    return seconds


def _best(work: Callable[[], object], threads: int, repeats: int) -> float:
    start_threads()
    numba.set_num_threads(threads)
    work()  # compiles
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
