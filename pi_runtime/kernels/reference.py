"""The forward pass as its equations, in NumPy: the definition every compiled operator is held against.

Shapes: T tokens of one block, S positions so far (T included), D model width, H heads, G KV heads, E head width, J
rotary frequencies, X experts, F neurons of one expert, R predictor rank, V vocabulary. All arithmetic is float32, one
token block at a time; slow on purpose. A product with a q8 or q4 matrix rounds its input to bytes first (`rounded`);
the weighted sum of `down` rows does not. Keys and values are rounded to float16 where the cache has that.
"""

from collections.abc import Callable, Mapping
from math import erf
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import kv_itemsize
from pi_runtime.artifact.formats import BLOCK, FORMATS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer

F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
EXACT = Layer(rung="dense")


def forward(artifact: Artifact, tokens: npt.ArrayLike, mode: str = "dense") -> F32:
    """Logits (T, V) of a sequence from its beginning.

    `mode`: `dense` computes every neuron; `gate` is the same function (what it skips is zero); `predicted` leaves out
    of each layer what its rung does not select (see `schema.Layer`).
    """
    d, ends = artifact.manifest.decoder, StoredWeights(artifact, "")
    x_TD = embed(d, ends, artifact, np.asarray(tokens, np.int64))
    for n, layer in enumerate(artifact.manifest.layers):
        w = StoredWeights(artifact, f"layers/{n}/")
        x_TD = block(d, w, layer if mode == "predicted" else EXACT, x_TD)
    if d.final_norm:
        x_TD = norm(d, ends, "final_norm", x_TD)
    if d.d_embedding != d.d_model:
        x_TD = ends.product("embedding_out", x_TD)
    logits_TV = ends.product("embedding" if d.tied_head else "head", x_TD)
    return logits_TV + ends["head_bias"] if d.head_bias else logits_TV


def embed(d: Decoder, ends: "Weights", artifact: Artifact, ids_T: npt.NDArray[np.int64]) -> F32:
    """Rows of the embedding, brought to the model's width, plus learned positions from 0 where there are such."""
    x_TD: F32 = artifact.values("embedding")[ids_T]
    if d.d_embedding != d.d_model:
        x_TD = ends.product("embedding_in", x_TD)
    if d.positions == "learned":
        x_TD = x_TD + artifact.values("positions")[d.position_offset + np.arange(len(ids_T))]
    return x_TD


def block(d: Decoder, w: "Weights", layer: Layer, x_TD: F32) -> F32:
    """One block on the layer's rung; see `Decoder` for its three forms."""
    if d.block == "post-norm":
        x_TD = norm(d, w, "attention/norm", x_TD + attention(d, w, x_TD))
        return norm(d, w, "ffn/norm", x_TD + ffn(d, w, x_TD, selected(w, layer, x_TD), layer.threshold))
    normed_TD = norm(d, w, "attention/norm", x_TD)
    attended_TD = x_TD + attention(d, w, normed_TD)
    if not d.shared_norm:
        normed_TD = norm(d, w, "ffn/norm", x_TD if d.block == "parallel" else attended_TD)
    return attended_TD + ffn(d, w, normed_TD, selected(w, layer, normed_TD), layer.threshold)


def norm(decoder: Decoder, w: "Weights", name: str, x_TD: F32) -> F32:
    """rms: x / √(mean x² + eps) · weight;  layer: (x − mean) / √(var + eps) · weight + bias."""
    if decoder.norm == "layer":
        x_TD = x_TD - x_TD.mean(-1, keepdims=True)
    y_TD = rms(decoder, x_TD) * w[f"{name}/weight"]
    return y_TD + w[f"{name}/bias"] if decoder.norm == "layer" else y_TD


def rms(decoder: Decoder, x: F32) -> F32:
    """x / √(mean x² + eps) over the last axis."""
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(decoder.norm_eps)), np.float32)


def attention(decoder: Decoder, w: "Weights", x_TD: F32) -> F32:
    """softmax(q kᵀ / √E) v, causal, H query heads sharing G heads of keys and values; from position 0."""
    d, n_tokens = decoder, len(x_TD)
    qkv = w.product("attention/qkv", x_TD) + (w["attention/qkv_bias"] if d.qkv_bias else np.float32(0))
    heads = qkv.reshape(n_tokens, d.n_heads + 2 * d.n_kv_heads, d.head_dim)
    q_THE, k_SGE, v_SGE = np.split(heads, [d.n_heads, d.n_heads + d.n_kv_heads], axis=1)
    if d.qk_norm:
        q_THE, k_SGE = rms(d, q_THE) * w["attention/q_norm"], rms(d, k_SGE) * w["attention/k_norm"]
    if d.positions == "rope":
        q_THE, k_SGE = rotate(d, q_THE), rotate(d, k_SGE)
    k_SGE, v_SGE = w.remembered(k_SGE), w.remembered(v_SGE)
    group = d.n_heads // d.n_kv_heads
    k_SHE, v_SHE = np.repeat(k_SGE, group, 1), np.repeat(v_SGE, group, 1)
    scores_HTS = np.einsum("the,she->hts", q_THE, k_SHE) / np.float32(np.sqrt(d.head_dim))
    scores_HTS = np.where(np.tri(n_tokens, dtype=bool), scores_HTS, np.float32(-np.inf))
    p_HTS = np.exp(scores_HTS - scores_HTS.max(-1, keepdims=True))
    p_HTS /= p_HTS.sum(-1, keepdims=True)
    mixed_THE = np.einsum("hts,she->the", p_HTS, v_SHE)
    y_TD = w.product("attention/out", mixed_THE.reshape(n_tokens, -1))
    return y_TD + w["attention/out_bias"] if d.out_bias else y_TD


def rotary_table(decoder: Decoder, length: int) -> tuple[F32, F32]:
    """cos and sin (length, J) of the angles pos · frequency_j, times `rotary_scale`; angles in float32 as transformers
    has them. J = 0 where positions are learned.
    """
    frequency_J = np.array(decoder.rotary_frequencies, np.float32)
    angles = np.outer(np.arange(length, dtype=np.float32), frequency_J)
    scale = np.float32(decoder.rotary_scale)
    return np.cos(angles).astype(np.float32) * scale, np.sin(angles).astype(np.float32) * scale


def rotate(decoder: Decoder, x_THE: F32) -> F32:
    """Rotary positions: (a, b) → (a cos − b sin, b cos + a sin), a and b the halves of each head's first 2J numbers;
    the others stay. From position 0."""
    cos, sin = (t[:, None, :] for t in rotary_table(decoder, len(x_THE)))
    half = len(decoder.rotary_frequencies)
    a, b, others = np.split(x_THE, [half, 2 * half], axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, others], axis=-1)


def _silu(z: F32) -> F32:
    with np.errstate(over="ignore"):  # exp(−z) = inf makes the right 0
        return np.asarray(z / (np.float32(1) + np.exp(-z)), np.float32)


def _gelu(z: F32) -> F32:
    return np.asarray(z * (0.5 + 0.5 * np.vectorize(erf, otypes=[np.float64])(z / np.sqrt(2))), np.float32)


def _gelu_tanh(z: F32) -> F32:
    inner = np.float32(np.sqrt(2 / np.pi)) * (z + np.float32(0.044715) * z * z * z)
    return np.asarray(np.float32(0.5) * z * (np.float32(1) + np.tanh(inner)), np.float32)


def _relu(z: F32) -> F32:
    return np.maximum(z, np.float32(0))


_ACTIVATIONS: Mapping[str, Callable[[F32], F32]] = {
    "relu": _relu,
    "relu2": lambda z: _relu(z) * _relu(z),
    "drelu": _relu,
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}


def activate(decoder: Decoder, z: F32, threshold: float = 0.0) -> F32:
    """a(z), and 0 where its magnitude is at most the model's own threshold or a layer's.

    A threshold of 0 leaves everything as it is.
    """
    h = _ACTIVATIONS[decoder.activation](z)
    limit = np.float32(max(decoder.threshold, threshold))
    return np.where(np.abs(h) <= limit, np.float32(0), h)


def selected(w: "Weights", layer: Layer, x_TD: F32) -> Bools | None:
    """(T, X·F): neurons whose `first` is read on the rungs `predicted` and `sign`; None for all."""
    if layer.rung == "predicted":
        return scores(w, x_TD) > 0
    if layer.rung == "sign":
        return agreement(w["predictor/signs"], x_TD) > layer.margin
    return None


def scores(w: "Weights", x_TD: F32) -> F32:
    """(T, X·F) of the predictor: up · (down · x) + bias, in each expert with its own R rows of `down`."""
    up, r_TR = w["predictor/up"], w.product("predictor/down", x_TD)
    found = [w.product("predictor/up", r) for r in np.split(r_TR, r_TR.shape[1] // up.shape[1], axis=1)]
    own = np.split(np.arange(len(up)), len(found))
    return np.concatenate([s[:, rows] for s, rows in zip(found, own, strict=True)], axis=1) + w["predictor/bias"]


def agreement(signs_FW: npt.NDArray[np.uint64], x_TD: F32) -> npt.NDArray[np.int64]:
    """(T, F): columns in which weight and input have the same sign, less those in which they differ."""
    negative_FD = np.unpackbits(signs_FW.view(np.uint8), axis=1, bitorder="little")[:, : x_TD.shape[1]]
    return (1 - 2 * (x_TD < 0).astype(np.int64)) @ (1 - 2 * negative_FD.astype(np.int64)).T


def routing(d: Decoder, w: "Weights", x_TD: F32) -> F32:
    """(T, X) shares of the experts: softmax of the router's largest `experts_per_token` values, 0 for the others.

    Of equal values those of the lower expert go first.
    """
    if d.n_experts == 1:
        return np.ones((len(x_TD), 1), np.float32)
    values_TX = x_TD @ w["ffn/router"].T
    best_TK = np.argsort(-values_TX, axis=1, kind="stable")[:, : d.experts_per_token]
    taken_TK = np.take_along_axis(values_TX, best_TK, 1)
    share_TK = np.exp(taken_TK - taken_TK.max(1, keepdims=True))
    share_TX = np.zeros_like(values_TX)
    np.put_along_axis(share_TX, best_TK, share_TK / share_TK.sum(1, keepdims=True), 1)
    return share_TX


def ffn(d: Decoder, w: "Weights", x_TD: F32, active_TF: Bools | None = None, threshold: float = 0.0) -> F32:
    """y = Σ share h_i rest_i over all neurons, or the active ones; see `Decoder` for h, `activate` for thresholds."""
    z_TF = w.product("ffn/first", x_TD) + (w["ffn/first_bias"] if d.ffn_bias else np.float32(0))
    h_TF = activate(d, z_TF, threshold)
    if d.ffn == "gated":
        up_TF = w.product("ffn/rest", x_TD)[..., 0] + (w["ffn/up_bias"] if d.ffn_bias else np.float32(0))
        h_TF = h_TF * (_relu(up_TF) if d.activation == "drelu" else up_TF)
    if active_TF is not None:
        h_TF = np.where(active_TF, h_TF, np.float32(0))
    if d.n_experts > 1:
        h_TF = h_TF * np.repeat(routing(d, w, x_TD), d.d_ff, axis=1)
    y_TD = h_TF @ w["ffn/rest"][:, -1]
    return y_TD + w["ffn/down_bias"] if d.ffn_bias else y_TD


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


class Weights(Protocol):
    """Values of one layer by their short names, and products with them."""

    def __getitem__(self, name: str) -> npt.NDArray[Any]: ...

    def product(self, name: str, x_TD: F32) -> F32: ...

    def remembered(self, x_SGE: F32) -> F32: ...


class StoredWeights:
    """Those of an artifact."""

    def __init__(self, artifact: Artifact, prefix: str) -> None:
        self._artifact, self._prefix = artifact, prefix

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._artifact.values(self._prefix + name)

    def product(self, name: str, x_TD: F32) -> F32:
        """x Wᵀ over the last axis of W: (T, N), or (T, N, k) for rows in groups of k."""
        quantised = FORMATS[self._artifact.manifest.arrays[self._prefix + name].format].quantised
        x_TD = rounded(x_TD) if quantised else x_TD
        return np.tensordot(x_TD, self[name], (-1, -1))

    def remembered(self, x_SGE: F32) -> F32:
        """Keys or values as the cache holds them."""
        if kv_itemsize(self._artifact.manifest.formats["attention"]) == 4:
            return x_SGE
        return np.clip(x_SGE, -65504, 65504).astype(np.float16).astype(np.float32)
