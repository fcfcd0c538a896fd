"""Pack: write a checkpoint as one artifact, array by array, with one block in memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_compile.checkpoint import Checkpoint
from pi_compile.checkpoint.checkpoint import NEURON_ARRAYS, part_of
from pi_compile.checkpoint.eagle3 import PublishedHead
from pi_compile.checkpoint.part_formats import KEEP, resolve_formats
from pi_compile.errors import ProfileError
from pi_compile.files import file_digest
from pi_compile.results import ActivationProfile, PredictorSet, QuantisedWeights, Stored
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import FORMATS, WEIGHT_FORMATS, Format
from pi_runtime.artifact.guess_head import PREFIX
from pi_runtime.artifact.layout import manifest_specs, place_arrays
from pi_runtime.artifact.quantisation import RoundingError, dequantise
from pi_runtime.artifact.rungs import exact_rung
from pi_runtime.artifact.schema import ArrayEntry, Layer, Manifest, Plan, RowPlan
from pi_runtime.artifact.sizes import MIXED, PARTS, WHOLE, ArraySpec, array_specs, is_scales, layer_layouts
from pi_runtime.artifact.writer import ArtifactWriter

Array = npt.NDArray[Any]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class PackSpec:
    """How a checkpoint is to be packed."""

    formats: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(PARTS, KEEP))
    """Number format of each of embedding, attention, ffn, head and predictor (`WEIGHT_FORMATS`), or `keep`; and of
    matrices that have fewer bytes."""
    guess: PublishedHead | None = None
    """A head that drafts tokens, to be stored beside the model."""
    mixed: bool = False
    """Whether the FFNs of dense layers are stored as matrices, the others by neuron."""


@dataclass(frozen=True, kw_only=True)
class PackResult:
    """The artifact that was written."""

    path: Path
    sha256: str
    """Digest of the whole file."""
    nbytes: int
    manifest: Manifest
    errors: Mapping[str, RoundingError]
    """Rounding errors of each part that is quantised."""
    notices: tuple[str, ...]
    """Lines for the user about tokenizer and template."""


def pack(
    checkpoint: Checkpoint,
    spec: PackSpec,
    output: Path,
    *,
    recipe: Mapping[str, Any],
    profile: ActivationProfile | None = None,
    predictor_set: PredictorSet | None = None,
    quantised: QuantisedWeights | None = None,
    plans: Sequence[Plan] = (),
    row_plans: Sequence[RowPlan] = (),
    progress: Progress | None = None,
) -> PackResult:
    """Write the artifact of a checkpoint to `output`; the same inputs give the same bytes.

    `recipe` is stored as it is. `profile` orders the neurons and is stored. `predictor_set` gives rungs and predictors,
    `quantised` matrices that are rounded already. `progress` is called with the bytes done and their total. Memory
    holds one block, one layer's matrix where neurons are reordered, and the scales of one quantised matrix. Raises
    CheckpointError for values that are not finite or that a format cannot hold, and what `ArtifactWriter` raises.
    """
    _check_profile(profile, checkpoint)
    text, formats = checkpoint.text_files, part_formats(checkpoint, spec)
    layers, layout = _layers(checkpoint.decoder, predictor_set), checkpoint.layout
    if spec.mixed:
        layout, layouts = MIXED, layer_layouts(MIXED, (layer.rung for layer in layers))
        checkpoint, formats = replace(checkpoint, layout=layouts), _by_layout(formats, layouts)
    manifest = Manifest(
        decoder=checkpoint.decoder,
        formats=formats,
        layers=layers,
        ffn_layout=layout,
        profiled_tokens=0 if profile is None else profile.tokens,
        plans=tuple(plans),
        row_plans=tuple(row_plans),
        guess=None if spec.guess is None else spec.guess.head,
        guess_layers=int(checkpoint.drafts),
        text=text.text,
        generation=text.generation,
        recipe=recipe,
        provenance=_provenance(checkpoint, profile, predictor_set),
        arrays={},
        files={},
    )
    specs = manifest_specs(manifest)
    expected = place_arrays(specs)[1] + sum(map(len, text.files.values()))
    with ArtifactWriter(output, expected_nbytes=expected) as writer:
        values = _ArrayValues(checkpoint, profile, predictor_set, quantised, specs, spec.guess)
        plain = {n: s for n, s in specs.items() if not is_scales(n)}  # scales are written with the array they belong to
        meter = _ProgressMeter(sum(s.nbytes_with_scales for s in plain.values()), progress)
        errors: dict[str, RoundingError] = {}
        for name, array_spec in plain.items():
            blocks = meter.watch(array_spec, values.blocks(name, array_spec))
            error, part = _written(writer, name, array_spec, blocks, values), part_of(name)
            if error is not None and part is not None:
                errors[part] = errors.get(part, RoundingError()) + error
        for name, data in text.files.items():
            writer.add_file(name, data)
        manifest = writer.finish(manifest)
    digest, nbytes = file_digest(output), output.stat().st_size
    return PackResult(path=output, sha256=digest, nbytes=nbytes, manifest=manifest, errors=errors, notices=text.notices)


def _check_profile(profile: ActivationProfile | None, checkpoint: Checkpoint) -> None:
    if profile is not None and profile.decoder != checkpoint.decoder:
        raise ProfileError(
            "the activation profile is of another model", expected=checkpoint.decoder, found=profile.decoder
        )


def part_formats(checkpoint: Checkpoint, spec: PackSpec) -> dict[str, str]:
    """Number format of every part of the artifact (see `resolve_formats`), and of matrices that have another one."""
    parts = resolve_formats(checkpoint.formats(), spec.formats, tied_head=checkpoint.decoder.tied_head)
    return parts | {name: fmt for name, fmt in spec.formats.items() if name not in PARTS}


def _by_layout(formats: Mapping[str, str], layouts: Sequence[str]) -> dict[str, str]:
    """The formats with the names of the matrices that each layer has: `up` and `down` have that of `rest`."""
    found = dict(formats)
    for n, layout in enumerate(layouts):
        rest = found.pop(f"layers/{n}/ffn/rest", None) if layout == WHOLE else None
        found |= {} if rest is None else {f"layers/{n}/ffn/{name}": rest for name in ("up", "down")}
    return found


def _written(
    writer: ArtifactWriter, name: str, spec: ArraySpec, blocks: Iterable[Array], values: "_ArrayValues"
) -> RoundingError | None:
    """Write one array, from blocks of its values or as it is stored already; returns what rounding cost."""
    stored, on_grid = values.rounded(name), values.on_grid(name)
    if on_grid is not None:
        return _written_on_grid(writer, name, spec, blocks, on_grid)
    if stored is None:
        return writer.add_array(name, spec, blocks, powers=values.checkpoint.source.powers)
    error = _rounding_error(FORMATS[spec.format], stored, blocks)
    writer.add_stored(name, spec, *stored)
    return error


def _written_on_grid(
    writer: ArtifactWriter, name: str, spec: ArraySpec, blocks: Iterable[Array], stored: Iterable[Stored]
) -> RoundingError:
    """Write one array of which tensors are taken bit for bit; returns what rounding the others cost."""
    error, fmt = RoundingError(), FORMATS[spec.format]

    def checked() -> Iterator[Stored]:
        nonlocal error
        for block, (integers, scales) in zip(blocks, stored, strict=True):
            error += RoundingError.between(block, dequantise(fmt, integers, scales, block.shape[-1]))
            yield integers, scales

    writer.add_stored_blocks(name, spec, checked())
    return error


def _rounding_error(fmt: Format, stored: Stored, blocks: Iterable[Array]) -> RoundingError:
    """The error of a matrix that is rounded already; `blocks` are its values, checked as they are read."""
    error, row = RoundingError(), 0
    for block in blocks:
        integers, scales = (array[row : row + len(block)] for array in stored)
        error += RoundingError.between(block, dequantise(fmt, integers, scales, block.shape[-1]))
        row += len(block)
    return error


class _ProgressMeter:
    """Reports how many bytes of all arrays are done."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._done = total, progress, 0

    def watch(self, spec: ArraySpec, blocks: Iterable[Array]) -> Iterator[Array]:
        row = spec.nbytes_with_scales // spec.shape[0]
        for block in blocks:
            yield block
            self._done += row * len(block)
            if self._progress is not None:
                self._progress(self._done, self._total)


@dataclass(frozen=True)
class _ArrayValues:
    """The values of each array, from the checkpoint, the profile or the predictors."""

    checkpoint: Checkpoint
    profile: ActivationProfile | None
    predictor_set: PredictorSet | None
    quantised: QuantisedWeights | None
    specs: Mapping[str, ArraySpec] | Mapping[str, ArrayEntry]
    guess: PublishedHead | None

    def rounded(self, name: str) -> Stored | None:
        """The stored form of a matrix that is rounded already, in the order of the artifact's rows."""
        if self.quantised is None or name not in self.quantised:
            return None
        order = self._order(name)
        integers, scales = self.quantised[name]
        return (integers, scales) if order is None else (integers[order], scales[order])

    def on_grid(self, name: str) -> Iterator[Stored] | None:
        """The stored form of a matrix of which some tensors lie on its format's grid already, block by block."""
        if name not in self.checkpoint.array_shapes or self.rounded(name) is not None:
            return None
        return self.checkpoint.stored_blocks(name, FORMATS[self.specs[name].format], self._order(name))

    def _order(self, name: str) -> Array | None:
        """The order of an array's neurons in the artifact; None where it stays, or there are none."""
        if self.profile is None or not name.startswith("layers/"):
            return None
        layer, _, local = name.removeprefix("layers/").partition("/")
        by_neuron = local in NEURON_ARRAYS and f"layers/{layer}/ffn/order" in self.specs
        return self.profile.order[int(layer)] if by_neuron else None

    def blocks(self, name: str, spec: ArraySpec) -> Iterable[Array]:
        if name.startswith(PREFIX) and self.guess is not None:
            return [self.guess.arrays[name.removeprefix(PREFIX)]]
        layer, _, local = name.removeprefix("layers/").partition("/")
        if local.startswith("predictor/"):
            return [self._predictor(int(layer), local.removeprefix("predictor/"))]
        if self.profile is not None and local == "ffn/order":
            return [self.profile.order[int(layer)].astype(np.uint32)]
        if self.profile is not None and local == "ffn/counts":
            return [self.profile.ordered_counts()[int(layer)].astype(np.uint64)]
        return self.checkpoint.fitting(name, spec.format, self.checkpoint.blocks(name, self._order(name)))

    def _predictor(self, layer: int, part: str) -> Array:
        assert self.predictor_set is not None
        predictor = self.predictor_set.predictors[layer]
        assert predictor is not None
        values = predictor[("down", "up", "bias").index(part)]
        # `down` has one row a rank, the others have one row a neuron.
        return values if part == "down" or self.profile is None else values[self.profile.order[layer]]


def _layers(decoder: Decoder, predictor_set: PredictorSet | None) -> tuple[Layer, ...]:
    if predictor_set is None:
        return (Layer(rung=exact_rung(decoder.sparse)),) * decoder.n_layers
    return tuple(row.layer for row in predictor_set.rows)


def _provenance(
    checkpoint: Checkpoint, profile: ActivationProfile | None, predictor_set: PredictorSet | None
) -> dict[str, Any]:
    made_from: dict[str, Any] = {"digest": checkpoint.digest(), "files": checkpoint.file_digests}
    if checkpoint.ignored_config:
        made_from["ignored_config"] = list(checkpoint.ignored_config)
    if checkpoint.declared_activation:
        made_from["declared_activation"] = checkpoint.declared_activation
    results = {"profile": profile, "trained": predictor_set}
    digests = {name: result.digest() for name, result in results.items() if result is not None}
    return {"pi_toolchain": version("pi-toolchain"), "checkpoint": made_from, **digests}


def specs_of(checkpoint: Checkpoint, formats: Mapping[str, str]) -> dict[str, ArraySpec]:
    """The arrays of an artifact without predictors, whose parts and matrices have these formats."""
    d = checkpoint.decoder
    return array_specs(d, formats, [None] * d.n_layers, False, checkpoint.layout)


def rounded_parts(checkpoint: Checkpoint, formats: Mapping[str, str]) -> dict[str, list[str]]:
    """The parts of which something is rounded, in the order of an artifact, with the formats of all their matrices."""
    found: dict[str, set[str]] = {}
    rounded = set()
    for name, spec in specs_of(checkpoint, formats).items():
        # Routers are always f32.
        if len(spec.shape) > 1 and spec.format in WEIGHT_FORMATS and not name.endswith("/router"):
            part = str(part_of(name))
            found.setdefault(part, set()).add(spec.format)
            if not _holds(checkpoint, name, spec.format):
                rounded.add(part)
    return {part: sorted(found[part]) for part in checkpoint.formats() if part in rounded}


def _holds(checkpoint: Checkpoint, name: str, fmt: str) -> bool:
    """Whether a format holds an array bit for bit."""
    if FORMATS[fmt].quantised:
        return checkpoint.keeps(name, fmt)
    return FORMATS[fmt].number == "float32" or all(
        checkpoint.source.dtype(tensor) == fmt for tensor in checkpoint.tensor_names(name)
    )
