"""The forward pass as its equations, in NumPy: the definition every compiled operator is held against.

Shapes: T tokens of one block, S positions so far (T included), D model width, H heads, G KV heads, E head width,
F neurons, R predictor rank, V vocabulary. All arithmetic is float32, one token block at a time; slow on purpose. A
product with a q8 or q4 matrix rounds its input to bytes first (`rounded`); the weighted sum of `down` rows does not.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import BLOCK, FORMATS
from pi_runtime.artifact.reader import Artifact

F32 = npt.NDArray[np.float32]


def forward(artifact: Artifact, tokens: npt.ArrayLike, mode: str = "dense") -> F32:
    """Logits (T, V) of a sequence from its beginning.

    `mode`: `dense` computes every neuron; `gate` is the same function (what it skips is zero); `predicted` computes
    in each layer with a predictor only the neurons whose score is above 0.
    """
    decoder = artifact.manifest.decoder
    ids = np.asarray(tokens, np.int64)
    x_TD = artifact.values("embedding")[ids]
    if decoder.positions == "learned":
        x_TD = x_TD + artifact.values("positions")[decoder.position_offset + np.arange(len(ids))]
    for n, layer in enumerate(artifact.manifest.layers):
        w = StoredWeights(artifact, f"layers/{n}/")
        # x ← x + attention(norm(x))
        x_TD = x_TD + attention(decoder, w, norm(decoder, w, "attention/norm", x_TD))
        # x ← x + ffn(norm(x))
        normed_TD = norm(decoder, w, "ffn/norm", x_TD)
        predict = mode == "predicted" and layer.rung == "predicted"
        active_TF = scores(w, normed_TD) > 0 if predict else None
        x_TD = x_TD + ffn(decoder, w, normed_TD, active_TF)
    x_TD = norm(decoder, StoredWeights(artifact, ""), "final_norm", x_TD)
    return StoredWeights(artifact, "").product("embedding" if decoder.tied_head else "head", x_TD)


def norm(decoder: Decoder, w: "Weights", name: str, x_TD: F32) -> F32:
    """rms: x / √(mean x² + eps) · weight;  layer: (x − mean) / √(var + eps) · weight + bias."""
    if decoder.norm == "layer":
        x_TD = x_TD - x_TD.mean(-1, keepdims=True)
    scale = np.sqrt((x_TD * x_TD).mean(-1, keepdims=True) + np.float32(decoder.norm_eps))
    y_TD = x_TD / scale * w[f"{name}/weight"]
    return y_TD + w[f"{name}/bias"] if decoder.norm == "layer" else y_TD


def attention(decoder: Decoder, w: "Weights", x_TD: F32) -> F32:
    """softmax(q kᵀ / √E) v, causal, H query heads sharing G heads of keys and values; from position 0."""
    d, n_tokens = decoder, len(x_TD)
    qkv = w.product("attention/qkv", x_TD) + (w["attention/qkv_bias"] if d.qkv_bias else np.float32(0))
    heads = qkv.reshape(n_tokens, d.n_heads + 2 * d.n_kv_heads, d.head_dim)
    q_THE, k_SGE, v_SGE = np.split(heads, [d.n_heads, d.n_heads + d.n_kv_heads], axis=1)
    if d.positions == "rope":
        q_THE, k_SGE = rotate(d, q_THE), rotate(d, k_SGE)
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
    """cos and sin (length, E/2) of the angles pos · theta^(−2j/E), angles in float32 as transformers has them.

    Empty where positions are learned.
    """
    if decoder.positions != "rope":
        return np.empty((0, 0), np.float32), np.empty((0, 0), np.float32)
    j = np.arange(0, decoder.head_dim, 2, dtype=np.float32) / np.float32(decoder.head_dim)
    frequency = (np.float32(1) / np.float32(decoder.rope_theta) ** j).astype(np.float32)
    angles = np.outer(np.arange(length, dtype=np.float32), frequency)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(decoder: Decoder, x_THE: F32) -> F32:
    """Rotary positions: (a, b) → (a cos − b sin, b cos + a sin), a and b the halves of each head. From position 0."""
    cos, sin = (t[:, None, :] for t in rotary_table(decoder, len(x_THE)))
    a, b = np.split(x_THE, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def activate(decoder: Decoder, x: F32) -> F32:
    if decoder.activation == "relu":
        return np.maximum(x, np.float32(0))
    with np.errstate(over="ignore"):  # exp(−x) = inf makes the right 0
        return np.asarray(x / (np.float32(1) + np.exp(-x)), np.float32)


def scores(w: "Weights", x_TD: F32) -> F32:
    """Predictor: up · (down · x) + bias; a neuron is predicted to fire where it is above 0."""
    return w.product("predictor/up", w.product("predictor/down", x_TD)) + w["predictor/bias"]


def ffn(decoder: Decoder, w: "Weights", x_TD: F32, active_TF: npt.NDArray[np.bool_] | None = None) -> F32:
    """y = Σ h_i rest_i over all neurons, or the active ones; see `Decoder` for h."""
    d, rest = decoder, w["ffn/rest"]
    h_TF = activate(d, w.product("ffn/first", x_TD) + (w["ffn/first_bias"] if d.ffn_bias else np.float32(0)))
    if d.ffn == "gated":
        up_TF = w.product("ffn/rest", x_TD)[..., 0]
        h_TF = h_TF * (up_TF + (w["ffn/up_bias"] if d.ffn_bias else np.float32(0)))
    if active_TF is not None:
        h_TF = np.where(active_TF, h_TF, np.float32(0))
    y_TD = h_TF @ rest[:, -1]
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
