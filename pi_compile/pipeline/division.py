"""Which format each matrix has, within a budget of bytes or of perplexity: divided exactly.

A part's format in [pack] is the widest that its matrices may have. Each of them takes it, or a block format of fewer
bytes (with scales of groups where FFNs are whole matrices, as these are not for GPUs), so that

    the divergence that all cost together is least,   within so many bytes,      or
    the bytes of all are fewest,                      within so much divergence.

Either is a multiple-choice knapsack, and is solved exactly. The perplexity rises by e^divergence − 1 at most, if the
text is as likely as the model thinks. Bytes are counted as they lie in the file, aligned.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pi_compile.calibration.quantising import Sensitivity, sensitivities, text_windows
from pi_compile.checkpoint import Checkpoint
from pi_compile.checkpoint.part_formats import KEEP
from pi_compile.packing import PackSpec, part_formats
from pi_compile.placement.solvers.constrained_path import most_value
from pi_compile.results import Division
from pi_runtime.artifact.formats import FORMATS, ROW_FORMATS, WEIGHT_FORMATS
from pi_runtime.artifact.layout import ALIGN, ALIGN_LARGE, LARGE_FROM
from pi_runtime.artifact.sizes import (
    ALL_MATRICES,
    BY_NEURON,
    PARTS,
    WHOLE,
    ArraySpec,
    array_specs,
    is_scales,
    misfits,
    part_of,
)
from pi_runtime.errors import NotMetError, size

Tokens = npt.NDArray[np.integer]
Ints = npt.NDArray[np.int64]
_HEADER = 256
"""At most the bytes of what stands before an array in the file."""
_MANIFEST = 512
"""The same of what the manifest and the directories say about an array."""
_REST = 8192
"""The same of all else that the manifest says: decoder, recipe, what it was made from."""
_UNITS = 1e11
"""Divergences are whole numbers of so many parts of a nat."""


@dataclass(frozen=True)
class Option:
    """A format that a matrix may have, with bytes and divergence."""

    format: str
    nbytes: int
    cost: int


def divide(
    checkpoint: Checkpoint,
    tokens: Tokens,
    *,
    formats: Mapping[str, str],
    file_mib: float = 0.0,
    perplexity_increase: float = 0.0,
    window: int = 512,
    threads: int = 1,
    inputs: str = "",
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Division:
    """Choose the format of each matrix within a budget, by what an error of its weights costs on a text.

    `tokens` are ids (T,) of a text; 2,048 suffice. `formats` are the widest that each part may have (see
    `stages.train`). With `file_mib` the least is lost in so many MiB, predictors not counted; with
    `perplexity_increase` the artifact is the smallest that is expected to lose no more.

    Returns the formats, for `place`, `quantise` and `pack`, with bytes and the divergence that they are expected to
    cost; and what errors of columns cost, which weighs the rounding of a checkpoint that has it as its `importance`.
    Raises NotMetError where the budget cannot be kept, CorpusError for fewer tokens than one window.
    """
    widest = part_formats(checkpoint, PackSpec(formats={**dict.fromkeys(PARTS, KEEP), **formats}))
    ids_NT = text_windows(checkpoint.decoder, tokens, window)
    found = sensitivities(checkpoint, ids_NT, threads, lambda done, total: progress(done, 2 * total))

    def shown(done: int, total: int) -> None:
        progress(total + done, 2 * total)

    return _divided(checkpoint, found, widest, (round(file_mib * 2**20), perplexity_increase), inputs, shown)


def _divided(
    checkpoint: Checkpoint,
    found: Mapping[str, Sensitivity],
    formats: Mapping[str, str],
    budget: tuple[int, float],
    inputs: str,
    progress: Callable[[int, int], None],
) -> Division:
    """The division of a budget of (bytes, perplexity), one of which is 0."""
    d, (nbytes, perplexity_increase) = checkpoint.decoder, budget
    specs = array_specs(d, formats, [None] * d.n_layers, checkpoint.layout == BY_NEURON, checkpoint.layout)
    groups = _groups(specs)
    plain = {name: _stored(spec) for name, spec in specs.items() if not is_scales(name)}
    fixed = _REST + _MANIFEST * len(specs) + sum(map(len, checkpoint.text_files.files.values())) + sum(plain.values())
    fixed -= sum(plain[name] for names in groups.values() for name in names)
    options = {}
    for done, (key, names) in enumerate(groups.items()):
        options[key] = _options(checkpoint, found, {name: specs[name] for name in names})
        progress(done + 1, len(groups))
    if nbytes:
        taken = _least_divergence(options, nbytes - fixed)
    else:
        taken = _fewest_bytes(options, round(math.log1p(perplexity_increase) * _UNITS))
    named = _named(formats, {key: option.format for key, option in taken.items()})
    return Division(
        formats=named | ({"head": named["embedding"]} if d.tied_head else {}),
        nbytes=fixed + sum(option.nbytes for option in taken.values()),
        divergence=sum(option.cost for option in taken.values()) / _UNITS,
        importance={name: sensitivity.importances for name, sensitivity in found.items()},
        inputs=inputs,
    )


def _groups(specs: Mapping[str, ArraySpec]) -> dict[str, list[str]]:
    """What shares a format: each matrix of the layers alone, those of the embedding, and the head."""
    groups: dict[str, list[str]] = {}
    for name in specs:
        local = name.split("/", 2)[-1]
        if local in ALL_MATRICES:
            groups[name] = [name]
        elif part_of(name) in ("embedding", "head") and len(specs[name].shape) > 1 and not is_scales(name):
            groups.setdefault(str(part_of(name)), []).append(name)
    return groups


def _options(checkpoint: Checkpoint, found: Mapping[str, Sensitivity], specs: Mapping[str, ArraySpec]) -> list[Option]:
    """The formats that some matrices may have together: more bytes cost less."""
    widest = next(iter(specs.values())).format
    values = {name: checkpoint.values(name) for name in specs if name in found}
    options, tried = [], WEIGHT_FORMATS if checkpoint.layout == WHOLE else ROW_FORMATS
    for name in dict.fromkeys((widest, *(name for name in tried if FORMATS[name].quantised))):
        own = {array: ArraySpec(name, spec.shape) for array, spec in specs.items()}
        if not misfits(own) and all(own[array].nbytes <= specs[array].nbytes for array in specs):
            as_is = {array: checkpoint.kept_rows(array, name) for array in values}
            cost = sum(found[array].divergence(FORMATS[name], v, as_is[array]) for array, v in values.items())
            options.append(Option(name, sum(map(_stored, own.values())), round(cost * _UNITS)))
    least, kept = math.inf, []
    for option in sorted(options, key=lambda o: (o.nbytes, o.cost)):
        if option.cost < least and option.nbytes <= sum(map(_stored, specs.values())):
            kept.append(option)
            least = option.cost
    return kept


def _stored(spec: ArraySpec) -> int:
    """Most bytes that an array takes in the file, with its scales."""
    arrays = [spec.nbytes] + ([spec.scales.nbytes] if spec.scales else [])
    aligned = ((n + _HEADER, ALIGN_LARGE if n >= LARGE_FROM else ALIGN) for n in arrays)
    return sum(-(-n // align) * align for n, align in aligned)


def _least_divergence(options: Mapping[str, list[Option]], capacity: int) -> dict[str, Option]:
    least = sum(found[0].nbytes for found in options.values())
    if least > capacity:
        raise NotMetError(
            "the budget of bytes is too small",
            expected=f"at least {size(least - capacity)} more, which the narrowest formats take",
            remedy="a larger [bits] file_mib",
        )
    classes = [
        _class([o.nbytes - found[0].nbytes for o in found], [found[0].cost - o.cost for o in found])
        for found in options.values()
    ]
    taken = most_value(classes, capacity - least)
    return {key: found[item] for (key, found), item in zip(options.items(), taken, strict=True)}


def _fewest_bytes(options: Mapping[str, list[Option]], limit: int) -> dict[str, Option]:
    best = sum(found[-1].cost for found in options.values())
    if best > limit:
        raise NotMetError(
            "no division of the bits keeps the perplexity",
            expected=f"at most {math.expm1(limit / _UNITS):.2%} more, as [bits] perplexity_increase says",
            found=f"about {math.expm1(best / _UNITS):.2%} with the widest formats that [pack] allows",
            remedy="wider formats in [pack], or a larger perplexity_increase",
        )
    falling = {key: found[::-1] for key, found in options.items()}
    classes = [
        _class([o.cost - found[0].cost for o in found], [found[0].nbytes - o.nbytes for o in found])
        for found in falling.values()
    ]
    taken = most_value(classes, limit - best)
    return {key: found[item] for (key, found), item in zip(falling.items(), taken, strict=True)}


def _class(weights: list[int], values: list[int]) -> tuple[Ints, Ints]:
    return np.array(weights, np.int64), np.array(values, np.int64)


def _named(formats: Mapping[str, str], chosen: Mapping[str, str]) -> dict[str, str]:
    """The formats as a manifest has them: a part has the widest of its matrices, and narrower ones are named."""
    found = dict(formats)
    for part in PARTS:
        own = {key: name for key, name in chosen.items() if part_of(key) == part}
        if own:
            found[part] = max(own.values(), key=lambda name: ArraySpec(name, (1, 8192)).nbytes_with_scales)
            other = {key: name for key, name in own.items() if key.startswith("layers/") and name != found[part]}
            found |= dict(sorted(other.items()))
    return found
