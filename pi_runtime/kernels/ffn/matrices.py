"""The feed-forward network as whole matrices, of which every neuron is computed: for models that skip nothing.

    h_t = a(first · x_t) [up · x_t]        y_t ← y_t + down · h_t

`down` has a row for each column of y, as checkpoints have it, where `network` has one for each neuron.

Shape letters: T tokens, D model width, F neurons.
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
    is_quantised,
    matrix,
    pointer_of,
    vector,
)
from pi_runtime.kernels.data.weight_table import LayerRecords
from pi_runtime.kernels.ffn.blocks import factor
from pi_runtime.kernels.ffn.memory import FIRES, KEPT, READ, Ffn
from pi_runtime.kernels.ops.linear import activate, linear, prepare_inputs
from pi_runtime.kernels.ops.row_products import row_products

NEURONS_AT_ONCE = 32
"""Neurons that a thread takes at once."""


@public
def add_matrices(f: Ffn, w_X: LayerRecords, x_TD: Floats, sum_TD: Floats, tally_T3: Ints, y_TD: Floats) -> None:
    """y ← y + the FFN of T tokens; `sum_TD` holds its result meanwhile. See `network.add_neurons` for what is counted.

    `f.inputs` has room for T inputs of F columns.
    """
    w, tokens = w_X[0], x_TD.shape[0]
    h_TF = carray(pointer_of(f.h_CTK), (tokens, f.d_ff), np.float32)
    prepare_inputs(w.first_format if is_quantised(w.first_format) else w.up_format, x_TD, f.inputs)
    _factors(f, w_X, h_TF)
    for t in range(tokens):
        tally_T3[t, FIRES], tally_T3[t, READ] = 0, f.d_ff
        tally_T3[t, KEPT] = _count(h_TF[t]) if w.dense == 0 else f.d_ff
    linear(matrix(w.down_format, w.down, w.down_scales, f.d_ff), f.d_model, 0, h_TF, f.inputs, sum_TD)
    for t in range(tokens):
        for j in range(f.d_model):
            y_TD[t, j] += sum_TD[t, j]


@device
def _count(h_F: Floats) -> int:
    """How many factors are not 0."""
    found = 0
    for i in range(h_F.shape[0]):
        found += h_F[i] != 0
    return found


@loop_body
def _some_factors(f: Ffn, w_X: LayerRecords, begin: int, end: int, h_TF: Floats) -> None:
    """h ← the factors of the neurons [begin, end)."""
    w, tokens, columns = w_X[0], h_TF.shape[0], f.d_model
    up_TF = carray(pointer_of(f.up_CTK), h_TF.shape, np.float32)
    x, rows = Vectors(f.inputs, input_nbytes(columns), 0, tokens), RowList(begin, 0, end - begin, f.d_ff - begin)
    first = matrix(w.first_format, w.first, w.first_scales, columns)
    row_products(first, rows, x, address_of(h_TF) + 4 * begin, 4 * f.d_ff)
    if f.gated:
        up = matrix(w.up_format, w.up, w.up_scales, columns)
        row_products(up, rows, x, address_of(up_TF) + 4 * begin, 4 * f.d_ff)
    first_bias_F = vector(w.first_bias, f.d_ff if w.first_bias != 0 else 0)
    up_bias_F = vector(w.up_bias, f.d_ff if w.up_bias != 0 else 0)
    for t in range(tokens):
        for i in range(begin, end):
            z = h_TF[t, i] + first_bias_F[i] if w.first_bias != 0 else h_TF[t, i]
            u = up_TF[t, i] + up_bias_F[i] if w.up_bias != 0 else up_TF[t, i]
            h_TF[t, i] = factor(f, activate(f.activation, np.float32(f.threshold), z), u)


@parallel(_some_factors)
def _factors(f: Ffn, w_X: LayerRecords, h_TF: Floats) -> None:
    for part in prange((f.d_ff + NEURONS_AT_ONCE - 1) // NEURONS_AT_ONCE):
        begin = part * NEURONS_AT_ONCE
        _some_factors(f, w_X, begin, min(f.d_ff, begin + NEURONS_AT_ONCE), h_TF)
