"""The decoder in torch, layer by layer: what profiling and training push text through.

The same equations as `pi_runtime.kernels.reference`, over batches. B sequences, T tokens each, D model width, F
neurons. float32 throughout; weights of one layer at a time, by their artifact names.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from pi_compile.checkpoint import Checkpoint
from pi_compile.errors import CorpusError
from pi_runtime.artifact.decoder import Decoder

Tensor = torch.Tensor
Weights = Mapping[str, Tensor]


def layer_weights(checkpoint: Checkpoint, layer: int, device: str) -> dict[str, Tensor]:
    """All arrays of one layer in the checkpoint's neuron order, named as in the artifact without `layers/N/`."""
    return {name: torch.from_numpy(v).to(device) for name, v in checkpoint.layer_values(layer).items()}


def end_weights(checkpoint: Checkpoint, device: str) -> dict[str, Tensor]:
    """Embedding, learned positions, final norm and head."""
    names = [name for name in checkpoint.array_shapes if not name.startswith("layers/")]
    return {name: torch.from_numpy(checkpoint.values(name)).to(device) for name in names}


def embed(d: Decoder, ends: Weights, ids_BT: Tensor) -> Tensor:
    """(B, T) ids → (B, T, D), positions from 0."""
    x_BTD = ends["embedding"][ids_BT]
    if d.positions == "learned":
        x_BTD = x_BTD + ends["positions"][d.position_offset : d.position_offset + ids_BT.shape[1]]
    return x_BTD


def norm(d: Decoder, w: Weights, name: str, x: Tensor) -> Tensor:
    weight = w[f"{name}/weight"]
    if d.norm == "layer":
        return F.layer_norm(x, weight.shape, weight, w[f"{name}/bias"], d.norm_eps)
    return F.rms_norm(x, weight.shape, weight, d.norm_eps)


def attention(d: Decoder, w: Weights, x_BTD: Tensor) -> Tensor:
    """x + attention(norm(x)), causal, from position 0."""
    batch, tokens, _ = x_BTD.shape
    normed = norm(d, w, "attention/norm", x_BTD)
    qkv = F.linear(normed, w["attention/qkv"], w.get("attention/qkv_bias"))
    heads = qkv.view(batch, tokens, -1, d.head_dim).transpose(1, 2)
    q, k, v = torch.split(heads, [d.n_heads, d.n_kv_heads, d.n_kv_heads], dim=1)
    if d.positions == "rope":
        cos, sin = _rotary(d, tokens, x_BTD.device)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    group = d.n_heads // d.n_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mixed = mixed.transpose(1, 2).reshape(batch, tokens, -1)
    return x_BTD + F.linear(mixed, w["attention/out"], w.get("attention/out_bias"))


def neurons(d: Decoder, w: Weights, x: Tensor) -> Tensor:
    """(…, D) normed FFN inputs → (…, F) neuron values h; zero exactly where a ReLU neuron does not fire."""
    z = F.linear(x, w["ffn/first"], w.get("ffn/first_bias"))
    # In place: at this width every further pass over (…, F) costs as much as a tenth of the product.
    h = F.relu_(z) if d.activation == "relu" else F.silu(z, inplace=True)
    if d.ffn == "gated":
        h *= F.linear(x, w["ffn/rest"][:, 0], w.get("ffn/up_bias"))
    return h


def ffn_output(w: Weights, h: Tensor) -> Tensor:
    """(…, F) neuron values → (…, D): Σ h_i rest_i + bias."""
    y = h @ w["ffn/rest"][:, -1]
    return y + w["ffn/down_bias"] if "ffn/down_bias" in w else y


def logits(d: Decoder, ends: Weights, x_BTD: Tensor) -> Tensor:
    head = ends["embedding" if d.tied_head else "head"]
    return F.linear(norm(d, ends, "final_norm", x_BTD), head)


def _rotary(d: Decoder, tokens: int, device: Any) -> tuple[Tensor, Tensor]:
    j = torch.arange(0, d.head_dim, 2, dtype=torch.float32, device=device) / d.head_dim
    angles = torch.outer(torch.arange(tokens, dtype=torch.float32, device=device), 1.0 / d.rope_theta**j)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def windows(tokens: np.ndarray[Any, np.dtype[Any]], length: int) -> Tensor:
    """A token stream → (N, length) consecutive windows, the rest dropped. Raises CorpusError if there is none."""
    n = len(tokens) // length
    if n == 0:
        raise CorpusError(f"the text has {len(tokens)} tokens", expected=f"at least one window of {length}")
    return torch.from_numpy(np.asarray(tokens[: n * length], np.int64).reshape(n, length))
