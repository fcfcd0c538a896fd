"""The manifest: the one truth of an artifact, as frozen dataclasses and canonical JSON.

Canonical JSON: UTF-8, keys sorted, no spaces, non-ASCII characters as themselves, floats as Python's `repr`.
`Manifest.from_json` reports every problem with its path, not only the first.
"""

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, Self

from pi_runtime.artifact.decoder import ACTIVATIONS, FFNS, NORMS, POSITIONS, Decoder
from pi_runtime.artifact.formats import WEIGHT_FORMATS
from pi_runtime.artifact.sizes import PARTS, array_specs
from pi_runtime.errors import ArtifactError

FORMAT_NAME = "pi-artifact"
FORMAT_VERSION = 1
RUNGS = ("dense", "gate", "predicted")


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
    """`dense`: every neuron;  `gate`: `first` for all, `rest` where it is non-zero;  `predicted`: `first` on the
    rows whose score  up · (down · x) + bias  is above 0, then `rest` where non-zero."""
    rank: int | None = None
    """Rank of the predictor, None where there is none."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One placement: in layer l the neurons [0, cuts[l]) of the stored order belong to the GPU."""

    objective: str
    vram_bytes: int
    """Budget the plan was solved for."""
    used_bytes: int
    """GPU bytes it needs."""
    cuts: tuple[int, ...]


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
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self:
        """Parse and check. `where` names the file in messages. Raises ArtifactError listing every problem."""
        try:
            value = json.loads(data)
        except ValueError as error:
            raise ArtifactError(f"{where}: the manifest is not JSON", found=error) from None
        if not isinstance(value, dict) or value.get("format") != FORMAT_NAME:
            raise ArtifactError(f"{where}: not a {FORMAT_NAME} manifest")
        if value.get("version") != FORMAT_VERSION:
            raise ArtifactError(
                f"{where}: artifact format version {value.get('version')}",
                expected=f"version {FORMAT_VERSION}",
                remedy="pack it again with `pi-compile build`, or use the release that wrote it",
            )
        problems: list[str] = []
        manifest = _decode(cls, value, "manifest", problems)
        if not problems:
            problems = list(_contradictions(manifest))
        if problems:
            raise ArtifactError(f"{where}: invalid manifest", found="\n    " + "\n    ".join(problems))
        return typing.cast(Self, manifest)


def _contradictions(m: Manifest) -> typing.Iterator[str]:
    """What is well-typed and still cannot be."""
    d = m.decoder
    for name, allowed in (("norm", NORMS), ("positions", POSITIONS), ("ffn", FFNS), ("activation", ACTIVATIONS)):
        if getattr(d, name) not in allowed:
            yield f"decoder.{name}: {getattr(d, name)!r} is none of {', '.join(allowed)}"
    for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "context_length"):
        if not 1 <= getattr(d, name) < 2**31:
            yield f"decoder.{name}: {getattr(d, name)} is not a size"
            return
    if d.n_heads % d.n_kv_heads:
        yield f"decoder.n_kv_heads: {d.n_kv_heads} does not divide n_heads {d.n_heads}"
    if len(m.layers) != d.n_layers:
        yield f"layers: {len(m.layers)} entries for {d.n_layers} layers"
        return
    for n, layer in enumerate(m.layers):
        if layer.rung not in RUNGS:
            yield f"layers[{n}].rung: {layer.rung!r} is none of {', '.join(RUNGS)}"
        if layer.rung == "predicted" and layer.rank is None:
            yield f"layers[{n}]: rung predicted without a predictor"
        if layer.rank is not None and not 1 <= layer.rank <= d.d_model:
            yield f"layers[{n}].rank: {layer.rank} is not in 1…{d.d_model}"
    for n, plan in enumerate(m.plans):
        if len(plan.cuts) != d.n_layers or not all(0 <= cut <= d.d_ff for cut in plan.cuts):
            yield f"plans[{n}].cuts: not one cut in 0…{d.d_ff} for each layer"
    wrong = {part: m.formats.get(part) for part in PARTS if m.formats.get(part) not in WEIGHT_FORMATS}
    if wrong or set(m.formats) != set(PARTS):
        yield f"formats: each of {', '.join(PARTS)} needs one of {', '.join(WEIGHT_FORMATS)}"
        return
    expected = array_specs(d, m.formats, [layer.rank for layer in m.layers], m.profiled_tokens > 0)
    for name in sorted(expected.keys() ^ m.arrays.keys()):
        yield f"arrays.{name}: {'missing' if name in expected else 'not an array of this decoder'}"
    for name, spec in expected.items():
        entry = m.arrays.get(name)
        if entry and (entry.format, entry.shape, entry.nbytes) != (spec.format, spec.shape, spec.nbytes):
            yield (
                f"arrays.{name}: {entry.format} {entry.shape} in {entry.nbytes} bytes, "
                f"expected {spec.format} {spec.shape} in {spec.nbytes}"
            )
    ids = (*m.text.prefix_ids, *m.text.end_ids)
    if not all(0 <= i < d.vocab_size for i in ids):
        yield f"text: token ids {ids} outside the vocabulary of {d.vocab_size}"


def _decode(kind: Any, value: Any, path: str, problems: list[str]) -> Any:
    """JSON value → the type `kind`, noting in `problems` whatever does not match."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _decode_dataclass(kind, value, path, problems)
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(arguments[0], v, f"{path}[{n}]", problems) for n, v in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {k: _decode(arguments[1], v, f"{path}.{k}", problems) for k, v in value.items()}
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _decode(arguments[0], value, path, problems)
    # bool is a subclass of int, and 1 stands for 1.0 in no canonical file.
    if origin is None and type(value) is kind:
        return value
    problems.append(f"{path}: expected {getattr(kind, '__name__', kind)}, found {str(value)[:60]!r}")
    return None


def _decode_dataclass(kind: Any, value: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(value, dict):
        problems.append(f"{path}: expected an object, found {type(value).__name__}")
        return None
    hints, known = typing.get_type_hints(kind), {f.name: f for f in fields(kind)}
    problems += [f"{path}.{key}: unknown key" for key in value.keys() - known.keys()]
    decoded = {}
    for name, f in known.items():
        if name in value:
            decoded[name] = _decode(hints[name], value[name], f"{path}.{name}", problems)
        elif f.default is MISSING and f.default_factory is MISSING:
            problems.append(f"{path}.{name}: missing")
    return None if problems else kind(**decoded)
