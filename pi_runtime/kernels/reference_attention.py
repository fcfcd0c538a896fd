"""Attention in NumPy, with and without latents: the definition that compiled kernels are held to (see `reference`).

Shape letters: T tokens, S positions, D model width, H query heads, G key-value heads, E head width, J rotary
frequencies, P = 2 J,
N numbers of a head that are not rotated, L of a latent, X = L + P.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.decoder import LATENT_EPS, Decoder

F32 = npt.NDArray[np.float32]


class WeightSource(Protocol):
    """One layer's values by their short names, and products with them."""

    def __contains__(self, name: str) -> bool: ...

    def __getitem__(self, name: str) -> npt.NDArray[Any]: ...

    def product(self, name: str, x_TD: F32) -> F32: ...

    def as_cached(self, x_SGE: F32) -> F32: ...


def rms(decoder: Decoder, x: F32) -> F32:
    """x / √(mean x² + eps) over the last axis."""
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(decoder.norm_eps)), np.float32)


def attention(decoder: Decoder, w: WeightSource, x_TD: F32) -> F32:
    """softmax(q kᵀ / √E) v, causal, from position 0 on; H query heads share G heads of keys and values.

    With a window of W, a token sees the W positions up to its own. A head's sink adds its exponential to the sum.
    """
    d, n_tokens = decoder, len(x_TD)
    if d.latent_rank:
        return latent_attention(d, w, x_TD)
    qkv = w.product("attention/qkv", x_TD) + (w["attention/qkv_bias"] if d.qkv_bias else np.float32(0))
    heads = qkv.reshape(n_tokens, d.n_heads + 2 * d.n_kv_heads, d.head_dim)
    q_THE, k_SGE, v_SGE = np.split(heads, [d.n_heads, d.n_heads + d.n_kv_heads], axis=1)
    if d.qk_norm:
        q_THE, k_SGE = _norm_heads(d, w["attention/q_norm"], q_THE), _norm_heads(d, w["attention/k_norm"], k_SGE)
    if d.positions == "rope":
        q_THE, k_SGE = rotate(d, q_THE), rotate(d, k_SGE)
    k_SGE, v_SGE = w.as_cached(k_SGE), w.as_cached(v_SGE)
    group = d.n_heads // d.n_kv_heads
    k_SHE, v_SHE = np.repeat(k_SGE, group, 1), np.repeat(v_SGE, group, 1)
    scores_HTS = np.einsum("the,she->hts", q_THE, k_SHE) / np.float32(np.sqrt(d.head_dim))
    seen_TS = np.tri(n_tokens, dtype=bool)
    if d.window:
        seen_TS &= ~np.tri(n_tokens, k=-d.window, dtype=bool)
    scores_HTS = np.where(seen_TS, scores_HTS, np.float32(-np.inf))
    largest_HT1 = scores_HTS.max(-1, keepdims=True)
    p_HTS = np.exp(scores_HTS - largest_HT1)
    total_HT1 = p_HTS.sum(-1, keepdims=True)
    if d.attention_sinks:
        total_HT1 = total_HT1 + np.exp(w["attention/sinks"][:, None, None] - largest_HT1)
    p_HTS /= total_HT1
    mixed_THE = np.einsum("hts,she->the", p_HTS, v_SHE)
    y_TD = w.product("attention/out", _inner_norm(d, w, mixed_THE.reshape(n_tokens, -1)))
    return y_TD + w["attention/out_bias"] if d.out_bias else y_TD


def latent_attention(d: Decoder, w: WeightSource, x_TD: F32) -> F32:
    """softmax(s (q'ᵀ c + rᵀ k) / √E) c, then the values of each head's sum; c a latent, k rotated numbers beside it.

    q' is the part of a head's query that is not rotated, times the matrix that would make its keys of latents; r is its
    rotated part. So keys and values of single heads are never made, and the cache holds c and k alone.
    """
    heads, half, rank = d.n_heads, d.rotary_dim // 2, d.latent_rank
    made = w.product("attention/qkv", x_TD) + (w["attention/qkv_bias"] if d.qkv_bias else np.float32(0))
    q, c_TL, k_TP = np.split(made, [d.qkv_width - d.cached_width, d.qkv_width - d.rotary_dim], axis=1)
    if d.query_rank:
        q = w.product("attention/q_up", latent_norm(w["attention/q_norm"], q))
    plain, a, b = np.split(q, [heads * (d.head_dim - 2 * half), heads * (d.head_dim - half)], axis=1)
    q_THN, a_THJ, b_THJ = (part.reshape(len(q), heads, -1) for part in (plain, a, b))
    r_THP = rotate(d, np.concatenate([a_THJ, b_THJ], axis=-1))
    c_T1L, k_T1P = latent_norm(w["attention/k_norm"], c_TL)[:, None], rotate(d, k_TP[:, None])
    cached_TX = w.as_cached(np.concatenate([c_T1L, k_T1P], axis=-1))[:, 0]
    query_THX = np.concatenate([_by_head(w, "attention/k_up", q_THN), r_THP], axis=-1)
    scale = np.float32(d.score_scale / np.sqrt(d.head_dim))
    scores_HTS = np.einsum("thx,sx->hts", query_THX, cached_TX) * scale
    scores_HTS = np.where(np.tri(len(q), dtype=bool), scores_HTS, np.float32(-np.inf))
    p_HTS = np.exp(scores_HTS - scores_HTS.max(-1, keepdims=True))
    p_HTS /= p_HTS.sum(-1, keepdims=True)
    mixed_THL = np.einsum("hts,sl->thl", p_HTS, cached_TX[:, :rank])
    mixed_TQ = _by_head(w, "attention/v_up", mixed_THL).reshape(len(q), -1)
    y_TD = w.product("attention/out", _inner_norm(d, w, mixed_TQ))
    return y_TD + w["attention/out_bias"] if d.out_bias else y_TD


def _inner_norm(d: Decoder, w: WeightSource, mixed_TQ: F32) -> F32:
    return rms(d, mixed_TQ) * w["attention/inner_norm"] if d.inner_norms else mixed_TQ


def latent_norm(weight: F32, x: F32) -> F32:
    """The rms norm of latents."""
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(LATENT_EPS)), np.float32) * weight


def _by_head(w: WeightSource, name: str, x_THN: F32) -> F32:
    """The products of each head's numbers with its own rows of a matrix."""
    heads = range(x_THN.shape[1])
    return np.stack([np.split(w.product(name, x_THN[:, h]), len(heads), axis=1)[h] for h in heads], axis=1)


def _norm_heads(d: Decoder, weight: F32, x_THE: F32) -> F32:
    """The rms norm of each head, or of all heads of a token together."""
    x = x_THE.reshape(len(x_THE), 1, -1) if d.joint_qk_norm else x_THE
    return (rms(d, x) * weight).reshape(x_THE.shape)


def rotary_table(decoder: Decoder, length: int) -> tuple[F32, F32]:
    """cos and sin (length, J) of the angles position · frequency_j, times `rotary_scale`.

    The angles are float32, as in transformers; cos and sin are rounded from 64 bits, because NumPy's in 32 depend on
    the processor. J = 0 where positions are learned.
    """
    frequency_J = np.array(decoder.rotary_frequencies, np.float32)
    angles = np.outer(np.arange(length, dtype=np.float32), frequency_J).astype(np.float64)
    scale = np.float32(decoder.rotary_scale)
    return np.cos(angles).astype(np.float32) * scale, np.sin(angles).astype(np.float32) * scale


def rotate(decoder: Decoder, x_THE: F32) -> F32:
    """Rotary positions from 0 on: (a, b) → (a cos − b sin, b cos + a sin), a and b the halves of each head's first 2J
    numbers; the others stay."""
    cos, sin = (t[:, None, :] for t in rotary_table(decoder, len(x_THE)))
    half = len(decoder.rotary_frequencies)
    a, b, others = np.split(x_THE, [half, 2 * half], axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, others], axis=-1)
