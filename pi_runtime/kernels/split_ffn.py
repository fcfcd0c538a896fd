"""FFNs of some tokens in parts, for a run in which a selector and its neurons are on different devices.

`predict` lists the neurons that a selector names in the K experts that the router takes for a token; `cold_sum`
computes those of a list, or those beyond each expert's cut. A layer without experts is one expert of weight 1. Python
calls a sum once a layer while a GPU waits for it. Taking apart tuples of arrays at each call would cost too much
(16 µs), so what stays the same goes in as addresses (`neuron_chunks.Chunks`, `neuron_selection.Inputs`).

The tokens of an expert go through its rows together, and no token changes another's bits.

Shape letters: M tokens, N of them that take one expert, D model width, F neurons of one expert, X experts, K experts
taken.
"""

import numpy as np
import numpy.typing as npt

from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import Floats, Ints
from pi_runtime.kernels.data.neuron_chunks import Chunks
from pi_runtime.kernels.data.weight_table import KernelConfig
from pi_runtime.kernels.ffn import add_some, input_format
from pi_runtime.kernels.ops.linear import prepare_inputs
from pi_runtime.kernels.ops.neuron_selection import Inputs, score, scores_of, selector_format

Integers = npt.NDArray[np.int32]


@device
def _take(expert_MK: Ints, expert: int, token_N: Ints, slot_N: Ints) -> int:
    """List the tokens that take an expert, and in which of their slots; returns how many."""
    count = 0
    for token in range(expert_MK.shape[0]):
        for slot in range(expert_MK.shape[1]):
            if expert_MK[token, slot] == expert:
                token_N[count], slot_N[count] = token, slot
                count += 1
                break  # an expert is taken once, or there would be more than there is room for
    return count


@public
def predict(
    cfg: KernelConfig, w_XW: Ints, x_MD: Floats, expert_MK: Ints, cut_X: Ints, base_X: Ints, x: Inputs,
    hot_count_M: Integers, hot_MF: Integers, cold_count_M: Integers, cold_MF: Integers,
) -> None:  # fmt: skip
    """List the neurons that are selected in each token's experts, and count them.

    Those below their expert's cut go to `hot_MF` as base + neuron, the others to `cold_MF` as expert · F + neuron.
    """
    tokens = x_MD.shape[0]
    token_N, slot_N = np.empty(tokens, np.int64), np.empty(tokens, np.int64)
    hot_count_M[:], cold_count_M[:] = 0, 0
    prepare_inputs(selector_format(cfg, w_XW[0]), x_MD, x.inputs)
    for expert in range(w_XW.shape[0]):
        taken = _take(expert_MK, expert, token_N, slot_N)
        if taken == 0:
            continue
        score(cfg, w_XW[expert], x_MD, token_N[:taken], 0, cfg.d_ff, True, x)
        for n in range(taken):
            score_F, token = scores_of(cfg, x, taken)[n], token_N[n]
            for neuron in range(cfg.d_ff):
                if score_F[neuron] <= 0:
                    continue
                if neuron < cut_X[expert]:
                    hot_MF[token, hot_count_M[token]] = base_X[expert] + neuron
                    hot_count_M[token] += 1
                else:
                    cold_MF[token, cold_count_M[token]] = expert * cfg.d_ff + neuron
                    cold_count_M[token] += 1


@public
def cold_sum(
    cfg: KernelConfig, w_XW: Ints, x_MD: Floats, expert_MK: Integers, route_weight_MK: Floats, cut_X: Ints,
    selected: bool, count_M: Integers, cold_MF: Integers, m: Chunks, x: Inputs, tally_M3: Ints, y_MD: Floats,
) -> None:  # fmt: skip
    """y ← Σ_k route_weight_k · the sum over expert_k's neurons from its cut on, or over those on a list (`selected`).

    A token's list is the first `count_M` of `cold_MF`: expert · F + neuron. The experts' sums are added in the order of
    the experts. `tally_M3` ← for each token (0, rows of `first` read, neurons kept).
    """
    tokens = x_MD.shape[0]
    token_N, slot_N = np.empty(tokens, np.int64), np.empty(tokens, np.int64)
    select_N, weight_N = np.ones(tokens, np.int64), np.empty(tokens, np.float32)
    y_MD[:], tally_M3[:] = np.float32(0), 0
    prepare_inputs(input_format(cfg, w_XW[0]), x_MD, x.inputs)
    for expert in range(w_XW.shape[0]):
        low, taken = cut_X[expert], _take(expert_MK, expert, token_N, slot_N)
        if taken == 0 or low == cfg.d_ff:
            continue
        for n in range(taken):
            weight_N[n] = route_weight_MK[token_N[n], slot_N[n]]
            if selected:
                _name(cfg, expert, low, cold_MF[token_N[n], : count_M[token_N[n]]], scores_of(cfg, x, taken)[n])
        of_expert = token_N[:taken], select_N[:taken], weight_N[:taken]
        add_some(cfg, w_XW[expert], x_MD, *of_expert, low, cfg.d_ff, selected, False, True, m, x, tally_M3, y_MD)


@device
def _name(cfg: KernelConfig, expert: int, low: int, listed_F: Integers, score_F: Floats) -> None:
    """Give the neurons of a list that are an expert's a score above 0, and its others from `low` on none."""
    score_F[low:] = np.float32(0)
    for neuron in listed_F:
        if neuron // cfg.d_ff == expert:
            score_F[neuron - expert * cfg.d_ff] = np.float32(1)
