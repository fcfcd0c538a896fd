"""One token's FFN in pieces, for a run in which predictor and neurons are not on the same side.

`predict` lists the neurons that are predicted to fire; `cold_sum` computes those of a list, or of a range. With
experts `predict_taken` and `cold_sum_taken` do the same for the K that the router takes. Python calls a sum once a
layer while a GPU waits for it: taking apart tuples of arrays at each call costs more (16 µs) than it may, so what stays
the same goes in as one array of addresses.
"""

import numpy as np
import numpy.typing as npt
from numba import carray, prange

from pi_runtime.artifact.footprint import CHUNKS, SHARES
from pi_runtime.kernels.codegen.jit import body, inner, leaf, operator
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import Floats, Ints, address_of, every, matrix, pointer_of
from pi_runtime.kernels.data.quantised_input import prepare
from pi_runtime.kernels.data.weight_table import Shape
from pi_runtime.kernels.data.workspace import Buffers
from pi_runtime.kernels.ffn import _close, _threaded_fire, _threaded_rest, limit_of
from pi_runtime.kernels.ops.neuron_selection import candidates

Integers = npt.NDArray[np.int32]
_FORMAT, _COLUMNS, _NEURONS, _ACTIVATION, _K, _RECORDS, _CANDIDATES, _INDEX, _H, _COUNTS, _SUMS, _SCRATCH = range(12)
_SUMS_WIDTH, _SCRATCH_WIDTH = 12, 13
SLICES = 16
"""Of a sum, that threads add up."""


def addresses(s: Shape, b: Buffers) -> Ints:
    """What `cold_sum` works with; good as long as the buffers are."""
    arrays = b.records, b.candidates_F, b.index_F, b.h_F, b.counts_B, b.sums_CP, b.scratch_CX
    sizes = s.ffn_format, s.d_model, s.d_ff, s.activation, s.rest_rows
    widths = b.sums_CP.shape[1], b.scratch_CX.shape[1]
    return np.array([*sizes, *(array.ctypes.data for array in arrays), *widths], np.int64)


@body
def _add_part(sums_CP: Floats, low: int, high: int, y_D: Floats) -> None:
    y_P = y_D[low:high]
    y_P[:] = np.float32(0)
    for c in range(sums_CP.shape[0]):
        sums_P = sums_CP[c, low:high]
        for j in range(y_P.shape[0]):
            y_P[j] += sums_P[j]


def _add_up(sums_CP: Floats, y_D: Floats) -> None:
    """y ← Σ_c sums_c, in order of c. Each sum lies in the cache of the thread that made it: one thread alone would
    fetch them for as long as few cold neurons take."""
    _add_part()
    for part in prange(SLICES):
        _add_part(sums_CP, y_D.shape[0] * part // SLICES, y_D.shape[0] * (part + 1) // SLICES, y_D)


_threaded_add_up = operator(_add_up)


@leaf
def predict(s: Shape, w: Ints, x_D: Floats, b: Buffers) -> int:
    """List all neurons that the layer's rung selects in `b.candidates_F`; returns how many."""
    prepare(s.predictor_format, x_D, address_of(b.records))
    return candidates(s, w, x_D, 0, s.d_ff, True, b)


@leaf
def cold_sum(c: Ints, w: Ints, x_D: Floats, low: int, count: int, listed: bool, y_D: Floats) -> int:
    """y ← the sum over the first `count` of the candidates (`listed`), or over the neurons [low, low + count).

    `c`: from `addresses`; `w`: the layer's row of the weight table. Returns how many neurons were kept.
    """
    prepare(c[_FORMAT], x_D, c[_RECORDS])
    kept = _cold_neurons(c, w, low, count, listed, np.float32(1), False)
    _give(c, y_D)
    return kept


@leaf
def predict_taken(
    s: Shape, w_XW: Ints, x_D: Floats, cut_X: Ints, base_X: Ints, b: Buffers, hot_F: Integers, cold_F: Integers
) -> tuple[int, int]:
    """List the neurons that are selected of the experts taken: those below their expert's cut in `hot_F`, from the
    expert's `base` on, the others in `cold_F`, expert · F + neuron. Returns how many of each."""
    hot, cold = 0, 0
    for k in range(s.experts_per_token):
        expert = b.taken_TK[0, k]
        for n in range(predict(s, w_XW[expert], x_D, b)):
            neuron = b.candidates_F[n]
            if neuron < cut_X[expert]:
                hot_F[hot] = base_X[expert] + neuron
                hot += 1
            else:
                cold_F[cold] = expert * s.d_ff + neuron
                cold += 1
    return hot, cold


@leaf
def cold_sum_taken(
    c: Ints, w_XW: Ints, x_D: Floats, taken_K: Integers, share_K: Floats, cut_X: Ints, listed: bool, count: int,
    listed_F: Integers, y_D: Floats,
) -> tuple[int, int]:  # fmt: skip
    """y ← Σ_k share_k · the sum over expert taken_k's neurons from its cut on, or (`listed`) over those among the first
    `count` of the list, which has expert · F + neuron, one expert after the other as they are taken.

    Returns the sums of (rows of `first` read, neurons kept).
    """
    prepare(c[_FORMAT], x_D, c[_RECORDS])
    neurons, read, kept, next_ = c[_NEURONS], 0, 0, 0
    candidates_F = carray(pointer_of(c[_CANDIDATES]), (neurons,), np.int64)
    for k in range(taken_K.shape[0]):
        expert = taken_K[k]
        low = cut_X[expert]
        wanted = neurons - low
        if listed:
            wanted = 0
            while next_ < count and listed_F[next_] // neurons == expert:
                candidates_F[wanted] = listed_F[next_] - expert * neurons
                wanted, next_ = wanted + 1, next_ + 1
        kept += _cold_neurons(c, w_XW[expert], low, wanted, listed, share_K[k], k > 0)
        read += wanted
    _give(c, y_D)
    return read, kept


@inner
def _cold_neurons(c: Ints, w: Ints, low: int, count: int, listed: bool, share: np.float32, more: bool) -> int:
    """Partial sums of neurons, times `share`, or added to what is there (`more`); see `cold_sum`."""
    neurons, k = c[_NEURONS], c[_K]
    candidates_F = carray(pointer_of(c[_CANDIDATES]), (neurons,), np.int64)
    index_F = carray(pointer_of(c[_INDEX]), (neurons,), np.int64)
    h_F = carray(pointer_of(c[_H]), (neurons,), np.float32)
    counts_B = carray(pointer_of(c[_COUNTS]), (SHARES,), np.int64)
    sums_CP = carray(pointer_of(c[_SUMS]), (CHUNKS, c[_SUMS_WIDTH]), np.float32)
    scratch_CX = carray(pointer_of(c[_SCRATCH]), (CHUNKS, c[_SCRATCH_WIDTH]), np.float32)
    first = matrix(c[_FORMAT], w[weight_table.FIRST], w[weight_table.FIRST_SCALES], c[_COLUMNS])
    rest = matrix(c[_FORMAT], w[weight_table.REST], w[weight_table.REST_SCALES], c[_COLUMNS])
    dense, cut_off = w[weight_table.RUNG] == weight_table.DENSE, c[_ACTIVATION] == weight_table.DRELU
    _threaded_fire(
        first, w[weight_table.FIRST_BIAS], c[_ACTIVATION], limit_of(w), dense, low, listed, count, c[_RECORDS],
        candidates_F, index_F, h_F, counts_B,
    )  # fmt: skip
    kept = _close(count, counts_B, index_F, h_F)
    _threaded_rest(
        rest, every(rest, k, k - 1), k, w[weight_table.UP_BIAS], cut_off, dense, share, more, kept, c[_RECORDS],
        index_F, h_F, sums_CP, scratch_CX,
    )  # fmt: skip
    return kept


@inner
def _give(c: Ints, y_D: Floats) -> None:
    """y ← the partial sums together."""
    _threaded_add_up(carray(pointer_of(c[_SUMS]), (CHUNKS, c[_SUMS_WIDTH]), np.float32), y_D)
