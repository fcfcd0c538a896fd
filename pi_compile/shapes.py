"""The sizes of a model, known from its config alone: enough to plan and place, before anything can run it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.sizes import PARTS, ArraySpec, array_specs


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
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated, at most."""
        return self.head_dim if self.positions == "rope" else 0

    @property
    def sparse(self) -> bool:
        """Whether most activations are exactly zero."""
        return "relu" in self.activation

    @classmethod
    def of(cls, d: Decoder) -> Self:
        """The shape of a decoder that the runtime knows."""
        shared = (name for name in cls.__dataclass_fields__ if hasattr(d, name))
        return cls(**{name: getattr(d, name) for name in shared})

    def decoder(self) -> Decoder:
        """The decoder of this shape. For sizes only: its function is not known."""
        shared = (name for name in Decoder.__dataclass_fields__ if name in self.__dataclass_fields__)
        rotary = (1.0,) * (self.rotary_dim // 2)
        fields = {name: getattr(self, name) for name in shared}
        return Decoder(
            **fields, norm_eps=1e-5, rotary_frequencies=rotary, block="parallel" if self.shared_norm else "sequential"
        )


def shape_specs(
    shape: ModelShape, formats: Mapping[str, str], ranks: Sequence[int | None], profiled: bool
) -> dict[str, ArraySpec]:
    """Every array of an artifact of this shape, as `array_specs` has them."""
    return array_specs(shape.decoder(), formats, ranks, profiled)


def parameters(shape: ModelShape) -> int:
    """Weights of the model, norms and biases included."""
    specs = shape_specs(shape, dict.fromkeys(PARTS, "f32"), [None] * shape.n_layers, profiled=False)
    return sum(prod(spec.shape) for spec in specs.values())
