"""Attention in torch, over whole sequences from position 0; the equations are those of `reference_attention`.

Shape letters: B sequences, T tokens each, D model width, H heads, E head width.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from pi_runtime.artifact.decoder import LATENT_EPS, Decoder

Tensor = torch.Tensor


def attention(
    d: Decoder, w: Mapping[str, Tensor], x_BTD: Tensor, on_input: Callable[[str, Tensor], None] | None = None
) -> Tensor:
    """Causal attention over (B, T, D) inputs, from position 0. `on_input` sees what its two matrices multiply."""
    qkv = F.linear(x_BTD, w["attention/qkv"], w.get("attention/qkv_bias"))
    attended = (_of_latents if d.latent_rank else _of_heads)(d, w, qkv)
    if d.inner_norms:
        attended = F.rms_norm(attended, attended.shape[-1:], w["attention/inner_norm"], d.norm_eps)
    if on_input is not None:
        on_input("attention/qkv", x_BTD)
        on_input("attention/out", attended)
    return F.linear(attended, w["attention/out"], w.get("attention/out_bias"))


def _of_heads(d: Decoder, w: Mapping[str, Tensor], qkv: Tensor) -> Tensor:
    """What each head takes of the values, from queries, keys and values."""
    batch, tokens, _ = qkv.shape
    heads = qkv.view(batch, tokens, -1, d.head_dim).transpose(1, 2)
    q, k, v = torch.split(heads, [d.n_heads, d.n_kv_heads, d.n_kv_heads], dim=1)
    if d.qk_norm:
        q, k = (_norm_heads(d, w[f"attention/{n}_norm"], t) for t, n in ((q, "q"), (k, "k")))
    if d.positions == "rope":
        cos, sin = _rotary(d, tokens, qkv.device)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    group = d.n_heads // d.n_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seen = _in_window(d, tokens, qkv.device) if d.window or d.attention_sinks else None
    if d.attention_sinks:  # a further position with this score, whose value is 0
        assert seen is not None
        seen = F.pad(
            torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -torch.inf).repeat(d.n_heads, 1, 1), (0, 1)
        )
        seen[..., -1] = w["attention/sinks"][:, None]
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    attended = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None)
    return attended.transpose(1, 2).reshape(batch, tokens, -1)


def _in_window(d: Decoder, tokens: int, device: Any) -> Tensor:
    """(T, T): whether a token sees a position."""
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    return seen & ~seen.tril(-d.window) if d.window else seen


def _norm_heads(d: Decoder, weight: Tensor, x_BHTE: Tensor) -> Tensor:
    """The rms norm of each head, or of all heads of a token together."""
    if not d.joint_qk_norm:
        return F.rms_norm(x_BHTE, weight.shape, weight, d.norm_eps)
    x = F.rms_norm(x_BHTE.transpose(1, 2).flatten(2), weight.shape, weight, d.norm_eps)
    return x.view(*x.shape[:2], -1, d.head_dim).transpose(1, 2)


def _of_latents(d: Decoder, w: Mapping[str, Tensor], qkv: Tensor) -> Tensor:
    """The same from queries and latents, whose matrices are multiplied into queries and sums."""
    heads, half = d.n_heads, d.rotary_dim // 2
    q, c, k = torch.split(qkv, [d.qkv_width - d.cached_width, d.latent_rank, 2 * half], -1)
    if d.query_rank:
        q = F.linear(F.rms_norm(q, q.shape[-1:], w["attention/q_norm"], LATENT_EPS), w["attention/q_up"])
    parts = torch.split(q, [heads * (d.head_dim - 2 * half), heads * half, heads * half], -1)
    q, a, b = (part.view(*part.shape[:2], heads, -1).transpose(1, 2) for part in parts)
    cos, sin = _rotary(d, qkv.shape[1], qkv.device)
    c = F.rms_norm(c, c.shape[-1:], w["attention/k_norm"], LATENT_EPS)[:, None]
    k_up, v_up = (w[f"attention/{name}_up"] for name in "kv")
    q = q @ k_up.view(heads, -1, k_up.shape[1]).mT
    queries = torch.cat([q, rotate(torch.cat([a, b], -1), cos, sin)], -1)
    keys = torch.cat([c, rotate(k[:, None], cos, sin)], -1).expand(-1, heads, -1, -1)
    scale, values = d.score_scale / d.head_dim**0.5, c.expand(-1, heads, -1, -1)
    sums = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
    return (sums @ v_up.view(heads, -1, d.latent_rank).mT).transpose(1, 2).flatten(2)


def _rotary(d: Decoder, tokens: int, device: Any) -> tuple[Tensor, Tensor]:
    frequencies = torch.tensor(d.rotary_frequencies, dtype=torch.float32, device=device)
    angles = torch.outer(torch.arange(tokens, dtype=torch.float32, device=device), frequencies)
    return angles.cos() * d.rotary_scale, angles.sin() * d.rotary_scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first columns of each head (…, T, E), as many as twice those of cosine and sine (T, J), turned."""
    half = cos.shape[-1]
    a, b, others = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, others], dim=-1)
