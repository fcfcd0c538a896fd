"""A guess head in torch: the equations of `pi_runtime.artifact.guess_head`, for all tokens of many texts at once.

A head reads its own results where the model has not run. Training has it do so for every token: in unroll j the state
of token p is what unroll j − 1 made of token p − 1, and of the keys up to p the last j are its own (EAGLE-3's
training-time test).

Shape letters: B texts, T tokens, W embedding width, D model width, H heads, E head width, S tokens of the short list.
"""

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from pi_compile.torch_model.attention import rotate
from pi_runtime.artifact.guess_head import GuessHead

Tensor = torch.Tensor
Weights = Mapping[str, Tensor]


class Unrolled:
    """One text after the other through a head, its keys and values kept from unroll to unroll."""

    def __init__(self, head: GuessHead, w: Weights, embedding_BTW: Tensor) -> None:
        self._head, self._w = head, w
        self._e = self._norm("embedding_norm", embedding_BTW)
        tokens = embedding_BTW.shape[1]
        angles = torch.outer(torch.arange(tokens, dtype=torch.float32), torch.tensor(head.rotary_frequencies))
        self._cos, self._sin = angles.cos() * head.rotary_scale, angles.sin() * head.rotary_scale
        self._past: list[tuple[Tensor, Tensor]] = []

    def step(self, g_BTD: Tensor) -> Tensor:
        """y (B, T, D) of the next unroll, from the states before each token."""
        head, w = self._head, self._w
        u = torch.cat([self._e, self._norm("hidden_norm", g_BTD)], -1)
        heads = F.linear(u, w["qkv"]).view(*u.shape[:2], -1, head.head_dim).transpose(1, 2)
        q, k, v = torch.split(heads, [head.n_heads, head.n_kv_heads, head.n_kv_heads], 1)
        group = head.n_heads // head.n_kv_heads
        q, k = (rotate(x, self._cos, self._sin) for x in (q, k))
        k = k.repeat_interleave(group, 1)
        self._past.append((k, v.repeat_interleave(group, 1)))
        a = g_BTD + F.linear(self._attend(q).transpose(1, 2).flatten(2), w["out"])
        x = self._norm("ffn_norm", a)
        return a + F.linear(F.silu(F.linear(x, w["gate"])) * F.linear(x, w["up"]), w["down"])

    def logits(self, y_BTD: Tensor) -> Tensor:
        """Logits (B, T, S) of the token after the next."""
        return F.linear(self._norm("norm", y_BTD), self._w["head"])

    def _attend(self, q: Tensor) -> Tensor:
        """Attention over the model's keys of earlier tokens, and over those of the chain that leads here."""
        unroll = len(self._past) - 1
        k, v = self._past[0]
        scores = q @ k.transpose(-1, -2)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(-unroll)
        parts = [scores.masked_fill(~seen, -torch.inf)]
        chain = [tuple(shifted(x, unroll - n) for x in self._past[n]) for n in range(1, unroll + 1)]
        parts += [(q * k_n).sum(-1, keepdim=True) for k_n, _ in chain]
        p = (torch.cat(parts, -1) * self._head.head_dim**-0.5).softmax(-1)
        mixed: Tensor = p[..., : k.shape[-2]] @ v
        for n, (_, v_n) in enumerate(chain):
            mixed = mixed + p[..., k.shape[-2] + n, None] * v_n
        return mixed

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._w[name], self._head.norm_eps)


def shifted(x: Tensor, count: int) -> Tensor:
    """What stands so many tokens earlier (…, T, E); 0 before the first."""
    return F.pad(x, (0, 0, count, 0))[..., : x.shape[-2], :]


def first_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """The weights that training begins with: the last state passes through unchanged."""
    rng, found = np.random.default_rng(seed), dict[str, Tensor]()
    for name, shape in shapes.items():
        if len(shape) == 1:
            found[name] = torch.ones(shape)
        elif name in ("fc", "out", "down"):
            found[name] = torch.zeros(shape)
        else:
            found[name] = torch.from_numpy(rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5))
    width = shapes["norm"][0]
    found["fc"][:, -width:] = torch.eye(width)
    return found
