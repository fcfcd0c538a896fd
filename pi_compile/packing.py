"""Pack: write a checkpoint as one artifact, array by array, with one block in memory."""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_compile.checkpoint import Checkpoint
from pi_compile.checkpoint.checkpoint import NEURON_ARRAYS, long_row_nbytes
from pi_compile.checkpoint.eagle3 import PublishedHead
from pi_compile.checkpoint.part_formats import KEEP, check_rows, resolve_formats
from pi_compile.checkpoint.stored_blocks import StoredBlock, check_underflow, rounded, stored_blocks
from pi_compile.results import ActivationProfile, PredictorSet, QuantisedWeights, Stored
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import FORMATS, WEIGHT_FORMATS
from pi_runtime.artifact.guess_head import PREFIX
from pi_runtime.artifact.layout import manifest_specs, place_arrays
from pi_runtime.artifact.quantisation import RoundingError, dequantise
from pi_runtime.artifact.rungs import exact_rung
from pi_runtime.artifact.schema import Layer, Manifest, Plan, RowPlan
from pi_runtime.artifact.sizes import (
    BY_NEURON,
    MIXED,
    PARTS,
    WHOLE,
    ArraySpec,
    array_specs,
    is_scales,
    layer_layouts,
    part_of,
)
from pi_runtime.artifact.writer import ArtifactWriter

Array = npt.NDArray[Any]
Progress = Callable[[int, int], None]
ALL_KEPT = "nothing is rounded: every tensor is kept bit for bit"


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
    if profile is not None:
        profile.check_model(checkpoint.decoder)
    text, formats = checkpoint.text_files, part_formats(checkpoint, spec)
    layers = _layers(checkpoint.decoder, predictor_set)
    checkpoint, formats = _laid_out(checkpoint.with_formats(formats), formats, layers if spec.mixed else ())
    manifest = Manifest(
        decoder=checkpoint.decoder,
        formats=formats,
        layers=layers,
        ffn_layout=MIXED if spec.mixed else str(checkpoint.layout),
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
        arrays = _Arrays(checkpoint, profile, predictor_set, quantised, spec.guess)
        plain = {n: s for n, s in specs.items() if not is_scales(n)}  # scales are written with the array they belong to
        meter = _ProgressMeter(sum(s.nbytes_with_scales for s in plain.values()), progress)
        errors: dict[str, RoundingError] = {}
        made = _ahead((name, task) for name, s in plain.items() for task in arrays.blocks(name, s.format))
        for name, blocks in groupby(made, key=itemgetter(0)):
            error, part = _write(writer, checkpoint, name, plain[name], meter.watch(plain[name], blocks)), part_of(name)
            if part is not None and plain[name].scales is not None:
                errors[part] = errors.get(part, RoundingError()) + error
        for name, data in text.files.items():
            writer.add_file(name, data)
        manifest = writer.finish(manifest)
    with output.open("rb") as file:
        digest, nbytes = hashlib.file_digest(file, "sha256").hexdigest(), output.stat().st_size
    return PackResult(path=output, sha256=digest, nbytes=nbytes, manifest=manifest, errors=errors, notices=text.notices)


def part_formats(checkpoint: Checkpoint, spec: PackSpec) -> dict[str, str]:
    """Number format of every part of the artifact (see `resolve_formats`), and of matrices that have another one: those
    that a checkpoint has in several, where the part is kept."""
    parts = resolve_formats(checkpoint.formats(), spec.formats, tied_head=checkpoint.decoder.tied_head)
    own = checkpoint.matrix_formats()
    parts |= {name: fmt for name, fmt in own.items() if spec.formats[str(part_of(name))] == KEEP}
    formats = parts | {name: fmt for name, fmt in spec.formats.items() if name not in PARTS}
    if spec.mixed or checkpoint.layout != BY_NEURON:
        formats |= _kept(checkpoint, formats)
    check_rows(specs_of(checkpoint, formats))
    return formats


def _kept(checkpoint: Checkpoint, formats: Mapping[str, str]) -> dict[str, str]:
    """The formats of FFNs' matrices that keep them bit for bit in fewer bytes than those in which a recipe has what no
    format keeps by neuron."""
    if checkpoint.in_layout(BY_NEURON).format("ffn") in FORMATS:
        return {}
    own = {name: fmt for name, fmt in checkpoint.array_formats.items() if part_of(name) == "ffn" and fmt in FORMATS}
    wide = {name: long_row_nbytes(formats.get(name, formats["ffn"])) for name in own}
    return {name: fmt for name, fmt in own.items() if FORMATS[fmt].quantised and long_row_nbytes(fmt) < wide[name]}


def _laid_out(
    checkpoint: Checkpoint, formats: Mapping[str, str], layers: Sequence[Layer]
) -> tuple[Checkpoint, dict[str, str]]:
    """Both with matrices where a layer is dense: `up` and `down` have the format of `rest`, or one that keeps them in
    fewer bytes. Without layers as is."""
    if not layers:
        return checkpoint, dict(formats)
    layouts, found = layer_layouts(MIXED, (layer.rung for layer in layers)), dict(formats)
    for n, layout in enumerate(layouts):
        rest = found.pop(f"layers/{n}/ffn/rest", None) if layout == WHOLE else None
        found |= {} if rest is None else {f"layers/{n}/ffn/{name}": rest for name in ("up", "down")}
    laid_out = replace(checkpoint, layout=layouts)
    return laid_out, found | _kept(laid_out, found)


def _write(
    writer: ArtifactWriter, checkpoint: Checkpoint, name: str, spec: ArraySpec, blocks: Iterable[StoredBlock]
) -> RoundingError:
    """Write one array from its blocks; returns what rounding them cost."""
    error, lost, of = RoundingError(), 0.0, 0.0

    def summed() -> Iterator[tuple[Array, Array | None]]:
        nonlocal error, lost, of
        for block in blocks:
            error, lost, of = error + (block.error or RoundingError()), lost + block.lost, of + block.of
            yield block.stored, block.scales

    writer.add_stored_blocks(name, spec, summed())
    check_underflow(checkpoint, name, spec.format, lost, of)
    return error


def _ahead(tasks: Iterable[tuple[str, Callable[[], StoredBlock]]]) -> Iterator[tuple[str, StoredBlock]]:
    """What the tasks make, in their order; while one is written, threads make the next ones."""
    threads = min(4, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="pi-pack") as pool:
        waiting: deque[tuple[str, Future[StoredBlock]]] = deque()
        try:
            for name, task in tasks:
                waiting.append((name, pool.submit(task)))
                if len(waiting) > threads:
                    first, made = waiting.popleft()
                    yield first, made.result()
            for name, made in waiting:
                yield name, made.result()
        finally:
            pool.shutdown(cancel_futures=True)


class _ProgressMeter:
    """Reports how many bytes of all arrays are done."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._done = total, progress, 0

    def watch(self, spec: ArraySpec, blocks: Iterable[tuple[str, StoredBlock]]) -> Iterator[StoredBlock]:
        row = spec.nbytes_with_scales // spec.shape[0]
        for _, block in blocks:
            yield block
            self._done += row * len(block.stored)
            if self._progress is not None:
                self._progress(self._done, self._total)


@dataclass(frozen=True)
class _Arrays:
    """What makes each array, from the checkpoint, the profile or the predictors."""

    checkpoint: Checkpoint
    profile: ActivationProfile | None
    predictor_set: PredictorSet | None
    quantised: QuantisedWeights | None
    guess: PublishedHead | None

    def blocks(self, name: str, fmt: str) -> Iterator[Callable[[], StoredBlock]]:
        """What makes each block of an array, on any thread."""
        layer, _, local = name.removeprefix("layers/").partition("/")
        by_neuron = local in NEURON_ARRAYS and f"layers/{layer}/ffn/rest" in self.checkpoint.array_shapes
        order = None if self.profile is None or not by_neuron else self.profile.order[int(layer)]
        if name.startswith(PREFIX) and self.guess is not None:
            yield self._whole(name, fmt, self.guess.arrays[name.removeprefix(PREFIX)])
        elif local.startswith("predictor/"):
            yield self._whole(name, fmt, self._predictor(int(layer), local.removeprefix("predictor/")))
        elif self.profile is not None and local == "ffn/order":
            yield self._whole(name, fmt, self.profile.order[int(layer)].astype(np.uint32))
        elif self.profile is not None and local == "ffn/counts":
            yield self._whole(name, fmt, self.profile.ordered_counts()[int(layer)].astype(np.uint64))
        elif self.quantised is not None and name in self.quantised:
            yield from self._rounded(name, fmt, self.quantised[name], order)
        else:
            yield from stored_blocks(self.checkpoint, name, fmt, order)

    def _whole(self, name: str, fmt: str, values: Array) -> Callable[[], StoredBlock]:
        return partial(rounded, self.checkpoint, name, fmt, values, own=not FORMATS[fmt].quantised)

    def _rounded(self, name: str, fmt: str, found: Stored, order: Array | None) -> Iterator[Callable[[], StoredBlock]]:
        """The blocks of a matrix that is rounded already, in the order of the artifact's rows."""
        row = 0
        for values in self.checkpoint.blocks(name, order):
            rows = slice(row, row + len(values)) if order is None else order[row : row + len(values)]
            yield partial(_compared, fmt, found[0][rows], found[1][rows], values)
            row += len(values)

    def _predictor(self, layer: int, part: str) -> Array:
        assert self.predictor_set is not None
        predictor = self.predictor_set.predictors[layer]
        assert predictor is not None
        values = predictor[("down", "up", "bias").index(part)]
        # `down` has one row a rank, the others have one row a neuron.
        return values if part == "down" or self.profile is None else values[self.profile.order[layer]]


def _compared(name: str, stored: Array, scales: Array, values: Array) -> StoredBlock:
    """Rows that are rounded already, with the error of that."""
    error = RoundingError.between(values, dequantise(FORMATS[name], stored, scales, values.shape[-1]))
    return StoredBlock(stored=stored, scales=scales, error=error)


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
    rounded, checkpoint = set(), checkpoint.with_formats(formats)
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
