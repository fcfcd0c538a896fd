"""The manifest: the one truth of an artifact, as frozen dataclasses and canonical JSON."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, cast

from pi_runtime.artifact.checks import RUNGS, contradictions
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.decoding import canonical_json, decode, parse_json
from pi_runtime.artifact.sizes import SIGNS
from pi_runtime.errors import ArtifactError

__all__ = [
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "REMEDY",
    "RUNGS",
    "ArrayEntry",
    "FileEntry",
    "Layer",
    "Manifest",
    "Plan",
    "Text",
    "wrong_version",
]

FORMAT_NAME = "pi-artifact"
FORMAT_VERSION = 3
REMEDY = "copy or download it again, or pack it anew with `pi-compile build`"


@dataclass(frozen=True, kw_only=True)
class ArrayEntry:
    """Where one array lies: its bytes are `file[offset : offset + nbytes]`, C order, padded rows."""

    format: str
    shape: tuple[int, ...]
    """Logical shape; `FORMATS[format].stored_shape(shape)` is the stored one."""
    offset: int
    nbytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Where one plain file (tokenizer, chat template) lies."""

    offset: int
    nbytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Layer:
    """How one layer's FFN is to be run."""

    rung: str
    """`dense`: every neuron;  `gate`: `first` for all, `rest` where the activation is not 0;  `threshold`: `rest` where
    its magnitude is above `threshold`;  `predicted`: `first` on the rows whose score  up · (down · x) + bias  is
    above 0, then `rest` where it is not 0;  `sign`: `first` on the rows where columns in which weight and input have
    the same sign, less those in which they differ, are more than `margin`, then likewise."""
    rank: int | None = None
    """Rank of the predictor, None where there is none."""
    threshold: float = 0.0
    """On the rung `threshold`: magnitudes of the activation up to here count as 0 (CATS)."""
    margin: int = 0
    """On the rung `sign` (SparseInfer); an input of 0 counts as above 0."""

    @property
    def predictor(self) -> int | None:
        """Rank of the predictor that is stored, `SIGNS`, or None."""
        return SIGNS if self.rung == "sign" else self.rank


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One placement: which parts belong on the GPU. Sides are `cpu` or `gpu`."""

    objective: str
    """What it is best at: `time` or `hot-mass`."""
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
    """Of expert e in layer l the neurons [0, cuts[l · experts + e]) of its stored order belong to the GPU."""
    embedding: str
    head: str
    predicted_ns: int
    """Time of a token by the compiler's model, 0 if it has none."""
    digest: str
    """Of what it was solved from, and of the answer: sha256, for comparing with a lock."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """How text becomes tokens and back."""

    prefix_ids: tuple[int, ...]
    """Tokens that the model expects before any text (begin-of-text), () if none."""
    end_ids: tuple[int, ...]
    """Tokens that end a generation."""
    bos_token: str | None = None
    eos_token: str | None = None
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    """Further named tokens a chat template may use."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything an artifact says of itself."""

    format: str = FORMAT_NAME
    version: int = FORMAT_VERSION
    decoder: Decoder
    formats: Mapping[str, str]
    """Weight format of each part: embedding, attention, ffn, head, predictor."""
    layers: tuple[Layer, ...]
    profiled_tokens: int
    """Tokens behind the stored counts; 0 where the model was not profiled (then order and counts are absent)."""
    plans: tuple[Plan, ...] = ()
    """Placements by rising budget."""
    text: Text
    generation: Mapping[str, Any]
    """The checkpoint's generation defaults: temperature, top_k, top_p, min_p, repetition_penalty, do_sample."""
    recipe: Mapping[str, Any]
    provenance: Mapping[str, Any]
    arrays: Mapping[str, ArrayEntry]
    files: Mapping[str, FileEntry]

    def to_json(self) -> bytes:
        """Canonical JSON. Raises ValueError for what JSON cannot say (NaN in a recipe)."""
        return canonical_json(self)

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self:
        """Parse and check. `where` names the file in messages. Raises ArtifactError listing every problem."""
        try:
            value = parse_json(data)
        except ValueError as error:
            raise ArtifactError(f"{where}: the manifest is not JSON", found=error) from None
        if not isinstance(value, dict) or value.get("format") != FORMAT_NAME:
            raise ArtifactError(f"{where}: not a {FORMAT_NAME} manifest")
        if value.get("version") != FORMAT_VERSION:
            raise wrong_version(where, value.get("version"))
        problems: list[str] = []
        manifest = cast("Self", decode(cls, value, "manifest", problems))
        problems = problems or list(contradictions(manifest))
        if problems:
            raise ArtifactError(f"{where}: invalid manifest", found=_listed(problems), remedy=REMEDY)
        if not _spelled(manifest, data):
            raise ArtifactError(f"{where}: the manifest is not in canonical JSON", remedy=REMEDY)
        return manifest


def _listed(problems: list[str]) -> str:
    """Problems a line each; they may quote a hostile file, so nothing unprintable and nothing endless."""
    lines = ["".join(c if c.isprintable() else "�" for c in p[:300]) for p in problems[:50]]
    more = [f"… and {len(problems) - 50} more"] if len(problems) > 50 else []
    return "".join(f"\n    {line}" for line in (*lines, *more))


def wrong_version(where: str, version: object) -> ArtifactError:
    """The error for an artifact of another format version."""
    return ArtifactError(
        f"{where}: artifact format version {reprlib.repr(version)}",
        expected=f"version {FORMAT_VERSION}",
        remedy="pack it again with `pi-compile build`, or use the release that wrote it",
    )


def _spelled(manifest: Manifest, data: bytes) -> bool:
    """Whether `data` is the canonical spelling of the manifest."""
    try:
        return manifest.to_json() == data
    except ValueError:  # lone surrogates
        return False
