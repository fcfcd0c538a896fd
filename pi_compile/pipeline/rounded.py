"""What packing rounds: the parts of which the formats do not hold the checkpoint's numbers bit for bit."""

from collections.abc import Mapping

from pi_compile.checkpoint import Checkpoint
from pi_compile.checkpoint.checkpoint import part_of
from pi_runtime.artifact.formats import FORMATS, WEIGHT_FORMATS
from pi_runtime.artifact.sizes import ArraySpec, array_specs


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
    return fmt == "f32" or all(checkpoint.source.dtype(tensor) == fmt for tensor in checkpoint.tensor_names(name))
