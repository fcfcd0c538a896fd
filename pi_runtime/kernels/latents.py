"""A layer's attention where keys and values are made of latents: from x to what its last matrix reads."""

import numpy as np

from pi_runtime.artifact.decoder import LATENT_EPS
from pi_runtime.artifact.footprint import CHUNKS
from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import Floats, Ints, address_of, matrix
from pi_runtime.kernels.data.weight_table import KernelConfig, LayerRecord
from pi_runtime.kernels.data.workspace import Workspace
from pi_runtime.kernels.ops.attention import LayerCache
from pi_runtime.kernels.ops.latent_attention import (
    Heads,
    attend_latents,
    norm_latents,
    products_by_head,
    rotate_apart,
    store_latents,
)
from pi_runtime.kernels.ops.linear import linear

_norm_latents, _rotate_apart, _store_latents = map(by_address, (norm_latents, rotate_apart, store_latents))
_EPS = np.float32(LATENT_EPS)


@public
def mix_latents(
    cfg: KernelConfig, w: LayerRecord, cache: LayerCache, cos_SJ: Floats, sin_SJ: Floats, position_T: Ints,
    run_R4: Ints, ws: Workspace,
) -> None:  # fmt: skip
    """ws.mixed_TQ ← the values of all heads, from what the layer's first matrix made in `ws.qkv_TQ`.

    See `reference.latent_attention`, whose parts follow each other in the same order.
    """
    tokens, heads, rank, rotated = position_T.shape[0], cfg.heads, cfg.latent_rank, 2 * cos_SJ.shape[1]
    qkv_TQ, latent_TX, plain = ws.qkv_TQ[:tokens], ws.latent_TQ[:tokens], cfg.head_dim - rotated
    behind = qkv_TQ.shape[1] - cache.width
    # The latent is normed and its neighbours are rotated where they stand.
    _norm_latents(_EPS, w.k_norm, rank, behind, qkv_TQ, behind, qkv_TQ)
    own = Heads(behind + rank, rotated)
    _rotate_apart(cos_SJ, sin_SJ, position_T, 1, own, qkv_TQ, own, qkv_TQ)
    _store_latents(cache, behind, qkv_TQ, run_R4)
    queries_TQ = qkv_TQ
    if cfg.query_rank > 0:
        normed_TL = _rows(ws.latent_TQ, tokens, cfg.query_rank)
        _norm_latents(_EPS, w.q_norm, cfg.query_rank, 0, qkv_TQ, 0, normed_TL)
        up = matrix(cfg.attention_format, w.q_up, w.q_up_scales, cfg.query_rank)
        queries_TQ = ws.query_TQ[:tokens]
        linear(up, queries_TQ.shape[1], 0, normed_TL, address_of(ws.inputs), queries_TQ)
    parts, inputs = min(CHUNKS, heads), address_of(ws.latent_inputs)
    part_nbytes = ws.latent_inputs.shape[0] // parts
    at, sums = Heads(0, cache.width), Heads(0, cfg.value_dim)
    k_up = matrix(cfg.attention_format, w.k_up, w.k_up_scales, plain)
    products_by_head(k_up, rank, heads, Heads(0, plain), queries_TQ, parts, inputs, part_nbytes, at, latent_TX)
    rotations = Heads(heads * plain, rotated), Heads(rank, cache.width)
    _rotate_apart(cos_SJ, sin_SJ, position_T, heads, rotations[0], queries_TQ, rotations[1], latent_TX)
    scale = np.float32(cfg.score_scale / np.sqrt(cfg.head_dim))
    attend_latents(cache, rank, scale, run_R4, ws.unpacked_CBE, ws.attention_CX, latent_TX)
    v_up = matrix(cfg.attention_format, w.v_up, w.v_up_scales, rank)
    products_by_head(v_up, cfg.value_dim, heads, at, latent_TX, parts, inputs, part_nbytes, sums, ws.mixed_TQ[:tokens])


@device
def _rows(memory_TQ: Floats, tokens: int, columns: int) -> Floats:
    """The beginning of a buffer as a matrix."""
    return memory_TQ.reshape(-1)[: tokens * columns].reshape(tokens, columns)
