"""Rates at which this machine's memory feeds the runtime's kernels.

Shape letters: T tokens, D columns, N rows, F neurons, R rows of a slice, G key-value heads, S positions, E head width.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numba
import numpy as np
import numpy.typing as npt
from numba import prange

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import CHUNKS, POSITIONS, input_nbytes
from pi_runtime.artifact.formats import BLOCK, FORMATS, Array
from pi_runtime.artifact.layout import ALIGN_LARGE
from pi_runtime.artifact.quantisation import quantise
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.sizes import PARTS, ArraySpec
from pi_runtime.kernels.codegen.jit import public, public_parallel
from pi_runtime.kernels.codegen.threads import start_threads
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import F16, Floats, Ints, MatrixView, matrix, rows_from
from pi_runtime.kernels.data.workspace import allocate_workspace
from pi_runtime.kernels.ffn.memory import KEPT, READ, every_token, ffn_of
from pi_runtime.kernels.ffn.network import add_neurons
from pi_runtime.kernels.ops.attention import LayerCache, attend
from pi_runtime.kernels.ops.linear import ROWS_AT_ONCE, linear

SLICES = 256
COLUMNS = 4096
"""Width of the matrices that products are timed with."""
PICKED = 10
"""One neuron in so many is selected where they are gathered."""
RANK = 512
"""Rank of the predictor that is timed."""
TASKS, WIDTH, PAGES = 16, 64, 64
"""Attention that is timed: queries a thread, the width of a head, and the pages that hold its keys and values."""
_NEVER = np.float32(-1e30)
"""A bias with which the predictor never names a neuron."""


@public_parallel
def _read(values: npt.NDArray[np.uint64], sums: npt.NDArray[np.uint64]) -> None:
    """Sum slices of an array: the least work per byte that reads every byte."""
    size = values.shape[0] // sums.shape[0]
    for i in prange(sums.shape[0]):
        # A slice of its own: the compiler sees indices from 0 and makes vector loads of them.
        part = values[i * size : (i + 1) * size]
        total = np.uint64(0)
        for j in range(part.shape[0]):
            total += part[j]
        sums[i] = total


@public
def _in_slices(m: MatrixView, rows: int, slices: int, x_TD: Floats, inputs_at: int, y_TN: Floats) -> None:
    """y ← W x for one vector, by `slices` products of `rows` rows each."""
    for k in range(slices):
        y_1R = y_TN[0, k * rows : (k + 1) * rows].reshape(1, rows)
        linear(rows_from(m, k * rows), rows, 0, x_TD, inputs_at, y_1R)


@dataclass(frozen=True)
class TimedMatrix:
    """A stored matrix of positive numbers, large enough to be timed."""

    fmt: str
    values: Array
    scales: Array | None
    view: MatrixView

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def columns(self) -> int:
        return int(self.view.columns)

    @property
    def row_nbytes(self) -> int:
        return self.nbytes // len(self)

    def __len__(self) -> int:
        return len(self.values)


class _TimedFfn:
    """A gated FFN as kernels take it: the first rows of `w` are `first`, the next `rest`, and `up` is the predictor's.

    All numbers are positive: so every neuron fires, and the predictor names it unless its bias forbids that.
    """

    def __init__(self, w: TimedMatrix, up: TimedMatrix, rank: int, neurons: int, tokens: int = 1) -> None:
        self.neurons, self.tokens = neurons, tokens
        self.all_F, self.none_F = np.zeros(neurons, np.float32), np.full(neurons, _NEVER, np.float32)
        self._matrices = w, up  # kept: the table holds their addresses
        first, rest = rows_from(w.view, 0), rows_from(w.view, neurons)
        decoder = _gated(w.columns, neurons)
        formats = dict.fromkeys(PARTS, w.fmt)
        cfg = weight_table.config_of(decoder, formats)
        self._workspace = allocate_workspace(decoder, rank, tokens)
        self._x_TD, self._w_1 = np.ones((tokens, w.columns), np.float32), np.zeros(1, weight_table.LAYER)
        for field, m in {"first": first, "rest": rest, "predictor_down": first, "predictor_up": up.view}.items():
            self._w_1[field], self._w_1[f"{field}_scales"] = m.values, m.scales
        for field, value in weight_table.formats_of(formats, 0).items():
            self._w_1[field] = value
        self._w_1["rank"] = rank
        self._ffn = ffn_of(cfg, self._workspace)
        self._sum_TD, self._tally_T3 = np.zeros((tokens, w.columns), np.float32), np.zeros((tokens, 3), np.int64)

    def only(self, named: Ints) -> Floats:
        """Biases with which the predictor names just these neurons."""
        bias_F = self.none_F.copy()
        bias_F[named] = 0
        return bias_F

    def run(self, rung: str, bias_F: Floats) -> tuple[int, int]:
        """All tokens: rows of `first` read for one, and neurons kept."""
        self._w_1["dense"] = RUNGS[rung].dense
        self._w_1["picks"] = RUNGS[rung].picks
        self._w_1["predictor_bias"] = bias_F.ctypes.data
        batch = every_token(self._w_1, 0, 0, self.neurons, self.tokens)
        add_neurons(self._ffn, batch, self._x_TD, self._tally_T3, self._sum_TD)
        return int(self._tally_T3[0, READ]), int(self._tally_T3[0, KEPT])


def _gated(width: int, neurons: int) -> Decoder:
    """A decoder with a gated FFN; nothing else of it is used."""
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
    """The most threads that kernels may run on."""
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


def timed_matrix(fmt: str, nbytes: int, columns: int = COLUMNS, rows: int = 1) -> TimedMatrix:
    """A matrix of ones of about `nbytes` bytes, with at least `rows` rows."""
    row = ArraySpec(fmt, (1, columns))
    rows = max(nbytes // row.nbytes_with_scales, rows)
    ones, f = np.ones((1, columns), np.float32), FORMATS[fmt]
    stored, scale = quantise(f, ones) if f.quantised else (f.encode(ones), None)
    values, scales = _filled(rows, stored), None if scale is None else _filled(rows, scale)
    address = 0 if scales is None else scales.ctypes.data
    return TimedMatrix(fmt, values, scales, MatrixView(*matrix(f.code, values.ctypes.data, address, columns)))


def _filled(rows: int, row: Array) -> Array:
    """So many equal rows, aligned like an artifact's arrays: vector loads across cache lines would be slower."""
    room = np.empty(rows * row.nbytes + ALIGN_LARGE, np.uint8)
    start = -room.ctypes.data % ALIGN_LARGE
    values = room[start : start + rows * row.nbytes].view(row.dtype).reshape(rows, *row.shape[1:])
    values[:] = row
    return values


def product_bandwidth(w: TimedMatrix, threads: int, repeats: int = 5) -> float:
    """Stored bytes a second at which a matrix is multiplied by one vector; the best of `repeats`."""
    return w.nbytes / _product(w, len(w), 1, threads, repeats)


def neuron_bandwidth(w: TimedMatrix, threads: int, repeats: int = 5) -> float:
    """Stored bytes a second at which an FFN reads all its neurons, three rows of `w` each; the best of `repeats`."""
    layer = _TimedFfn(w, w, rank=1, neurons=len(w) // 3)
    return layer.neurons * 3 * w.row_nbytes / _best(partial(layer.run, "dense", layer.all_F), threads, repeats)


def gather_bandwidth(w: TimedMatrix, threads: int, repeats: int = 5) -> float:
    """Stored bytes a second at which an FFN reads the neurons that a predictor names, one in `PICKED` at random; the
    median of `repeats`.

    The time of naming none, for predictor and launches, is subtracted. Each run names other neurons, so that no cache
    holds them.
    """
    neurons = len(w) // 3
    layer = _TimedFfn(w, timed_matrix(w.fmt, 1, BLOCK, neurons), BLOCK, neurons)
    parts = np.array_split(np.random.default_rng(0).permutation(neurons), PICKED)
    picks = itertools.cycle([layer.only(part) for part in parts])
    none, some, found = partial(layer.run, "predicted", layer.none_F), 0.0, []
    for _ in range(repeats):
        some = _best(lambda: layer.run("predicted", next(picks)), threads, 1)
        found.append(some - _best(none, threads, 1))
    # On a busy machine a difference may be anything.
    return neurons * 3 * w.row_nbytes / PICKED / max(statistics.median(found), some / PICKED)


def predictor_bandwidth(up: TimedMatrix, threads: int, repeats: int = 5) -> float:
    """Stored bytes a second at which a predictor that names no neuron is read; its rank is the columns of `up`."""
    layer = _TimedFfn(timed_matrix(up.fmt, 1, COLUMNS, up.columns), up, up.columns, len(up))
    return up.nbytes / _best(partial(layer.run, "predicted", layer.none_F), threads, repeats)


def launch_seconds(w: TimedMatrix, threads: int, repeats: int = 5) -> float:
    """Seconds to start one parallel loop, with the waking and waiting of its threads; the median of `repeats`.

    It is what a product takes longer in slices than at once, for each slice. In a row of empty loops no thread would
    fall asleep, and a launch would seem to take next to nothing.
    """
    rows = min(4 * ROWS_AT_ONCE * threads, len(w) // 2)
    slices = len(w) // rows
    x_TD, y_TN = np.ones((1, w.columns), np.float32), np.empty((1, slices * rows), np.float32)
    inputs = np.empty(input_nbytes(w.columns), np.uint8).ctypes

    def seconds(at_once: int) -> float:
        work = partial(_in_slices, w.view, rows * at_once, slices // at_once, x_TD, inputs.data, y_TN)
        return _best(work, threads, 1)

    return max(0.0, statistics.median(seconds(1) - seconds(slices) for _ in range(repeats)) / (slices - 1))


def attention_bandwidth(threads: int, repeats: int = 5) -> float:
    """Bytes of float16 keys and values a second that attention reads from the processor's cache, for each query.

    `TASKS` queries a thread, of `WIDTH` numbers, share one head of keys and values in `PAGES` pages.
    """
    heads = TASKS * threads
    pages = np.ones((PAGES, 1, 2, 1, POSITIONS, WIDTH), np.float16)
    table = np.array([page.ctypes.data for page in pages])
    run_R4 = np.array([[0, 1, PAGES * POSITIONS - 1, table.ctypes.data]])
    cache, unpacked_CBE = LayerCache(F16, F16, 0, 1, WIDTH, 0), np.empty((CHUNKS, 0, WIDTH), np.float32)
    scratch_CX = np.empty((CHUNKS, heads * (WIDTH + POSITIONS + 4)), np.float32)
    qkv_TQ, out_TQ = np.ones((1, (heads + 2) * WIDTH), np.float32), np.empty((1, heads * WIDTH), np.float32)
    seconds = _best(lambda: attend(cache, qkv_TQ, run_R4, unpacked_CBE, scratch_CX, out_TQ), threads, repeats)
    assert np.allclose(out_TQ, 1)
    return heads * pages.nbytes / seconds


def product_flops(fmt: str, threads: int, tokens: int = 64, rows: int = 1024, repeats: int = 3) -> float:
    """Operations a second of a matrix times many vectors, as in prefill; a multiplication and an addition are two."""
    w = timed_matrix(fmt, rows * ArraySpec(fmt, (1, COLUMNS)).nbytes_with_scales)
    return 2 * tokens * rows * COLUMNS / _product(w, rows, tokens, threads, repeats)


def neuron_flops(fmt: str, threads: int, tokens: int = 64, neurons: int = 4096, repeats: int = 3) -> float:
    """Operations a second of an FFN by neuron, dense, for many vectors, as in prefill."""
    w = timed_matrix(fmt, 1, COLUMNS // 4, 3 * neurons)
    layer = _TimedFfn(w, w, 1, neurons, tokens)
    return 2 * tokens * len(w) * w.columns / _best(partial(layer.run, "dense", layer.all_F), threads, repeats)


def _product(w: TimedMatrix, rows: int, tokens: int, threads: int, repeats: int) -> float:
    """Best seconds of `rows` rows times `tokens` vectors."""
    x_TD, y_TN = np.ones((tokens, w.columns), np.float32), np.empty((tokens, rows), np.float32)
    inputs = np.empty(tokens * input_nbytes(w.columns), np.uint8)
    seconds = _best(lambda: linear(w.view, rows, 0, x_TD, inputs.ctypes.data, y_TN), threads, repeats)
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
