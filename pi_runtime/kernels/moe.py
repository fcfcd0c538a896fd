"""The FFN with its experts: which of them the router takes, and the sum of what they give.

T tokens, X experts, K taken for each token, D model width. A layer's `w_XW` has a row of addresses for each expert; of
one expert there is no router, and it is always taken.
"""

import numpy as np

from pi_runtime.kernels import ffn
from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.jit import inner, leaf
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import F32, Floats, Ints, address_of, matrix
from pi_runtime.kernels.data.weight_table import Shape
from pi_runtime.kernels.data.workspace import Buffers
from pi_runtime.kernels.ops.linear import linear

_block = by_address(ffn.block)


@leaf
def route(s: Shape, w: Ints, x_TD: Floats, b: Buffers) -> None:
    """The K experts with the largest router · x into `b.taken_TK`, the softmax of these values into `b.share_TK`.

    Largest first; of equal values that of the lower expert.
    """
    tokens = x_TD.shape[0]
    router = matrix(F32, w[weight_table.ROUTER], 0, s.d_model)
    linear(router, s.experts, 0, x_TD, address_of(b.records), b.router_TX[:tokens])
    for t in range(tokens):
        value_X, taken_K, share_K = b.router_TX[t], b.taken_TK[t], b.share_TK[t]
        total = np.float32(0)
        for k in range(s.experts_per_token):
            best = -1
            for e in range(s.experts):
                if _place(taken_K[:k], e) < 0 and (best < 0 or value_X[e] > value_X[best]):
                    best = e
            taken_K[k] = best
            share_K[k] = np.exp(value_X[best] - value_X[taken_K[0]])
            total += share_K[k]
        for k in range(s.experts_per_token):
            share_K[k] /= total


@inner
def _place(taken_K: Ints, expert: int) -> int:
    """Where an expert stands among those taken; -1: it is not."""
    place = -1
    for k in range(taken_K.shape[0]):
        if taken_K[k] == expert:
            place = k
    return place


@leaf
def step(s: Shape, w_XW: Ints, x_D: Floats, b: Buffers) -> tuple[int, int]:
    """One token: `ffn.step` of the experts taken, their partial sums added in `b.sums_CP`; returns the sums of (rows of
    `first` read, neurons kept)."""
    read, kept = 0, 0
    for k in range(s.experts_per_token):
        w = w_XW[b.taken_TK[0, k]]
        found = ffn.step(s, w, x_D, 0, s.d_ff, b.share_TK[0, k], k > 0, b)
        read, kept = read + found[0], kept + found[1]
    return read, kept


@leaf
def block(s: Shape, w_XW: Ints, x_TD: Floats, select: bool, b: Buffers, tally_3: Ints, y_TD: Floats) -> None:
    """y ← y + the FFN of T tokens; see `ffn.block`. With experts, tokens are gathered for each, and what it makes of
    them goes back weighted."""
    tally_3[:] = 0
    if s.experts == 1:
        _block(s, w_XW[0], x_TD, 0, s.d_ff, select, b, tally_3, y_TD)
        return
    for expert in range(s.experts):
        count = 0
        for t in range(x_TD.shape[0]):
            if _place(b.taken_TK[t], expert) >= 0:
                b.places_T[count] = t
                for j in range(s.d_model):
                    b.gathered_TD[count, j] = x_TD[t, j]
                count += 1
        if count == 0:
            continue
        out_TD = b.attended_TD[:count]
        out_TD[:] = np.float32(0)
        _block(s, w_XW[expert], b.gathered_TD[:count], 0, s.d_ff, select, b, tally_3, out_TD)
        for n in range(count):
            t = b.places_T[n]
            share = b.share_TK[t, _place(b.taken_TK[t], expert)]
            for j in range(s.d_model):
                y_TD[t, j] += share * out_TD[n, j]
