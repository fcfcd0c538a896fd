"""Arrays of a checkpoint in number formats, block by block: as they are where a format keeps them, else rounded."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pi_compile.checkpoint.checkpoint import Checkpoint, Order, Piece, joined
from pi_compile.checkpoint.tensors import Array, Values
from pi_compile.errors import CheckpointError
from pi_runtime.artifact.formats import FORMATS, Format
from pi_runtime.artifact.quantisation import RoundingError, beside, dequantise, pack_rows, quantise, row_scales
from pi_runtime.artifact.sizes import part_of

NOTABLE = 1e-3
"""Share of Σ w² of what is rounded that may underflow: as much as rounding to q5 loses."""


@dataclass(frozen=True, kw_only=True)
class StoredBlock:
    """Consecutive rows of an array as an artifact stores them."""

    stored: Array
    scales: Array | None = None
    """None where the format has none."""
    error: RoundingError | None = None
    """That of rounding to a block format, of the rows that do not lie on its grid already."""
    lost: float = 0.0
    """Σ w² of the values that underflow."""
    of: float = 0.0
    """Σ w² of all that might."""


def stored_blocks(
    checkpoint: Checkpoint, array: str, name: str, order: Order | None = None
) -> Iterator[Callable[[], StoredBlock]]:
    """What makes each of an array's blocks (see `Checkpoint.blocks`) in the weight format `name`, on any thread.

    Rows that lie on the format's grid are taken bit for bit, the others are rounded.
    """
    if not checkpoint.tensor_names(array):
        return (partial(rounded, checkpoint, array, name, block) for block in checkpoint.blocks(array))
    return (partial(_block, checkpoint, array, name, pieces) for pieces in checkpoint.pieces(array, order))


def as_stored(checkpoint: Checkpoint, array: str, name: str) -> Iterator[Values]:
    """The same blocks of values as a weight format holds them; bit for bit where they lie on its grid."""
    fmt, columns = FORMATS[name], checkpoint.array_shapes[array][-1]
    for block in (make() for make in stored_blocks(checkpoint, array, name)):
        if block.scales is None:
            yield fmt.decode(block.stored, columns)
        else:
            yield dequantise(fmt, block.stored, block.scales, columns)


def rounded(
    checkpoint: Checkpoint, array: str, name: str, values: Values, weights: Array | None = None, *, own: bool = False
) -> StoredBlock:
    """Rows of an array's values in a weight format; `own`: the tensor's, in which they need no check.

    `weights` (D,) are what errors of the columns cost.

    Raises CheckpointError for values that are too large.
    """
    fmt = FORMATS[name]
    if own:
        return StoredBlock(stored=fmt.encode(values))
    if fmt.overflows(values):
        raise _too_large(checkpoint, array, fmt)
    lost = fmt.underflow(values)
    if not fmt.quantised:
        of = float(np.square(values, dtype=np.float64).sum()) if fmt.underflows_below else 0.0
        return StoredBlock(stored=fmt.encode(values), lost=lost, of=of)
    stored, scales = quantise(fmt, values, weights, powers=checkpoint.source.powers)
    error = RoundingError.between(values, dequantise(fmt, stored, scales, values.shape[-1]))
    return StoredBlock(stored=stored, scales=scales, error=error, lost=lost, of=error.of)


def check_underflow(checkpoint: Checkpoint, array: str, name: str, lost: float, of: float) -> None:
    """Raise CheckpointError where too much of an array underflows in a weight format."""
    if lost > NOTABLE * of:
        raise CheckpointError(
            f"{checkpoint.folder}: values of {', '.join(checkpoint.tensor_names(array))} are too small for {name}",
            expected=f"values that {name} can hold, or so few others that they do not count",
            found=f"{lost / of:.3%} of Σ w² in values that it stores as 0, or with less than three bits",
            remedy=_wider(array, FORMATS[name]),
        )


def _block(checkpoint: Checkpoint, array: str, name: str, pieces: Sequence[Piece]) -> StoredBlock:
    """A block of its pieces, which stand side by side in `ffn/rest`."""
    weights = checkpoint.importance.get(array)
    each = [None] * len(pieces) if weights is None else weights.reshape(len(pieces), -1)
    found = [_piece(checkpoint, array, name, piece, own) for piece, own in zip(pieces, each, strict=True)]
    errors = [part.error for part in found if part.error is not None]
    scales = [part.scales for part in found if part.scales is not None]
    return StoredBlock(
        stored=joined(array, [part.stored for part in found]),
        scales=joined(array, scales) if scales else None,
        error=sum(errors, RoundingError()) if errors else None,
        lost=sum(part.lost for part in found),
        of=sum(part.of for part in found),
    )


def _piece(checkpoint: Checkpoint, array: str, name: str, piece: Piece, weights: Array | None) -> StoredBlock:
    (tensor, matrix, rows), fmt = piece, FORMATS[name]
    found = None if tensor.is_changed else matrix.on_grid(fmt, rows)
    if found is None:
        own = checkpoint.source.dtype(tensor.name) == name and not (fmt.quantised or tensor.is_changed)
        return rounded(checkpoint, array, name, checkpoint.read(*piece), weights, own=own)
    stored, scales = pack_rows(fmt, *found)
    with np.errstate(over="ignore"):
        for each in (*beside(fmt, scales, found[0].shape[1]), *([row_scales(scales)] if fmt.row_scaled else ())):
            checkpoint.check_finite(tensor.name, each * np.float32(fmt.reach) if fmt.byte_scale else each)
    return StoredBlock(stored=stored, scales=scales)


def _too_large(checkpoint: Checkpoint, array: str, target: Format) -> CheckpointError:
    largest = {tensor: checkpoint.largest(tensor) for tensor in checkpoint.tensor_names(array)}
    wrong = {tensor: value for tensor, value in largest.items() if target.overflows(np.array(value))}
    return CheckpointError(
        f"{checkpoint.folder}: values of {', '.join(wrong)} are too large for {target.name}",
        expected=f"values that {target.name} can hold",
        found=f"{max(wrong.values()):.6g}",
        remedy=_wider(array, target),
    )


def _wider(array: str, target: Format) -> str:
    """The remedy for values that a format does not hold."""
    return f'in the recipe: [pack] {part_of(array)} = "{"f32" if target.number == "bfloat16" else "bf16"}"'
