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
s(gate · x), stand behind those of the router; a dense layer is made of such experts alone. Another
FFN may be beside the experts; in a sandwich block with n₃ its norm, and m₃ and m₄ those of both sums:
m₂(m₃(ffn(n₃(x))) + m₄(y)). Experts may be narrower than the model:  y = out · Σ_e p_e y_e(in · x).
Behind its FFN a sandwich block may read a further embedding, of which it has a row e of P numbers a token, with x₀
what entered the first block, and n and m norms:  x ← x + m(out (a(gate · x) (n(in · x₀ / √D) + e √P) / √2)).

In some layers a recurrence may stand in attention's place: each head has a state S of a fixed size, and no keys and
values. Sources: Yang et al. 2024, Gated Delta Networks, arXiv:2412.06464; Dao and Gu 2024, Mamba-2, arXiv:2405.21060;
transformers' `modeling_lfm2.py`, of which `short_conv` has no state beside the columns of its convolution.

    gated_delta   S ← eᵍ S,   S ← S + k (b (v − Sᵀk))ᵀ,   y = Sᵀq / √K       g = −decay · ln(1 + e^(a + bias))
    mamba2        S ← e^(−decay · t) S + k (t v)ᵀ,   y = Sᵀq + skip · v      t = max(ln(1 + e^(a + bias)), least step)
    short_conv    y = c · the causal convolution of b · v, number by number                  b, c and v linear in x

with a head's numbers a and s(b) of the token, and q, k, v SiLU of a causal convolution; of the delta rule, q and k then
divided by their lengths. Several heads may share q and k. The delta rule's sums y are normed, head by head, and
multiplied by SiLU(z); those of Mamba-2 are multiplied first, and the heads that share a q are normed together.

A layer may have its mixer alone, attention or a recurrence, or its FFN alone; each has its norm.

Each field is a fact, one record: its meaning, the values it may have, its default, what else must hold where it has
another one, and who computes it. From the records follow the keys of a manifest, its validation, its features, what a
body refuses, and the table in the format's reference. A file says only what differs from the defaults.
"""

import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any, Self

BLOCKS = ("sequential", "parallel", "post-norm", "reordered", "sandwich")
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
LENGTH_EPS = 1e-6
"""Added to the square of the length that queries and keys of a recurrence are divided by."""
BODIES = {"numpy": "the definition", "torch": "torch's layers", "cpu": "the CPU's kernels", "gpu": "the GPU tier"}
"""What computes a decoder, each by itself: its name, and how it is spoken of."""
ALL = tuple(BODIES)
WITHOUT_GPU = ALL[:-1]


@dataclass(frozen=True)
class Recurrence:
    """What one recurrence has that others lack, of a decoder as its layer computes it."""

    gates: int
    """Numbers that each head has of a token beside those of the convolution."""
    arrays: Callable[["Decoder"], Mapping[str, tuple[int, ...]]]
    """Its float32 arrays beside the convolution's, by their names, with their shapes."""
    factors: int = 1
    """Factors of each of its sums that `attention/gate` makes; of two, one is of what the convolution reads."""
    has_keys: bool = True
    """Whether its heads have queries and keys."""


def _of_heads(d: "Decoder") -> dict[str, tuple[int, ...]]:
    return {"gates": (d.state_gates, d.d_model), **dict.fromkeys(("decay", "decay_bias"), (d.state_heads,))}


RECURRENCES: Mapping[str, Recurrence] = {
    "gated_delta": Recurrence(2, lambda d: {**_of_heads(d), "state_norm": (d.state_value_dim,)}),
    "mamba2": Recurrence(
        1,
        lambda d: {
            "conv_bias": (d.qkv_width,), **_of_heads(d), "skip": (d.state_heads,), "state_norm": (d.mixed_width,)
        },
    ),
    "short_conv": Recurrence(0, lambda _: {}, factors=2, has_keys=False),
}  # fmt: skip
"""What may stand in attention's place, by name."""


@dataclass(frozen=True)
class Values:
    """The values that a fact may have by itself."""

    text: str
    holds: Callable[[Any, "Decoder"], bool]
    default: Any
    """The one that most facts of this kind have unless given."""


@dataclass(frozen=True)
class Rule:
    """What must hold of a decoder where a fact has another value than its default."""

    text: str
    holds: Callable[["Decoder"], bool]


@dataclass(frozen=True)
class Fact:
    """What there is to say of one field of a decoder."""

    meaning: str
    values: Values
    default: Any
    """`MISSING` where every manifest has it."""
    rules: tuple[Rule, ...]
    of: str
    """The fact without which this one is not given; "" for none."""
    bodies: tuple[str, ...]
    """Who computes another value than the default; the others refuse such a model by the fact's name."""
    later: Mapping[str, tuple[str, ...]]
    """Values that came later, which are features of their own, with their bodies."""


def fact(
    meaning: str,
    values: Values,
    *rules: Rule,
    of: str = "",
    bodies: tuple[str, ...] = ALL,
    later: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    default: Any = None,
) -> Any:
    """A field of `Decoder` with its record; see `Fact`."""
    default = values.default if default is None else default
    return field(default=default, metadata={"fact": Fact(meaning, values, default, rules, of, bodies, later)})


given = partial(fact, default=MISSING)


def facts() -> dict[str, Fact]:
    """Each fact of a decoder by its name."""
    return {f.name: f.metadata["fact"] for f in fields(Decoder)}


def one_of(*names: str) -> Values:
    """A name among these; the first one is the usual."""
    return Values(f"one of {', '.join(f'`{name}`' for name in names)}", lambda value, _: value in names, names[0])


TEXT = Values("string", lambda *_: True, "")
FLAG = Values("boolean", lambda *_: True, False)
SIZE = Values("integer in 1…2³¹−1", lambda value, _: 1 <= value < 2**31, 1)
COUNT = Values("integer in 0…2³¹−1", lambda value, _: 0 <= value < 2**31, 0)
ABOVE_0 = Values("float > 0", lambda value, _: 0 < value < inf, 1.0)
FROM_0 = Values("float ≥ 0", lambda value, _: 0 <= value < inf, 0.0)
LAYERS = Values("list of layers, rising", lambda v, d: [*v] == sorted(n for n in {*v} if 0 <= n < d.n_layers), ())
ANGLES = Values("list of float32 numbers, all ≥ 0", lambda value, _: all(f >= 0 for f in value), ())
TURNS = Values("list of float32 numbers, all ≥ 0 or all < 0", lambda v, _: all(f >= 0 for f in v) or max(v) < 0, ())
ALONE = (
    Rule("in a sequential block", lambda d: d.block == "sequential"),
    Rule("in layers that have the other part", lambda d: not {*d.mixer_only_layers} & {*d.ffn_only_layers}),
    Rule("without `router_early`", lambda d: not d.router_early),
)
WITH_ROPE = Rule("with rope", lambda d: d.positions == "rope")
NOT_EARLY = Rule("without `router_early`", lambda d: not d.router_early)

HAS_STATES = Rule(
    "with states of heads, values and positions, and of keys but for `short_conv`",
    lambda d: (
        min(d.state_heads, d.state_value_dim, d.state_columns) > 0
        and [d.state_key_heads > 0, d.state_key_dim > 0] == 2 * [RECURRENCES[d.recurrence].has_keys]
    ),
)
EVENLY = Rule("as a divisor of `state_heads`", lambda d: d.state_heads % d.state_key_heads == 0)
IN_SOME_LAYERS = (
    Rule("beside attention in another layer", lambda d: len({*d.recurrent_layers, *d.ffn_only_layers}) < d.n_layers),
    Rule(
        "in layers that have a mixer, without a window and with rotation",
        lambda d: not {*d.recurrent_layers} & {*d.windowed_layers, *d.unrotated_layers, *d.ffn_only_layers},
    ),
    Rule("without `latent_rank` and `inner_norms`", lambda d: not (d.latent_rank or d.inner_norms)),
)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Shape and function of a decoder-only transformer, fact by fact."""

    # fmt: off
    family: str = given("name of the adapter that read it, for display; no behaviour depends on it", TEXT)
    vocab_size: int = given("V", SIZE)
    d_model: int = given("D", SIZE)
    d_embedding: int = given("W; where it is not D, one matrix converts embeddings, and another converts back", SIZE)
    n_layers: int = given("layers", SIZE)
    n_heads: int = given("H", SIZE)
    n_kv_heads: int = given(
        "G, heads of keys and values", SIZE, Rule("as a divisor of `n_heads`", lambda d: d.n_heads % d.n_kv_heads == 0)
    )
    head_dim: int = given("E", SIZE)
    d_ff: int = given("F, neurons of one FFN; with experts, of one expert", SIZE)
    n_experts: int = fact("X, experts; a single one has no router", SIZE)
    experts_per_token: int = fact(
        "experts that a token goes to", SIZE, Rule("up to `n_experts`", lambda d: d.experts_per_token <= d.n_experts)
    )
    router_normalised: bool = fact(
        "weights of a token's experts are a softmax over these, else over all", FLAG, of="n_experts", default=True
    )
    router_score: str = fact(
        "how a router's values become weights", one_of("softmax", "sigmoid"), of="n_experts", bodies=WITHOUT_GPU
    )
    router_scale: float = fact("factor of the weights of experts that the router takes", ABOVE_0, bodies=WITHOUT_GPU)
    router_bias: bool = fact("the router's values have a bias", FLAG, of="n_experts", bodies=WITHOUT_GPU)
    router_choice_bias: bool = fact(
        "experts are taken by their sigmoid plus a bias of each expert, which does not change the weights",
        FLAG, Rule("with `router_score` sigmoid", lambda d: d.router_score == "sigmoid"), NOT_EARLY,
    )
    router_groups: int = fact(
        "groups of equally many experts; a group's value is the sum of its largest ones",
        SIZE, NOT_EARLY, Rule("where they divide the routed experts, and have enough", lambda d: d.has_even_groups),
        Rule("with `router_choice_bias` or by the largest", lambda d: d.router_choice_bias or d.router_group_top == 1),
        bodies=WITHOUT_GPU,
    )
    router_group_top: int = fact(
        "how many of its largest values make a group's", Values("1 or 2", lambda value, _: value in (1, 2), 2),
        Rule("without `router_choice_bias`", lambda d: not d.router_choice_bias), of="router_groups",
    )
    router_groups_taken: int = fact(
        "groups, those with the largest values, from which a token's experts are taken",
        SIZE, Rule("up to `router_groups`", lambda d: d.router_groups_taken <= d.router_groups),
    )
    router_early: bool = fact(
        "the router reads x as it enters the block, without a norm", FLAG, of="n_experts", bodies=WITHOUT_GPU
    )
    router_norm: bool = fact(
        "the router reads x behind attention through an `rms` norm of its own", FLAG, NOT_EARLY,
        Rule("in a sandwich block", lambda d: d.block == "sandwich"), of="n_experts", bodies=WITHOUT_GPU,
    )
    expert_scale: bool = fact(
        "weights of routed experts are times a number of each", FLAG, of="n_experts", bodies=WITHOUT_GPU
    )
    experts_shared: int = fact(
        "so many experts, the last ones, are taken by every token and not by the router; they count in both numbers",
        COUNT, NOT_EARLY, Rule("below `experts_per_token`", lambda d: d.experts_shared < d.experts_per_token),
        bodies=WITHOUT_GPU,
    )
    shared_gate: bool = fact(
        "their weight is s(gate · x), with a gate behind the router's rows, and not 1", FLAG, of="experts_shared",
        bodies=WITHOUT_GPU,
    )
    dense_layers: tuple[int, ...] = fact(
        "layers whose FFN is dense: cut into experts, the last ones, unless there is `last_ff`",
        LAYERS, Rule("without `ffn_bias`", lambda d: not d.ffn_bias), NOT_EARLY, of="dense_ff", bodies=WITHOUT_GPU,
    )
    dense_ff: int = fact(
        "neurons of a dense layer's FFN", COUNT,
        Rule("up to X · F, with several experts", lambda d: d.dense_experts <= d.n_experts > 1), of="dense_layers",
    )
    last_ff: int = fact(
        "neurons of the last expert, in the layout `matrices`: the shared one, if any is",
        COUNT, Rule("with one shared expert at most", lambda d: d.experts_shared <= 1),
        Rule("without `ffn_bias`", lambda d: not d.ffn_bias), of="n_experts", bodies=WITHOUT_GPU,
    )
    expert_width: int = fact(
        "numbers that experts read and make, between two matrices; 0 for D", COUNT,
        Rule("up to D in a sequential block", lambda d: d.block == "sequential" and d.expert_width <= d.d_model),
        Rule("without `router_early`, `experts_shared`, `dense_layers` and `ffn_bias`",
             lambda d: not (d.router_early or d.experts_shared or d.dense_layers or d.ffn_bias)),
        of="n_experts", bodies=WITHOUT_GPU,
    )
    beside_ff: int = fact(
        "neurons of an FFN beside several experts, below", COUNT,
        Rule("in a sequential block, or a sandwich one of `rms` norms",
             lambda d: d.n_experts > 1 and (d.block == "sequential" or (d.block, d.norm) == ("sandwich", "rms"))),
        Rule("without `ffn_bias` and activations of gated FFNs only",
             lambda d: not d.ffn_bias and d.activation not in GATED_ACTIVATIONS),
        bodies=WITHOUT_GPU,
    )
    context_length: int = given("positions that the model was made for", SIZE)
    embedding_scale: float = fact("factor of the embedding at D numbers, before learned positions are added", ABOVE_0)
    embedding_norm: bool = fact("the first block reads a norm of that sum", FLAG)
    block: str = fact(
        "how attention, FFN and norms follow each other, below", one_of(*BLOCKS),
        later={"reordered": ALL, "sandwich": WITHOUT_GPU},
    )
    block_scale: bool = fact("what leaves a block is times a number of its layer", FLAG, bodies=WITHOUT_GPU)
    mixer_only_layers: tuple[int, ...] = fact(
        "layers without an FFN and its norm, whose arrays they lack", LAYERS, *ALONE,
        Rule("not in all layers", lambda d: len(d.mixer_only_layers) < d.n_layers),
        Rule("in layers that are not dense", lambda d: not {*d.mixer_only_layers} & {*d.dense_layers}),
        bodies=WITHOUT_GPU,
    )
    ffn_only_layers: tuple[int, ...] = fact(
        "layers without attention, or what stands in its place, and its norm", LAYERS, *ALONE, bodies=WITHOUT_GPU
    )
    layer_embedding: int = fact(
        "P, numbers that each layer has of a token in an embedding of its own, below", COUNT,
        Rule("in a sandwich block of `rms` norms", lambda d: d.block == "sandwich" and d.norm == "rms"),
        Rule("with a tied head and no learned positions", lambda d: d.tied_head and d.positions != "learned"),
        bodies=WITHOUT_GPU,
    )
    shared_norm: bool = fact(
        "attention and FFN read the same norm", FLAG, Rule("in a parallel block", lambda d: d.block == "parallel")
    )
    norm: str = given(
        "`rms`: x / √(mean x² + eps) · w; `layer`: (x − mean) / √(var + eps) · w + b", one_of("rms", "layer")
    )
    norm_eps: float = given("eps", ABOVE_0)
    final_norm: bool = fact("there is a norm before the head", FLAG, default=True)
    qk_norm: bool = fact("each head of queries and keys goes through an `rms` norm before its rotation", FLAG)
    joint_qk_norm: bool = fact(
        "this norm is over all heads of a token's queries, and over all keys", FLAG, of="qk_norm"
    )
    v_norm: bool = fact(
        "each head of values goes through an `rms` norm too", FLAG, of="qk_norm", bodies=WITHOUT_GPU
    )
    keys_as_values: bool = fact(
        "in layers without a window values are keys before these norms, and have no rows of their own", FLAG,
        of="v_norm", bodies=WITHOUT_GPU,
    )
    shared_key_layers: tuple[int, ...] = fact(
        "layers that read keys and values of the last other one before them that has the same window, or none",
        LAYERS, Rule("behind such a one", lambda d: all(d.keys_of(n) < n for n in d.shared_key_layers)),
        Rule("without `joint_qk_norm` and `latent_rank`, with attention in all layers",
             lambda d: not (d.joint_qk_norm or d.latent_rank or d.recurs or d.ffn_only_layers)),
        bodies=WITHOUT_GPU,
    )
    narrow_ff: int = fact(
        "neurons of an FFN in the other layers; by neuron, zeros follow them", COUNT,
        Rule("up to F of one expert without biases",
             lambda d: d.narrow_ff <= d.d_ff and d.n_experts == 1 and not d.ffn_bias),
        of="shared_key_layers", bodies=WITHOUT_GPU,
    )
    inner_norms: bool = fact(
        "what attention's last matrix reads, and the h of the FFN, go through an `rms` norm before it, below", FLAG,
        Rule("with `rms` norms, a sparse activation and a single expert",
             lambda d: d.norm == "rms" and d.sparse and d.n_experts == 1),
        bodies=WITHOUT_GPU,
    )
    positions: str = given(
        "`rope`: the first 2J numbers of each head are two halves, rotated by angles position · frequency_j; "
        "`learned`: row `position + position_offset` of a table is added to the embedding; `none`: there are none",
        one_of("rope", "learned", "none"),
        Rule("rope where there are `rotary_frequencies`", lambda d: (d.positions == "rope") == (d.rotary_dim > 0)),
        later={"none": WITHOUT_GPU},
    )
    rotary_frequencies: tuple[float, ...] = fact(
        "J angles for one position, which include the model's scaling; below 0 where the model turns the other way",
        TURNS, Rule("up to J = E/2", lambda d: d.rotary_dim <= d.head_dim), later={"negative": ALL},
    )
    rotary_scale: float = fact("factor of cosine and sine (YaRN's attention factor)", ABOVE_0, WITH_ROPE)
    unrotated_layers: tuple[int, ...] = fact("layers whose queries and keys are not rotated", LAYERS, WITH_ROPE)
    window: int = fact(
        "positions that a token sees in some layers, its own included", COUNT, of="windowed_layers", bodies=WITHOUT_GPU
    )
    windowed_layers: tuple[int, ...] = fact(
        "layers with this window; in the others a token sees all positions up to its own", LAYERS, of="window"
    )
    windowed_head_dim: int = fact(
        "E of layers with a window; 0 for `head_dim`", COUNT,
        Rule("from as many as are rotated on",
             lambda d: d.windowed_head_dim >= 2 * len(d.windowed_frequencies or d.rotary_frequencies)),
        of="windowed_layers", bodies=WITHOUT_GPU,
    )
    windowed_kv_heads: int = fact(
        "G of layers with a window; 0 for `n_kv_heads`", COUNT,
        Rule("as a divisor of `n_heads`", lambda d: d.n_heads % d.windowed_kv_heads == 0),
        of="windowed_layers", bodies=WITHOUT_GPU,
    )
    windowed_frequencies: tuple[float, ...] = fact(
        "the angles of layers with a window, where they have others", ANGLES,
        Rule("up to half of these layers' E",
             lambda d: 2 * len(d.windowed_frequencies) <= (d.windowed_head_dim or d.head_dim)),
        of="windowed_layers",
    )
    windowed_scale: float = fact(
        "factor of cosine and sine in layers with a window; 0.0 for `rotary_scale`", FROM_0, of="windowed_frequencies"
    )
    query_growth: float = fact(
        "a query at position p is times 1 + this · ln(1 + ⌊p / `query_period`⌋)", FROM_0,
        Rule("without `latent_rank`", lambda d: not d.latent_rank), of="query_period", bodies=WITHOUT_GPU,
    )
    query_period: int = fact("positions in which that factor stays", COUNT, of="query_growth")
    position_offset: int = fact(
        "row of position 0 in the table", COUNT, Rule("with learned positions", lambda d: d.positions == "learned")
    )
    ffn: str = given("the FFN's form (section 4)", one_of("plain", "gated"))
    activation: str = given(
        "of the FFN (section 4)", one_of(*ACTIVATIONS),
        Rule("in a gated FFN: `drelu` and `clamped_swiglu`",
             lambda d: d.activation not in GATED_ACTIVATIONS or d.ffn == "gated"),
        later={"clamped_swiglu": WITHOUT_GPU},
    )
    threshold: float = fact(
        "the activation's value a(z) counts as 0 unless it is above this (FATReLU, ProSparse)",
        FROM_0, Rule("with relu, relu2 or drelu", lambda d: d.sparse),
    )
    tied_head: bool = given("the output head is the embedding", FLAG)
    head_bias: bool = fact("the head has a bias", FLAG)
    logit_scale: float = fact("factor of the logits, bias included", ABOVE_0)
    logit_softcap: float = fact("c: a logit z, scaled, becomes c tanh(z / c); 0.0 for none", FROM_0)
    qkv_bias: bool = given("queries, keys and values have a bias", FLAG)
    out_bias: bool = given("attention's last matrix has a bias", FLAG)
    ffn_bias: bool = given("the FFN's matrices have biases", FLAG)
    expert_bias: bool = fact(
        "the FFN's last bias is one of each expert, weighed as its result is", FLAG,
        Rule("with `ffn_bias`, not in a reordered or sandwich block",
             lambda d: d.ffn_bias and d.block not in ("reordered", "sandwich")),
        of="n_experts", bodies=WITHOUT_GPU,
    )
    attention_sinks: bool = fact(
        "each head has a sink: e^sink is added to the sum that divides a softmax of scores", FLAG, bodies=WITHOUT_GPU
    )
    output_gate: bool = fact(
        "what attention's last matrix reads is multiplied by s(gate · x), number by number", FLAG,
        Rule("without `latent_rank`", lambda d: not d.latent_rank), bodies=WITHOUT_GPU,
    )
    recurrence: str = fact(
        "what stands in attention's place in some layers, below", one_of("none", *RECURRENCES), HAS_STATES,
        of="recurrent_layers", bodies=WITHOUT_GPU,
    )
    recurrent_layers: tuple[int, ...] = fact("layers that have it", LAYERS, *IN_SOME_LAYERS, of="recurrence")
    state_heads: int = fact("heads with a state", COUNT, of="recurrent_layers")
    state_key_heads: int = fact("G', heads of keys, which consecutive ones share", COUNT, EVENLY, of="recurrent_layers")
    state_heads_tiled: bool = fact("head h shares number h mod G' of them", FLAG, of="recurrent_layers")
    state_key_dim: int = fact("numbers of a key", COUNT, of="recurrent_layers")
    state_value_dim: int = fact("numbers of a value", COUNT, of="recurrent_layers")
    state_columns: int = fact("positions of the convolution, a token's own included", COUNT, of="recurrent_layers")
    state_least_step: float = fact(
        "the least t of mamba2", FROM_0, Rule("with mamba2", lambda d: d.recurrence == "mamba2"), of="recurrent_layers"
    )
    state_norm_eps: float = fact("eps of the norm of a recurrence's sums; 0.0 for `norm_eps`", FROM_0, of="recurrence")
    latent_rank: int = fact(
        "L, where keys and values of all heads are products with one latent of L numbers (MLA). A head of queries then "
        "has E numbers, of which the last 2J are rotated, as are 2J more that all heads share as the rest of their key",
        COUNT, Rule("with rope, a G of 1 and 2J < E",
             lambda d: d.positions == "rope" and d.n_kv_heads == 1 and d.rotary_dim < d.head_dim),
        Rule("without norms of queries, windows, layers without rotation and sinks",
             lambda d: not (d.qk_norm or d.windowed_layers or d.unrotated_layers or d.attention_sinks)),
        bodies=WITHOUT_GPU,
    )
    query_rank: int = fact(
        "numbers of a latent from which the queries are made; 0 where they are made of x", COUNT, of="latent_rank"
    )
    value_dim: int = fact("numbers of a head's values; 0 for E", COUNT, of="latent_rank")
    score_scale: float = fact("factor of scores beside 1 / √E (YaRN's mscale, squared)", ABOVE_0, bodies=WITHOUT_GPU)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class Decoder(Facts):
    """A decoder, and what follows from its facts."""

    def of_layer(self, layer: int) -> Self:
        """The decoder as one layer computes it: without what the layer lacks of angles, a window, a recurrence, a
        router, heads or an FFN, and without facts of attention where a recurrence stands in its place."""
        return replace(self, **_differences(self, layer))

    def uncut(self) -> Self:
        """The same with what every token takes, shared experts or a dense layer's FFN, in one piece."""
        if not (self.experts_shared or self.dense_layers) or self.last_ff:
            return self
        less = max(0, self.experts_shared - 1)
        return replace(
            self,
            n_experts=self.n_experts - less,
            experts_per_token=self.experts_per_token - less,
            experts_shared=self.experts_shared - less,
            last_ff=(1 + less) * self.d_ff,
        )

    def problems(self) -> Iterator[str]:
        """Yield values that no model has; where all are possible, those that contradict others. Names stand first."""
        value, every = vars(self), facts().items()
        wrong = [(n, f"expected {own.values.text}") for n, own in every if not own.values.holds(value[n], self)]
        given = {} if wrong else {name: own for name, own in every if value[name] != own.default}
        for name, own in given.items():
            if own.of and own.of not in given:
                wrong.append((name, f"allowed only with {own.of}"))
            wrong += [(name, f"allowed only {rule.text}") for rule in own.rules if not rule.holds(self)]
        yield from (f"{name}: {reprlib.repr(value[name])}, {told.replace('`', '')}" for name, told in wrong)

    def without(self, *names: str) -> Self:
        """The decoder with the defaults of these facts, and of all that are not given without them."""
        usual: dict[str, Any] = {n: own.default for n, own in facts().items() if {n, own.of} & {*names}}
        return replace(self, **usual)

    def without_exceptions(self) -> Self:
        """The decoder as a layer computes it that is in none of its lists of layers."""
        return self.without(*(name for name, own in facts().items() if own.values is LAYERS))

    def within_context(self, window: int) -> int:
        """The length of a window of text, at most the context."""
        return min(window, self.context_length)

    @property
    def kinds(self) -> "tuple[Self, ...]":
        """The decoder as its layers compute it (see `of_layer`), each kind of them once."""
        return tuple(dict.fromkeys(self.of_layer(n) for n in range(self.n_layers)))

    @property
    def router_apart(self) -> bool:
        """Whether the router reads something else than the experts."""
        return self.router_early or self.router_norm or self.expert_width > 0

    def keys_of(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: mostly itself; without any before it, itself too."""
        kind, own = layer in self.windowed_layers, (n for n in range(layer, -1, -1) if n not in self.shared_key_layers)
        return next((n for n in own if (n in self.windowed_layers) == kind), layer)

    @property
    def shares_keys(self) -> bool:
        """Whether this layer has no keys and values of its own (see `of_layer`)."""
        return len(self.shared_key_layers) > 0

    @property
    def whole_ff(self) -> int:
        """Neurons of this layer's FFN that are not zeros (see `of_layer`)."""
        return self.d_ff if self.shares_keys else self.narrow_ff or self.d_ff

    def seen(self, layer: int, positions: int) -> int:
        """How many of so many positions the newest token sees in a layer."""
        return min(self.window, positions) if layer in self.windowed_layers else positions

    @property
    def sparse(self) -> bool:
        """Whether the activation is exactly zero for inactive neurons, so that skipping them is exact."""
        return self.activation in SPARSE_ACTIVATIONS

    @property
    def recurs(self) -> bool:
        """Whether a recurrence stands in attention's place, in some layers or in this one (see `of_layer`)."""
        return self.recurrence != "none"

    @property
    def has_mixer(self) -> bool:
        """Whether this layer has attention, or what stands in its place (see `of_layer`)."""
        return self.recurs or self.n_heads > 0

    @property
    def has_ffn(self) -> bool:
        """Whether this layer has an FFN (see `of_layer`)."""
        return self.d_ff > 0

    @property
    def ffn_layers(self) -> list[int]:
        """The layers that have an FFN."""
        return [n for n in range(self.n_layers) if n not in self.mixer_only_layers]

    @property
    def state_gates(self) -> int:
        """Numbers of all heads with a state beside those of the convolution."""
        return RECURRENCES[self.recurrence].gates * self.state_heads if self.recurs else 0

    @property
    def mixed_width(self) -> int:
        """Numbers that attention's last matrix reads: those of all heads."""
        if self.recurs:
            return self.state_heads * self.state_value_dim
        return self.n_heads * (self.value_dim or self.head_dim)

    @property
    def cached_width(self) -> int:
        """Numbers of a row of the cache: a head's key or value, or a latent with the rotated numbers behind it."""
        return self.latent_rank + self.rotary_dim if self.latent_rank else self.head_dim

    @property
    def gate_width(self) -> int:
        """Numbers that what attention's last matrix reads, or a convolution, is multiplied by; 0 for none."""
        factors = RECURRENCES[self.recurrence].factors if self.recurs else int(self.output_gate)
        return factors * self.mixed_width

    @property
    def qkv_parts(self) -> tuple[int, int, int]:
        """Numbers of queries, of keys and of values that attention's first matrix makes of a token; of mamba2, those of
        values come first and of queries last."""
        if self.recurs:
            keys = self.state_key_heads * self.state_key_dim
            return (self.mixed_width, keys, keys) if self.recurrence == "mamba2" else (keys, keys, self.mixed_width)
        keys = 0 if self.shares_keys else self.n_kv_heads * self.head_dim
        return self.n_heads * self.head_dim, keys, keys

    @property
    def qkv_rows(self) -> int:
        """Rows of attention's first matrix."""
        return self.qkv_width - (self.qkv_parts[2] if self.keys_as_values else 0)

    @property
    def qkv_width(self) -> int:
        """Numbers that attention's first matrix makes of a token."""
        if self.latent_rank:
            return (self.query_rank or self.n_heads * self.head_dim) + self.cached_width
        return sum(self.qkv_parts)

    @property
    def neuron_width(self) -> int:
        """Numbers that neurons read and make."""
        return self.expert_width or self.d_model

    @property
    def neurons(self) -> int:
        """Neurons of a layer, all experts together."""
        return self.n_experts * self.d_ff

    @property
    def experts_routed(self) -> int:
        """Experts of a layer that the router chooses among."""
        return self.n_experts - self.experts_shared

    @property
    def has_even_groups(self) -> bool:
        """Whether the routed experts are equally many a group, and those of the groups taken are enough."""
        groups, size = self.router_groups, self.experts_routed // self.router_groups
        enough = self.experts_per_token - self.experts_shared <= self.router_groups_taken * size
        return groups * size == self.experts_routed and size >= self.router_group_top and enough

    @property
    def dense_experts(self) -> int:
        """Experts that a dense layer's FFN is made of."""
        return 1 if self.last_ff else -(-self.dense_ff // self.d_ff)

    @property
    def uncut_layers(self) -> tuple[int, ...]:
        """Dense layers with an FFN in one piece, beside layers of experts."""
        return self.dense_layers if self.last_ff else ()

    @property
    def experts_alike(self) -> int:
        """Experts of F neurons, whose matrices lie in the same arrays."""
        return self.experts_routed if self.last_ff else self.n_experts

    @property
    def widest_ff(self) -> int:
        """Neurons of the expert that has most."""
        return max(self.d_ff, self.last_ff, self.dense_ff if self.last_ff else 0)

    @property
    def most_experts(self) -> int:
        """Most experts that a token takes in a layer."""
        return max(self.experts_per_token, self.dense_experts)

    @property
    def rotary_dim(self) -> int:
        """Number of leading columns of a head that are rotated."""
        return 2 * len(self.rotary_frequencies)


def _differences(d: Decoder, layer: int) -> dict[str, Any]:
    """The fields of a decoder as one layer computes it that are not those of the model."""
    found: dict[str, Any] = {"window": 0, "shared_key_layers": ()}
    if d.recurrent_layers:
        found |= _NO_ATTENTION if layer in d.recurrent_layers else {"recurrence": "none"}
    if layer in d.windowed_layers:
        del found["window"]
        found["keys_as_values"] = False
        found["head_dim"] = d.windowed_head_dim or d.head_dim
        found["n_kv_heads"] = d.windowed_kv_heads or d.n_kv_heads
        found["rotary_frequencies"] = d.windowed_frequencies or d.rotary_frequencies
        found["rotary_scale"] = d.windowed_scale or d.rotary_scale
    if layer in d.shared_key_layers:
        del found["shared_key_layers"]
        found |= {"keys_as_values": False, "v_norm": False}
    if layer in d.unrotated_layers:
        found["rotary_frequencies"] = ()
    if layer in d.uncut_layers:
        found |= {"n_experts": 1, "experts_per_token": 1, "experts_shared": 0, "d_ff": d.dense_ff, "last_ff": 0}
    elif layer in d.dense_layers:
        found |= dict.fromkeys(("experts_per_token", "experts_shared"), d.dense_experts)
    if layer in d.mixer_only_layers:
        found["d_ff"] = 0
    if layer in d.ffn_only_layers:
        found |= {**_NO_ATTENTION, "n_heads": 0, "n_kv_heads": 0}
    return found


_NO_ATTENTION = dict.fromkeys(
    ("qkv_bias", "out_bias", "qk_norm", "v_norm", "keys_as_values", "output_gate", "attention_sinks"), False
)
"""Facts that a layer lacks in which a recurrence stands in attention's place."""
