"""The layer of a guess head (see `artifact.guess_head`), of the operators that a model's layers are made of; and what
the block of a guess layer (see `artifact.guess_head`) reads.

Shape letters: T tokens, C·D the states of some layers side by side, D model width, W embedding width, U = W + D,
Q numbers of a token's queries, keys and values, F neurons, S tokens of the short list (of tables of angles positions),
J frequencies.
"""

from typing import NamedTuple

import numpy as np

from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import Floats, Ints, address_of, matrix
from pi_runtime.kernels.data.row_loading import load_row
from pi_runtime.kernels.data.weight_table import SILU
from pi_runtime.kernels.forward import Positions
from pi_runtime.kernels.ops.activations import activate
from pi_runtime.kernels.ops.attention import LayerCache, attend, rotate, store_kv
from pi_runtime.kernels.ops.linear import linear, norm
from pi_runtime.kernels.ops.page_rows import unsteady

_load_row, _norm = by_address(load_row), by_address(norm)


class GuessWeights(NamedTuple):
    """Addresses of a guess head's arrays and of the model's embedding, and what is to be known of them."""

    heads: int
    kv_heads: int
    head_dim: int
    matrix_format: int
    embedding_format: int
    embedding: int
    embedding_scales: int
    fc: int
    fc_scales: int
    embedding_norm: int
    hidden_norm: int
    qkv: int
    qkv_scales: int
    out: int
    out_scales: int
    ffn_norm: int
    gate: int
    gate_scales: int
    up: int
    up_scales: int
    down: int
    down_scales: int
    norm: int
    head: int
    head_scales: int


class GuessWorkspace(NamedTuple):
    """Everything that one call writes beside its results."""

    embedding_TW: Floats
    normed_TD: Floats
    joined_TU: Floats
    qkv_TQ: Floats
    mixed_TQ: Floats
    gate_TF: Floats
    up_TF: Floats
    inputs: Ints
    attention_CX: Floats
    unpacked_CBE: Floats


@public
def fuse(w: GuessWeights, states_TC: Floats, ws: GuessWorkspace, y_TD: Floats) -> None:
    """y ← fc · x, with x the states of some layers of the model side by side."""
    fc = matrix(w.matrix_format, w.fc, w.fc_scales, states_TC.shape[1])
    linear(fc, y_TD.shape[1], 0, states_TC, address_of(ws.inputs), y_TD)


@public
def enter(
    w: GuessWeights, eps: np.float32, final_norm: int, tokens_T: Ints, ws: GuessWorkspace, h_TD: Floats, x_TD: Floats
) -> None:
    """x ← fc · (n₁(the tokens' embeddings) | n₂(h)), with h ← n(h) first where the address of a norm is given."""
    if final_norm != 0:
        _norm(0, eps, final_norm, 0, h_TD, h_TD)
    fuse(w, _joined(w, eps, tokens_T, ws, h_TD), ws, x_TD)


@device
def _joined(w: GuessWeights, eps: np.float32, tokens_T: Ints, ws: GuessWorkspace, y_TD: Floats) -> Floats:
    """n₁(the tokens' embeddings) | n₂(y)."""
    tokens = y_TD.shape[0]
    embedding_TW, normed_TD, joined_TU = ws.embedding_TW[:tokens], ws.normed_TD[:tokens], ws.joined_TU[:tokens]
    narrow = embedding_TW.shape[1]
    rows = matrix(w.embedding_format, w.embedding, w.embedding_scales, narrow)
    for t in range(tokens):
        _load_row(rows, tokens_T[t], 0, embedding_TW[t])
    _norm(0, eps, w.embedding_norm, 0, embedding_TW, embedding_TW)
    _norm(0, eps, w.hidden_norm, 0, y_TD, normed_TD)
    for t in range(tokens):
        joined_TU[t, :narrow] = embedding_TW[t]
        joined_TU[t, narrow:] = normed_TD[t]
    return joined_TU


@public
def guess(
    w: GuessWeights,
    eps: np.float32,
    cos_SJ: Floats,
    sin_SJ: Floats,
    at: Positions,
    tokens_T: Ints,
    ws: GuessWorkspace,
    y_TD: Floats,
    logits_1S: Floats,
) -> None:
    """y ← the layer over the embeddings of some tokens beside y; logits ← head · n₄(the last y)."""
    tokens, width = y_TD.shape
    inputs, last = address_of(ws.inputs), tokens - 1
    normed_TD, joined_TU = ws.normed_TD[:tokens], _joined(w, eps, tokens_T, ws, y_TD)
    qkv_TQ, mixed_TQ = ws.qkv_TQ[:tokens], ws.mixed_TQ[:tokens]
    qkv = matrix(w.matrix_format, w.qkv, w.qkv_scales, joined_TU.shape[1])
    linear(qkv, qkv_TQ.shape[1], 0, joined_TU, inputs, qkv_TQ)
    rotate(cos_SJ, sin_SJ, cos_SJ.shape[1], at.position_T, w.heads + w.kv_heads, w.head_dim, qkv_TQ)
    turned = cos_SJ.shape[1], unsteady(cos_SJ, sin_SJ, cos_SJ.shape[1])
    cache = LayerCache(at.keys, at.values, 0, w.kv_heads, w.head_dim, 0, 0, 1, 0, *turned)
    store_kv(cache, qkv_TQ, at.run_R4)
    attend(cache, qkv_TQ, at.run_R4, ws.unpacked_CBE, ws.attention_CX, mixed_TQ)
    out = matrix(w.matrix_format, w.out, w.out_scales, mixed_TQ.shape[1])
    linear(out, width, 0, mixed_TQ, inputs, normed_TD)
    for t in range(tokens):
        for j in range(width):
            y_TD[t, j] += normed_TD[t, j]
    _norm(0, eps, w.ffn_norm, 0, y_TD, normed_TD)
    gate_TF, up_TF = ws.gate_TF[:tokens], ws.up_TF[:tokens]
    neurons = gate_TF.shape[1]
    linear(matrix(w.matrix_format, w.gate, w.gate_scales, width), neurons, 0, normed_TD, inputs, gate_TF)
    linear(matrix(w.matrix_format, w.up, w.up_scales, width), neurons, 0, normed_TD, inputs, up_TF)
    for t in range(tokens):
        activate(SILU, np.float32(0), gate_TF[t])
        for n in range(neurons):
            gate_TF[t, n] *= up_TF[t, n]
    linear(matrix(w.matrix_format, w.down, w.down_scales, neurons), width, 0, gate_TF, inputs, normed_TD)
    for t in range(tokens):
        for j in range(width):
            y_TD[t, j] += normed_TD[t, j]
    _norm(0, eps, w.norm, 0, y_TD[last:], normed_TD[last:])
    head = matrix(w.matrix_format, w.head, w.head_scales, width)
    linear(head, logits_1S.shape[1], 0, normed_TD[last:], inputs, logits_1S)
