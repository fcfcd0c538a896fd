"""What a family of checkpoints is to us: its config keys, its decoder, and where each artifact array comes from.

An adapter is data plus one function from config to `Decoder`. Tensor names are relative to a prefix, since the bare
model and the model with its head are saved under different ones. D model width, F neurons, N layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_runtime.artifact.decoder import Decoder


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor that an array is made of."""

    name: str
    """Name without the family's prefix; `{n}` stands for the layer."""
    transposed: bool = False
    """Whether it is stored as [D, F] and wanted as [F, D]."""


Table = Mapping[str, tuple[Piece, ...]]
"""Artifact array → its pieces, joined along axis 0; the pieces of `ffn/rest` [F, k, D] are joined along axis 1."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One family."""

    family: str
    """`model_type` of its config.json."""
    architectures: tuple[str, ...]
    """Classes whose checkpoints hold the whole decoder."""
    prefixes: tuple[str, ...]
    """What may stand before the names of `globals` and `layer`, tried in turn."""
    head: str
    """Name of the output head; never prefixed."""
    globals: Table
    layer: Table
    read_keys: frozenset[str]
    neutral_keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignorable: tuple[str, ...] = ()
    """Patterns of tensors without effect, such as buffers that older versions saved."""
    tied_by_default: bool
    """Value of `tie_word_embeddings` where the config has none."""
    decoder: Callable[[Config], Decoder]

    def pieces(self, array: str, prefix: str, tied_head: bool) -> tuple[Piece, ...]:
        """Pieces of one artifact array, with full tensor names."""
        if array == "head":
            assert not tied_head
            return (Piece(self.head),)
        if array.startswith("layers/"):
            _, n, rest = array.split("/", 2)
            return tuple(Piece(prefix + p.name.format(n=n), p.transposed) for p in self.layer[rest])
        return tuple(Piece(prefix + p.name, p.transposed) for p in self.globals[array])


def of(*names: str) -> tuple[Piece, ...]:
    """Pieces that are used as they are stored."""
    return tuple(Piece(name) for name in names)


def adapters() -> dict[str, Adapter]:
    """Every supported family by its `model_type`."""
    from pi_compile.checkpoint import llama, opt  # noqa: PLC0415 (they import this module)

    return {adapter.family: adapter for adapter in (llama.ADAPTER, opt.ADAPTER)}


def families() -> tuple[str, ...]:
    """Names of the supported families, sorted."""
    return tuple(sorted(adapters()))
