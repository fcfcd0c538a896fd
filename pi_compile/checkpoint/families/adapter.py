"""What a family of checkpoints is to us: its config keys, its decoder, and where each artifact array comes from.

An adapter is data plus functions from config to `Decoder` and from `Decoder` to tensor names. Names are relative to a
prefix, since the bare model and the model with its head are saved under different ones. D model width, F neurons, N
layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_runtime.artifact.decoder import Decoder

HEAD = {"head": "lm_head.weight", "head_bias": "lm_head.bias"}
"""Tensors of the output head; never prefixed."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a fused tensor: it is `groups` blocks of `size` rows; of each those from `start` to `stop`."""

    groups: int
    size: int
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor, or some rows of it, that an array is made of."""

    name: str
    """Name without the family's prefix; `{n}` stands for the layer."""
    transposed: bool = False
    """Whether it is stored as [D, F] and wanted as [F, D]."""
    rows: Rows | None = None
    """Those taken, of several arrays that are stored as one; None for all."""
    addend: float = 0.0
    """Added to every value: 1 where the model multiplies by 1 + weight."""


Table = Mapping[str, tuple[Piece, ...]]
"""Artifact array → its pieces, joined along axis 0; those of `ffn/rest` [F, k, D] are k for each expert, joined along
axis 1."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One family."""

    family: str
    """`model_type` of its config.json."""
    older: tuple[str, ...] = ()
    """Further values of `model_type`."""
    architectures: tuple[str, ...]
    """Classes whose checkpoints hold the whole decoder."""
    prefixes: tuple[str, ...] = ("model.", "")
    """What may stand before the names of `globals` and `layer`, tried in turn."""
    globals: Table
    layer: Callable[[Decoder], Table]
    """Names of a layer's tensors, which may depend on the kind of decoder."""
    read_keys: frozenset[str]
    neutral_keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignorable: tuple[str, ...] = ()
    """Patterns of tensors without effect, such as buffers that older versions saved."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Pattern of tensors that are not used → the notice that says so."""
    planned_only: str = ""
    """Why its checkpoints cannot be read though its sizes are known; empty where they can."""
    decoder: Callable[[Config], Decoder]
    """Raises CheckpointError for a value it does not know; other keys are not its concern, see `check_keys`."""

    def pieces(self, array: str, prefix: str, decoder: Decoder) -> tuple[Piece, ...]:
        """Pieces of one artifact array, with full tensor names."""
        if array in HEAD:
            return of(HEAD[array])
        if not array.startswith("layers/"):
            return tuple(_named(piece, prefix) for piece in self.globals[array])
        _, n, rest = array.split("/", 2)
        return tuple(_named(piece, prefix, n) for piece in self.layer(decoder)[rest])


def _named(piece: Piece, prefix: str, layer: str = "") -> Piece:
    return Piece(prefix + piece.name.replace("{n}", layer), piece.transposed, piece.rows, piece.addend)


def of(*names: str) -> tuple[Piece, ...]:
    """Pieces that are used as they are stored."""
    return tuple(Piece(name) for name in names)


def both(array: str, name: str) -> dict[str, tuple[Piece, ...]]:
    """`array/weight` and `array/bias` of a module."""
    return {f"{array}/{part}": of(f"{name}.{part}") for part in ("weight", "bias")}
