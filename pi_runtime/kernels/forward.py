"""The decoder over one block of T ≥ 1 tokens: one compiled call, prefill (T > 1) and decode (T = 1) alike."""

import numpy as np

from pi_runtime.kernels import ffn, moe
from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.jit import inner, leaf
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import Floats, Halves, Ints, address_of, matrix
from pi_runtime.kernels.data.row_loading import load_row
from pi_runtime.kernels.data.weight_table import Ends, Shape
from pi_runtime.kernels.data.workspace import Buffers
from pi_runtime.kernels.ops.attention import attend, norm_heads, remember, rotate
from pi_runtime.kernels.ops.linear import add_vector, linear, norm

_load_row, _norm_heads, _route = by_address(load_row), by_address(norm_heads), by_address(moe.route)


@leaf
def embed(s: Shape, ends: Ends, tokens_T: Ints, start: int, b: Buffers, x_TD: Floats) -> None:
    """x ← the tokens' embeddings, brought to the model's width, plus learned positions where the model has them."""
    tokens = tokens_T.shape[0]
    rows = matrix(s.embedding_format, ends.embedding, ends.embedding_scales, s.d_embedding)
    places = matrix(s.embedding_format, ends.positions, ends.positions_scales, s.d_model)
    if ends.embedding_in != 0:
        narrow_TW = b.narrow_TW[:tokens]
        for t in range(tokens):
            _load_row(rows, tokens_T[t], 0, narrow_TW[t])
        widen = matrix(s.embedding_format, ends.embedding_in, ends.embedding_in_scales, s.d_embedding)
        linear(widen, s.d_model, 0, narrow_TW, address_of(b.records), x_TD)
    else:
        for t in range(tokens):
            _load_row(rows, tokens_T[t], 0, x_TD[t])
    if ends.positions != 0:
        position_D = b.normed_TD[0]
        for t in range(tokens):
            _load_row(places, start + t + s.position_offset, 0, position_D)
            _add(position_D, x_TD[t])


@leaf
def attention(
    s: Shape,
    w: Ints,
    eps: np.float32,
    cos_SJ: Floats,
    sin_SJ: Floats,
    start: int,
    cache_2GSW: Halves,
    x_TD: Floats,
    b: Buffers,
) -> None:
    """The block up to its FFN: attention is added to x, `b.normed_TD` gets the FFN's input, and its experts are chosen.

    sequential   x ← x + attention(n₁(x)),  input n₂(x)
    parallel     input n₂(x) or n₁(x),  x ← x + attention(n₁(x))
    post-norm    x ← n₁(x + attention(x)),  input x
    """
    tokens = x_TD.shape[0]
    normed_TD, attended_TD = b.normed_TD[:tokens], b.attended_TD[:tokens]
    if s.block == weight_table.POST_NORM:
        _mix(s, w, eps, cos_SJ, sin_SJ, start, cache_2GSW, x_TD, b)
    else:
        norm(s.centred, eps, w[weight_table.ATTENTION_NORM], w[weight_table.ATTENTION_NORM_BIAS], x_TD, normed_TD)
        _mix(s, w, eps, cos_SJ, sin_SJ, start, cache_2GSW, normed_TD, b)
    if s.block == weight_table.PARALLEL and w[weight_table.FFN_NORM] != 0:
        norm(s.centred, eps, w[weight_table.FFN_NORM], w[weight_table.FFN_NORM_BIAS], x_TD, normed_TD)
    for t in range(tokens):
        _add(attended_TD[t], x_TD[t])
    if s.block == weight_table.SEQUENTIAL:
        norm(s.centred, eps, w[weight_table.FFN_NORM], w[weight_table.FFN_NORM_BIAS], x_TD, normed_TD)
    elif s.block == weight_table.POST_NORM:
        norm(s.centred, eps, w[weight_table.ATTENTION_NORM], w[weight_table.ATTENTION_NORM_BIAS], x_TD, x_TD)
        for t in range(tokens):
            _copy(x_TD[t], normed_TD[t])
    if s.experts > 1:
        _route(s, w, normed_TD, b)


@inner
def _mix(
    s: Shape,
    w: Ints,
    eps: np.float32,
    cos_SJ: Floats,
    sin_SJ: Floats,
    start: int,
    cache_2GSW: Halves,
    x_TD: Floats,
    b: Buffers,
) -> None:
    """`b.attended_TD` ← attention(x)."""
    tokens = x_TD.shape[0]
    qkv_TQ, mixed_TQ = b.qkv_TQ[:tokens], b.mixed_TQ[:tokens]
    qkv = matrix(s.attention_format, w[weight_table.QKV], w[weight_table.QKV_SCALES], s.d_model)
    out = matrix(s.attention_format, w[weight_table.OUT], w[weight_table.OUT_SCALES], s.heads * s.head_dim)
    linear(qkv, qkv_TQ.shape[1], w[weight_table.QKV_BIAS], x_TD, address_of(b.records), qkv_TQ)
    if w[weight_table.Q_NORM] != 0:
        _norm_heads(eps, w[weight_table.Q_NORM], 0, s.heads, s.head_dim, qkv_TQ)
        _norm_heads(eps, w[weight_table.K_NORM], s.heads, s.kv_heads, s.head_dim, qkv_TQ)
    rotate(cos_SJ, sin_SJ, start, s.heads + s.kv_heads, s.head_dim, qkv_TQ)
    remember(qkv_TQ, s.heads, s.head_dim, start, cache_2GSW)
    attend(qkv_TQ, s.heads, start, cache_2GSW, mixed_TQ)
    linear(out, s.d_model, w[weight_table.OUT_BIAS], mixed_TQ, address_of(b.records), b.attended_TD[:tokens])


@leaf
def after_ffn(s: Shape, w: Ints, eps: np.float32, x_TD: Floats) -> None:
    """x ← x + the FFN's bias, and normed where the block ends with a norm."""
    for t in range(x_TD.shape[0]):
        add_vector(w[weight_table.DOWN_BIAS], x_TD[t])
    if s.block == weight_table.POST_NORM:
        norm(s.centred, eps, w[weight_table.FFN_NORM], w[weight_table.FFN_NORM_BIAS], x_TD, x_TD)


@leaf
def head(s: Shape, ends: Ends, eps: np.float32, x_TD: Floats, b: Buffers, logits_TV: Floats) -> None:
    """logits = norm(x) Wᵀ + bias, brought to the embedding's width before; x is overwritten."""
    tokens, records = x_TD.shape[0], address_of(b.records)
    if ends.norm != 0:
        norm(s.centred, eps, ends.norm, ends.norm_bias, x_TD, x_TD)
    rows = matrix(s.head_format, ends.head, ends.head_scales, s.d_embedding)
    if ends.embedding_out != 0:
        narrow = matrix(s.embedding_format, ends.embedding_out, ends.embedding_out_scales, s.d_model)
        linear(narrow, s.d_embedding, 0, x_TD, records, b.narrow_TW[:tokens])
        linear(rows, s.vocabulary, ends.head_bias, b.narrow_TW[:tokens], records, logits_TV)
    else:
        linear(rows, s.vocabulary, ends.head_bias, x_TD, records, logits_TV)


_embed, _attention, _head = by_address(embed), by_address(attention), by_address(head)
_block = by_address(moe.block)


@leaf
def forward(
    s: Shape,
    ends: Ends,
    table_LXW: Ints,
    eps: np.float32,
    cos_SJ: Floats,
    sin_SJ: Floats,
    tokens_T: Ints,
    start: int,
    cache_L2GSW: Halves,
    select: bool,
    every: bool,
    b: Buffers,
) -> None:
    """Tokens at positions start… → logits in `b.logits_TV`, keys and values in the cache.

    `select`: skip what the layer's rung skips (else all layers are dense); `every`: logits at all positions, and
    tallies, else only the last position's, in row 0. Returns nothing; all float32 but the cache (see `attention`).
    """
    tokens = tokens_T.shape[0]
    x_TD = b.x_TD[:tokens]
    _embed(s, ends, tokens_T, start, b, x_TD)
    for layer in range(table_LXW.shape[0]):
        w_XW = table_LXW[layer]
        _attention(s, w_XW[0], eps, cos_SJ, sin_SJ, start, cache_L2GSW[layer], x_TD, b)
        if tokens == 1 and select and not every:
            read, kept = moe.step(s, w_XW, b.normed_TD[0], b)
            b.rows_L2[layer, 0], b.rows_L2[layer, 1] = read, kept
            ffn.add_sums(b.sums_CP, x_TD[0])
        else:
            _block(s, w_XW, b.normed_TD[:tokens], select, b, b.tally_L3[layer], x_TD)
        after_ffn(s, w_XW[0], eps, x_TD)
    if every:
        _head(s, ends, eps, x_TD, b, b.logits_TV[:tokens])
    else:
        _head(s, ends, eps, x_TD[tokens - 1 :], b, b.logits_TV[:1])


@inner
def _add(y_D: Floats, x_D: Floats) -> None:
    """x ← x + y."""
    for j in range(x_D.shape[0]):
        x_D[j] += y_D[j]


@inner
def _copy(y_D: Floats, x_D: Floats) -> None:
    """x ← y."""
    for j in range(x_D.shape[0]):
        x_D[j] = y_D[j]
