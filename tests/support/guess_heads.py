"""A guess head from its equations, in NumPy: nothing here is quick, and nothing is shared with the kernels. And help
for a head with random weights, so that it drafts as if it were trained.

    g_t = fc · [low_t | middle_t | high_t]              states that the model computed; else y of the step before
    u_t = n₁(e_t+1) | n₂(g_t)                           the next token's embedding beside it
    a_t = g_t + out · attention(qkv · u)                over all t so far, with rotary positions
    y_t = a_t + down · (silu(gate · n₃(a_t)) ⊙ up · n₃(a_t))
    logits_t = head · n₄(y_t)

Source: Li et al. 2025, EAGLE-3 (arXiv 2503.01840), section 3.2 and figure 5.
"""

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from pi_runtime.artifact.formats import Array
from pi_runtime.artifact.guess_head import GuessHead, block_of
from pi_runtime.artifact.reader import Artifact
from pi_runtime.kernels.reference import DENSE_LAYER, ArtifactWeights, block
from pi_runtime.sequence.head_draft import HeadDraft


def norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotated(x_THE: Array, frequencies: tuple[float, ...]) -> Array:
    angles = np.outer(np.arange(len(x_THE)), np.array(frequencies))[:, None]
    half = len(frequencies)
    a, b, rest = np.split(x_THE, [half, 2 * half], -1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def layer(head: GuessHead, w: Mapping[str, Array], embedding_TW: Array, g_TD: Array) -> tuple[Array, Array]:
    """y (T, D) and logits (T, S) for all tokens of a text, each next to the state before it."""
    eps, heads, groups, width = head.norm_eps, head.n_heads, head.n_kv_heads, head.head_dim
    u = np.concatenate([norm(embedding_TW, w["embedding_norm"], eps), norm(g_TD, w["hidden_norm"], eps)], -1)
    q, k, v = np.split(u @ w["qkv"].T, [heads * width, (heads + groups) * width], -1)
    q = rotated(q.reshape(-1, heads, width), head.rotary_frequencies)
    k = rotated(k.reshape(-1, groups, width), head.rotary_frequencies).repeat(heads // groups, 1)
    v = v.reshape(-1, groups, width).repeat(heads // groups, 1)
    scores = np.einsum("the,she->hts", q, k) / np.sqrt(width)
    scores[:, ~np.tri(len(u), dtype=bool)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hts,she->the", p / p.sum(-1, keepdims=True), v).reshape(len(u), -1)
    a = g_TD + mixed @ w["out"].T
    x = norm(a, w["ffn_norm"], eps)
    z = x @ w["gate"].T
    y = a + (z / (1 + np.exp(-z)) * (x @ w["up"].T)) @ w["down"].T
    return y, norm(y, w["norm"], eps) @ w["head"].T


def drafted(
    head: GuessHead, w: Mapping[str, Array], embedding_VW: Array, tokens: list[int], states_TC: Array, count: int
) -> tuple[list[int], Array]:
    """The greedy draft behind a text, whose states are known but for its last token; and the logits of each step."""
    g, text, found, logits = states_TC @ w["fc"].T, list(tokens), list[int](), []
    for _ in range(count):
        y, z = layer(head, w, embedding_VW[text[1:]], g)
        logits.append(z[-1])
        found.append(int(w["ids"][z[-1].argmax()]))
        g, text = np.concatenate([g, y[-1:]]), [*text, found[-1]]
    return found, np.array(logits)


def drafted_behind(file: Artifact, tokens: list[int], states_TD: Array, count: int) -> tuple[list[int], Array]:
    """The same of a guess layer, whose block is the model's definition of a layer:

        h_t = n(x_t), or n₃(y) of the step before    y = block(fc · (n₁(e_t+1) | n₂(h_t)))    logits = head · n₃(y)

    Source: DeepSeek-AI 2024, DeepSeek-V3 (arXiv 2412.19437), section 2.2, equations 21 to 23.
    """
    d, w, ends = block_of(file.manifest.decoder), ArtifactWeights(file, "guess/"), ArtifactWeights(file, "")
    h, text, found, logits = norm(states_TD, ends["final_norm/weight"], d.norm_eps), list(tokens), list[int](), []
    for _ in range(count):
        e = norm(ends["embedding"][text[1:]], w["embedding_norm"], d.norm_eps)
        g = w.product("fc", np.concatenate([e, norm(h, w["hidden_norm"], d.norm_eps)], -1))
        y = norm(block(d, w, DENSE_LAYER, g), w["norm"], d.norm_eps)[-1:]
        logits.append(ends.product("embedding" if d.tied_head else "head", y)[0])
        found.append(int(logits[-1].argmax()))
        h, text = np.concatenate([h, y]), [*text, found[-1]]
    return found, np.array(logits)


def help_head(patch: pytest.MonkeyPatch, known: Sequence[list[int]], right: float, rng: random.Random) -> None:
    """Let a guess head draft the answers that are known, with some wrong tokens. It computes what it would compute."""
    make = HeadDraft._make

    def helped(self: HeadDraft, count: int) -> list[int]:
        found, so_far = make(self, count), list(self._tokens)
        after = next((k[len(so_far) :] for k in known if k[: len(so_far)] == so_far), [])
        return [a if rng.random() < right else f for a, f in zip(after, found, strict=False)]

    patch.setattr(HeadDraft, "_make", helped)
