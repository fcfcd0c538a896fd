"""The forward pass as its equations, in NumPy: the definition that every compiled operator is tested against.

Shape letters: T tokens of one block, S positions so far (T included), D model width, H heads, G key-value heads, E head
width, J rotary frequencies, X experts, K experts taken, F neurons of one expert, R predictor rank, V vocabulary, B
blocks of J columns. All arithmetic is float32, one token block at a time; slow on purpose. A product with a matrix of a
block format rounds its input to bytes first (`rounded`); the sum of `down` rows does not. Keys and values are rounded
to float16 where the cache holds float16.
"""

from collections.abc import Callable, Mapping
from math import erf
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.buffers import query_factors, rotary_table
from pi_runtime.artifact.decoder import (
    CLAMP,
    LATENT_EPS,
    LENGTH_EPS,
    SWIGLU_SLOPE,
    Decoder,
)
from pi_runtime.artifact.features import refuse_lacking
from pi_runtime.artifact.formats import BLOCK, FORMATS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rungs import DENSE, RUNGS
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import APART

F32 = npt.NDArray[np.float32]
Keys = dict[int, tuple[F32, F32]]
"""Keys and values of layers by their windows."""


class WeightSource(Protocol):
    """One layer's values by their short names, and products with them."""

    def __contains__(self, name: str) -> bool: ...

    def __getitem__(self, name: str) -> npt.NDArray[Any]: ...

    def product(self, name: str, x_TD: F32) -> F32: ...

    def as_cached(self, x_SGE: F32) -> F32: ...


def _silu(z: F32) -> F32:
    with np.errstate(over="ignore"):  # exp(−z) = inf makes the right 0
        return np.asarray(z / (np.float32(1) + np.exp(-z)), np.float32)


def _gelu(z: F32) -> F32:
    return np.asarray(z * (0.5 + 0.5 * np.vectorize(erf, otypes=[np.float64])(z / np.sqrt(2))), np.float32)


def _gelu_tanh(z: F32) -> F32:
    inner = np.float32(np.sqrt(2 / np.pi)) * (z + np.float32(0.044715) * z * z * z)
    return np.asarray(np.float32(0.5) * z * (np.float32(1) + np.tanh(inner)), np.float32)


def _clamped_swiglu(z: F32) -> F32:
    cut = np.minimum(z, np.float32(CLAMP))
    with np.errstate(over="ignore"):
        return np.asarray(cut / (np.float32(1) + np.exp(-np.float32(SWIGLU_SLOPE) * cut)), np.float32)


def _relu(z: F32) -> F32:
    return np.maximum(z, np.float32(0))


ACTIVATIONS: Mapping[str, Callable[[F32], F32]] = {
    "relu": _relu,
    "relu2": lambda z: _relu(z) * _relu(z),
    "drelu": _relu,
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "clamped_swiglu": _clamped_swiglu,
}
UPS: Mapping[str, Callable[[F32], F32]] = {
    "drelu": _relu,
    "clamped_swiglu": lambda up: np.clip(up, np.float32(-CLAMP), np.float32(CLAMP)) + np.float32(1),
}
"""What an activation makes of up · x + c."""
Bools = npt.NDArray[np.bool_]
DENSE_LAYER = Layer(rung=DENSE)


def forward(artifact: Artifact, tokens: npt.ArrayLike, mode: str = DENSE) -> F32:
    """Logits (T, V) of a sequence from its beginning.

    `mode`: `dense` computes every neuron; `gate` is the same function, because what it skips is zero; `predicted` runs
    each layer on its stored rung (see `rungs`).
    """
    d, ends = artifact.manifest.decoder, ArtifactWeights(artifact, "")
    refuse_lacking(d, "numpy")
    ids_T, keys = np.asarray(tokens, np.int64), Keys()
    entered_TD = x_TD = embed(d, ends, artifact, ids_T)
    for n, layer in enumerate(artifact.manifest.layers):
        w, own = ArtifactWeights(artifact, f"layers/{n}/"), d.of_layer(n)
        x_TD = block(own, w, layer if mode == "predicted" else DENSE_LAYER, x_TD, keys)
        if d.layer_embedding:
            x_TD = x_TD + _of_embedding(d, w, x_TD, row_of_layer(d, ends, n, ids_T, entered_TD))
        x_TD = x_TD * w["ffn/block_scale"] if d.block_scale else x_TD
    if d.final_norm:
        x_TD = norm(d, ends, "final_norm", x_TD)
    if d.d_embedding != d.d_model:
        x_TD = ends.product("embedding_out", x_TD)
    logits_TV = ends.product("embedding" if d.tied_head else "head", x_TD)
    return finish_logits(d, logits_TV + ends["head_bias"] if d.head_bias else logits_TV)


def finish_logits(d: Decoder, logits_TV: F32) -> F32:
    """s z, or c tanh(s z / c) with a cap c."""
    scaled_TV, c = logits_TV * np.float32(d.logit_scale), np.float32(d.logit_softcap)
    return c * np.tanh(scaled_TV / c) if c > 0 else scaled_TV


def embed(d: Decoder, ends: WeightSource, artifact: Artifact, ids_T: npt.NDArray[np.int64]) -> F32:
    """The tokens' embeddings at the model's width, plus learned positions from 0 on and normed where it has these."""
    x_TD: F32 = artifact.values("embedding")[ids_T]
    if d.d_embedding != d.d_model:
        x_TD = ends.product("embedding_in", x_TD)
    x_TD = x_TD * np.float32(d.embedding_scale)
    if d.positions == "learned":
        x_TD = x_TD + artifact.values("positions")[d.position_offset + np.arange(len(ids_T))]
    return norm(d, ends, "embedding_norm", x_TD) if d.embedding_norm else x_TD


def row_of_layer(d: Decoder, ends: WeightSource, layer: int, ids_T: npt.NDArray[np.int64], entered_TD: F32) -> F32:
    """(T, P): (n(in · x / √D) + e √P) / √2, with x what entered the first block and e a layer's row of each token."""
    own = slice(layer * d.layer_embedding, (layer + 1) * d.layer_embedding)
    made_TP = ends.product("layer_embedding_in", entered_TD)[:, own] / np.float32(np.sqrt(d.d_model))
    e_TP = ends["layer_embedding"][ids_T, own] * np.float32(np.sqrt(d.layer_embedding))
    return (rms(d, made_TP) * ends["layer_embedding_norm"] + e_TP) * np.float32(0.5**0.5)


def _of_embedding(d: Decoder, w: WeightSource, x_TD: F32, row_TP: F32) -> F32:
    h_TP = activate(d, w.product("ffn/embedding_gate", x_TD)) * row_TP
    return norm(d, w, "ffn/embedding_norm", w.product("ffn/embedding_out", h_TP))


def block(d: Decoder, w: WeightSource, layer: Layer, x_TD: F32, keys: Keys | None = None) -> F32:
    """Run one block on the layer's rung; see `Decoder` for its forms.

    `keys`: those and values of the last layer with the window of each that had some, which others read.
    """
    entered_TD = x_TD
    if not d.has_ffn:
        return x_TD + attention(d, w, norm(d, w, "attention/norm", x_TD), keys)
    if not d.has_mixer:
        x_TD = norm(d, w, "ffn/norm", x_TD)
        return entered_TD + ffn(d, w, x_TD, selected(w, layer, x_TD), layer.threshold)
    if d.block == "post-norm":
        x_TD = norm(d, w, "attention/norm", x_TD + attention(d, w, x_TD, keys))
        y_TD = ffn(d, w, x_TD, selected(w, layer, x_TD), layer.threshold, entered_TD)
        return norm(d, w, "ffn/norm", x_TD + y_TD)
    if d.block == "reordered":
        x_TD = x_TD + norm(d, w, "attention/norm", attention(d, w, x_TD, keys))
        return x_TD + norm(d, w, "ffn/norm", ffn(d, w, x_TD, selected(w, layer, x_TD), layer.threshold, entered_TD))
    if d.block == "sandwich":
        y_TD = attention(d, w, norm(d, w, "attention/norm", x_TD), keys)
        x_TD = x_TD + norm(d, w, "attention/out_norm", y_TD)
        normed_TD = norm(d, w, "ffn/norm", x_TD)
        entered_TD = rms(d, x_TD) * w["ffn/router_norm"] if "ffn/router_norm" in w else entered_TD
        y_TD = ffn(d, w, normed_TD, selected(w, layer, normed_TD), layer.threshold, entered_TD)
        if d.beside_ff:
            beside_TD = rms(d, beside(d, w, rms(d, x_TD) * w["ffn/beside_norm"])) * w["ffn/beside_out_norm"]
            y_TD = rms(d, y_TD) * w["ffn/experts_out_norm"] + beside_TD
        return x_TD + norm(d, w, "ffn/out_norm", y_TD)
    normed_TD = norm(d, w, "attention/norm", x_TD)
    attended_TD = x_TD + attention(d, w, normed_TD, keys)
    if not d.shared_norm:
        normed_TD = norm(d, w, "ffn/norm", x_TD if d.block == "parallel" else attended_TD)
    return attended_TD + ffn(d, w, normed_TD, selected(w, layer, normed_TD), layer.threshold, entered_TD)


def norm(decoder: Decoder, w: WeightSource, name: str, x_TD: F32) -> F32:
    """rms: x / √(mean x² + eps) · weight;  layer: (x − mean) / √(var + eps) · weight + bias."""
    if decoder.norm == "layer":
        x_TD = x_TD - x_TD.mean(-1, keepdims=True)
    y_TD = rms(decoder, x_TD) * w[f"{name}/weight"]
    return y_TD + w[f"{name}/bias"] if decoder.norm == "layer" else y_TD


def beside(d: Decoder, w: WeightSource, x_TD: F32) -> F32:
    """down (a(first x) [up x]): the FFN beside the experts."""
    h_TF = activate(d, w.product("ffn/beside_first", x_TD))
    h_TF = h_TF * w.product("ffn/beside_up", x_TD) if d.ffn == "gated" else h_TF
    return w.product("ffn/beside_down", h_TF)


def activate(decoder: Decoder, z: F32, threshold: float = 0.0) -> F32:
    """a(z), but 0 where its magnitude is at most the model's own threshold or a layer's.

    Thresholds of 0 change nothing.
    """
    h = ACTIVATIONS[decoder.activation](z)
    limit = np.float32(max(decoder.threshold, threshold))
    return np.where(np.abs(h) <= limit, np.float32(0), h)


def selected(w: WeightSource, layer: Layer, x_TD: F32) -> Bools | None:
    """(T, X·F): whether the layer's predictor names a neuron, so that its `first` is read; None for all."""
    return scores(w, x_TD) > 0 if RUNGS[layer.rung].picks else None


def scores(w: WeightSource, x_TD: F32) -> F32:
    """(T, X·F): the predictor's scores up · (down · x) + bias, x what experts read; each has its R rows of `down`."""
    up, r_TR = w["predictor/up"], w.product("predictor/down", narrowed(w, x_TD))
    found = [w.product("predictor/up", r) for r in np.split(r_TR, r_TR.shape[1] // up.shape[1], axis=1)]
    own = np.split(np.arange(len(up)), len(found))
    return np.concatenate([s[:, rows] for s, rows in zip(found, own, strict=True)], axis=1) + w["predictor/bias"]


def narrowed(w: WeightSource, x_TD: F32) -> F32:
    """What experts read: the FFN's input, or fewer numbers that a matrix makes of it."""
    return w.product("ffn/experts_in", x_TD) if "ffn/experts_in" in w else x_TD


def sigmoid(z: F32) -> F32:
    """1 / (1 + e⁻ᶻ), but never below 1e-30, so that a sum of such is not 0."""
    with np.errstate(over="ignore"):
        return np.maximum(np.float32(1) / (np.float32(1) + np.exp(-z)), np.float32(1e-30))


def routing(d: Decoder, w: WeightSource, x_TD: F32) -> F32:
    """(T, X): route weights of the experts, the softmax of the router's K largest logits, or their part of the softmax
    of all, or their sigmoids, mostly over the sum of these, and 0 for the others; 1, or the sigmoid of their gate, for
    those that every token takes.

    Among equal logits the lower expert comes first.
    """
    route_weight_TX = np.zeros((len(x_TD), d.n_experts), np.float32)
    route_weight_TX[:, d.n_experts - max(d.experts_shared, d.n_experts == 1) :] = 1
    if d.n_experts == 1 or d.experts_per_token == d.experts_shared:
        return route_weight_TX
    logit_TX = x_TD @ w["ffn/router"].T
    if d.shared_gate:
        logit_TX, gate_T1 = np.split(logit_TX, [d.experts_routed], axis=1)
        route_weight_TX[:, d.experts_routed :] = sigmoid(gate_T1)
    logit_TX = logit_TX + w["ffn/router_bias"] if d.router_bias else logit_TX
    score_TX = sigmoid(logit_TX) + w["ffn/router_choice_bias"] if d.router_choice_bias else logit_TX
    choice_TX = choices(d, score_TX)
    expert_TK = np.argsort(-choice_TX, axis=1, kind="stable")[:, : d.experts_per_token - d.experts_shared]
    logit_TK = np.take_along_axis(logit_TX, expert_TK, 1)
    if d.router_score == "sigmoid":
        route_weight_TK = sigmoid(logit_TK)
        total_T1 = route_weight_TK.sum(1, keepdims=True) if d.router_normalised else np.float32(1)
    else:
        largest_T1 = logit_TK.max(1, keepdims=True)
        route_weight_TK = np.exp(logit_TK - largest_T1)
        total_T1 = np.exp((logit_TK if d.router_normalised else logit_TX) - largest_T1).sum(1, keepdims=True)
    route_weight_TK = route_weight_TK / total_T1 * np.float32(d.router_scale)
    route_weight_TK = route_weight_TK * w["ffn/expert_scale"][expert_TK] if d.expert_scale else route_weight_TK
    np.put_along_axis(route_weight_TX, expert_TK, route_weight_TK, 1)
    return route_weight_TX


def choices(d: Decoder, score_TX: F32) -> F32:
    """(T, X): what experts are chosen by, their score in the groups whose largest ones have the largest sums, else −∞.

    Among equal groups the lower comes first.
    """
    choice_TGX = score_TX.reshape(len(score_TX), d.router_groups, -1).copy()
    group_TG = np.argsort(-np.sort(choice_TGX)[..., -d.router_group_top :].sum(-1), axis=1, kind="stable")[
        :, d.router_groups_taken :
    ]
    for group in group_TG.T:
        choice_TGX[np.arange(len(group)), group] = -np.inf
    return choice_TGX.reshape(score_TX.shape)


def ffn(
    d: Decoder, w: WeightSource, x_TD: F32, active_TF: Bools | None = None, threshold: float = 0.0,
    entered_TD: F32 | None = None,
) -> F32:  # fmt: skip
    """y = Σ route_weight h_i rest_i over all neurons, or the active ones; see `Decoder` for h. Where the matrices are
    whole, Σ route_weight (down · h) over experts; then h is rounded as the input of any product.

    `entered_TD` is what a router reads that does not read x: what entered the block, or a norm of its own.
    """
    whole, input_TD, x_TD = "ffn/down" in w, x_TD, narrowed(w, x_TD)
    h_TF = _factors(d, w, x_TD, threshold)
    if active_TF is not None:
        h_TF = np.where(active_TF, h_TF, np.float32(0))
    if d.inner_norms:
        h_TF = rms(d, h_TF) * w["ffn/inner_norm"]
    read_TD = entered_TD if (d.router_early or d.router_norm) and entered_TD is not None else input_TD
    route_weight_TX = routing(d, w, read_TD)
    if whole:
        y_TXD = _by_head(w, "ffn/down", h_TF.reshape(len(h_TF), d.experts_alike, -1))
        y_TD = (y_TXD * route_weight_TX[:, : d.experts_alike, None]).sum(1) if d.n_experts > 1 else y_TXD[:, 0]
        if d.experts_alike < d.n_experts:
            y_TD += route_weight_TX[:, -1:] * w.product("ffn/shared_down", _factors(d, w, x_TD, threshold, "shared_"))
    else:
        h_TF = h_TF * np.repeat(route_weight_TX, d.d_ff, axis=1) if d.n_experts > 1 else h_TF
        y_TD = h_TF @ w["ffn/rest"][:, -1]
    y_TD = w.product("ffn/experts_out", y_TD) if d.expert_width else y_TD
    if d.beside_ff and d.block == "sequential":
        y_TD = y_TD + beside(d, w, input_TD)
    if d.expert_bias:
        return y_TD + route_weight_TX @ w["ffn/expert_bias"]
    return y_TD + w["ffn/down_bias"] if d.ffn_bias else y_TD


def _factors(d: Decoder, w: WeightSource, x_TD: F32, threshold: float, of: str = "") -> F32:
    """h of each neuron, or of those of the shared expert where these are apart."""
    z_TF = w.product(f"ffn/{of}first", x_TD) + (w["ffn/first_bias"] if d.ffn_bias else np.float32(0))
    h_TF = activate(d, z_TF, threshold)
    if d.ffn == "plain":
        return h_TF
    up_TF = w.product(f"ffn/{of}up", x_TD) if "ffn/down" in w else w.product("ffn/rest", x_TD)[..., 0]
    up_TF = up_TF + (w["ffn/up_bias"] if d.ffn_bias else np.float32(0))
    return h_TF * (UPS[d.activation](up_TF) if d.activation in UPS else up_TF)


def rounded(x_TD: F32) -> F32:
    """s · round(x / s) in blocks of 32 columns with s = max |x| / 127, half to even; 0 where s is below 2⁻¹²⁶."""
    n_tokens, columns = x_TD.shape
    blocks = -(-columns // BLOCK)
    x_TBJ = np.zeros((n_tokens, blocks * BLOCK), np.float32)
    x_TBJ[:, :columns] = x_TD
    x_TBJ = x_TBJ.reshape(n_tokens, blocks, BLOCK)
    s_TB1 = np.abs(x_TBJ).max(-1, keepdims=True) / np.float32(127)
    usable = s_TB1 >= np.float32(2.0**-126)
    inverse = np.divide(np.float32(1), s_TB1, out=np.zeros_like(s_TB1), where=usable)
    found = np.rint(x_TBJ * inverse) * np.where(usable, s_TB1, np.float32(0))
    return np.asarray(found.reshape(n_tokens, -1)[:, :columns], np.float32)


class ArtifactWeights:
    """The values of an artifact whose names begin with `prefix`."""

    def __init__(self, artifact: Artifact, prefix: str) -> None:
        self._artifact, self._prefix = artifact, prefix

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._artifact.manifest.arrays

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._artifact.values(self._prefix + name)

    def product(self, name: str, x_TD: F32) -> F32:
        """x Wᵀ over the last axis of W: (T, N), or (T, N, k) for rows in groups of k."""
        quantised = FORMATS[self._artifact.manifest.arrays[self._prefix + name].format].quantised
        x_TD = rounded(x_TD) if quantised else x_TD
        return np.tensordot(x_TD, self[name], (-1, -1))

    def as_cached(self, x_SGE: F32) -> F32:
        """Keys or values as the cache holds them."""
        if self._artifact.manifest.formats["attention"] == "f32":
            return x_SGE
        return np.clip(x_SGE, -65504, 65504).astype(np.float16).astype(np.float32)


def rms(decoder: Decoder, x: F32, eps: float = 0.0) -> F32:
    """x / √(mean x² + eps) over the last axis; the model's eps unless there is another."""
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps or decoder.norm_eps)), np.float32)


def attention(decoder: Decoder, w: WeightSource, x_TD: F32, keys: Keys | None = None) -> F32:
    """softmax(q kᵀ / √E) v, causal, from position 0 on; H query heads share G heads of keys and values.

    With a window of W, a token sees the W positions up to its own. A head's sink adds its exponential to the sum.
    """
    d, n_tokens = decoder, len(x_TD)
    if d.latent_rank:
        return latent_attention(d, w, x_TD)
    if d.recurs:
        return recurrence(d, w, x_TD)
    matrices = [name for name in ("attention/qkv", *APART) if name in w]
    qkv = np.concatenate([w.product(name, x_TD) for name in matrices], axis=1)
    qkv = qkv + (w["attention/qkv_bias"] if d.qkv_bias else np.float32(0))
    qkv = np.concatenate([qkv, qkv[:, -d.qkv_parts[1] :]], axis=1) if d.keys_as_values else qkv
    heads = qkv.reshape(n_tokens, -1, d.head_dim)
    q_THE, k_SGE, v_SGE = np.split(heads, [d.n_heads, d.n_heads + d.n_kv_heads], axis=1)
    q_THE = _norm_heads(d, w["attention/q_norm"], q_THE) if d.qk_norm else q_THE
    q_THE = rotate(d, q_THE) if d.positions == "rope" else q_THE
    q_THE = q_THE * query_factors(d, n_tokens)[:, None, None]
    keys = Keys() if keys is None else keys
    if not d.shares_keys:
        k_SGE = _norm_heads(d, w["attention/k_norm"], k_SGE) if d.qk_norm else k_SGE
        k_SGE = rotate(d, k_SGE) if d.positions == "rope" else k_SGE
        v_SGE = rms(d, v_SGE) * w["attention/v_norm"] if d.v_norm else v_SGE
        keys[d.window] = w.as_cached(k_SGE), w.as_cached(v_SGE)
    k_SGE, v_SGE = keys[d.window]
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
    mixed_TQ = mixed_THE.reshape(n_tokens, -1)
    if d.output_gate:
        mixed_TQ = mixed_TQ * sigmoid(w.product("attention/gate", x_TD))
    y_TD = w.product("attention/out", _inner_norm(d, w, mixed_TQ))
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


def recurrence(d: Decoder, w: WeightSource, x_TD: F32) -> F32:
    """What stands in attention's place, from position 0 on, one token after the other; see `artifact.decoder`."""
    n_tokens = len(x_TD)
    made_TC, z = w.product("attention/qkv", x_TD), w.product("attention/gate", x_TD)
    if d.recurrence == "short_conv":
        b, z = np.split(z, 2, axis=1)
        made_TC = b * made_TC
    padded_TC = np.concatenate([np.zeros((d.state_columns - 1, d.qkv_width), np.float32), made_TC])
    taps = zip(range(d.state_columns), w["attention/conv"], strict=True)
    sums_TC = sum(padded_TC[j : j + n_tokens] * tap_C for j, tap_C in taps)
    sums_TC = sums_TC + w["attention/conv_bias"] if "attention/conv_bias" in w else sums_TC
    if d.recurrence == "short_conv":
        return w.product("attention/out", z * sums_TC)
    first, second, _ = d.qkv_parts
    q, k, v = np.split(_silu(sums_TC), [first, first + second], axis=1)
    q, v = (v, q) if d.recurrence == "mamba2" else (q, v)
    q_TGK, k_TGK = (part.reshape(n_tokens, d.state_key_heads, -1) for part in (q, k))
    v_THV, z_THV = (part.reshape(n_tokens, d.state_heads, -1) for part in (v, z))
    gates_TG, step = x_TD @ w["attention/gates"].T, _RECURRENCES[d.recurrence]
    mixed_TQ = step(d, w, q_TGK, k_TGK, v_THV, z_THV, gates_TG).reshape(n_tokens, -1)
    return w.product("attention/out", mixed_TQ)


def _shared(d: Decoder, x_TGK: F32) -> F32:
    """Queries or keys as each head has them."""
    shared = d.state_heads // d.state_key_heads
    return np.tile(x_TGK, (1, shared, 1)) if d.state_heads_tiled else np.repeat(x_TGK, shared, axis=1)


def _gated_delta(
    d: Decoder, w: WeightSource, q_TGK: F32, k_TGK: F32, v_THV: F32, z_THV: F32, gates_TG: F32
) -> F32:  # fmt: skip
    q_THK, k_THK = (_shared(d, _unit(part)) for part in (q_TGK, k_TGK))
    b_TH, a_TH = np.split(gates_TG, 2, axis=1)
    b_TH = sigmoid(b_TH)
    kept_TH = np.exp(-w["attention/decay"] * np.logaddexp(np.float32(0), a_TH + w["attention/decay_bias"]))
    y_THV = v_THV.copy()
    state_HKV = np.zeros((d.state_heads, d.state_key_dim, d.state_value_dim), np.float32)
    for q_HK, k_HK, y_HV, kept_H, b_H in zip(q_THK, k_THK, y_THV, kept_TH, b_TH, strict=True):
        state_HKV *= kept_H[:, None, None]
        wrong_HV = y_HV - np.einsum("hkv,hk->hv", state_HKV, k_HK)
        state_HKV += k_HK[:, :, None] * (b_H[:, None] * wrong_HV)[:, None]
        y_HV[:] = np.einsum("hkv,hk->hv", state_HKV, q_HK) / np.float32(np.sqrt(d.state_key_dim))
    return rms(d, y_THV, d.state_norm_eps) * w["attention/state_norm"] * _silu(z_THV)


def _mamba2(d: Decoder, w: WeightSource, q_TGK: F32, k_TGK: F32, v_THV: F32, z_THV: F32, a_TH: F32) -> F32:
    step_TH = np.logaddexp(np.float32(0), a_TH + w["attention/decay_bias"])
    step_TH = np.maximum(step_TH, np.float32(d.state_least_step))
    sum_THV = v_THV * w["attention/skip"][:, None]
    state_HKV = np.zeros((d.state_heads, d.state_key_dim, d.state_value_dim), np.float32)
    steps = enumerate(zip(_shared(d, q_TGK), _shared(d, k_TGK), v_THV, step_TH, strict=True))
    for t, (q_HK, k_HK, v_HV, step_H) in steps:
        state_HKV *= np.exp(-w["attention/decay"] * step_H)[:, None, None]
        state_HKV += k_HK[:, :, None] * (step_H[:, None] * v_HV)[:, None]
        sum_THV[t] += np.einsum("hkv,hk->hv", state_HKV, q_HK)
    y_TGN = (sum_THV * _silu(z_THV)).reshape(len(v_THV), d.state_key_heads, -1)
    return rms(d, y_TGN, d.state_norm_eps).reshape(len(v_THV), -1) * w["attention/state_norm"]


_RECURRENCES = {"gated_delta": _gated_delta, "mamba2": _mamba2}
"""What each makes of queries, keys, values, z and gates: what attention's last matrix reads."""


def _unit(x: F32) -> F32:
    """x / √(Σ x² + 1e-6) over the last axis."""
    return np.asarray(x / np.sqrt((x * x).sum(-1, keepdims=True) + np.float32(LENGTH_EPS)), np.float32)


def _inner_norm(d: Decoder, w: WeightSource, mixed_TQ: F32) -> F32:
    return rms(d, mixed_TQ) * w["attention/inner_norm"] if d.inner_norms else mixed_TQ


def latent_norm(weight: F32, x: F32) -> F32:
    """The rms norm of latents."""
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(LATENT_EPS)), np.float32) * weight


def _by_head(w: WeightSource, name: str, x_THN: F32) -> F32:
    """The products of each head's, or expert's, numbers with its own rows of a matrix."""
    heads = range(x_THN.shape[1])
    return np.stack([np.split(w.product(name, x_THN[:, h]), len(heads), axis=1)[h] for h in heads], axis=1)


def _norm_heads(d: Decoder, weight: F32, x_THE: F32) -> F32:
    """The rms norm of each head, or of all heads of a token together."""
    x = x_THE.reshape(len(x_THE), 1, -1) if d.joint_qk_norm else x_THE
    return (rms(d, x) * weight).reshape(x_THE.shape)


def rotate(decoder: Decoder, x_THE: F32) -> F32:
    """Rotary positions from 0 on: (a, b) → (a cos − b sin, b cos + a sin), a and b the halves of each head's first 2J
    numbers; the others stay."""
    cos, sin = (t[:, None, :] for t in rotary_table(decoder, len(x_THE)))
    half = len(decoder.rotary_frequencies)
    a, b, others = np.split(x_THE, [half, 2 * half], axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, others], axis=-1)
