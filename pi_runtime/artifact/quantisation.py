"""The block formats q8 and q4: quantising blocks of weights, and the way back.

A block is `BLOCK` consecutive columns of one row; D columns are ⌈D / 32⌉ blocks, the last one filled up with zeros. The
scale s is rounded to binary16 before it is used:

    q8   s = max |w| / 127                 q = round(w / s) in −127…127        w ≈ ŵ = s q
    q4   s = −w* / m, then refitted        q = round(w / s) + 8 in 0…15        w ≈ ŵ = s (q − 8)

w* is the block's value of largest magnitude with its sign (of two equal ones, the negative). At m = 8 it becomes
q − 8 = −8, the integer that has no counterpart above. m is the divisor in `_DIVISORS` with the least Σ (w − ŵ)². The
refit is the least-squares scale Σ (q − 8) w / Σ (q − 8)² for the integers found; it is kept where its own error is
smaller (in outline llama.cpp's make_qx_quants; docs/explanation/fidelity.md says what else was tried). Rounding is
half to even.
All of this is elementwise float32 arithmetic in a fixed order, so the bytes are the same on every machine.

Where the importance a of a column is given, as the mean square of what it is multiplied by (llama.cpp's importance
matrix), q4's errors and its refit are weighted: Σ a (w − ŵ)², and Σ a (q − 8) w / Σ a (q − 8)². q8's scale does not
depend on it.

Shape letters: D columns, N blocks side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from pi_runtime.artifact.formats import BLOCK, FORMATS, Array, Format

GROUP, FOUR = 8, 4
"""Blocks of a group, and columns that stay together when these are interleaved."""

_DIVISORS = (8.0, 7.0, 7.25, 7.5, 7.75, 8.25, 8.5, 8.75)
"""Divisors that q4 tries. The first of equals wins, so that values which are s q already (largest |q| 7 or 8) stay."""
_LARGEST_SCALE = np.float32(65504)
_AT_ONCE = 2048
"""Blocks quantised at once, so that their temporaries stay in the cache."""


def quantise(fmt: Format, values: Array, importance: Array | None = None) -> tuple[Array, Array]:
    """Quantise values (…, D): returns the stored arrays of `fmt` and of `scale`, both padded with zeros.

    Values must be finite and representable (see `Format.overflows`). `importance` (D,) ≥ 0 weighs the columns.
    """
    columns = values.shape[-1]
    rows = values.reshape(-1, columns)
    stored, scales = empty_stored(fmt, rows.shape)
    step = max(1, _AT_ONCE // -(-columns // BLOCK))
    for start in range(0, len(rows), step):
        piece = slice(start, start + step)
        w, a = as_blocks(rows[piece]), None
        if importance is not None:
            a = np.tile(as_blocks(importance[None]), len(rows[piece]))
        stored[piece], scales[piece] = pack_blocks(fmt, *round_blocks(fmt, w, a), columns)
    leading = values.shape[:-1]
    return stored.reshape(*leading, stored.shape[-1]), scales.reshape(*leading, scales.shape[-1])


def empty_stored(fmt: Format, shape: Sequence[int]) -> tuple[Array, Array]:
    """The stored arrays of a matrix (…, D), of `fmt` and of `scale`, all zero."""
    scale = FORMATS["scale"]
    of_scales = scale.stored_shape((*shape[:-1], -(-shape[-1] // BLOCK)))
    return np.zeros(fmt.stored_shape(shape), fmt.stored), np.zeros(of_scales, scale.stored)


def dequantise(fmt: Format, stored: Array, scales: Array, columns: int) -> Array:
    """Convert stored arrays to float32 values (…, D): each the float32 product of scale and integer."""
    blocks = -(-columns // BLOCK)
    scale = np.repeat(scales[..., :blocks].astype(np.float32), BLOCK, axis=-1)[..., :columns]
    return integers(fmt, stored, columns).astype(np.float32) * scale


def as_stored(name: str, values: Array) -> Array:
    """Float32 values of a matrix after a round trip through the weight format `name`."""
    fmt = FORMATS[name]
    if not fmt.quantised:
        return np.ascontiguousarray(fmt.decode(fmt.encode(values), values.shape[-1]))
    return np.ascontiguousarray(dequantise(fmt, *quantise(fmt, values), values.shape[-1]))


def integers(fmt: Format, stored: Array, columns: int) -> Array:
    """The signed integers (…, D) that multiply the scales, in the order of the columns: q of q8, q − 8 of q4."""
    leading, blocks = stored.shape[:-1], -(-columns // BLOCK)
    grouped, left = blocks // GROUP * GROUP * BLOCK // fmt.per_item, blocks % GROUP
    fours, rest = stored[..., :grouped], stored[..., grouped : grouped + -(-left // fmt.per_item) * BLOCK]
    if fmt.per_item == 2:
        fours, rest = ((_split(part, n * BLOCK) - np.uint8(8)).view(np.int8) for part, n in ((fours, 4), (rest, 1)))
    q = fours.reshape(*leading, -1, BLOCK // FOUR, GROUP, FOUR).swapaxes(-3, -2).reshape(*leading, -1)
    return np.concatenate([q, rest], axis=-1)[..., :columns]


# Below, N blocks lie side by side: w (BLOCK, N). Sums over a block are then elementwise sums of rows, in an order that
# we choose (that of NumPy's own sums depends on the processor), and every operation is a long one.


def as_blocks(rows: Array) -> Array:
    """Rows (R, D) as blocks side by side (BLOCK, R · ⌈D / 32⌉), float32; the last block of a row ends in zeros."""
    blocks = -(-rows.shape[1] // BLOCK)
    padded = np.zeros((len(rows), blocks * BLOCK), np.float32)
    padded[:, : rows.shape[1]] = rows
    return np.ascontiguousarray(padded.reshape(-1, BLOCK).T)


def round_blocks(fmt: Format, w: Array, importance: Array | None = None) -> tuple[Array, Array]:
    """The signed integers (BLOCK, N) and scales (N,) of blocks; `importance` (BLOCK, N) weighs their squared errors."""
    if fmt.name == "q8":
        return _q8(w)
    return _q4(w, importance)


def nearest(fmt: Format, w: Array, scale: Array) -> Array:
    """The signed integers with which a scale comes nearest to values; 0 where the scale is 0."""
    return _quotient(w, scale, *_BOUNDS[fmt.name])


def pack_blocks(fmt: Format, q: Array, scale: Array, columns: int) -> tuple[Array, Array]:
    """Signed integers (BLOCK, N) and scales (N,) of whole rows as stored arrays, as `quantise` returns them."""
    blocks = -(-columns // BLOCK)
    packed = _pack(fmt, q, blocks)
    stored, scales = empty_stored(fmt, (len(packed), columns))
    stored[:, : packed.shape[-1]], scales[:, :blocks] = packed, scale.reshape(-1, blocks)
    return stored, scales


def _q8(w: Array) -> tuple[Array, Array]:
    scale = _rounded(np.abs(w).max(0) / np.float32(127))
    return _quotient(w, scale, *_BOUNDS["q8"]), scale


def _q4(w: Array, a: Array | None) -> tuple[Array, Array]:
    """The integers q − 8, and the scales."""
    high, low = w.max(0), w.min(0)
    extreme = np.where(high > -low, high, low)
    bounds = _BOUNDS["q4"]
    scale = _rounded(extreme / np.float32(-_DIVISORS[0]))
    q = _quotient(w, scale, *bounds)
    least = _squared_error(w, q, scale, a)
    for divisor in _DIVISORS[1:]:
        tried = _rounded(extreme / np.float32(-divisor))
        error = _squared_error(w, _quotient(w, tried, *bounds), tried, a)
        scale, least = np.where(error < least, tried, scale), np.minimum(error, least)
    q = _quotient(w, scale, *bounds)
    weighted = q if a is None else q * a
    norm = _sum(weighted * q)
    fitted = _rounded(_sum(weighted * w) / np.where(norm == 0, np.float32(1), norm))
    refitted = _quotient(w, fitted, *bounds)
    better = _squared_error(w, refitted, fitted, a) < least
    return np.where(better, refitted, q), np.where(better, fitted, scale)


_BOUNDS = {"q8": (-127, 127), "q4": (-8, 7)}
"""The least and the greatest integer of each block format."""


def _rounded(scale: Array) -> Array:
    """The nearest binary16 numbers, as float32; no infinity and no −0."""
    bounded = np.clip(scale, -_LARGEST_SCALE, _LARGEST_SCALE)
    return bounded.astype(np.float16).astype(np.float32) + np.float32(0)


def _quotient(w: Array, scale: Array, lowest: int, highest: int) -> Array:
    """round(w / s) within bounds, 0 where the scale is 0."""
    q = w / np.where(scale == 0, np.float32(np.inf), scale)
    np.rint(q, out=q)
    return np.clip(q, lowest, highest, out=q)


def _squared_error(w: Array, q: Array, scale: Array, a: Array | None) -> Array:
    e = q * scale
    np.subtract(w, e, out=e)
    np.square(e, out=e)
    return _sum(e if a is None else np.multiply(e, a, out=e))


def _sum(x: Array) -> Array:
    """Sums over the blocks: the second half is added to the first, again and again."""
    while len(x) > 1:
        half = len(x) // 2
        x = x[:half] + x[half:]
    total: Array = x[0]
    return total


def _pack(fmt: Format, q: Array, blocks: int) -> Array:
    """Pack integers (BLOCK, N) into stored rows without padding."""
    rows = q.astype(np.int8).T.reshape(-1, blocks * BLOCK)
    if fmt.per_item == 2:
        rows = (rows + np.int8(8)).view(np.uint8)
    grouped = blocks // GROUP * GROUP * BLOCK
    fours = rows[:, :grouped].reshape(len(rows), -1, GROUP, BLOCK // FOUR, FOUR).swapaxes(2, 3)
    head, rest = fours.reshape(len(rows), -1), rows[:, grouped:]
    if fmt.per_item == 2:
        head, rest = _join(head, 4 * BLOCK), _join(rest, BLOCK)
    return np.concatenate([head, rest], axis=1)


def _join(nibbles: Array, apart: int) -> Array:
    """Pack two nibbles a byte: of every 2 `apart`, the second half goes to the upper bits (0 where there are none)."""
    rows, columns = nibbles.shape
    whole = np.zeros((rows, -(-columns // (2 * apart)) * 2 * apart), np.uint8)
    whole[:, :columns] = nibbles
    pairs = whole.reshape(rows, -1, 2, apart)
    joined: Array = pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)
    return joined.reshape(rows, -1)


def _split(stored: Array, apart: int) -> Array:
    """The inverse of `_join`, on any leading axes."""
    bytes_ = stored.reshape(*stored.shape[:-1], -1, 1, apart)
    return np.concatenate([bytes_ & np.uint8(15), bytes_ >> np.uint8(4)], axis=-2).reshape(*stored.shape[:-1], -1)


@dataclass(frozen=True)
class RoundingError:
    """The distance of stored values ŵ from the values w; errors of several arrays add up.

    The last bits depend on the machine.
    """

    squares: float = 0.0
    """Σ (w − ŵ)²."""
    of: float = 0.0
    """Σ w²."""
    largest: float = 0.0
    """max |w − ŵ|."""

    @classmethod
    def between(cls, values: Array, stored: Array) -> Self:
        error = values - stored
        squares, of = (float(np.square(x).sum(dtype=np.float64)) for x in (error, values))
        return cls(squares, of, float(np.abs(error, out=error).max(initial=0)))

    def __add__(self, other: "RoundingError") -> "RoundingError":
        return RoundingError(self.squares + other.squares, self.of + other.of, max(self.largest, other.largest))

    @property
    def relative(self) -> float:
        """√(Σ (w − ŵ)² / Σ w²), 0 where all values are 0."""
        return float(np.sqrt(self.squares / self.of)) if self.of else 0.0
