"""A decoder described by data: everything that the forward pass must know beside the weights.

One block, with n₁ and n₂ its norms, is

    sequential   x ← x + attention(n₁(x));   x ← x + ffn(n₂(x))
    parallel     x ← x + attention(n₁(x)) + ffn(n₂(x))               n₂ = n₁ where they share a norm
    post-norm    x ← n₁(x + attention(x));   x ← n₂(x + ffn(x))
    reordered    x ← x + n₁(attention(x));   x ← x + n₂(ffn(x))
    sandwich     x ← x + m₁(attention(n₁(x)));   x ← x + m₂(ffn(n₂(x)))      m₁, m₂ further norms

The FFN is, per neuron i with activation a,

    plain   h_i = a(fc1_i · x + b_i)                       y = Σ h_i fc2_i + b
    gated   h_i = a(gate_i · x + b_i) (up_i · x + c_i)     y = Σ h_i down_i + b

and with experts  y = Σ_e p_e y_e  over the experts_per_token experts e with the largest router_e · x, p the softmax of
these values over those experts, or over all; or  p_e = s(router_e · x), with s(z) = 1 / (1 + e⁻ᶻ), and mostly over
their sum. The router reads what the FFN reads, or x as it enters the block. Experts that every token takes, p_e = 1 or
s(gate · x), stand behind those of the router; a dense layer is made of such experts alone.

Attention is softmax(q kᵀ) v of some heads, or in some layers a recurrence stands in its place (see `Recurrence`).

A file says only what differs from the defaults here, and each such fact is a feature (`features`).
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

NORMS = ("rms", "layer")
POSITIONS = ("rope", "learned")
BLOCKS = ("sequential", "parallel", "post-norm", "reordered", "sandwich")
FFNS = ("plain", "gated")
ROUTER_SCORES = ("softmax", "sigmoid")
SPARSE_ACTIVATIONS = ("relu", "relu2", "drelu")
GATED_ACTIVATIONS = ("drelu", "clamped_swiglu")
"""Activations of gated FFNs only: they change up · x + c too."""
ACTIVATIONS = (*SPARSE_ACTIVATIONS, "silu", "gelu", "gelu_tanh", "clamped_swiglu")
"""`relu` max(z, 0);  `relu2` max(z, 0)²;  `drelu` max(z, 0) with the gated FFN's up · x + c likewise cut off at 0
(TurboSparse);  `silu` z / (1 + e⁻ᶻ);  `gelu` z Φ(z), Φ the normal distribution;  `gelu_tanh` its usual approximation
z/2 (1 + tanh(√(2/π) (z + 0.044715 z³)));  `clamped_swiglu` z̄ / (1 + e^(−1.702 z̄)) with z̄ = min(z, 7), and of a gated
FFN's up · x + c, within −7 … 7, one more (gpt-oss)."""
CLAMP, SWIGLU_SLOPE = 7.0, 1.702
LATENT_EPS = 1e-6
"""Epsilon of the `rms` norms of latents, whatever that of the others is."""
RECURRENCES = ("gated_delta",)
LENGTH_EPS = 1e-6
"""Added to the square of the length that queries and keys of a recurrence are divided by."""


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """What stands in attention's place in some layers: each head has a state of a fixed size, and no keys and values.

        gated_delta   S ← eᵍ S,   S ← S + k (b (v − Sᵀk))ᵀ,   y = Sᵀq / √K       g = −decay · ln(1 + e^(a + bias))

    with a head's numbers a and s(b) of the token, and q, k, v SiLU of a causal convolution of `columns` positions, q
    and k then divided by their lengths. Several heads may share q and k. The sums y are normed and multiplied by
    SiLU(z). Source: Yang et al. 2024, Gated Delta Networks, arXiv:2412.06464.
    """

    kind: str
    layers: tuple[int, ...]
    """Layers, in order, that have it."""
    heads: int
    """Heads with a state."""
    key_heads: int
    """Heads of queries and keys, a divisor of `heads`: as many consecutive heads share one."""
    key_dim: int
    value_dim: int
    columns: int
    """Positions of the convolution, a token's own included."""

    @property
    def channels(self) -> int:
        """Numbers of a token that go through the convolution: those of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Shape and function of a decoder-only transformer."""

    family: str
    """Name of the adapter that read it; it is displayed, and nothing depends on it."""
    vocab_size: int
    d_model: int
    d_embedding: int
    """Width of the embedding. Where it is not `d_model`, one matrix converts it, and another converts back."""
    n_layers: int
    n_heads: int
    n_kv_heads: int
    """Heads of keys and values; a divisor of `n_heads` (grouped-query attention)."""
    head_dim: int
    d_ff: int
    """Neurons of one FFN; with experts, of one expert."""
    n_experts: int = 1
    experts_per_token: int = 1
    """Experts that the router takes for a token. A single expert has no router."""
    router_normalised: bool = True
    """Whether the weights of a token's experts are a softmax over these; else over all experts."""
    router_score: str = "softmax"
    """What makes a router's values the weights of a token's experts."""
    router_scale: float = 1.0
    """Factor of the weights of the experts that the router takes."""
    router_bias: bool = False
    """Whether the router's values have a bias."""
    router_choice_bias: bool = False
    """Whether experts are chosen by their sigmoid plus a bias of each expert, which does not change the weights."""
    router_groups: int = 1
    """Groups of equally many experts; a group's value is the sum of its largest ones."""
    router_group_top: int = 2
    """How many of its largest values make a group's, 2 with `router_choice_bias`, or 1."""
    router_groups_taken: int = 1
    """Groups, those with the largest values, from which a token's experts are taken."""
    router_early: bool = False
    """Whether the router reads x as it enters the block, without a norm, and not what the FFN reads."""
    experts_shared: int = 0
    """So many experts, the last ones, are taken by every token and not by the router; they count in both numbers."""
    shared_gate: bool = False
    """Whether the experts that every token takes are weighed by s(gate · x), with a gate beside the router's rows."""
    dense_layers: tuple[int, ...] = ()
    """Layers, in order, whose FFN is dense. It is cut into experts, the last ones, which every token takes; what is
    left of these, and all experts before them, are zeros."""
    dense_ff: int = 0
    """Neurons of a dense layer's FFN."""
    context_length: int
    """Positions the model was made for."""
    embedding_scale: float = 1.0
    """Factor of the embedding, before learned positions are added."""
    embedding_norm: bool = False
    """Whether the first block reads a norm of the embedding."""
    block: str = "sequential"
    shared_norm: bool = False
    """Whether attention and FFN of a parallel block read the same norm's output."""
    norm: str
    """`rms`: x / √(mean x² + eps) · w;  `layer`: (x − mean) / √(var + eps) · w + b."""
    norm_eps: float
    final_norm: bool = True
    qk_norm: bool = False
    """Whether each head of queries and keys goes through an `rms` norm before its rotation."""
    joint_qk_norm: bool = False
    """Whether this norm is taken over all heads of a token's queries together, and over all of its keys."""
    inner_norms: bool = False
    """Whether what attention's last matrix reads, and the h of a sparse FFN, go through an `rms` norm before it. Its
    mean is over all of them: those that a rung leaves out count as 0."""
    positions: str
    """`rope`: the first 2J numbers of each head are two halves, rotated by angles pos · frequency_j;
    `learned`: a table is added."""
    rotary_frequencies: tuple[float, ...] = ()
    """J angles for one position, float32 numbers that include the model's scaling; () where positions are learned. They
    are above 0, or all below where the model turns the other way."""
    rotary_scale: float = 1.0
    """Factor of cosine and sine (YaRN's attention factor)."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers, in order, whose queries and keys are not rotated (NoPE); with rope."""
    window: int = 0
    """Positions that a token sees in the layers with a window, its own included; 0 where no layer has one."""
    windowed_layers: tuple[int, ...] = ()
    """Layers, in order, that have this window; in the others a token sees all positions up to its own."""
    windowed_frequencies: tuple[float, ...] = ()
    """The angles of layers with a window, where they have others: as many as `rotary_frequencies`."""
    position_offset: int = 0
    """Row of position 0 in the learned table; 0 with rope."""
    ffn: str
    activation: str
    threshold: float = 0.0
    """A sparse activation's value a(z) counts as 0 unless it is above this (FATReLU, ProSparse)."""
    tied_head: bool
    """Whether the output head is the embedding table."""
    head_bias: bool = False
    logit_scale: float = 1.0
    """Factor of the logits."""
    logit_softcap: float = 0.0
    """c, by which a logit z, scaled, becomes c tanh(z / c); 0 for none."""
    qkv_bias: bool
    out_bias: bool
    ffn_bias: bool
    expert_bias: bool = False
    """Whether the FFN's last bias is one of each expert, weighed as its result is; with `ffn_bias`."""
    attention_sinks: bool = False
    """Whether each head has a number whose exponential is added to the sum that a softmax of scores divides by."""

    output_gate: bool = False
    """Whether what attention's last matrix reads is multiplied by s(gate · x), number by number."""
    recurrence: Recurrence | None = None
    """What stands in attention's place in some layers."""
    latent_rank: int = 0
    """R, where keys and values of all heads are products with one latent of R numbers (MLA); 0 for none. A head of
    queries then has `head_dim` numbers, of which the last 2J are rotated, as are 2J more that all heads share as the
    rest of their keys."""
    query_rank: int = 0
    """Numbers of a latent from which the queries are made; 0 where they are made of x. With `latent_rank`."""
    value_dim: int = 0
    """Numbers of a head's values, with `latent_rank`; 0 for `head_dim`."""
    score_scale: float = 1.0
    """Factor of scores beside 1 / √head_dim (YaRN's mscale, squared), with `latent_rank`."""

    def of_layer(self, layer: int) -> Self:
        """The decoder as one layer computes it: without angles, a window, a recurrence, or a router, where the layer
        has none; and of attention nothing where a recurrence stands in its place."""
        differences: dict[str, Any] = {"window": 0}
        if self.recurrence is not None:
            recurs = layer in self.recurrence.layers
            differences |= _NO_ATTENTION if recurs else {"recurrence": None}
        if layer in self.windowed_layers:
            del differences["window"]
            differences["rotary_frequencies"] = self.windowed_frequencies or self.rotary_frequencies
        if layer in self.unrotated_layers:
            differences["rotary_frequencies"] = ()
        if layer in self.dense_layers:
            differences |= dict.fromkeys(("experts_per_token", "experts_shared"), self.dense_experts)
        return replace(self, **differences)

    def within_context(self, window: int) -> int:
        """The length of a window of text, at most the context."""
        return min(window, self.context_length)

    def seen(self, layer: int, positions: int) -> int:
        """How many of so many positions the newest token sees in a layer."""
        return min(self.window, positions) if layer in self.windowed_layers else positions

    @property
    def sparse(self) -> bool:
        """Whether the activation is exactly zero for inactive neurons, so that skipping them is exact."""
        return self.activation in SPARSE_ACTIVATIONS

    @property
    def mixed_width(self) -> int:
        """Numbers that attention's last matrix reads: those of all heads."""
        if self.recurrence is not None:
            return self.recurrence.heads * self.recurrence.value_dim
        return self.n_heads * (self.value_dim or self.head_dim)

    @property
    def cached_width(self) -> int:
        """Numbers of a row of the cache: a head's key or value, or a latent with the rotated numbers behind it."""
        return self.latent_rank + self.rotary_dim if self.latent_rank else self.head_dim

    @property
    def gate_width(self) -> int:
        """Numbers that what attention's last matrix reads is multiplied by; 0 for none."""
        return self.mixed_width if self.output_gate or self.recurrence is not None else 0

    @property
    def qkv_parts(self) -> tuple[int, int, int]:
        """Numbers of queries, of keys and of values that attention's first matrix makes of a token."""
        if (r := self.recurrence) is not None:
            return r.key_heads * r.key_dim, r.key_heads * r.key_dim, r.heads * r.value_dim
        keys = self.n_kv_heads * self.head_dim
        return self.n_heads * self.head_dim, keys, keys

    @property
    def qkv_width(self) -> int:
        """Numbers that attention's first matrix makes of a token."""
        if self.latent_rank:
            return (self.query_rank or self.n_heads * self.head_dim) + self.cached_width
        return sum(self.qkv_parts)

    def widest(self, width: str) -> int:
        """The most that a layer has of one of these numbers: `qkv_width`, `mixed_width` or `gate_width`."""
        kinds = [replace(self, recurrence=None), *([self] if self.recurrence else [])]
        return max(getattr(kind, width) for kind in kinds)

    @property
    def neurons(self) -> int:
        """Neurons of a layer, all experts together."""
        return self.n_experts * self.d_ff

    @property
    def experts_routed(self) -> int:
        """Experts of a layer that the router chooses among."""
        return self.n_experts - self.experts_shared

    @property
    def dense_experts(self) -> int:
        """Experts that a dense layer's FFN is made of."""
        return -(-self.dense_ff // self.d_ff)

    @property
    def most_experts(self) -> int:
        """Most experts that a token takes in a layer."""
        return max(self.experts_per_token, self.dense_experts)

    @property
    def rotary_dim(self) -> int:
        """Number of leading columns of a head that are rotated."""
        return 2 * len(self.rotary_frequencies)


_NO_ATTENTION = dict.fromkeys(("qkv_bias", "out_bias", "qk_norm", "output_gate", "attention_sinks"), False)
"""Facts of attention that a layer with a recurrence lacks."""


def rotary_table(decoder: Decoder, length: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """cos and sin (length, J) of the angles position · frequency_j, times `rotary_scale`.

    The angles are float32, as in transformers; cos and sin are rounded from 64 bits, because NumPy's in 32 depend on
    the processor. J = 0 where positions are learned.
    """
    frequency_J = np.array(decoder.rotary_frequencies, np.float32)
    angles = np.outer(np.arange(length, dtype=np.float32), frequency_J).astype(np.float64)
    scale = np.float32(decoder.rotary_scale)
    return np.cos(angles).astype(np.float32) * scale, np.sin(angles).astype(np.float32) * scale
