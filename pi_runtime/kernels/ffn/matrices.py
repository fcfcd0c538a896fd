"""The feed-forward network of one expert as whole matrices, of which every neuron is computed: for models that skip
nothing.

    h_t = a(first · x_t) [up · x_t]        y_t ← y_t + route_weight_t (down · h_t)

`down` has a row for each column of y, as checkpoints have it, where `network` has one for each neuron.

Shape letters: T tokens, N of them that take the expert, D model width, F neurons.
"""

import numpy as np
from numba import carray, prange

from pi_runtime.kernels.codegen.intrinsics import input_nbytes
from pi_runtime.kernels.codegen.jit import device, loop_body, parallel, public
from pi_runtime.kernels.data.matrix_view import (
    Floats,
    Ints,
    RowList,
    Vectors,
    address_of,
    matrix,
    pointer_of,
    vector,
)
from pi_runtime.kernels.ffn.blocks import factor
from pi_runtime.kernels.ffn.memory import KEPT, READ, Batch, Ffn, weights_of
from pi_runtime.kernels.ops.activations import activate
from pi_runtime.kernels.ops.linear import linear
from pi_runtime.kernels.ops.row_products import row_products

NEURONS_AT_ONCE = 32
"""Neurons that a thread takes at once."""


@public
def add_matrices(f: Ffn, e: Batch, sum_TD: Floats, tally_T3: Ints, y_TD: Floats) -> None:
    """y ← y + an expert's FFN for its tokens, whose inputs are prepared; `sum_TD` holds the results meanwhile.

    `tally_T3` ← tally + what `network.add_neurons` counts. `f.low_rank_inputs` has room for N inputs of F columns.
    """
    w, tokens = weights_of(e), e.token_N.shape[0]
    h_NF, sum_ND = carray(pointer_of(f.h_CTK), (tokens, w.d_ff), np.float32), sum_TD[:tokens]
    _factors(f, e, h_NF)
    linear(matrix(w.down_format, w.down, w.down_scales, w.d_ff), f.d_model, 0, h_NF, f.low_rank_inputs, sum_ND)
    for n in range(tokens):
        t, weight = e.token_N[n], e.route_weight_N[n]
        tally_T3[t, READ] += w.d_ff
        tally_T3[t, KEPT] += _count(h_NF[n]) if w.dense == 0 else w.d_ff
        for j in range(f.d_model):
            y_TD[t, j] += weight * sum_ND[n, j]


@device
def _count(h_F: Floats) -> int:
    """How many factors are not 0."""
    found = 0
    for i in range(h_F.shape[0]):
        found += h_F[i] != 0
    return found


@loop_body
def _some_factors(f: Ffn, e: Batch, begin: int, end: int, h_NF: Floats) -> None:
    """h ← the factors of the neurons [begin, end)."""
    w, tokens, columns = weights_of(e), h_NF.shape[0], f.d_model
    up_NF = carray(pointer_of(f.up_CTK), h_NF.shape, np.float32)
    x = Vectors(f.inputs, input_nbytes(columns), address_of(e.token_N), tokens)
    rows = RowList(begin, 0, end - begin, w.d_ff - begin)
    first = matrix(w.first_format, w.first, w.first_scales, columns)
    row_products(first, rows, x, address_of(h_NF) + 4 * begin, 4 * w.d_ff)
    if f.gated:
        up = matrix(w.up_format, w.up, w.up_scales, columns)
        row_products(up, rows, x, address_of(up_NF) + 4 * begin, 4 * w.d_ff)
    first_bias_F = vector(w.first_bias, w.d_ff if w.first_bias != 0 else 0)
    up_bias_F = vector(w.up_bias, w.d_ff if w.up_bias != 0 else 0)
    for n in range(tokens):
        if w.first_bias != 0:
            for i in range(begin, end):
                h_NF[n, i] += first_bias_F[i]
        activate(f.activation, np.float32(f.threshold), h_NF[n, begin:end])
        for i in range(begin, end):
            u = up_NF[n, i] + up_bias_F[i] if w.up_bias != 0 else up_NF[n, i]
            h_NF[n, i] = factor(f, h_NF[n, i], u)


@parallel(_some_factors)
def _factors(f: Ffn, e: Batch, h_NF: Floats) -> None:
    for part in prange((h_NF.shape[1] + NEURONS_AT_ONCE - 1) // NEURONS_AT_ONCE):
        begin = part * NEURONS_AT_ONCE
        _some_factors(f, e, begin, min(h_NF.shape[1], begin + NEURONS_AT_ONCE), h_NF)
