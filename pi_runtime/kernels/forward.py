"""The decoder over one block of T ≥ 1 tokens: one compiled call, prefill (T > 1) and decode (T = 1) alike."""

import numpy as np

from pi_runtime.kernels import ffn, table
from pi_runtime.kernels.attention import attend, remember, rotate
from pi_runtime.kernels.buffers import Buffers
from pi_runtime.kernels.compiling import leaf
from pi_runtime.kernels.linear import add_vector, linear, norm
from pi_runtime.kernels.memory import Floats, Ints, row_load, row_stride
from pi_runtime.kernels.table import Ends, Shape


@leaf
def embed(s: Shape, ends: Ends, tokens_T: Ints, start: int, x_TD: Floats) -> None:
    """x ← the tokens' embeddings, plus learned positions where the model has them."""
    stride = row_stride(s.embedding_format, s.d_model)
    position_D = np.empty(s.d_model, np.float32)
    for t in range(tokens_T.shape[0]):
        row_load(s.embedding_format, ends.embedding + tokens_T[t] * stride, x_TD[t])
        if ends.positions != 0:
            row = start + t + s.position_offset
            row_load(s.embedding_format, ends.positions + row * stride, position_D)
            for j in range(s.d_model):
                x_TD[t, j] += position_D[j]


@leaf
def attention(
    s: Shape,
    w: Ints,
    eps: float,
    cos_SE: Floats,
    sin_SE: Floats,
    start: int,
    cache_2GSE: Floats,
    x_TD: Floats,
    b: Buffers,
) -> None:
    """x ← x + attention(norm(x)); then the FFN's input norm(x) into `b.normed_TD`."""
    tokens = x_TD.shape[0]
    normed_TD, qkv_TQ, mixed_TQ = b.normed_TD[:tokens], b.qkv_TQ[:tokens], b.mixed_TQ[:tokens]
    stride = row_stride(s.attention_format, s.d_model)
    out_stride = row_stride(s.attention_format, s.heads * s.head_dim)
    norm(s.centred, eps, w[table.ATTENTION_NORM], w[table.ATTENTION_NORM_BIAS], x_TD, normed_TD)
    linear(s.attention_format, w[table.QKV], stride, qkv_TQ.shape[1], w[table.QKV_BIAS], normed_TD, qkv_TQ)
    if s.rotary:
        rotate(cos_SE, sin_SE, start, s.heads + s.kv_heads, s.head_dim, qkv_TQ)
    remember(qkv_TQ, s.heads, start, cache_2GSE)
    attend(qkv_TQ, s.heads, start, cache_2GSE, mixed_TQ)
    linear(s.attention_format, w[table.OUT], out_stride, s.d_model, w[table.OUT_BIAS], mixed_TQ, normed_TD)
    for t in range(tokens):
        for j in range(s.d_model):
            x_TD[t, j] += normed_TD[t, j]
    norm(s.centred, eps, w[table.FFN_NORM], w[table.FFN_NORM_BIAS], x_TD, normed_TD)


@leaf
def head(s: Shape, ends: Ends, eps: float, x_TD: Floats, logits_TV: Floats) -> None:
    """logits = norm(x) Wᵀ."""
    norm(s.centred, eps, ends.norm, ends.norm_bias, x_TD, x_TD)
    linear(s.head_format, ends.head, row_stride(s.head_format, s.d_model), s.vocabulary, 0, x_TD, logits_TV)


@leaf
def forward(
    s: Shape,
    ends: Ends,
    table_LW: Ints,
    eps: float,
    cos_SE: Floats,
    sin_SE: Floats,
    tokens_T: Ints,
    start: int,
    cache_L2GSE: Floats,
    select: bool,
    every: bool,
    b: Buffers,
) -> None:
    """Tokens at positions start… → logits in `b.logits_TV`, keys and values in the cache.

    `select`: skip what the layer's rung skips (else all layers are dense); `every`: logits at all positions, and
    tallies, else only the last position's, in row 0. Returns nothing; float32 throughout.
    """
    tokens = tokens_T.shape[0]
    x_TD = b.x_TD[:tokens]
    embed(s, ends, tokens_T, start, x_TD)
    for layer in range(table_LW.shape[0]):
        w = table_LW[layer]
        attention(s, w, eps, cos_SE, sin_SE, start, cache_L2GSE[layer], x_TD, b)
        if tokens == 1 and select and not every:
            read, kept = ffn.step(s, w, b.normed_TD[0], 0, s.d_ff, b)
            b.rows_L2[layer, 0], b.rows_L2[layer, 1] = read, kept
            ffn.add_sums(b.sums_CD, x_TD[0])
        else:
            ffn.block(s, w, b.normed_TD[:tokens], 0, s.d_ff, select, b, b.tally_L3[layer], x_TD)
        for t in range(tokens):
            add_vector(w[table.DOWN_BIAS], x_TD[t])
    if every:
        head(s, ends, eps, x_TD, b.logits_TV[:tokens])
    else:
        head(s, ends, eps, x_TD[tokens - 1 :], b.logits_TV[:1])
