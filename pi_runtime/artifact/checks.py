"""Checks of a well-typed manifest: each yields the problems it finds, with their paths."""

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.features import feature_problems
from pi_runtime.artifact.formats import WEIGHT_FORMATS
from pi_runtime.artifact.guess_head import guess_layer_problems
from pi_runtime.artifact.layout import manifest_specs
from pi_runtime.artifact.rungs import DENSE, RUNGS, Rung
from pi_runtime.artifact.schema import OBJECTIVES, SIDES, Layer, Manifest, Plan, RowPlan
from pi_runtime.artifact.sizes import APART, LAYOUTS, MATRICES, MIXED, PARTS, WHOLE, ArraySpec, misfits

REQUIRED_FILE = "tokenizer.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.[A-Za-z0-9._-]{1,64}")
_RESERVED = ("manifest.json", "zarr.json")
_LAYER = re.compile(r"0|[1-9][0-9]{0,9}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Generation default → the types it may have, and its bounds, which are both allowed.
_GENERATION: dict[str, tuple[tuple[type, ...], float, float]] = {
    "do_sample": ((bool,), 0, 1),
    "min_p": ((int, float), 0, 1),
    "repetition_penalty": ((int, float), 1e-6, 1e6),
    "temperature": ((int, float), 0, 1e6),
    "top_k": ((int,), 0, 2**31),
    "top_p": ((int, float), 0, 1),
}


def contradictions(m: Manifest) -> Iterator[str]:
    """Yield the problems of a manifest. Later checks rest on earlier ones, so it ends after the first that fails."""
    for check in (_decoder, _layout, _formats, _layers, _guess, feature_problems, _plans, _arrays, _files, _text):
        problems = list(check(m))
        if problems:
            yield from problems
            return


def _decoder(m: Manifest) -> Iterator[str]:
    yield from (f"decoder.{problem}" for problem in m.decoder.problems())


def _layout(m: Manifest) -> Iterator[str]:
    if m.ffn_layout not in LAYOUTS:
        yield f"ffn_layout: {m.ffn_layout!r} is none of {', '.join(LAYOUTS)}"
    divided = m.plans or m.row_plans
    cut = m.decoder.dense_layers != m.decoder.uncut_layers
    if m.ffn_layout == WHOLE and (
        divided or m.profiled_tokens or cut or any(layer != Layer(rung=DENSE) for layer in m.layers)
    ):
        yield f"ffn_layout: {WHOLE} with an FFN cut into experts, a profile, a plan or a layer that is not dense"
    if m.ffn_layout != WHOLE and m.decoder.last_ff:
        yield f"ffn_layout: {m.ffn_layout} with decoder.last_ff"
    if m.ffn_layout == MIXED and (divided or m.decoder.n_experts > 1):
        yield f"ffn_layout: {MIXED} with experts or a plan"


def _formats(m: Manifest) -> Iterator[str]:
    parts = {name: fmt for name, fmt in m.formats.items() if not name.startswith("layers/")}
    if set(parts) != set(PARTS) or not set(parts.values()) <= set(WEIGHT_FORMATS):
        yield f"formats: each of {', '.join(PARTS)} needs one of {', '.join(WEIGHT_FORMATS)}, found {parts}"
        return
    for name in m.formats.keys() - parts.keys():
        number, _, matrix = name.removeprefix("layers/").partition("/")
        is_layer = _LAYER.fullmatch(number) and int(number) < len(m.layers)
        known = MATRICES[m.layouts[int(number)]] | ({} if m.decoder.latent_rank else APART) if is_layer else {}
        if matrix not in known:
            yield f"formats.{name}: no matrix that may have a format of its own"
            continue
        own, whole = m.formats[name], parts[known[matrix]]
        if own not in WEIGHT_FORMATS or not (_narrower(own, whole) or (matrix in APART and own == whole)):
            yield f"formats.{name}: {own!r} is no other one with at most the bytes of {whole}"

    if not m.decoder.latent_rank and any(
        name.endswith("/k") and f"{name[:-1]}v" not in m.formats for name in m.formats
    ):
        yield "formats: keys apart from values that are not"


def _narrower(fmt: str, part: str) -> bool:
    """Whether rows of another format fit where those of its part's format do, with their scales too."""
    own, whole = (ArraySpec(name, (1, 8192)) for name in (fmt, part))
    return fmt != part and own.nbytes <= whole.nbytes and own.nbytes_with_scales <= whole.nbytes_with_scales


def _layers(m: Manifest) -> Iterator[str]:
    d = m.decoder
    if len(m.layers) != d.n_layers:
        yield f"layers: {len(m.layers)} entries for {d.n_layers} layers"
    for n, layer in enumerate(m.layers):
        if layer.rung not in RUNGS:
            yield f"layers[{n}].rung: {layer.rung!r} is none of {', '.join(RUNGS)}"
            continue
        yield from (f"layers[{n}]{problem}" for problem in _layer(layer, RUNGS[layer.rung], d))


def _layer(layer: Layer, rung: Rung, d: Decoder) -> Iterator[str]:
    if rung.parameter == "rank" and layer.rank is None:
        yield f": rung {rung.name} without a predictor"
    if layer.rank is not None and not 1 <= layer.rank <= d.neuron_width:
        yield f".rank: {layer.rank} is not in 1…{d.neuron_width}"
    if not layer.threshold >= 0 or (layer.threshold > 0 and rung.parameter != "threshold"):
        yield f".threshold: {layer.threshold} on the rung {rung.name}"


def _guess(m: Manifest) -> Iterator[str]:
    if m.guess is not None:
        yield from m.guess.problems(m.decoder)
    if m.guess_layers not in (0, 1) or (m.guess_layers and m.guess is not None):
        yield f"guess_layers: {m.guess_layers}, or beside a guess head"
    elif m.guess_layers:
        yield from guess_layer_problems(m.decoder)


def _plans(m: Manifest) -> Iterator[str]:
    d = m.decoder
    for n, plan in enumerate(m.plans):
        if len(plan.cuts) != d.n_layers * d.n_experts or not all(0 <= cut <= d.d_ff for cut in plan.cuts):
            yield f"plans[{n}].cuts: not one cut in 0…{d.d_ff} for each layer and expert"
        if not 0 <= plan.used_bytes <= plan.vram_bytes < 2**63:
            yield f"plans[{n}]: {plan.used_bytes} bytes used of a budget of {plan.vram_bytes}"
        yield from (f"plans[{n}].{problem}" for problem in _plan(plan, d))
        if plan.rows is not None and len(plan.cuts) == d.n_layers * d.n_experts:
            yield from (f"plans[{n}].rows.{problem}" for problem in _row_plan(plan.rows, d, plan.cuts))
    budgets = [plan.vram_bytes for plan in m.plans]
    if budgets != sorted(budgets):
        yield f"plans: budgets {budgets} do not rise"
    for n, row_plan in enumerate(m.row_plans):
        yield from (f"row_plans[{n}].{problem}" for problem in _row_plan(row_plan, d))
    room = [plan.ram_bytes for plan in m.row_plans]
    if room != sorted(room):
        yield f"row_plans: budgets {room} do not rise"


def _row_plan(plan: RowPlan, d: Decoder, cuts: Sequence[int] = ()) -> Iterator[str]:
    """The problems of a division of all rows, or of those behind the cuts of a placement."""
    of_layer = d.n_experts if cuts else 1
    for name in ("pinned", "cached", "first"):
        if len(getattr(plan, name)) != d.n_layers * (of_layer if name == "pinned" else 1):
            yield f"{name}: {len(getattr(plan, name))} values for {d.n_layers} layers"
            return
    for layer, cached in enumerate(plan.cached):
        own = slice(layer * of_layer, (layer + 1) * of_layer)
        pinned, rows = sum(plan.pinned[own]), d.neurons - sum(cuts[own])
        uneven = not cuts and pinned % d.n_experts and pinned % d.d_ff
        if min(*plan.pinned[own], cached) < 0 or pinned + cached > rows or uneven:
            yield f"pinned, cached: {pinned} and {cached} rows of a layer with {rows}"
        if any(kept > d.d_ff - cut for kept, cut in zip(plan.pinned[own], cuts[own], strict=False)):
            yield f"pinned: {list(plan.pinned[own])} rows, of experts with {d.d_ff} behind cuts of {list(cuts[own])}"
    yield from _facts(plan, d, "ram_bytes", "slot_bytes", "read_bytes", "predicted_ns")


def _plan(plan: Plan, d: Decoder) -> Iterator[str]:
    if plan.objective not in OBJECTIVES:
        yield f"objective: {plan.objective!r} is none of {', '.join(OBJECTIVES)}"
    if len(plan.attention) != d.n_layers:
        yield f"attention: {len(plan.attention)} sides for {d.n_layers} layers"
    for name, sides in (("attention", plan.attention), ("embedding", [plan.embedding]), ("head", [plan.head])):
        for side in sorted(set(sides) - set(SIDES)):
            yield f"{name}: {side!r} is none of {', '.join(SIDES)}"
    yield from _facts(plan, d, "ram_bytes", "predicted_ns")


def _facts(plan: Plan | RowPlan, d: Decoder, *sizes: str) -> Iterator[str]:
    """The problems of what both kinds of plans say, some sizes among it."""
    if not 1 <= plan.context <= d.context_length:
        yield f"context: {plan.context} is not in 1…{d.context_length}"
    for name in sizes:
        if not 0 <= getattr(plan, name) < 2**63:
            yield f"{name}: {getattr(plan, name)} is not a size"
    if not _DIGEST.fullmatch(plan.digest):
        yield "digest: not a digest"


def _arrays(m: Manifest) -> Iterator[str]:
    if not 0 <= m.profiled_tokens < 2**63:
        yield f"profiled_tokens: {m.profiled_tokens} is not a count"
        return
    expected = manifest_specs(m)
    for name in misfits(expected):
        yield f"arrays.{name}: {expected[name].format} is for rows of whole groups that are not summed"
    for name in sorted(expected.keys() ^ m.arrays.keys()):
        yield f"arrays.{name}: {'missing' if name in expected else 'not an array of this decoder'}"
    for name, spec in expected.items():
        entry = m.arrays.get(name)
        if entry is None:
            continue
        if (entry.format, entry.shape, entry.nbytes) != (spec.format, spec.shape, spec.nbytes):
            yield (
                f"arrays.{name}: {entry.format} {entry.shape} in {entry.nbytes} bytes, "
                f"expected {spec.format} {spec.shape} in {spec.nbytes}"
            )
        if not _DIGEST.fullmatch(entry.sha256):
            yield f"arrays.{name}.sha256: not a digest"


def _files(m: Manifest) -> Iterator[str]:
    if REQUIRED_FILE not in m.files:
        yield f"files.{REQUIRED_FILE}: missing"
    for name, entry in m.files.items():
        if not _FILE_NAME.fullmatch(name) or name in _RESERVED:
            yield f"files.{name}: not a file name"
        if not 0 <= entry.nbytes < 2**63:
            yield f"files.{name}.nbytes: {entry.nbytes} is not a size"
        if not _DIGEST.fullmatch(entry.sha256):
            yield f"files.{name}.sha256: not a digest"


def _text(m: Manifest) -> Iterator[str]:
    ids = (*m.text.prefix_ids, *m.text.end_ids)
    if not all(0 <= i < m.decoder.vocab_size for i in ids):
        yield f"text: token ids {ids} outside the vocabulary of {m.decoder.vocab_size}"
    yield from generation_problems(m.generation)


def generation_problems(generation: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of generation defaults; a packer asks before it writes anything."""
    for name, value in generation.items():
        if name not in _GENERATION:
            yield f"generation.{name}: unknown key; known are {', '.join(_GENERATION)}"
        elif not _in_range(value, *_GENERATION[name]):
            yield f"generation.{name}: {reprlib.repr(value)} is no value for it"


def _in_range(value: Any, kinds: tuple[type, ...], low: float, high: float) -> bool:
    return type(value) in kinds and low <= value <= high
