"""The sizes of a model, known from its config alone: enough to plan and place, before anything can run it.

Legend as in `pi_runtime.artifact.sizes`, and X experts. What a `Decoder` can say has the arrays of `array_specs`;
beyond it:

    layers/N/attention/norm only, where attention and FFN stand side by side and share their norm
    layers/N/attention/{q_norm,k_norm} [E]
    layers/N/ffn/router [X, D]     layers/N/ffn/{first,rest,order,counts} over X·F neurons, expert by expert
    layers/N/predictor/{down [X·R, D], up [X·F, R]}
    embedding_in [D, W], embedding_out [W, D] beside an embedding [V, W] narrower than the model     head_bias [V]
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.sizes import PARTS, ArraySpec, array_specs, is_scales, scales_name


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What decides how large a model's parts are; names as in `Decoder`."""

    family: str
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    """Neurons of one FFN; with experts, of one expert."""
    context_length: int
    norm: str
    positions: str
    """`rope`, which stores nothing, or `learned`, a table."""
    position_offset: int = 0
    ffn: str
    activation: str
    tied_head: bool
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    n_experts: int = 1
    experts_per_token: int = 1
    """Experts that the router takes for a token; of one expert there is no router."""
    shared_norm: bool = False
    """Whether attention and FFN read the same norm's output."""
    final_norm: bool = True
    qk_norm: bool = False
    """Whether each head of queries and keys is normalised (RMS)."""
    d_embedding: int
    """Width of the embedding, W."""
    head_bias: bool = False

    @property
    def neurons(self) -> int:
        """Neurons of a layer, all experts together."""
        return self.n_experts * self.d_ff

    @property
    def sparse(self) -> bool:
        """Whether most activations are exactly zero."""
        return "relu" in self.activation

    @classmethod
    def of(cls, d: Decoder) -> Self:
        """The shape of a decoder that the runtime knows."""
        shared = (name for name in cls.__dataclass_fields__ if hasattr(d, name))
        return cls(**{name: getattr(d, name) for name in shared}, d_embedding=d.d_model)

    def decoder(self) -> Decoder:
        """The decoder nearest to it, with the neurons of all experts in one FFN. For sizes only: it may not run."""
        return Decoder(
            family=self.family,
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            d_ff=self.neurons,
            context_length=self.context_length,
            norm=self.norm,
            norm_eps=1e-5,
            positions=self.positions,
            rope_theta=0.0,
            position_offset=self.position_offset,
            ffn=self.ffn,
            activation=self.activation,
            tied_head=self.tied_head,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            ffn_bias=self.ffn_bias,
        )


def shape_specs(
    shape: ModelShape, formats: Mapping[str, str], ranks: Sequence[int | None], profiled: bool
) -> dict[str, ArraySpec]:
    """Every array of an artifact of this shape, as `array_specs` has them."""
    specs: dict[str, ArraySpec] = {}
    for name, spec in _adapted(shape, formats, ranks, profiled):
        specs[name] = spec
        if spec.scales is not None:
            specs[scales_name(name)] = spec.scales
    return specs


def parameters(shape: ModelShape) -> int:
    """Weights of the model, norms and biases included."""
    specs = shape_specs(shape, dict.fromkeys(PARTS, "f32"), [None] * shape.n_layers, profiled=False)
    return sum(prod(spec.shape) for spec in specs.values())


def _adapted(
    s: ModelShape, formats: Mapping[str, str], ranks: Sequence[int | None], profiled: bool
) -> Iterator[tuple[str, ArraySpec]]:
    for name, spec in array_specs(s.decoder(), formats, ranks, profiled).items():
        part = name.split("/", 2)[2] if name.startswith("layers/") else name
        if is_scales(name) or (s.shared_norm and part.startswith("ffn/norm")):
            continue
        if not s.final_norm and name.startswith("final_norm"):
            continue
        if part == "embedding" and s.d_embedding != s.d_model:
            yield from _narrow_embedding(s, formats["embedding"])
        elif part == "head" and s.d_embedding != s.d_model:
            yield name, ArraySpec(formats["head"], (s.vocab_size, s.d_embedding))
        elif part == "predictor/down":
            yield name, ArraySpec(spec.format, (s.n_experts * spec.shape[0], spec.shape[1]))
        else:
            yield name, spec
        if part == "attention/out" and s.qk_norm:
            yield from ((name.replace("out", norm), ArraySpec("f32", (s.head_dim,))) for norm in ("q_norm", "k_norm"))
        if part == "ffn/rest" and s.n_experts > 1:
            yield name.replace("rest", "router"), ArraySpec("f32", (s.n_experts, s.d_model))
    if s.head_bias:
        yield "head_bias", ArraySpec("f32", (s.vocab_size,))


def _narrow_embedding(s: ModelShape, fmt: str) -> Iterator[tuple[str, ArraySpec]]:
    yield "embedding", ArraySpec(fmt, (s.vocab_size, s.d_embedding))
    yield "embedding_in", ArraySpec(fmt, (s.d_model, s.d_embedding))
    yield "embedding_out", ArraySpec(fmt, (s.d_embedding, s.d_model))
