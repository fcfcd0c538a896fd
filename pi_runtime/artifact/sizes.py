"""The arrays of an artifact and their bytes: the one count that all parts of the toolchain share.

Names are paths in the Zarr hierarchy. Shape letters: V vocabulary, P positions, D model width, W embedding width, H
heads, G key-value heads, E head width, X experts, F neurons of all experts, k = 1 (plain: fc2) or 2 (gated: up, down)
rows of `rest` a neuron, R predictor rank.

    embedding [V, W]   positions [P, D]   head [V, W]   head_bias [V]   final_norm/weight [D]   final_norm/bias [D]
    embedding_norm/weight [D]   embedding_norm/bias [D]
    embedding_in [D, W]   embedding_out [W, D]   only where W is not D: x = in · e, and the head reads out · x
    layer_embedding [V, L·P]   layer_embedding_in [L·P, D]   layer_embedding_norm [P]   the rows of L layers
    layers/N/ffn/embedding_gate [P, D]   …/embedding_out [D, P]   …/embedding_norm/weight [D]   beside them
    layers/N/attention/norm/{weight,bias} [D]   …/qkv [(H+2G)·E, D]   …/qkv_bias   …/out [D, H·E]   …/out_bias [D]
    layers/N/attention/sinks [H]
    layers/N/attention/qkv [Q + L + P, D]   …/q_norm [Q]   …/k_norm [L]   …/q_up [H·E, Q]   …/k_up [H·L, E − P]
    layers/N/attention/v_up [H·U, L]   …/out [D, H·U]   with a latent of L numbers beside P rotated ones and U values a
    head; Q is the queries' latent, or H·E without it. Rows of queries are those that are not rotated, head by head,
    then the first halves of the others, then the second ones
    layers/N/attention/gate [H·E, D]   what is multiplied with attention's sums goes through a sigmoid
    layers/N/attention/qkv [C, D]   …/conv [W, C]   …/gates [2·H, D] of b, then of a   …/decay [H]   …/decay_bias [H]
    …/state_norm [U]   …/gate [H·U, D]   …/out [D, H·U]   of a recurrence with H heads of U values, C channels of
    queries, keys and values, and a convolution of W positions; of mamba2 …/gates [H, D] of a, …/state_norm [H·U], and
    …/conv_bias [C]   …/skip [H] beside; of short_conv …/qkv [H·U, D] of v, …/gate [2·H·U, D] of b, then of c,
    …/conv and …/out alone
    layers/N/attention/{q_norm,k_norm} [E], or [H·E] and [G·E] where the norm is joint
    layers/N/attention/inner_norm [H·E], or [H·U]   layers/N/ffn/inner_norm [F]
    layers/N/attention/out_norm/{weight,bias} [D], layers/N/ffn/out_norm/{weight,bias} [D] of a sandwich block
    layers/N/ffn/norm/{weight,bias} [D]         …/first [F, D]        …/first_bias [F]
    layers/N/attention/qkv [H·E, D] and no …/k_norm and …/v_norm where the layer reads the keys of another
    layers/N/attention/v [G·E, D]   …/k [G·E, D]   where values, or keys too, have a format of their own: `qkv` has
    the other rows then
    layers/N/ffn/rest [F, k, D]                 …/up_bias [F]         …/down_bias [D], or …/expert_bias [X, D]
    layers/N/ffn/up [F, D]   …/down [X·D, F / X]   in place of `rest` in the layout `matrices`; `up` only where it is
    gated; `down` has D rows an expert
    layers/N/ffn/shared_first [S, D]   …/shared_up [S, D]   …/shared_down [D, S]   of a shared expert of S neurons,
    which the arrays above then lack; those of a dense layer have its own neurons, as if they were one expert's
    layers/N/ffn/beside_first [B, D]   …/beside_up [B, D]   …/beside_down [D, B]   …/beside_norm [D]
    …/beside_out_norm [D]   …/experts_out_norm [D]   of another FFN beside the experts; `beside_up` only where it is
    gated, and its norms only in a sandwich block
    layers/N/ffn/experts_in [L, D]   …/experts_out [D, L]   where experts have L numbers: D of `first`, `rest`, `up`,
    `down` and `predictor/down` is L then
    layers/N/ffn/router_norm [D]   …/expert_scale [X]   layers/N/ffn/block_scale [1]   layers/N/attention/v_norm [E]
    layers/N/ffn/router [X, D]   …/{router_bias,router_choice_bias} [X]    where the router takes experts; behind the
    router's rows that of a gate of the shared ones
    layers/N/ffn/order [F]    original index of each stored neuron
    layers/N/ffn/counts [F]   how often it fired while profiling
    layers/N/predictor/down [X·R, D]   …/up [F, R]   …/bias [F]

`first` decides whether a neuron fires; `rest` is needed only when it does. Rows are neurons, expert by expert, and in
each expert the hottest comes first; `down` has R rows an expert. Every matrix NAME […, D] of a block format is followed
by NAME_scales […, ⌈D / 32⌉], or […, 2, ⌈D / 32⌉] with its blocks' minima or zeros; or […, R] with records of groups.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Self

from pi_runtime.artifact.decoder import RECURRENCES, Decoder
from pi_runtime.artifact.formats import BLOCK, FORMATS, GROUP
from pi_runtime.artifact.rungs import DENSE

LAYOUTS = BY_NEURON, WHOLE, MIXED = "neurons", "matrices", "mixed"
"""How FFNs are stored: by neuron, so that neurons can be skipped, placed, and read one by one; as the matrices that
checkpoints have, which keeps the blocks of `down`, is quicker, and is only for layers that compute every neuron; or
mixed: as matrices where the layer's rung is dense, else by neuron."""
PARTS = ("embedding", "attention", "ffn", "head", "predictor")
BESIDE = ("ffn/beside_first", "ffn/beside_up", "ffn/beside_down")
"""Matrices of an FFN beside the experts."""
SHARED = {f"ffn/shared_{name}": f"ffn/{name}" for name in ("first", "up", "down")}
"""Matrices of a shared expert of its own width, and those of the others."""
NARROWING = ("ffn/experts_in", "ffn/experts_out")
"""Matrices between the model's width and that of the experts."""
OF_EMBEDDING = ("ffn/embedding_gate", "ffn/embedding_out")
"""Matrices of a layer that reads a row of its own of the layers' embedding."""
_EVERY_LAYOUT = {
    **dict.fromkeys(("attention/qkv", "attention/gate", "attention/out"), "attention"),
    **dict.fromkeys((*BESIDE, *NARROWING, *OF_EMBEDDING), "ffn"),
}
MATRICES = {
    BY_NEURON: {**_EVERY_LAYOUT, **dict.fromkeys(("ffn/first", "ffn/rest"), "ffn")},
    WHOLE: {**_EVERY_LAYOUT, **dict.fromkeys((*SHARED.values(), *SHARED), "ffn")},
}
"""For each layout the matrices of a layer that may have a format of their own, and their parts."""
ALL_MATRICES = MATRICES[BY_NEURON] | MATRICES[WHOLE]
APART = dict.fromkeys(("attention/k", "attention/v"), "attention")
"""Matrices that `qkv` has the rows of, unless they have a format of their own; keys only where values do."""


def part_of(array: str) -> str | None:
    """The part of the model (see `PARTS`) that an array belongs to; None for final norms and the head's bias."""
    if array.startswith("layers/"):
        return array.split("/")[2]
    if array in ("embedding", "embedding_in", "embedding_out", "positions", "layer_embedding", "layer_embedding_in"):
        return "embedding"
    return "head" if array == "head" else None


def layer_layouts(layout: str, rungs: Iterable[str]) -> tuple[str, ...]:
    """How the FFN of each layer is stored, by neuron or as matrices."""
    return tuple(WHOLE if layout == WHOLE or (layout == MIXED and rung == DENSE) else BY_NEURON for rung in rungs)


@dataclass(frozen=True)
class ArraySpec:
    """Number format and logical shape of one array."""

    format: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return FORMATS[self.format].nbytes(self.shape)

    @property
    def scales(self) -> "ArraySpec | None":
        """The array of scales beside this one, if its format has them."""
        if not FORMATS[self.format].quantised:
            return None
        fmt = FORMATS[self.format]
        return ArraySpec(fmt.scale_format, fmt.scales_shape(self.shape))

    @property
    def nbytes_with_scales(self) -> int:
        return self.nbytes + (self.scales.nbytes if self.scales else 0)


def scales_name(name: str) -> str:
    """Name of the array that holds the scales of array `name`."""
    return f"{name}_scales"


def is_scales(name: str) -> bool:
    return name.endswith("_scales")


def without_scales(name: str) -> str:
    """Name of the array itself, given its own or that of its scales."""
    return name.removesuffix("_scales")


@dataclass(frozen=True)
class FfnBytes:
    """Stored bytes of the parts of one layer's FFN, row padding included."""

    d: Decoder
    ffn_format: str
    predictor_format: str

    @classmethod
    def of(cls, d: Decoder, formats: Mapping[str, str]) -> Self:
        return cls(d, formats["ffn"], formats["predictor"])

    @property
    def first(self) -> int:
        """Bytes of one neuron's row of `first`."""
        return ArraySpec(self.ffn_format, (1, self.d.neuron_width)).nbytes_with_scales

    @property
    def rest(self) -> int:
        """Bytes of one neuron's rows of `rest`."""
        return self.first * (2 if self.d.ffn == "gated" else 1)

    def predictor(self, rank: int) -> int:
        """Bytes of the predictor of one expert's neurons: down, up and bias."""
        down = ArraySpec(self.predictor_format, (rank, self.d.neuron_width)).nbytes_with_scales
        return down + self.d.d_ff * self.predictor_row(rank)

    def predictor_row(self, rank: int) -> int:
        """Bytes of one neuron's row of `up` and its bias."""
        return ArraySpec(self.predictor_format, (1, rank)).nbytes_with_scales + 4


def array_specs(
    decoder: Decoder,
    formats: Mapping[str, str],
    ranks: Sequence[int | None],
    profiled: bool,
    layout: str | Sequence[str] = BY_NEURON,
) -> dict[str, ArraySpec]:
    """Every array of an artifact, in the order in which it is written.

    `formats` maps each of `PARTS` to a weight format, and may name matrices (`layers/N/` and one of `MATRICES`) with
    another one. `ranks` has a predictor rank or None for each layer. `profiled` says whether neuron order and
    counts are stored, `layout` how FFNs are, or those of each layer (see `LAYOUTS`). Norms, biases and routers are
    always f32.
    """
    plain = _plain_specs(decoder, formats, ranks, profiled, layout)
    return with_scales((name, ArraySpec(formats.get(name, spec.format), spec.shape)) for name, spec in plain)


def with_scales(arrays: Iterable[tuple[str, ArraySpec]]) -> dict[str, ArraySpec]:
    """Arrays by name, each of a block format followed by its scales."""
    specs = {}
    for name, spec in arrays:
        specs[name] = spec
        if spec.scales is not None:
            specs[scales_name(name)] = spec.scales
    return specs


def _plain_specs(
    d: Decoder, formats: Mapping[str, str], ranks: Sequence[int | None], profiled: bool, layout: str | Sequence[str]
) -> Iterator[tuple[str, ArraySpec]]:
    layouts = [layout] * len(ranks) if isinstance(layout, str) else layout
    narrow = d.d_embedding != d.d_model
    yield "embedding", ArraySpec(formats["embedding"], (d.vocab_size, d.d_embedding))
    if narrow:
        yield "embedding_in", ArraySpec(formats["embedding"], (d.d_model, d.d_embedding))
    if d.positions == "learned":
        yield "positions", ArraySpec(formats["embedding"], (d.context_length + d.position_offset, d.d_model))
    if d.embedding_norm:
        yield from _norm(d, "embedding_norm")
    if p := d.layer_embedding:
        yield "layer_embedding", ArraySpec(formats["embedding"], (d.vocab_size, d.n_layers * p))
        yield "layer_embedding_in", ArraySpec(formats["embedding"], (d.n_layers * p, d.d_model))
        yield "layer_embedding_norm", ArraySpec("f32", (p,))
    for n, (rank, own) in enumerate(zip(ranks, layouts, strict=True)):
        for name, spec in layer_specs(d.of_layer(n), formats, rank, profiled, own):
            if name == "attention/qkv":
                yield from _apart(d.of_layer(n), f"layers/{n}/", formats, spec)
            else:
                yield f"layers/{n}/{name}", spec
    if d.final_norm:
        yield from _norm(d, "final_norm")
    if narrow:
        yield "embedding_out", ArraySpec(formats["embedding"], (d.d_embedding, d.d_model))
    if not d.tied_head:
        yield "head", ArraySpec(formats["head"], (d.vocab_size, d.d_embedding))
    if d.head_bias:
        yield "head_bias", ArraySpec("f32", (d.vocab_size,))


def _apart(d: Decoder, layer: str, formats: Mapping[str, str], qkv: ArraySpec) -> Iterator[tuple[str, ArraySpec]]:
    """The matrix of queries, keys and values, and what stands apart from it."""
    rows = d.qkv_parts[1]
    apart = [layer + name for name in APART if layer + name in formats]
    yield f"{layer}attention/qkv", ArraySpec(qkv.format, (qkv.shape[0] - rows * len(apart), qkv.shape[1]))
    yield from ((name, ArraySpec(qkv.format, (rows, qkv.shape[1]))) for name in apart)


def misfits(specs: Mapping[str, ArraySpec]) -> list[str]:
    """Names of arrays whose format needs rows of whole groups that are not summed, which theirs are not."""
    whole = {name: spec for name, spec in specs.items() if not FORMATS[spec.format].summed}
    cut = {n for n, spec in whole.items() if FORMATS[spec.format].grouped and spec.shape[-1] % (GROUP * BLOCK)}
    return [n for n in whole if n in cut or n.endswith("ffn/rest")]


def layer_specs(
    d: Decoder, formats: Mapping[str, str], rank: int | None, profiled: bool, layout: str
) -> Iterator[tuple[str, ArraySpec]]:
    """The arrays of a layer, scales apart, without `layers/N/`; `d` is the decoder as this layer computes it."""
    if d.has_mixer:
        yield from _attention_specs(d, formats["attention"])
    if d.has_ffn:
        yield from _ffn_specs(d, formats, rank, profiled, layout)


def _ffn_specs(
    d: Decoder, formats: Mapping[str, str], rank: int | None, profiled: bool, layout: str
) -> Iterator[tuple[str, ArraySpec]]:
    if not d.shared_norm:
        yield from _norm(d, "ffn/norm")
    if d.block == "sandwich":
        yield from _norm(d, "ffn/out_norm")
    yield from _router_specs(d)
    if d.expert_width:
        shapes = (d.expert_width, d.d_model), (d.d_model, d.expert_width)
        yield from ((name, ArraySpec(formats["ffn"], shape)) for name, shape in zip(NARROWING, shapes, strict=True))
    if d.beside_ff:
        yield from _beside_specs(d, formats["ffn"])
    if p := d.layer_embedding:
        shapes = (p, d.d_model), (d.d_model, p)
        yield from ((name, ArraySpec(formats["ffn"], shape)) for name, shape in zip(OF_EMBEDDING, shapes, strict=True))
        yield from _norm(d, "ffn/embedding_norm")
    if d.block_scale:
        yield "ffn/block_scale", ArraySpec("f32", (1,))
    yield from _ffn_matrices(d, formats["ffn"], layout)
    if d.ffn_bias:
        yield "ffn/first_bias", ArraySpec("f32", (d.neurons,))
        if d.ffn == "gated":
            yield "ffn/up_bias", ArraySpec("f32", (d.neurons,))
        if d.expert_bias:
            yield "ffn/expert_bias", ArraySpec("f32", (d.n_experts, d.d_model))
        else:
            yield "ffn/down_bias", ArraySpec("f32", (d.d_model,))
    if profiled and layout == BY_NEURON:
        yield "ffn/order", ArraySpec("u32", (d.neurons,))
        yield "ffn/counts", ArraySpec("u64", (d.neurons,))
    if rank is not None:
        yield "predictor/down", ArraySpec(formats["predictor"], (d.n_experts * rank, d.neuron_width))
        yield "predictor/up", ArraySpec(formats["predictor"], (d.neurons, rank))
        yield "predictor/bias", ArraySpec("f32", (d.neurons,))


def _router_specs(d: Decoder) -> Iterator[tuple[str, ArraySpec]]:
    if d.n_experts == 1 or d.experts_per_token == d.experts_shared:
        return
    yield "ffn/router", ArraySpec("f32", (d.experts_routed + d.shared_gate, d.d_model))
    if d.router_norm:
        yield "ffn/router_norm", ArraySpec("f32", (d.d_model,))
    given = {"router_bias": d.router_bias, "router_choice_bias": d.router_choice_bias, "expert_scale": d.expert_scale}
    yield from ((f"ffn/{name}", ArraySpec("f32", (d.experts_routed,))) for name, has in given.items() if has)


def _beside_specs(d: Decoder, fmt: str) -> Iterator[tuple[str, ArraySpec]]:
    wide, narrow = (d.beside_ff, d.d_model), (d.d_model, d.beside_ff)
    matrices = zip(BESIDE, (wide, wide if d.ffn == "gated" else None, narrow), strict=True)
    yield from ((name, ArraySpec(fmt, shape)) for name, shape in matrices if shape)
    for name in ("beside_norm", "beside_out_norm", "experts_out_norm") if d.block == "sandwich" else ():
        yield f"ffn/{name}", ArraySpec("f32", (d.d_model,))


def _ffn_matrices(d: Decoder, fmt: str, layout: str) -> Iterator[tuple[str, ArraySpec]]:
    whole = d.experts_alike * d.whole_ff, d.neuron_width
    by_neuron = (d.neurons, d.neuron_width) if layout == BY_NEURON else whole
    yield "ffn/first", ArraySpec(fmt, by_neuron)
    if d.inner_norms:
        yield "ffn/inner_norm", ArraySpec("f32", (d.neurons,))
    if layout == BY_NEURON:
        yield "ffn/rest", ArraySpec(fmt, (d.neurons, 2 if d.ffn == "gated" else 1, d.neuron_width))
        return
    if d.ffn == "gated":
        yield "ffn/up", ArraySpec(fmt, by_neuron)
    yield "ffn/down", ArraySpec(fmt, (d.experts_alike * d.neuron_width, d.whole_ff))
    if d.experts_alike < d.n_experts:
        one = replace(d, n_experts=1, d_ff=d.last_ff, last_ff=0)
        yield from ((name.replace("ffn/", "ffn/shared_"), spec) for name, spec in _ffn_matrices(one, fmt, layout))


def _attention_specs(d: Decoder, fmt: str) -> Iterator[tuple[str, ArraySpec]]:
    qkv = d.qkv_rows
    yield from _norm(d, "attention/norm")
    yield "attention/qkv", ArraySpec(fmt, (qkv, d.d_model))
    if d.qkv_bias:
        yield "attention/qkv_bias", ArraySpec("f32", (qkv,))
    if d.latent_rank:
        yield from _latent_specs(d, fmt)
    if d.recurs:
        yield "attention/conv", ArraySpec("f32", (d.state_columns, d.qkv_width))
        arrays = RECURRENCES[d.recurrence].arrays(d).items()
        yield from ((f"attention/{name}", ArraySpec("f32", shape)) for name, shape in arrays)
    if d.gate_width:
        yield "attention/gate", ArraySpec(fmt, (d.gate_width, d.d_model))
    if d.qk_norm:
        queries, keys = (d.n_heads, d.n_kv_heads) if d.joint_qk_norm else (1, 1)
        yield "attention/q_norm", ArraySpec("f32", (queries * d.head_dim,))
        if not d.shares_keys:
            yield "attention/k_norm", ArraySpec("f32", (keys * d.head_dim,))
    if d.v_norm:
        yield "attention/v_norm", ArraySpec("f32", (d.head_dim,))
    if d.attention_sinks:
        yield "attention/sinks", ArraySpec("f32", (d.n_heads,))
    if d.inner_norms:
        yield "attention/inner_norm", ArraySpec("f32", (d.mixed_width,))
    yield "attention/out", ArraySpec(fmt, (d.d_model, d.mixed_width))
    if d.out_bias:
        yield "attention/out_bias", ArraySpec("f32", (d.d_model,))
    if d.block == "sandwich":
        yield from _norm(d, "attention/out_norm")


def _latent_specs(d: Decoder, fmt: str) -> Iterator[tuple[str, ArraySpec]]:
    if d.query_rank:
        yield "attention/q_norm", ArraySpec("f32", (d.query_rank,))
        yield "attention/q_up", ArraySpec(fmt, (d.n_heads * d.head_dim, d.query_rank))
    yield "attention/k_norm", ArraySpec("f32", (d.latent_rank,))
    yield "attention/k_up", ArraySpec(fmt, (d.n_heads * d.latent_rank, d.head_dim - d.rotary_dim))
    yield "attention/v_up", ArraySpec(fmt, (d.mixed_width, d.latent_rank))


def _norm(d: Decoder, name: str) -> list[tuple[str, ArraySpec]]:
    parts = ("weight", "bias") if d.norm == "layer" else ("weight",)
    return [(f"{name}/{part}", ArraySpec("f32", (d.d_model,))) for part in parts]


def active_parameters(d: Decoder) -> int:
    """Number of weights that a token meets: those of other experts are left out."""
    idle = (d.n_experts - d.experts_per_token) * d.d_ff * d.neuron_width * (3 if d.ffn == "gated" else 2)
    return parameters(d) - (len(d.ffn_layers) - len(d.dense_layers)) * idle


def parameters(d: Decoder) -> int:
    """Number of weights of a model, norms and biases included."""
    specs = array_specs(d.uncut(), dict.fromkeys(PARTS, "f32"), [None] * d.n_layers, profiled=False, layout=WHOLE)
    return sum(prod(spec.shape) for spec in specs.values())
