"""The FFN with its experts: which experts the router takes, and the sum of their results.

Shape letters: T tokens, X experts, K experts taken for each token, D model width. A layer's
`w_X` has a record for each expert. A single expert has no router and is always taken.
"""

import numpy as np

from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import F32, Floats, Ints, address_of, matrix, values_of_row, vector
from pi_runtime.kernels.data.weight_table import KernelConfig, LayerRecord, LayerRecords
from pi_runtime.kernels.data.workspace import Workspace
from pi_runtime.kernels.ffn.matrices import add_matrices
from pi_runtime.kernels.ffn.memory import Batch, Ffn, ffn_of, take_expert, weights_of, whole_expert
from pi_runtime.kernels.ffn.network import add, prepare
from pi_runtime.kernels.ops.linear import linear

_add, _add_matrices = by_address(add), by_address(add_matrices)


@public
def route(cfg: KernelConfig, w: LayerRecord, x_TD: Floats, ws: Workspace) -> None:
    """Write a token's experts to `ws.expert_TK`, their weights to `ws.route_weight_TK`: those that the router takes,
    the largest value first, and among equal ones the lower expert; then those that every token takes, with weight 1 or
    the sigmoid of their gate, whose value stands behind the router's. Slots that are left over have the expert −1.

    Narrower experts get what they read, and an empty sum.
    """
    tokens = x_TD.shape[0]
    if w.experts_in != 0:
        narrow = matrix(w.experts_in_format, w.experts_in, w.experts_in_scales, cfg.d_model)
        linear(narrow, cfg.neuron_width, 0, x_TD, address_of(ws.inputs), ws.narrow_TL[:tokens])
        ws.narrow_sum_TL[:tokens] = np.float32(0)
    for t in range(tokens):
        expert_K, route_weight_K = ws.expert_TK[t, w.experts_chosen :], ws.route_weight_TK[t, w.experts_chosen :]
        for k in range(expert_K.shape[0]):
            expert_K[k] = cfg.experts - w.experts_shared + k if k < w.experts_shared else -1
            route_weight_K[k] = np.float32(1)
    if w.experts_chosen > 0:
        router, routed = matrix(F32, w.router, 0, cfg.d_model), cfg.experts - w.experts_shared
        width = routed + cfg.shared_gate
        value_TX = _rows(ws.router_TX, 0, tokens, width)
        has_choices = w.router_choice_bias != 0 or cfg.router_groups_taken < cfg.router_groups
        choice_TX = value_TX if not has_choices else _rows(ws.router_TX, tokens * width, tokens, width)
        linear(router, width, w.router_bias, x_TD, address_of(ws.inputs), value_TX)
        for t in range(tokens):
            expert_K, route_weight_K = ws.expert_TK[t, : w.experts_chosen], ws.route_weight_TK[t, : w.experts_chosen]
            if has_choices:
                _choices(cfg, w.router_choice_bias, value_TX[t, :routed], choice_TX[t, :routed])
            _take_largest(choice_TX[t, :routed], expert_K)
            _weigh(cfg, w, value_TX[t, :routed], expert_K, route_weight_K)
            if w.expert_scale != 0:
                for k in range(w.experts_chosen):
                    route_weight_K[k] *= vector(w.expert_scale, routed)[expert_K[k]]
            if cfg.shared_gate != 0:
                ws.route_weight_TK[t, w.experts_chosen : w.experts_chosen + w.experts_shared] = _sigmoid(
                    value_TX[t, routed]
                )


@public
def add_expert_biases(w: LayerRecord, ws: Workspace, x_TD: Floats) -> None:
    """x ← x + the biases of each token's experts, weighed as their results are."""
    width = x_TD.shape[1]
    bias = matrix(F32, w.expert_bias, 0, width)
    for t in range(x_TD.shape[0]):
        for k in range(ws.expert_TK.shape[1]):
            if ws.expert_TK[t, k] >= 0:
                bias_D = vector(values_of_row(bias, ws.expert_TK[t, k]), width)
                for j in range(width):
                    x_TD[t, j] += ws.route_weight_TK[t, k] * bias_D[j]


@device
def _rows(memory_TX: Floats, first: int, rows: int, columns: int) -> Floats:
    """Some numbers of a buffer as a matrix: as many columns as the router has rows."""
    return memory_TX.reshape(-1)[first : first + rows * columns].reshape(rows, columns)


@device
def _choices(cfg: KernelConfig, bias: int, value_X: Floats, choice_X: Floats) -> None:
    """choice ← value, or with a bias value ← s(value) and choice ← that + bias; but −∞ in groups that are not taken."""
    size = value_X.shape[0] // cfg.router_groups
    for e in range(value_X.shape[0]):
        if bias != 0:
            value_X[e] = _sigmoid(value_X[e])
            choice_X[e] = value_X[e] + vector(bias, e + 1)[e]
        else:
            choice_X[e] = value_X[e]
    for _ in range(cfg.router_groups - cfg.router_groups_taken):
        least, least_sum = -1, np.float32(0)
        for first in range(0, value_X.shape[0], size):
            top = _sum_of_largest(cfg.router_group_top, choice_X[first : first + size])
            if top > -np.inf and (least < 0 or top <= least_sum):
                least, least_sum = first, top
        choice_X[least : least + size] = np.float32(-np.inf)


@device
def _sum_of_largest(count: int, value_X: Floats) -> np.float32:
    """The largest value, or the sum of the two largest."""
    largest, second = np.float32(-np.inf), np.float32(-np.inf)
    for value in value_X:
        if value > largest:
            largest, second = value, largest
        elif value > second:
            second = value
    return largest if count == 1 else largest + second


@device
def _take_largest(choice_X: Floats, expert_K: Ints) -> None:
    """Take the experts with the largest values, the largest first."""
    for k in range(expert_K.shape[0]):
        best = -1
        for e in range(choice_X.shape[0]):
            if _slot(expert_K[:k], e) < 0 and (best < 0 or choice_X[e] > choice_X[best]):
                best = e
        expert_K[k] = best


@device
def _weigh(cfg: KernelConfig, w: LayerRecord, value_X: Floats, expert_K: Ints, route_weight_K: Floats) -> None:
    """The softmax of the taken experts' values, or their part of the softmax of all; or their sigmoids, over the sum of
    these or as they are. With a bias for choosing the values are sigmoids already."""
    total = np.float32(0)
    for k in range(expert_K.shape[0]):
        value = value_X[expert_K[k]]
        if cfg.router_sigmoid != 0:
            route_weight_K[k] = value if w.router_choice_bias != 0 else _sigmoid(value)
        else:
            route_weight_K[k] = np.exp(value - value_X[expert_K[0]])
        total += route_weight_K[k]
    if cfg.router_normalised == 0:
        total = np.float32(cfg.router_sigmoid)
        for e in range(value_X.shape[0] if cfg.router_sigmoid == 0 else 0):
            total += np.exp(value_X[e] - value_X[expert_K[0]])
    for k in range(expert_K.shape[0]):
        route_weight_K[k] = route_weight_K[k] / total * np.float32(cfg.router_scale)


@device
def _sigmoid(z: np.float32) -> np.float32:
    """1 / (1 + e⁻ᶻ), but never below 1e-30, so that a sum of such is not 0."""
    return max(np.float32(1) / (np.float32(1) + np.exp(-z)), np.float32(1e-30))


@device
def _slot(expert_K: Ints, expert: int) -> int:
    """Index of an expert among those taken, or -1."""
    slot = -1
    for k in range(expert_K.shape[0]):
        if expert_K[k] == expert:
            slot = k
    return slot


def ends_of_ffn(ws: Workspace) -> tuple[Floats, Floats]:
    """What the FFN of a call's tokens reads, and what takes its sum."""
    if ws.narrow_TL.shape[1] > 0:
        return ws.narrow_TL, ws.narrow_sum_TL
    return ws.normed_TD, ws.x_TD


@public
def ffn_of_experts(
    cfg: KernelConfig, w_X: LayerRecords, x_TD: Floats, select_T: Ints, ws: Workspace, tally_T3: Ints, y_TD: Floats
) -> None:
    """y ← y + the FFN of T tokens, by neuron or, where `down` is one, by matrices; see `network.add_neurons`.

    The results of a token's experts are added in the order of the experts, so that no other token changes it.
    """
    tokens, f = x_TD.shape[0], ffn_of(cfg, ws)
    if w_X[0].d_ff == 0:
        return
    prepare(f, w_X[0], x_TD)
    tally_T3[:] = 0
    if cfg.experts == 1:
        every = whole_expert(f, w_X, 0, ws.token_T[:tokens], select_T, ws.one_T[:tokens])
        _add_expert(f, every, ws, tally_T3, y_TD)
        return
    for expert in range(cfg.experts):
        taken = take_expert(ws.expert_TK[:tokens], ws.route_weight_TK, expert, ws.taken_T, ws.taken_weight_T)
        if taken == 0:
            continue
        token_N, select_N, weight_N = ws.taken_T[:taken], ws.taken_select_T[:taken], ws.taken_weight_T[:taken]
        for n in range(taken):
            select_N[n] = select_T[token_N[n]]
        _add_expert(f, whole_expert(f, w_X, expert, token_N, select_N, weight_N), ws, tally_T3, y_TD)


@device
def _add_expert(f: Ffn, e: Batch, ws: Workspace, tally_T3: Ints, y_TD: Floats) -> None:
    if weights_of(e).down != 0:
        _add_matrices(f, e, ws.attended_TD, tally_T3, y_TD)
    else:
        _add(f, e, tally_T3, y_TD)
