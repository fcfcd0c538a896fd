"""The FFN with its experts: which experts the router takes, and the sum of their results.

Shape letters: T tokens, X experts, K experts taken for each token, D model width. A layer's
`w_X` has a record for each expert. A single expert has no router and is always taken.
"""

import numpy as np

from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import F32, Floats, Ints, address_of, matrix
from pi_runtime.kernels.data.weight_table import KernelConfig, LayerRecord, LayerRecords
from pi_runtime.kernels.data.workspace import Workspace
from pi_runtime.kernels.ffn.experts import take_expert
from pi_runtime.kernels.ffn.memory import ffn_of, whole_expert
from pi_runtime.kernels.ffn.network import add, prepare
from pi_runtime.kernels.ops.linear import linear

_add = by_address(add)


@public
def route(cfg: KernelConfig, w: LayerRecord, x_TD: Floats, ws: Workspace) -> None:
    """Write the K experts with the largest logits router · x to `ws.expert_TK`, and the softmax of these logits, or
    their part of the softmax of all, or their sigmoids over the sum of these, to `ws.route_weight_TK`.

    The largest comes first; among equal ones, the lower expert.
    """
    tokens = x_TD.shape[0]
    router = matrix(F32, w.router, 0, cfg.d_model)
    linear(router, cfg.experts, 0, x_TD, address_of(ws.inputs), ws.router_TX[:tokens])
    for t in range(tokens):
        logit_X, expert_K, route_weight_K = ws.router_TX[t], ws.expert_TK[t], ws.route_weight_TK[t]
        total = np.float32(0)
        for k in range(cfg.experts_per_token):
            best = -1
            for e in range(cfg.experts):
                if _slot(expert_K[:k], e) < 0 and (best < 0 or logit_X[e] > logit_X[best]):
                    best = e
            expert_K[k] = best
            if cfg.router_sigmoid != 0:
                route_weight_K[k] = max(np.float32(1) / (np.float32(1) + np.exp(-logit_X[best])), np.float32(1e-30))
            else:
                route_weight_K[k] = np.exp(logit_X[best] - logit_X[expert_K[0]])
            total += route_weight_K[k]
        if cfg.router_normalised == 0:
            total = np.float32(0)
            for e in range(cfg.experts):
                total += np.exp(logit_X[e] - logit_X[expert_K[0]])
        for k in range(cfg.experts_per_token):
            route_weight_K[k] /= total


@device
def _slot(expert_K: Ints, expert: int) -> int:
    """Index of an expert among those taken, or -1."""
    slot = -1
    for k in range(expert_K.shape[0]):
        if expert_K[k] == expert:
            slot = k
    return slot


@public
def ffn_of_experts(
    cfg: KernelConfig, w_X: LayerRecords, x_TD: Floats, select_T: Ints, count_all: bool, ws: Workspace, tally_T3: Ints,
    y_TD: Floats,
) -> None:  # fmt: skip
    """y ← y + the FFN of T tokens; see `network.add_neurons`.

    The results of a token's experts are added in the order of the experts, so that no other token changes it.
    """
    tokens, f = x_TD.shape[0], ffn_of(cfg, ws)
    prepare(f, w_X[0], x_TD)
    tally_T3[:] = 0
    if cfg.experts == 1:
        _add(f, whole_expert(f, w_X, 0, ws.token_T[:tokens], select_T, ws.one_T[:tokens]), count_all, tally_T3, y_TD)
        return
    for expert in range(cfg.experts):
        taken = take_expert(ws.expert_TK[:tokens], ws.route_weight_TK, expert, ws.taken_T, ws.taken_weight_T)
        if taken == 0:
            continue
        token_N, select_N, weight_N = ws.taken_T[:taken], ws.taken_select_T[:taken], ws.taken_weight_T[:taken]
        for n in range(taken):
            select_N[n] = select_T[token_N[n]]
        _add(f, whole_expert(f, w_X, expert, token_N, select_N, weight_N), count_all, tally_T3, y_TD)
