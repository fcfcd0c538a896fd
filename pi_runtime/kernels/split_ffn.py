"""One token's FFN in parts, for a run in which a selector and its neurons are on different devices.

`predict` lists the neurons that a selector names in the K experts that the router takes; `cold_sum` computes those of
a list, or those beyond each expert's cut. A layer without experts is one expert of weight 1. Python calls a sum once a
layer while a GPU waits for it. Taking apart tuples of arrays at each call would cost too much (16 µs), so what stays
the same goes in as addresses (`neuron_chunks.Chunks`, `neuron_selection.Inputs`).

Shape letters: D model width, F neurons of one expert, X experts, K experts taken.
"""

import numpy as np
import numpy.typing as npt

from pi_runtime.kernels.codegen.jit import public
from pi_runtime.kernels.data.matrix_view import Floats, Ints
from pi_runtime.kernels.data.neuron_chunks import KEPT, Chunks, candidates_of, deal
from pi_runtime.kernels.data.weight_table import KernelConfig
from pi_runtime.kernels.ffn import add_some, input_format
from pi_runtime.kernels.ops.linear import prepare_inputs
from pi_runtime.kernels.ops.neuron_selection import Inputs, score, scores_of, selector_format

Integers = npt.NDArray[np.int32]


@public
def predict(
    cfg: KernelConfig, w_XW: Ints, x_D: Floats, expert_K: Ints, cut_X: Ints, base_X: Ints, x: Inputs, hot_F: Integers,
    cold_F: Integers,
) -> tuple[int, int]:  # fmt: skip
    """List the neurons that are selected in the experts taken; returns how many are hot, and how many cold.

    Those below their expert's cut go to `hot_F` as base + neuron, the others to `cold_F` as expert · F + neuron.
    """
    hot, cold = 0, 0
    x_1D, token_1 = x_D.reshape(1, x_D.shape[0]), np.zeros(1, np.int64)
    prepare_inputs(selector_format(cfg, w_XW[0]), x_1D, x.inputs)
    for k in range(expert_K.shape[0]):
        expert = expert_K[k]
        score(cfg, w_XW[expert], x_1D, token_1, 0, cfg.d_ff, True, x)
        score_F = scores_of(cfg, x, 1)[0]
        for neuron in range(cfg.d_ff):
            if score_F[neuron] <= 0:
                continue
            if neuron < cut_X[expert]:
                hot_F[hot] = base_X[expert] + neuron
                hot += 1
            else:
                cold_F[cold] = expert * cfg.d_ff + neuron
                cold += 1
    return hot, cold


@public
def cold_sum(
    cfg: KernelConfig, w_XW: Ints, x_D: Floats, expert_K: Integers, route_weight_K: Floats, cut_X: Ints, selected: bool,
    count: int, cold_F: Integers, m: Chunks, x: Inputs, y_D: Floats,
) -> tuple[int, int]:  # fmt: skip
    """y ← Σ_k route_weight_k · the sum over expert_k's neurons from its cut on, or over those on a list (`selected`).

    The list is the first `count` of `cold_F`: expert · F + neuron, one expert after the other in the order of
    `expert_K`. Returns the sums of (rows of `first` read, neurons kept).
    """
    read, done, candidates_F, tally_13 = 0, 0, candidates_of(m), np.zeros((1, 3), np.int64)
    x_1D, y_1D = x_D.reshape(1, x_D.shape[0]), y_D.reshape(1, y_D.shape[0])
    token_1, select_1, weight_1 = np.zeros(1, np.int64), np.ones(1, np.int64), np.ones(1, np.float32)
    y_1D[:] = np.float32(0)
    prepare_inputs(input_format(cfg, w_XW[0]), x_1D, x.inputs)
    for k in range(expert_K.shape[0]):
        expert = expert_K[k]
        low, high = cut_X[expert], cfg.d_ff
        if selected:
            wanted = 0
            while done < count and cold_F[done] // cfg.d_ff == expert:
                candidates_F[wanted] = cold_F[done] - expert * cfg.d_ff
                wanted, done = wanted + 1, done + 1
            deal(candidates_F, wanted, m)
            read += wanted
        else:
            read += high - low
        weight_1[0] = route_weight_K[k]
        add_some(
            cfg, w_XW[expert], x_1D, token_1, select_1, weight_1, low, high, selected, False, True, m, x, tally_13, y_1D
        )
    return read, tally_13[0, KEPT]
