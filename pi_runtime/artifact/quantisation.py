"""Block formats: quantising blocks of weights, and the way back.

A block is `BLOCK` consecutive columns of one row; D columns are ⌈D / 32⌉ blocks, the last one filled up with zeros. The
scale s is rounded to binary16 before it is used:

    q8   s = max |w| / 127                 q = round(w / s) in −127…127        w ≈ ŵ = s q
    q4   s = −w* / m, then refitted        q = round(w / s) + 8 in 0…15        w ≈ ŵ = s (q − 8)
    q5   the same                          q = round(w / s) + 16 in 0…31       w ≈ ŵ = s (q − 16)
    q6   the same                          q = round(w / s) + 32 in 0…63       w ≈ ŵ = s (q − 32)
    q4_1 s = (max w − min w) / m           q = round((w − b) / s) in 0…15      w ≈ ŵ = s q + b, rounded once
    q4z  the same, the range with 0 in it  q = round(w / s) + z in 0…15        w ≈ ŵ = s (q − z)
    q5_1 as q4_1, q in 0…31

Those with scales of groups (q4_k, q5_k, q6_k) have w ≈ ŵ = d s q − e m. Each block, or each half of one, gets the scale
and the minimum, 0 at most, that lose least by itself: of those that some divisors give, each fitted by least squares to
the integers it leads to. d and e are such that the largest of a group have the largest s and m. Then s and m are fitted
to the integers q, and d and e to all three, in turn, as long as less is lost. At the same bytes that loses 1 to 6 %
less (Σ a (w − ŵ)²) than llama.cpp's quantiser on normal, Laplace's and Student's numbers, with weights and without.

With a table an integer is the nearest entry. iq4_nl is rounded as q4 is, and so are mxfp4 and nvfp4, to the scales that
bytes stand for; a row of nvfp4 is divided by r = max |w| / (12 · 224) first. iq4_xs goes with those of groups below.

In the three with a constant z (8, 16 or 32) w* is the block's value of largest magnitude with its sign (of two equal
ones, the negative). At m = z it becomes q − z = −z, the integer that has no counterpart above. m is the divisor z + d,
d in `_DIVISORS`, with the least Σ (w − ŵ)². The refit is the least-squares scale Σ (q − z) w / Σ (q − z)² for the
integers found; it is kept where its own error is smaller (in outline llama.cpp's make_qx_quants;
docs/explanation/fidelity.md says what else was tried). Rounding is half to even.

A block of q4_1 has a minimum b in binary16, one of q4z an integer zero z in 0…15. m is one of 15 + d;
b = min w − s d / 2 and z = round((s d / 2 − min w) / s), so that the range lies in the middle of the grid. Then s, and
b with it, are refitted by least squares, and kept where the error is smaller.

Where powers of two are asked for, a block without an offset that this rounds, and that s = 2^⌊log₂ max |w|⌋ / (z / 2)
does not (z = 128 for q8), has that scale: so MXFP4 is kept exactly from 5 bits on.
All of this is elementwise float32 arithmetic in a fixed order, so the bytes are the same on every machine.

Where the importance a of a column is given, as the mean square of what it is multiplied by (llama.cpp's importance
matrix), errors and refits below 8 bits are weighted: Σ a (w − ŵ)², and Σ a (q − z) w / Σ a (q − z)². q8's scale does
not depend on it.

Shape letters: D columns, N blocks side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import numpy as np

from pi_runtime.artifact.formats import BLOCK, BYTE_SCALES, FORMATS, GROUP, RUN, Array, Format

FOUR = 4
"""Columns that stay together when the blocks of a group are interleaved."""

_DIVISORS = (0.0, -1.0, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75)
"""Divisors that are tried, less z. The first of equals wins, so that values which are s (q − z) already stay, where
their largest |q − z| is z or z − 1."""
_GROUP_DIVISORS = tuple(np.float32(n) / 8 for n in range(-8, 9))
"""The same where groups have scales; q and scale are fitted to each other after each."""
_REFITS = 3
"""How often integers and factors of a group are fitted in turn."""
_LARGEST_SCALE = np.float32(65504)
_SMALLEST_POWER, _LARGEST_POWER = -24, 15
"""Exponents of the powers of two that binary16 has."""
_AT_ONCE = 2048
"""Blocks quantised at once, so that their temporaries stay in the cache."""


def quantise(
    fmt: Format, values: Array, importance: Array | None = None, *, powers: bool = False
) -> tuple[Array, Array]:
    """Quantise values (…, D): returns the stored arrays of `fmt` and of `scale`, both padded with zeros.

    Values must be finite and representable (see `Format.overflows`). `importance` (D,) ≥ 0 weighs the columns.
    `powers`: whether blocks may have a power of two as their scale, where that loses nothing.
    """
    columns = values.shape[-1]
    rows = values.reshape(-1, columns)
    stored, scales = empty_stored(fmt, rows.shape)
    step = max(1, _AT_ONCE // -(-columns // BLOCK))
    for start in range(0, len(rows), step):
        piece = slice(start, start + step)
        factor = _row_factors(fmt, rows[piece])
        w, a = as_blocks(rows[piece] if factor is None else rows[piece] / factor), None
        if importance is not None:
            a = np.tile(as_blocks(importance[None]), len(rows[piece]))
        found = round_blocks(fmt, w, a)
        found = _exactly(fmt, w, *found) if powers and fmt.summed and not fmt.offset else found
        stored[piece], scales[piece] = pack_blocks(fmt, *found, columns)
        if factor is not None:
            scales[piece, :4] = factor.view(np.uint8)
    leading = values.shape[:-1]
    return stored.reshape(*leading, *stored.shape[1:]), scales.reshape(*leading, *scales.shape[1:])


def empty_stored(fmt: Format, shape: Sequence[int]) -> tuple[Array, Array]:
    """The stored arrays of a matrix (…, D) and of its scales, all zero."""
    scale = FORMATS[fmt.scale_format]
    of_scales = scale.stored_shape(fmt.scales_shape(shape))
    return np.zeros(fmt.stored_shape(shape), fmt.stored), np.zeros(of_scales, scale.stored)


@np.errstate(invalid="ignore")  # scales that are no numbers give such values
def dequantise(fmt: Format, stored: Array, scales: Array, columns: int) -> Array:
    """Convert stored arrays to float32 values (…, D): each the float32 product of scale and integer, which is exact,
    and rounded once where a minimum is added or a row has a factor."""
    q = integers(fmt, stored, columns).astype(np.float32)
    scale, offset = (_by_column(each, columns) for each in beside(fmt, scales, columns))
    if fmt.row_scaled:
        return q * scale * row_scales(scales)
    if not fmt.offset:
        return q * scale
    return q * scale + offset if fmt.offset == "minimum" else (q - offset) * scale


@np.errstate(invalid="ignore")
def beside(fmt: Format, scales: Array, columns: int) -> tuple[Array, Array]:
    """The scales (…, B), or those of halves (…, 2 B), and the minima or zeros (…, B), as float32; scales again where
    there are no such. What a row has for all its scales is not in them."""
    blocks = -(-columns // BLOCK)
    if fmt.byte_scale:
        first = 4 * fmt.row_scaled
        found = BYTE_SCALES[fmt.byte_scale][scales[..., first : first + fmt.scales * blocks]]
        return found, found
    if not fmt.grouped:
        found = scales[..., :blocks].astype(np.float32)
        return (found[..., 0, :], found[..., 1, :]) if fmt.offset else (found, found)
    used = fmt.scales_shape((columns,))[0]
    records = np.ascontiguousarray(scales[..., :used]).reshape(*scales.shape[:-1], -1, fmt.record_nbytes)
    heads = np.ascontiguousarray(records[..., : fmt.head_nbytes]).view("<f2").astype(np.float32)
    body, (starts, shifts) = records[..., fmt.head_nbytes :].astype(np.uint16), np.transpose(fmt.fields)
    fields = (body[..., starts] | body[..., starts + 1] << np.uint16(8)) >> shifts.astype(np.uint16)
    parts = [fields >> np.uint16(fmt.scale_bits * n) & np.uint16((1 << fmt.scale_bits) - 1) for n in range(2)]
    scale = np.stack(parts[: fmt.scales], axis=-1).astype(np.float32) - np.float32(fmt.scale_zero)
    scale = (heads[..., :1, None] * scale).reshape(*scales.shape[:-1], -1)
    return scale, (heads[..., 1:] * parts[1]).reshape(*scales.shape[:-1], -1) if fmt.offset else scale


def row_scales(scales: Array) -> Array:
    """What all scales of a row are multiplied by, where `Format.row_scaled` says so: (…, 1)."""
    return np.ascontiguousarray(scales[..., :4]).view("<f4")


def records(fmt: Format, heads: Array, fields: Array) -> Array:
    """The records of groups as bytes (…, G · `record_nbytes`), from binary16 numbers (…, G, 1 or 2) and the integers
    (…, G, 8, 1 or 2) of the blocks, not below 0."""
    found = np.zeros((*heads.shape[:-1], fmt.record_nbytes), np.uint8)
    found[..., : fmt.head_nbytes] = np.ascontiguousarray(heads, "<f2").view(np.uint8)
    for block, (start, shift) in enumerate(fmt.fields):
        parts = [fields[..., block, n].astype(np.uint32) << fmt.scale_bits * n for n in range(fields.shape[-1])]
        field = np.add.reduce(parts)
        for byte in range(2):
            found[..., fmt.head_nbytes + start + byte] |= (field << shift >> 8 * byte).astype(np.uint8)
    return found.reshape(*heads.shape[:-2], -1)


def _by_column(each: Array, columns: int) -> Array:
    """What blocks have, or halves of them, for each of their columns."""
    blocks = -(-columns // BLOCK)
    return np.repeat(each, BLOCK * blocks // each.shape[-1], axis=-1)[..., :columns]


def as_stored(name: str, values: Array, *, powers: bool = False) -> Array:
    """Float32 values of a matrix after a round trip through the weight format `name`; for `powers` see `quantise`."""
    fmt = FORMATS[name]
    if not fmt.quantised:
        return np.ascontiguousarray(fmt.decode(fmt.encode(values), values.shape[-1]))
    return np.ascontiguousarray(dequantise(fmt, *quantise(fmt, values, powers=powers), values.shape[-1]))


def integers(fmt: Format, stored: Array, columns: int) -> Array:
    """The signed integers (…, D) that multiply the scales, in the order of the columns: q of q8, q − z of others.

    Where blocks have minima or zeros of their own, they are q.
    """
    leading, blocks = stored.shape[:-1], -(-columns // BLOCK)
    grouped = blocks // GROUP * GROUP * BLOCK
    whole = fmt.row_nbytes(grouped)
    fours, rest = stored[..., :whole], stored[..., whole : fmt.row_nbytes(columns)]
    if fmt.bits < 8:
        runs = ((fours, GROUP * BLOCK), (rest, RUN))
        fours, rest = (meant(fmt, _split(part, run, fmt.bits)) for part, run in runs)
    q = fours.reshape(*leading, -1, BLOCK // FOUR, GROUP, FOUR).swapaxes(-3, -2).reshape(*leading, -1)
    return np.concatenate([q, rest], axis=-1)[..., :columns]


def meant(fmt: Format, stored: Array) -> Array:
    """The signed integers that unsigned ones stand for, as bytes."""
    if fmt.table:
        return np.array(fmt.table, np.int8)[stored]
    return (stored - np.uint8(fmt.zero)).view(np.int8)


def _coded(fmt: Format, q: Array) -> Array:
    """The inverse of `meant`; of equal entries of a table the first."""
    if not fmt.table:
        return (q + np.int8(fmt.zero)).view(np.uint8)
    codes = np.zeros(256, np.uint8)
    codes[np.array(fmt.table[::-1], np.int8).view(np.uint8)] = np.arange(len(fmt.table))[::-1]
    return codes[q.view(np.uint8)]


# Below, N blocks lie side by side: w (BLOCK, N). Sums over a block are then elementwise sums of rows, in an order that
# we choose (that of NumPy's own sums depends on the processor), and every operation is a long one.


def as_blocks(rows: Array) -> Array:
    """Rows (R, D) as blocks side by side (BLOCK, R · ⌈D / 32⌉), float32; the last block of a row ends in zeros."""
    blocks = -(-rows.shape[1] // BLOCK)
    padded = np.zeros((len(rows), blocks * BLOCK), np.float32)
    padded[:, : rows.shape[1]] = rows
    return np.ascontiguousarray(padded.reshape(-1, BLOCK).T)


def round_blocks(fmt: Format, w: Array, importance: Array | None = None) -> tuple[Array, Array]:
    """The signed integers (BLOCK, N) and scales (N,) of blocks; `importance` (BLOCK, N) weighs their squared errors.

    Where a block has a minimum or a zero, these and the scales are (2, N), and the integers are not below 0. In place
    of scales groups have records, and other formats bytes (N, 1 or 2).
    """
    if fmt.grouped:
        return _in_groups(fmt, w, importance)
    if fmt.byte_scale:
        q, scale = _symmetric(fmt, _apart(fmt, w), _weights(fmt, w, importance))
        return _together(fmt, q), _bytes_of(fmt, scale).reshape(fmt.scales, -1).T
    if fmt.offset:
        return _with_offset(fmt, w, importance)
    return _mirrored(fmt, w) if fmt.mirrored else _symmetric(fmt, w, importance)


def nearest(fmt: Format, w: Array, scale: Array) -> Array:
    """The signed integers with which a scale comes nearest to values; those nearest to 0 where the scale is 0."""
    if not fmt.table:
        return _quotient(w, scale, *bounds(fmt))
    levels = np.unique(np.array(fmt.table, np.float32))
    with np.errstate(over="ignore"):
        x = w / np.where(scale == 0, np.float32(np.inf), scale)
    return levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]


def bounds(fmt: Format) -> tuple[int, int]:
    """The least and the greatest integer that multiplies a scale."""
    return fmt.mirrored - fmt.zero, fmt.highest - fmt.zero


def pack_blocks(fmt: Format, q: Array, scale: Array, columns: int) -> tuple[Array, Array]:
    """Signed integers (BLOCK, N) and scales (N,) of whole rows as stored arrays, as `quantise` returns them."""
    blocks = -(-columns // BLOCK)
    rows = q.astype(np.int8).T.reshape(-1, blocks * BLOCK)
    if fmt.bits < 8:
        rows = _coded(fmt, rows)
    by_row: Array = scale.reshape(len(rows), -1)
    if fmt.row_scaled:
        by_row = np.pad(by_row, ((0, 0), (4, 0)))
    if fmt.offset and not fmt.grouped:
        by_row = scale.reshape(2, -1, blocks).swapaxes(0, 1)
    return _padded(fmt, _packed(fmt, rows), by_row, columns)


def pack_rows(fmt: Format, q: Array, beside: Array) -> tuple[Array, Array]:
    """Rows of integers (R, D) that lie on a format's grid already, as stored arrays; D is a multiple of 32.

    `beside` are their scales (R, B), or scales and minima or zeros (R, 2, B), in binary16; or bytes: records (see
    `records`), or scales as `formats` says.
    """
    q = q.astype(np.int8, copy=False)
    packed = _packed(fmt, _coded(fmt, q) if fmt.bits < 8 else q)
    return _padded(fmt, packed, beside, q.shape[1])


def _padded(fmt: Format, packed: Array, beside: Array, columns: int) -> tuple[Array, Array]:
    """Rows without padding, and what stands beside them, as stored arrays."""
    stored, scales = empty_stored(fmt, (len(packed), columns))
    stored[:, : packed.shape[-1]] = packed
    scales[..., : beside.shape[-1]] = beside
    return stored, scales


def _mirrored(fmt: Format, w: Array) -> tuple[Array, Array]:
    scale = _rounded(np.abs(w).max(0) / np.float32(fmt.reach))
    return _quotient(w, scale, *bounds(fmt)), scale


def _symmetric(fmt: Format, w: Array, a: Array | None) -> tuple[Array, Array]:
    """The integers q − z, or of a table, and the scales."""
    high, low = w.max(0), w.min(0)
    extreme = np.where(high > -low, high, low)
    if fmt.byte_scale:
        extreme = -np.abs(extreme)  # scales have no sign
    lowest, rounded = bounds(fmt)[0], partial(_storable, fmt)
    scale = rounded(extreme / np.float32(lowest))
    least = _squared_error(w, nearest(fmt, w, scale), scale, a)
    for divisor in _DIVISORS[1:]:
        tried = rounded(extreme / np.float32(lowest - _step(fmt) * divisor))
        error = _squared_error(w, nearest(fmt, w, tried), tried, a)
        scale, least = np.where(error < least, tried, scale), np.minimum(error, least)
    q = nearest(fmt, w, scale)
    weighted = q if a is None else q * a
    norm = _sum(weighted * q)
    fitted = rounded(_sum(weighted * w) / np.where(norm == 0, np.float32(1), norm))
    refitted = nearest(fmt, w, fitted)
    better = _squared_error(w, refitted, fitted, a) < least
    return np.where(better, refitted, q), np.where(better, fitted, scale)


def _step(fmt: Format) -> float:
    """What divisors that are tried differ by: about a step of the grid, and so much that powers of two differ."""
    return 1 if not fmt.table else fmt.reach / (2 if fmt.byte_scale == "e8m0" else 8)


def _row_factors(fmt: Format, rows: Array) -> Array | None:
    """What each row's scales are multiplied by (R, 1), so that the largest of them is used; None where none are."""
    if not fmt.row_scaled:
        return None
    found = np.abs(rows).max(-1, initial=0)[:, None] / np.float32(fmt.reach * _byte_values(fmt)[-1])
    return np.where(found == 0, np.float32(1), found).astype(np.float32)


def _byte_values(fmt: Format) -> Array:
    """The scales that bytes stand for, up to the last byte before they fall or end."""
    values = BYTE_SCALES[fmt.byte_scale]
    return values[: 1 + np.argmin(np.diff(values) > 0)]


def _bytes_of(fmt: Format, scale: Array) -> Array:
    """The bytes whose scales are nearest."""
    values = _byte_values(fmt)
    return np.searchsorted((values[1:] + values[:-1]) / 2, scale).astype(np.uint8)


def _storable(fmt: Format, scale: Array) -> Array:
    """The nearest scales that a format has."""
    return _byte_values(fmt)[_bytes_of(fmt, scale)] if fmt.byte_scale else _rounded(scale)


def _apart(fmt: Format, each: Array) -> Array:
    """Halves of blocks side by side, where these have scales of their own: (B, M), all first halves first."""
    size = BLOCK // fmt.scales
    return each.reshape(fmt.scales, size, -1).swapaxes(0, 1).reshape(size, -1)


def _weights(fmt: Format, w: Array, importance: Array | None) -> Array:
    """The weights of errors, of blocks or of halves; alike where all of one are 0."""
    a = _apart(fmt, np.ones_like(w) if importance is None else importance)
    return np.where(_sum(a) == 0, np.float32(1), a)


def _together(fmt: Format, each: Array) -> Array:
    """The inverse of `_apart`."""
    return each.reshape(len(each), fmt.scales, -1).swapaxes(0, 1).reshape(BLOCK, -1)


def _with_offset(fmt: Format, w: Array, a: Array | None) -> tuple[Array, Array]:
    """The integers q, and the scales and minima or zeros."""
    highest = np.float32(bounds(fmt)[1])
    low, high = w.min(0), w.max(0)
    if fmt.offset == "zero":
        low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
    best, least = (np.zeros_like(w), np.zeros((2, w.shape[1]), np.float32)), np.full(w.shape[1], np.inf, np.float32)

    def keep(scale: Array, offset: Array) -> None:
        nonlocal best, least
        q = _codes(fmt, w, scale, offset)
        error = _squared_error(w, _raised(fmt, q, scale, offset), np.ones((), np.float32), a)
        better = error < least
        best = np.where(better, q, best[0]), np.where(better, np.stack([scale, offset]), best[1])
        least = np.where(better, error, least)

    for divisor in _DIVISORS:
        scale = _rounded((high - low) / (highest + np.float32(divisor)))
        shift = np.float32(divisor) / np.float32(2) * scale  # beyond the ends, or within them, on both sides alike
        if fmt.offset == "minimum":
            keep(scale, _rounded(low - shift))
        else:
            keep(scale, np.clip(np.rint((shift - low) / np.where(scale == 0, np.float32(np.inf), scale)), 0, highest))
    keep(*_fitted(fmt, w, a, *best))
    return best


def _in_groups(fmt: Format, w: Array, importance: Array | None) -> tuple[Array, Array]:
    """The integers, and the records of groups; N is a multiple of 8."""
    grid = _Grid(fmt, _apart(fmt, w), _weights(fmt, w, importance))
    found = grid.stepped(*grid.searched())
    for _ in range(_REFITS):
        found = grid.better(found, grid.with_fields(found), 1)
        found = grid.better(found, grid.with_heads(found), GROUP)
    heads = [found.d_G, -found.e_G] if fmt.offset else [found.d_G]
    fields = found.s_M.reshape(fmt.scales, -1) + np.float32(fmt.scale_zero)
    if fmt.offset:
        fields = np.concatenate([fields, found.m_M[None]])
    return _together(fmt, found.q), records(fmt, np.stack(heads, -1), fields.T.reshape(-1, GROUP, len(fields)))


class _Found(NamedTuple):
    """Factors d and e of G groups, integers s and m of M columns of a block or of half a one, their integers q (B, M),
    and Σ a (w − ŵ)² of each column, where w ≈ ŵ = d s q − e m."""

    d_G: Array
    e_G: Array
    s_M: Array
    m_M: Array
    q: Array
    error_M: Array


@dataclass(frozen=True)
class _Grid:
    """Columns w (B, M) with the weights a of their errors, to be rounded with the scales of groups of eight blocks."""

    fmt: Format
    w: Array
    a: Array

    def searched(self) -> tuple[Array, Array]:
        """The scale, and what is subtracted, of each column alone: the best of some divisors, each fitted to its q."""
        lowest, highest = bounds(self.fmt)
        low, high = np.minimum(self.w.min(0), 0), self.w.max(0)
        extreme = np.where(high > -self.w.min(0), high, self.w.min(0))
        best, least = (np.zeros_like(low), np.zeros_like(low)), np.full(low.shape, np.inf, np.float32)
        for divisor in _GROUP_DIVISORS:
            if self.fmt.offset:
                scale, below = np.maximum(high - low, 0) / np.float32(highest + divisor), -low
            else:
                scale, below = extreme / np.float32(lowest - _step(self.fmt) * divisor), np.zeros_like(low)
            scale, below = self._fitted(self._rounded(scale, below))
            error = self._error(self._rounded(scale, below), scale, below)
            better = error < least
            best = np.where(better, scale, best[0]), np.where(better, below, best[1])
            least = np.where(better, error, least)
        return best

    def stepped(self, scale_M: Array, below_M: Array) -> _Found:
        """The factors whose largest integers are those of the largest scale and of what is subtracted most."""
        by_group = self._by_group(scale_M)
        at = np.abs(by_group).argmax(1)
        d_G = _rounded(by_group[np.arange(len(at)), at] / np.float32(self._bounds[self.fmt.offset != ""]))
        e_G = _rounded(self._by_group(below_M).max(1) / np.float32(self._bounds[1]))
        return self._with(d_G, e_G, *self._fields(d_G, e_G, scale_M, below_M))

    def with_fields(self, found: _Found) -> _Found:
        """The same factors, with the integers that come nearest to what fits q best."""
        return self._with(found.d_G, found.e_G, *self._fields(found.d_G, found.e_G, *self._fitted(found.q)))

    def with_heads(self, found: _Found) -> _Found:
        """The same integers, with the factors that fit q best."""
        x, y = found.s_M * found.q, np.broadcast_to(found.m_M, found.q.shape)
        xx, xy, yy, wx, wy = (
            _sum(self._by_group(_sum(self.a * product)).T) for product in (x * x, x * y, y * y, self.w * x, self.w * y)
        )
        if not self.fmt.offset:
            return self._with(_rounded(_ratio(wx, xx)), found.e_G, found.s_M, found.m_M)
        norm = xx * yy - xy * xy
        d_G, e_G = _rounded(_ratio(wx * yy - wy * xy, norm)), _rounded(_ratio(wx * xy - wy * xx, norm))
        alone = (e_G <= 0) | (norm <= 0)  # nothing is subtracted
        d_G = np.where(alone, _rounded(_ratio(wx, xx)), d_G)
        return self._with(np.maximum(d_G, 0), np.where(alone, np.float32(0), e_G), found.s_M, found.m_M)

    def better(self, one: _Found, other: _Found, columns: int) -> _Found:
        """The better of two, for each column or, with eight, for each group."""
        if columns == 1:
            better_M = other.error_M < one.error_M
            better_G = np.zeros(len(one.d_G), bool)
        else:
            better_G = _sum(self._by_group(other.error_M).T) < _sum(self._by_group(one.error_M).T)
            better_M = self._spread(better_G)
        better = better_G, better_G, *[better_M] * 4
        return _Found(*(np.where(is_better, y, x) for is_better, x, y in zip(better, one, other, strict=True)))

    @property
    def _bounds(self) -> tuple[int, int]:
        """The least and the greatest integer s."""
        return -self.fmt.scale_zero, (1 << self.fmt.scale_bits) - 1 - self.fmt.scale_zero

    def _by_group(self, x_M: Array) -> Array:
        """What columns have, by group (G, …): halves of a block belong to one."""
        return x_M.reshape(self.fmt.scales, -1, GROUP).swapaxes(0, 1).reshape(-1, self.fmt.scales * GROUP)

    def _spread(self, x_G: Array) -> Array:
        """What groups have, for each of their columns."""
        return np.tile(np.repeat(x_G, GROUP), self.fmt.scales)

    def _fields(self, d_G: Array, e_G: Array, scale_M: Array, below_M: Array) -> tuple[Array, Array]:
        """The integers s and m that come nearest."""
        s_M = _quotient(scale_M, self._spread(d_G), *self._bounds)
        return s_M, _quotient(below_M, self._spread(e_G), 0, self._bounds[1])

    def _with(self, d_G: Array, e_G: Array, s_M: Array, m_M: Array) -> _Found:
        scale, below = self._spread(d_G) * s_M, self._spread(e_G) * m_M
        q = self._rounded(scale, below)
        return _Found(d_G, e_G, s_M, m_M, q, self._error(q, scale, below))

    def _rounded(self, scale_M: Array, below_M: Array) -> Array:
        return nearest(self.fmt, self.w + below_M, scale_M)

    def _error(self, q: Array, scale_M: Array, below_M: Array) -> Array:
        return _squared_error(self.w + below_M, q, scale_M, self.a)

    def _fitted(self, q: Array) -> tuple[Array, Array]:
        """The scale, and what is subtracted, with the least squares for some integers; nothing that is added."""
        qq, wq = _sum(self.a * q * q), _sum(self.a * self.w * q)
        alone = _ratio(wq, qq)
        if not self.fmt.offset:
            return alone, np.zeros_like(alone)
        total, sum_q, sum_w = _sum(self.a), _sum(self.a * q), _sum(self.a * self.w)
        norm = total * qq - sum_q * sum_q
        scale, below = _ratio(total * wq - sum_q * sum_w, norm), _ratio(sum_q * wq - qq * sum_w, norm)
        only = (below <= 0) | (norm <= 0) | (scale <= 0)
        level = np.where(qq == 0, np.maximum(_ratio(-sum_w, total), 0), np.float32(0))  # all q are 0
        return np.where(only, np.maximum(alone, 0), scale), np.where(only, level, below)


def _ratio(x: Array, y: Array) -> Array:
    """x / y, 0 where y is 0."""
    return x / np.where(y == 0, np.float32(np.inf), y)


def _codes(fmt: Format, w: Array, scale: Array, offset: Array) -> Array:
    """The integers that come nearest to values; 0, or the zero, where the scale is 0."""
    inverse_of = np.where(scale == 0, np.float32(np.inf), scale)
    q = (w - offset) / inverse_of if fmt.offset == "minimum" else np.rint(w / inverse_of) + offset
    return np.clip(np.rint(q), *bounds(fmt))


def _raised(fmt: Format, q: Array, scale: Array, offset: Array) -> Array:
    """The values of integers."""
    found: Array = q * scale + offset if fmt.offset == "minimum" else (q - offset) * scale
    return found


def _fitted(fmt: Format, w: Array, a: Array | None, q: Array, beside: Array) -> tuple[Array, Array]:
    """The scale, and the minimum where there is one, with the least squares for the integers found."""
    a = np.ones_like(w) if a is None else a
    one = np.float32(1)
    if fmt.offset == "zero":
        q = q - beside[1]
        norm = _sum(a * q * q)
        return _rounded(_sum(a * q * w) / np.where(norm == 0, one, norm)), beside[1]
    total, sum_q, sum_w = _sum(a), _sum(a * q), _sum(a * w)
    norm = total * _sum(a * q * q) - sum_q * sum_q
    scale = _rounded((total * _sum(a * q * w) - sum_q * sum_w) / np.where(norm == 0, one, norm))
    return scale, _rounded((sum_w - scale * sum_q) / np.where(total == 0, one, total))


def _exactly(fmt: Format, w: Array, q: Array, scale: Array) -> tuple[Array, Array]:
    """The integers and scales, but a power of two as the scale of blocks that lose something, and nothing with it."""
    exponent = np.frexp(np.abs(w).max(0))[1] - np.int32(fmt.bits - 1)
    power = np.ldexp(np.float32(1), np.clip(exponent, _SMALLEST_POWER, _LARGEST_POWER))
    found = nearest(fmt, w, power)
    better = (found * power == w).all(0) & (q * scale != w).any(0)
    return np.where(better, found, q), np.where(better, power, scale)


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


def _packed(fmt: Format, rows: Array) -> Array:
    """Rows of stored integers, of whole blocks, as they are stored, without padding."""
    grouped = rows.shape[1] // (GROUP * BLOCK) * GROUP * BLOCK
    fours = np.ascontiguousarray(rows[:, :grouped]).view(np.uint32).reshape(len(rows), -1, GROUP, BLOCK // FOUR)
    head, rest = fours.swapaxes(2, 3).reshape(len(rows), -1).view(rows.dtype), rows[:, grouped:]
    if fmt.bits < 8:
        head, rest = _join(head, GROUP * BLOCK, fmt.bits), _join(rest, RUN, fmt.bits)
    return np.concatenate([head, rest], axis=1)


def _join(integers: Array, run: int, bits: int) -> Array:
    """Pack runs of so many integers below 8 bits (see `formats`), 0 where there are none."""
    rows, columns = integers.shape
    whole = np.zeros((rows, -(-columns // run) * run), np.uint8)
    whole[:, :columns] = integers
    runs = whole.reshape(rows, -1, run)
    pairs = (runs & np.uint8(15)).reshape(rows, -1, 2, run // 2)
    joined: Array = pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)
    if bits > 4:
        parts = (runs >> np.uint8(4)).reshape(rows, -1, *_upper_shape(run, bits))
        upper = np.bitwise_or.reduce(parts << _upper_shifts(bits), axis=2)
        joined = np.concatenate([joined, upper], axis=2)
    return joined.reshape(rows, -1)


def _split(stored: Array, run: int, bits: int) -> Array:
    """The inverse of `_join`, on any leading axes."""
    runs = stored.reshape(*stored.shape[:-1], -1, run * bits // 8)
    pairs = runs[..., None, : run // 2]
    found = np.concatenate([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=-2).reshape(*runs.shape[:-1], run)
    if bits > 4:
        upper = runs[..., None, run // 2 :] >> _upper_shifts(bits) & np.uint8((1 << bits - 4) - 1)
        found |= upper.reshape(found.shape) << np.uint8(4)
    return found.reshape(*stored.shape[:-1], -1)


def _upper_shape(run: int, bits: int) -> tuple[int, int]:
    """Upper bits of a run: integers that share a byte, and bytes."""
    return 8 // (bits - 4), run * (bits - 4) // 8


def _upper_shifts(bits: int) -> Array:
    """Where in a byte the upper bits of each of its integers begin."""
    return np.arange(0, 8, bits - 4, dtype=np.uint8)[:, None]


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
