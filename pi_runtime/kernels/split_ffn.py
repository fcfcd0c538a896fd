"""FFNs of some tokens in parts, for a run in which a selector and its neurons are on different devices.

`predict` lists the neurons that a selector names in the K experts that the router takes for a token; `cold_sum`
computes those of a list, or those beyond each expert's cut. A layer without experts is one expert of weight 1. Python
calls a sum once a layer while a GPU waits for it. Taking apart tuples of arrays at each call would cost too much
(16 µs), so what stays the same goes in as addresses (`memory.Ffn`).

The tokens of an expert go through its rows together, and no token changes another's bits.

Shape letters: M tokens, N of them that take one expert, D model width, F neurons of one expert, X experts, K experts
taken.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import Floats, Ints
from pi_runtime.kernels.data.weight_table import LayerRecords
from pi_runtime.kernels.ffn.memory import Batch, Ffn, take_expert, whole_expert
from pi_runtime.kernels.ffn.network import add_batch, prepare
from pi_runtime.kernels.ffn.selection import score, scored_of, scores_of, selector_format
from pi_runtime.kernels.ops.linear import prepare_inputs

Integers = npt.NDArray[np.int32]


class NeuronLists(NamedTuple):
    """A list of neurons for each token: the first `count_M` of `index_MF`."""

    count_M: Integers
    index_MF: Integers


@public
def predict(
    f: Ffn, w_X: LayerRecords, x_MD: Floats, expert_MK: Ints, cut_X: Ints, base_X: Ints, hot: NeuronLists,
    cold: NeuronLists,
) -> None:  # fmt: skip
    """List the neurons that are selected in each token's experts, and count them.

    Those below their expert's cut are hot: base + neuron. The others are cold: expert · F + neuron.
    """
    tokens = x_MD.shape[0]
    token_N, select_N = np.empty(tokens, np.int64), np.ones(tokens, np.int64)
    weight_N, unweighed_MK = np.empty(tokens, np.float32), np.ones(expert_MK.shape, np.float32)
    hot.count_M[:], cold.count_M[:] = 0, 0
    prepare_inputs(selector_format(f, w_X[0]), x_MD, f.inputs)
    for expert in range(w_X.shape[0]):
        taken = take_expert(expert_MK, unweighed_MK, expert, token_N, weight_N)
        if taken == 0:
            continue
        e = whole_expert(f, w_X, expert, token_N[:taken], select_N[:taken], weight_N[:taken])
        score(f, e, e.token_N, True)
        for n in range(taken):
            score_F, token = scores_of(f, n), token_N[n]
            for neuron in range(f.d_ff):
                if score_F[neuron] <= 0:
                    continue
                if neuron < cut_X[expert]:
                    _append(hot, token, base_X[expert] + neuron)
                else:
                    _append(cold, token, expert * f.d_ff + neuron)


@device
def _append(lists: NeuronLists, token: int, neuron: int) -> None:
    lists.index_MF[token, lists.count_M[token]] = neuron
    lists.count_M[token] += 1


@public
def cold_sum(
    f: Ffn, w_X: LayerRecords, x_MD: Floats, expert_MK: Integers, route_weight_MK: Floats, cut_X: Ints,
    selected: bool, cold: NeuronLists, tally_M3: Ints, y_MD: Floats,
) -> None:  # fmt: skip
    """y ← Σ_k route_weight_k · the sum over expert_k's neurons from its cut on, or over those on a list (`selected`).

    A list holds expert · F + neuron. The experts' sums are added in the order of the experts. `tally_M3` ← for each
    token (0, rows of `first` read, neurons kept).
    """
    tokens = x_MD.shape[0]
    token_N, select_N = np.empty(tokens, np.int64), np.ones(tokens, np.int64)
    weight_N = np.empty(tokens, np.float32)
    y_MD[:], tally_M3[:] = np.float32(0), 0
    prepare(f, w_X[0], x_MD)
    for expert in range(w_X.shape[0]):
        low, taken = cut_X[expert], take_expert(expert_MK, route_weight_MK, expert, token_N, weight_N)
        if taken == 0 or low == f.d_ff:
            continue
        if selected:
            for n in range(taken):
                _name(f, expert, low, cold.index_MF[token_N[n], : cold.count_M[token_N[n]]], scores_of(f, n))
        e = Batch(w_X, expert, low, f.d_ff, token_N[:taken], select_N[:taken], weight_N[:taken], 0)
        add_batch(f, e, selected, True, tally_M3, y_MD)


@public
def name_listed(f: Ffn, e: Batch, listed: NeuronLists, named_F: Ints) -> int:
    """Name for the tokens of a batch what their lists hold; list what any holds in ascending order, and count it.

    A list holds expert · F + neuron, and the batch the neurons that may be listed.
    """
    tokens, count = e.token_N.shape[0], 0
    scored_N = scored_of(f, tokens)
    for n in range(tokens):
        token, scored_N[n] = e.token_N[n], n
        _name(f, e.expert, e.low, listed.index_MF[token, : listed.count_M[token]], scores_of(f, n))
    for neuron in range(e.low, f.d_ff):
        wanted = False
        for n in range(tokens):
            wanted |= scores_of(f, n)[neuron] > 0
        named_F[count] = neuron
        count += wanted
    return count


@device
def _name(f: Ffn, expert: int, low: int, listed_F: Integers, score_F: Floats) -> None:
    """Give the neurons of a list that are an expert's a score above 0, and its others from `low` on none."""
    score_F[low:] = np.float32(0)
    for neuron in listed_F:
        if neuron // f.d_ff == expert:
            score_F[neuron - expert * f.d_ff] = np.float32(1)
