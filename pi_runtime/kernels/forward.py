"""The decoder over one block of T ≥ 1 tokens: one compiled call, prefill (T > 1) and decode (T = 1) alike."""

from pi_runtime.kernels import ffn, table
from pi_runtime.kernels.attention import attend, remember, rotate
from pi_runtime.kernels.buffers import Buffers
from pi_runtime.kernels.compiling import leaf
from pi_runtime.kernels.linear import add_vector, linear, norm
from pi_runtime.kernels.loading import load_row
from pi_runtime.kernels.memory import Floats, Ints, matrix
from pi_runtime.kernels.table import Ends, Shape


@leaf
def embed(s: Shape, ends: Ends, tokens_T: Ints, start: int, position_D: Floats, x_TD: Floats) -> None:
    """x ← the tokens' embeddings, plus learned positions where the model has them; `position_D` is scratch."""
    table = matrix(s.embedding_format, ends.embedding, ends.embedding_scales, s.d_model)
    places = matrix(s.embedding_format, ends.positions, ends.positions_scales, s.d_model)
    for t in range(tokens_T.shape[0]):
        load_row(table, tokens_T[t], 0, x_TD[t])
        if ends.positions != 0:
            load_row(places, start + t + s.position_offset, 0, position_D)
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
    qkv = matrix(s.attention_format, w[table.QKV], w[table.QKV_SCALES], s.d_model)
    out = matrix(s.attention_format, w[table.OUT], w[table.OUT_SCALES], s.heads * s.head_dim)
    norm(s.centred, eps, w[table.ATTENTION_NORM], w[table.ATTENTION_NORM_BIAS], x_TD, normed_TD)
    linear(qkv, qkv_TQ.shape[1], w[table.QKV_BIAS], normed_TD, b.records.ctypes.data, qkv_TQ)
    if s.rotary:
        rotate(cos_SE, sin_SE, start, s.heads + s.kv_heads, s.head_dim, qkv_TQ)
    remember(qkv_TQ, s.heads, start, cache_2GSE)
    attend(qkv_TQ, s.heads, start, cache_2GSE, mixed_TQ)
    linear(out, s.d_model, w[table.OUT_BIAS], mixed_TQ, b.records.ctypes.data, normed_TD)
    for t in range(tokens):
        for j in range(s.d_model):
            x_TD[t, j] += normed_TD[t, j]
    norm(s.centred, eps, w[table.FFN_NORM], w[table.FFN_NORM_BIAS], x_TD, normed_TD)


@leaf
def head(s: Shape, ends: Ends, eps: float, x_TD: Floats, records: int, logits_TV: Floats) -> None:
    """logits = norm(x) Wᵀ."""
    norm(s.centred, eps, ends.norm, ends.norm_bias, x_TD, x_TD)
    linear(matrix(s.head_format, ends.head, ends.head_scales, s.d_model), s.vocabulary, 0, x_TD, records, logits_TV)


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
    embed(s, ends, tokens_T, start, b.normed_TD[0], x_TD)
    for layer in range(table_LW.shape[0]):
        w = table_LW[layer]
        attention(s, w, eps, cos_SE, sin_SE, start, cache_L2GSE[layer], x_TD, b)
        if tokens == 1 and select and not every:
            read, kept = ffn.step(s, w, b.normed_TD[0], 0, s.d_ff, b)
            b.rows_L2[layer, 0], b.rows_L2[layer, 1] = read, kept
            ffn.add_sums(b.sums_CP, x_TD[0])
        else:
            ffn.block(s, w, b.normed_TD[:tokens], 0, s.d_ff, select, b, b.tally_L3[layer], x_TD)
        for t in range(tokens):
            add_vector(w[table.DOWN_BIAS], x_TD[t])
    if every:
        head(s, ends, eps, x_TD, b.records.ctypes.data, b.logits_TV[:tokens])
    else:
        head(s, ends, eps, x_TD[tokens - 1 :], b.records.ctypes.data, b.logits_TV[:1])
