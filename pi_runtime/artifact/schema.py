"""The manifest: the one truth of an artifact, as frozen dataclasses."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.decoding import ALWAYS
from pi_runtime.artifact.guess_head import GuessHead
from pi_runtime.artifact.rungs import RUNGS, Rung, rung_in_mode
from pi_runtime.artifact.sizes import BY_NEURON, layer_layouts

FORMAT_NAME = "pi-artifact"
FORMAT_VERSION = 1
"""What is new in a file is a feature that it lists (see `features`), and no further version."""
OBJECTIVES = ("time", "hot-mass")
SIDES = ("cpu", "gpu")


@dataclass(frozen=True, kw_only=True)
class ArrayEntry:
    """The place of one array: its bytes are `file[offset : offset + nbytes]`, in C order with padded rows."""

    format: str
    shape: tuple[int, ...]
    """Logical shape; `FORMATS[format].stored_shape(shape)` is the stored one."""
    offset: int
    nbytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """The place of one plain file (tokenizer, chat template)."""

    offset: int
    nbytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The rung of one layer's FFN, with the parameters of the rung."""

    rung: str
    """Name of its rung; see `rungs`."""
    rank: int | None = None
    """Rank of the predictor, None where there is none."""
    threshold: float = 0.0
    """On the rung `threshold`: magnitudes of the activation up to here count as 0 (CATS)."""

    @property
    def kind(self) -> Rung:
        """What the registry says of the rung."""
        return RUNGS[self.rung]


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """One division of FFN rows between RAM and disk, for a run within a budget of RAM.

    Within a `Plan` it is of the rows that are the CPU's.
    """

    ram_bytes: int
    """Budget of RAM it was solved for, the process itself not counted."""
    context: int
    """Positions of the key-value cache that this budget is for."""
    pinned: tuple[int, ...]
    """Neurons of each layer whose rows stay in RAM, of each expert equally many of those that are stored first. On
    rungs that need `first` of every neuron these are rows of `rest`, else of both arrays. Within a `Plan`: of each
    layer and expert, those that are stored first behind its cut."""
    cached: tuple[int, ...]
    """Neurons of each layer for whose rows a cache has room, of the same arrays."""
    first: tuple[bool, ...]
    """Whether each layer's `first` is in RAM as a whole."""
    slot_bytes: int
    """Bytes of RAM that these rows take."""
    read_bytes: int
    """Bytes that a token is predicted to read."""
    predicted_ns: int
    """Time of a token by the compiler's model."""
    digest: str
    """sha256 of what it was solved from and of the solution, for comparing with a lock."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One placement: which parts belong on the GPU. Sides are `cpu` or `gpu`."""

    objective: str
    """What it was optimised for: `time` or `hot-mass`."""
    vram_bytes: int
    """GPU budget it was solved for."""
    used_bytes: int
    """GPU bytes it needs: parts, cache and buffers."""
    ram_bytes: int
    """Bytes of RAM it needs."""
    context: int
    """Positions of the key-value cache that these bytes are for."""
    attention: tuple[str, ...]
    """Side of each layer's attention with its cache, norms and predictor."""
    cuts: tuple[int, ...]
    """Neurons of each layer and expert that belong to the GPU: [0, cuts[l · experts + e]) in their stored order."""
    embedding: str
    head: str
    predicted_ns: int
    """Time of a token by the compiler's model; 0 if it has none."""
    digest: str
    """sha256 of what it was solved from and of the solution, for comparing with a lock."""
    rows: RowPlan | None = None
    """How the rows behind the cuts are divided between RAM and disk; None where RAM holds all of them."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """The tokens that begin and end a text, by id and by name."""

    prefix_ids: tuple[int, ...]
    """Tokens that the model expects before any text (begin-of-text); () if none."""
    end_ids: tuple[int, ...]
    """Tokens that end a generation."""
    bos_token: str | None = None
    eos_token: str | None = None
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    """Further named tokens a chat template may use."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that an artifact says about itself."""

    format: str = field(default=FORMAT_NAME, metadata=ALWAYS)
    version: int = field(default=FORMAT_VERSION, metadata=ALWAYS)
    features: tuple[str, ...] = ()
    """Features that the file uses, by name (see `features`)."""
    decoder: Decoder
    formats: Mapping[str, str]
    """Weight format of each part: embedding, attention, ffn, head, predictor. Matrices with fewer bytes than their part
    says are named too, as arrays are (see `sizes.MATRICES`)."""
    layers: tuple[Layer, ...]
    ffn_layout: str = BY_NEURON
    """How FFNs are stored (see `sizes.LAYOUTS`)."""
    profiled_tokens: int
    """Tokens behind the stored counts; 0 where the model was not profiled (then order and counts are absent)."""
    plans: tuple[Plan, ...] = ()
    """Placements by rising budget."""
    row_plans: tuple[RowPlan, ...] = ()
    """Divisions of rows between RAM and disk by rising budget."""
    guess: GuessHead | None = None
    """What drafts tokens."""
    guess_layers: int = 0
    """1 where a layer behind the last one drafts tokens (see `guess_head`), in place of a head of another form."""
    text: Text
    generation: Mapping[str, Any]
    """The checkpoint's generation defaults: temperature, top_k, top_p, min_p, repetition_penalty, do_sample."""
    recipe: Mapping[str, Any]
    provenance: Mapping[str, Any]
    arrays: Mapping[str, ArrayEntry]
    files: Mapping[str, FileEntry]

    @property
    def layouts(self) -> tuple[str, ...]:
        """How the FFN of each layer is stored."""
        return layer_layouts(self.ffn_layout, (layer.rung for layer in self.layers))

    @property
    def guess_states(self) -> tuple[int, ...]:
        """Layers whose inputs what drafts tokens reads; the number of layers stands for what leaves the last one."""
        own = (self.decoder.n_layers,) if self.guess_layers else ()
        return own if self.guess is None else self.guess.states

    def rungs_in(self, mode: str) -> dict[str, int]:
        """How many layers run on each rung in a mode, the most frequent rung first."""
        return dict(Counter(rung_in_mode(layer.rung, mode).name for layer in self.layers).most_common())
