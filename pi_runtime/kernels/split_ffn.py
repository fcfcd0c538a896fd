"""One token's FFN in parts, for a run in which a selector and its neurons are on different devices.

`predict` lists the neurons that a selector names in the K experts that the router takes; `cold_sum` computes those of
a list, or those beyond each expert's cut. A layer without experts is one expert of weight 1. Python calls a sum once a
layer while a GPU waits for it. Taking apart tuples of arrays at each call would cost too much (16 µs), so what stays
the same goes in as one array of addresses.

Shape letters: D model width, F neurons of one expert, X experts, K experts taken, S segments, C chunks, P padded
columns, A addresses.
"""

import numpy as np
import numpy.typing as npt
from numba import carray, prange

from pi_runtime.artifact.footprint import CHUNKS, SEGMENTS
from pi_runtime.kernels.codegen.jit import device, loop_body, parallel, public
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import Floats, Ints, address_of, matrix, pointer_of, strided_rows
from pi_runtime.kernels.data.quantised_input import prepare_input
from pi_runtime.kernels.data.weight_table import KernelConfig
from pi_runtime.kernels.data.workspace import Workspace
from pi_runtime.kernels.ffn import compact_kept, limit_of, parallel_fire, parallel_rest
from pi_runtime.kernels.ops.neuron_selection import list_candidates, selector_format

Integers = npt.NDArray[np.int32]
# Places in the array of addresses.
_FORMAT, _COLUMNS, _NEURONS, _ACTIVATION, _ROWS_PER_NEURON = range(5)
_INPUTS, _CANDIDATES, _KEPT, _H, _COUNTS, _SUMS, _GATHER, _SUMS_WIDTH, _GATHER_WIDTH = range(5, 14)
SLICES = 16
"""Parts of a sum's columns that threads add up."""


def workspace_addresses(cfg: KernelConfig, ws: Workspace) -> Ints:
    """What `cold_sum` works with: sizes and addresses, valid as long as the workspace."""
    arrays = ws.inputs, ws.candidates_F, ws.kept_F, ws.h_F, ws.counts_S, ws.sums_CP, ws.gather_CX
    sizes = cfg.ffn_format, cfg.d_model, cfg.d_ff, cfg.activation, cfg.rows_per_neuron
    widths = ws.sums_CP.shape[1], ws.gather_CX.shape[1]
    return np.array([*sizes, *(array.ctypes.data for array in arrays), *widths], np.int64)


@loop_body
def _add_slice(sums_CP: Floats, low: int, high: int, y_D: Floats) -> None:
    y_P = y_D[low:high]
    y_P[:] = np.float32(0)
    for c in range(sums_CP.shape[0]):
        sums_P = sums_CP[c, low:high]
        for j in range(y_P.shape[0]):
            y_P[j] += sums_P[j]


@parallel
def _add_chunks(sums_CP: Floats, y_D: Floats) -> None:
    """y ← Σ_c sums_c, in order of c.

    Each sum lies in the cache of the thread that made it: to fetch them all, one thread alone would need as long as a
    few cold neurons take.
    """
    _add_slice()
    for part in prange(SLICES):
        _add_slice(sums_CP, y_D.shape[0] * part // SLICES, y_D.shape[0] * (part + 1) // SLICES, y_D)


@public
def predict(
    cfg: KernelConfig,
    w_XW: Ints,
    x_D: Floats,
    cut_X: Ints,
    base_X: Ints,
    ws: Workspace,
    hot_F: Integers,
    cold_F: Integers,
) -> tuple[int, int]:
    """List the neurons that are selected in the experts taken; returns how many are hot, and how many cold.

    Those below their expert's cut go to `hot_F` as base + neuron, the others to `cold_F` as expert · F + neuron.
    """
    hot, cold = 0, 0
    for k in range(cfg.experts_per_token):
        expert = ws.expert_TK[0, k]
        w = w_XW[expert]
        prepare_input(selector_format(cfg, w), x_D, address_of(ws.inputs))
        for n in range(list_candidates(cfg, w, x_D, 0, cfg.d_ff, True, ws)):
            neuron = ws.candidates_F[n]
            if neuron < cut_X[expert]:
                hot_F[hot] = base_X[expert] + neuron
                hot += 1
            else:
                cold_F[cold] = expert * cfg.d_ff + neuron
                cold += 1
    return hot, cold


@public
def cold_sum(
    at_A: Ints, w_XW: Ints, x_D: Floats, expert_K: Integers, route_weight_K: Floats, cut_X: Ints, selected: bool,
    count: int, cold_F: Integers, y_D: Floats,
) -> tuple[int, int]:  # fmt: skip
    """y ← Σ_k route_weight_k · the sum over expert_k's neurons from its cut on, or over those on a list (`selected`).

    The list is the first `count` of `cold_F`: expert · F + neuron, one expert after the other in the order of
    `expert_K`. `at_A` comes from `workspace_addresses`; `w_XW` is the layer's part of the weight table. Returns the
    sums of (rows of `first` read, neurons kept).
    """
    prepare_input(at_A[_FORMAT], x_D, at_A[_INPUTS])
    neurons, read, kept, done = at_A[_NEURONS], 0, 0, 0
    candidates_F = carray(pointer_of(at_A[_CANDIDATES]), (neurons,), np.int64)
    for k in range(expert_K.shape[0]):
        expert = expert_K[k]
        low = cut_X[expert]
        wanted = neurons - low
        if selected:
            wanted = 0
            while done < count and cold_F[done] // neurons == expert:
                candidates_F[wanted] = cold_F[done] - expert * neurons
                wanted, done = wanted + 1, done + 1
        kept += _cold_neurons(at_A, w_XW[expert], low, wanted, selected, route_weight_K[k], k > 0)
        read += wanted
    _write_sum(at_A, y_D)
    return read, kept


@device
def _cold_neurons(
    at_A: Ints, w: Ints, low: int, count: int, selected: bool, route_weight: np.float32, accumulate: bool
) -> int:
    """Partial sums of neurons times `route_weight`, or what is there plus these (`accumulate`); see `cold_sum`."""
    neurons, each = at_A[_NEURONS], at_A[_ROWS_PER_NEURON]
    candidates_F = carray(pointer_of(at_A[_CANDIDATES]), (neurons,), np.int64)
    kept_F = carray(pointer_of(at_A[_KEPT]), (neurons,), np.int64)
    h_F = carray(pointer_of(at_A[_H]), (neurons,), np.float32)
    counts_S = carray(pointer_of(at_A[_COUNTS]), (SEGMENTS,), np.int64)
    sums_CP = carray(pointer_of(at_A[_SUMS]), (CHUNKS, at_A[_SUMS_WIDTH]), np.float32)
    gather_CX = carray(pointer_of(at_A[_GATHER]), (CHUNKS, at_A[_GATHER_WIDTH]), np.float32)
    first = matrix(at_A[_FORMAT], w[weight_table.FIRST], w[weight_table.FIRST_SCALES], at_A[_COLUMNS])
    rest = matrix(at_A[_FORMAT], w[weight_table.REST], w[weight_table.REST_SCALES], at_A[_COLUMNS])
    dense, relu_up = w[weight_table.DENSE] != 0, at_A[_ACTIVATION] == weight_table.DRELU
    parallel_fire(
        first, w[weight_table.FIRST_BIAS], at_A[_ACTIVATION], limit_of(w), dense, low, selected, count, at_A[_INPUTS],
        candidates_F, kept_F, h_F, counts_S,
    )  # fmt: skip
    kept = compact_kept(count, counts_S, kept_F, h_F)
    parallel_rest(
        rest, strided_rows(rest, each, each - 1), each, w[weight_table.UP_BIAS], relu_up, dense, route_weight,
        accumulate, kept, at_A[_INPUTS], kept_F, h_F, sums_CP, gather_CX,
    )  # fmt: skip
    return kept


@device
def _write_sum(at_A: Ints, y_D: Floats) -> None:
    """y ← the sum of the partial sums."""
    _add_chunks(carray(pointer_of(at_A[_SUMS]), (CHUNKS, at_A[_SUMS_WIDTH]), np.float32), y_D)
