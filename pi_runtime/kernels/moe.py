"""The FFN with its experts: which experts the router takes, and the sum of their results.

Shape letters: T tokens, X experts, K experts taken for each token, D model width, W columns of the weight table. A
layer's `w_XW` has a row for each expert. A single expert has no router and is always taken.
"""

import numpy as np

from pi_runtime.kernels import ffn
from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import F32, Floats, Ints, address_of, matrix
from pi_runtime.kernels.data.weight_table import KernelConfig
from pi_runtime.kernels.data.workspace import Workspace
from pi_runtime.kernels.ops.linear import linear

_block = by_address(ffn.block)


@public
def route(cfg: KernelConfig, w: Ints, x_TD: Floats, ws: Workspace) -> None:
    """Write the K experts with the largest logits router · x to `ws.expert_TK`, and the softmax of these logits to
    `ws.route_weight_TK`.

    The largest comes first; among equal ones, the lower expert.
    """
    tokens = x_TD.shape[0]
    router = matrix(F32, w[weight_table.ROUTER], 0, cfg.d_model)
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
            route_weight_K[k] = np.exp(logit_X[best] - logit_X[expert_K[0]])
            total += route_weight_K[k]
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
def step(cfg: KernelConfig, w_XW: Ints, x_D: Floats, ws: Workspace) -> tuple[int, int]:
    """One token: `ws.sums_CP` ← the partial sums of `ffn.step` over the experts taken.

    Returns the sums of (rows of `first` read, neurons kept).
    """
    read, kept = 0, 0
    for k in range(cfg.experts_per_token):
        w = w_XW[ws.expert_TK[0, k]]
        found = ffn.step(cfg, w, x_D, 0, cfg.d_ff, ws.route_weight_TK[0, k], k > 0, ws)
        read, kept = read + found[0], kept + found[1]
    return read, kept


@public
def block(
    cfg: KernelConfig, w_XW: Ints, x_TD: Floats, select: bool, ws: Workspace, tally_3: Ints, y_TD: Floats
) -> None:
    """y ← y + the FFN of T tokens; see `ffn.block`.

    Each of several experts gets its tokens gathered; its results are added back times their route weights.
    """
    tally_3[:] = 0
    if cfg.experts == 1:
        _block(cfg, w_XW[0], x_TD, 0, cfg.d_ff, select, ws, tally_3, y_TD)
        return
    for expert in range(cfg.experts):
        count = 0
        for t in range(x_TD.shape[0]):
            if _slot(ws.expert_TK[t], expert) >= 0:
                ws.token_T[count] = t
                for j in range(cfg.d_model):
                    ws.gathered_TD[count, j] = x_TD[t, j]
                count += 1
        if count == 0:
            continue
        out_TD = ws.attended_TD[:count]
        out_TD[:] = np.float32(0)
        _block(cfg, w_XW[expert], ws.gathered_TD[:count], 0, cfg.d_ff, select, ws, tally_3, out_TD)
        for n in range(count):
            t = ws.token_T[n]
            route_weight = ws.route_weight_TK[t, _slot(ws.expert_TK[t], expert)]
            for j in range(cfg.d_model):
                y_TD[t, j] += route_weight * out_TD[n, j]
