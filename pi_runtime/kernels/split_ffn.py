"""One token's FFN in parts, for a run in which a selector and its neurons are on different devices.

`predict` lists the neurons that a selector names; `cold_sum` computes those of a list, or of a range. With experts,
`predict_experts` and `cold_sum_experts` do the same for the K experts that the router takes. Python calls a sum once a
layer while a GPU waits for it. Taking apart tuples of arrays at each call would cost too much (16 µs), so what stays
the same goes in as addresses.

Shape letters: D model width, F neurons of one expert, X experts, K experts taken.
"""

import numpy as np
import numpy.typing as npt
from numba import carray

from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import Floats, Ints, pointer_of
from pi_runtime.kernels.data.weight_table import KernelConfig
from pi_runtime.kernels.ffn import Chunks, collect, deal, input_format, name_all, neurons
from pi_runtime.kernels.ops.linear import prepare_inputs
from pi_runtime.kernels.ops.neuron_selection import Inputs, prepare_selection, selector_format

Integers = npt.NDArray[np.int32]


@device
def _candidates(m: Chunks) -> Ints:
    return carray(pointer_of(m.candidates_F), (m.neurons,), np.int64)


@public
def predict(cfg: KernelConfig, w: Ints, x_D: Floats, m: Chunks, x: Inputs) -> int:
    """List all neurons that the layer's selector names in the workspace's `candidates_F`; returns how many."""
    x_TD, token_N, select_N = x_D.reshape(1, x_D.shape[0]), np.zeros(1, np.int64), np.ones(1, np.int64)
    prepare_inputs(selector_format(cfg, w), x_TD, x.inputs)
    prepare_selection(cfg, w, x_TD, token_N, True, x)
    name_all(cfg, w, m, x, select_N)
    return collect(m, _candidates(m))


@public
def cold_sum(
    cfg: KernelConfig, w: Ints, x_D: Floats, low: int, count: int, selected: bool, m: Chunks, x: Inputs, y_D: Floats
) -> int:
    """y ← the sum over the first `count` of the candidates (`selected`), or over the neurons [low, low + count).

    Returns how many neurons were kept.
    """
    y_D[:] = np.float32(0)
    prepare_inputs(input_format(cfg, w), x_D.reshape(1, x_D.shape[0]), x.inputs)
    return _add(cfg, w, x_D, low, count, selected, np.float32(1), m, x, y_D)


@public
def predict_experts(
    cfg: KernelConfig, w_XW: Ints, x_D: Floats, expert_K: Ints, cut_X: Ints, base_X: Ints, m: Chunks, x: Inputs,
    hot_F: Integers, cold_F: Integers,
) -> tuple[int, int]:  # fmt: skip
    """List the neurons that are selected in the experts taken; returns how many are hot, and how many cold.

    Those below their expert's cut go to `hot_F` as base + neuron, the others to `cold_F` as expert · F + neuron.
    """
    hot, cold, candidates_F = 0, 0, _candidates(m)
    for k in range(expert_K.shape[0]):
        expert = expert_K[k]
        for n in range(predict(cfg, w_XW[expert], x_D, m, x)):
            neuron = candidates_F[n]
            if neuron < cut_X[expert]:
                hot_F[hot] = base_X[expert] + neuron
                hot += 1
            else:
                cold_F[cold] = expert * cfg.d_ff + neuron
                cold += 1
    return hot, cold


@public
def cold_sum_experts(
    cfg: KernelConfig, w_XW: Ints, x_D: Floats, expert_K: Integers, route_weight_K: Floats, cut_X: Ints, selected: bool,
    count: int, cold_F: Integers, m: Chunks, x: Inputs, y_D: Floats,
) -> tuple[int, int]:  # fmt: skip
    """y ← Σ_k route_weight_k · the sum over expert_k's neurons from its cut on, or over those on a list (`selected`).

    The list is the first `count` of `cold_F`: expert · F + neuron, one expert after the other in the order of
    `expert_K`. Returns the sums of (rows of `first` read, neurons kept).
    """
    read, kept, done, candidates_F = 0, 0, 0, _candidates(m)
    y_D[:] = np.float32(0)
    prepare_inputs(input_format(cfg, w_XW[0]), x_D.reshape(1, x_D.shape[0]), x.inputs)
    for k in range(expert_K.shape[0]):
        expert = expert_K[k]
        low = cut_X[expert]
        wanted = cfg.d_ff - low
        if selected:
            wanted = 0
            while done < count and cold_F[done] // cfg.d_ff == expert:
                candidates_F[wanted] = cold_F[done] - expert * cfg.d_ff
                wanted, done = wanted + 1, done + 1
        kept += _add(cfg, w_XW[expert], x_D, low, wanted, selected, route_weight_K[k], m, x, y_D)
        read += wanted
    return read, kept


@device
def _add(
    cfg: KernelConfig, w: Ints, x_D: Floats, low: int, count: int, selected: bool, route_weight: np.float32, m: Chunks,
    x: Inputs, y_D: Floats,
) -> int:  # fmt: skip
    """y ← y + route_weight · the sum over some neurons; returns how many are kept. See `cold_sum`."""
    width, tally_T3 = x_D.shape[0], np.zeros((1, 3), np.int64)
    token_N, select_N, weight_N = np.zeros(1, np.int64), np.ones(1, np.int64), np.full(1, route_weight)
    if selected:
        deal(_candidates(m), count, m)
    neurons(
        cfg, w, x_D.reshape(1, width), token_N, select_N, weight_N, low, low + count, selected, False, True, m, x,
        tally_T3, y_D.reshape(1, width),
    )  # fmt: skip
    return tally_T3[0, 2]
