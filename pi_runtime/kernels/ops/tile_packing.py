"""What products by AMX's tiles read: rows of weights as tiles, and scales beside, for some columns at a time.

Of 16 rows the k-th fours of columns of a block lie side by side, as signed bytes, whatever format they have. Of a row
they lie apart (see `artifact.formats`), so a group is unpacked and then transposed.

Shape letters: R rows and M vectors of a tile, B blocks of some columns, L lanes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numba import carray, types
from numba.core import cgutils

from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen import amx
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.intrinsics import emits, padded_width
from pi_runtime.kernels.codegen.jit import device
from pi_runtime.kernels.data.matrix_view import MatrixView, RowList, Vectors, integers, pointer_of, values_of_row
from pi_runtime.kernels.data.quantised_input import block_sums_at, column_order_at, scales_at
from pi_runtime.kernels.data.weight_formats import BLOCK_FORMATS, GROUP_COLUMNS, BlockFormat
from pi_runtime.kernels.ops.product_tiles import LANES

TILE, LINE = amx.ROWS, amx.ROW_NBYTES
"""Rows and vectors of a tile, and bytes of four columns of 16 rows."""
ROWS, VECTORS = 2 * TILE, 4 * TILE
"""Rows that share what is packed of vectors, and vectors that share tiles of weights."""
GROUPS = 4
"""Groups of columns that are taken at once: what a tile reads of so many stays in the first-level cache."""
BLOCKS = 8 * GROUPS + 10
"""Room for their blocks and up to seven outside the groups, which are written by twos and fours."""
WEIGHTS_TILE, SUMS_TILE = TILE * BLOCK, TILE * LINE
"""Bytes of a block of 16 rows, and of their sums with 16 vectors, or of one lane of these."""
SCALES = LINE * BLOCKS
"""Bytes of the scales of 16 rows."""
COPY, BESIDE = BLOCK * BLOCKS, 4 * (BLOCKS + LANES * (GROUPS + 7))
"""Bytes of a vector's copy, and of its scales and negative sums."""
_FOURS = 16
"""Bytes of four fours."""


class Room(NamedTuple):
    """The memory to work in: where each part begins, in bytes."""

    unpacked: int
    """A group of 16 rows in the order in which it is stored [R][256]."""
    unpacked_scales: int
    """Its scales [R][8], then its offsets."""
    weights: int
    """Tiles [ROWS / TILE][B][8][R] of fours."""
    scales: int
    """Scales [B][R] and then offsets, of 16 rows after 16 others."""
    copies: int
    """Vectors [M][B][32], where they do not follow each other."""
    beside: int
    """Vectors' scales [B], then their negative sums of blocks and of fours outside the groups."""
    lanes: int
    """What lanes have summed up [VECTORS / TILE][ROWS / TILE][L][M][R]."""
    sums: int
    """Tiles of sums that were just computed."""
    end: int


def _room() -> Room:
    packed = ROWS * COPY, ROWS // TILE * 2 * SCALES, TILE * COPY, TILE * BESIDE
    sizes = TILE * GROUP_COLUMNS, 2 * TILE * 32, *packed, 4 * LANES * ROWS * VECTORS, len(amx.SUMS) * SUMS_TILE
    assert not any(size % LINE for size in sizes)
    return Room(0, *accumulate(sizes))


ROOM = _room()


def emitted(
    formats: Mapping[int, BlockFormat], count: int, emit: Callable[[BlockFormat, Any, Sequence[Any]], None]
) -> Any:
    """A function for kernels of a format's code and a tuple of `count` integers: it emits something for each format."""

    @emits(types.void(types.intp, types.UniTuple(types.intp, count)))
    def run(b: Any, fmt: Any, call: Any) -> Any:
        values = cgutils.unpack_tuple(b, call)
        v.switch(b, fmt, {code: partial(emit, f, b, values) for code, f in formats.items()})

    return run


def _emit_unpack(group: bool, f: BlockFormat, b: Any, call: Sequence[Any]) -> None:
    """Write a group of a row, or two blocks outside the groups, as signed bytes with their scales.

    A group of a later row is prefetched meanwhile.
    """
    values, scales, offsets, block, later, to, beside = call
    row, size = v.pointer(b, values), LINE if group else BLOCK
    if group:
        runs = [f.group(b, row, b.udiv(block, v.offset(8)))]
        for line in range(0, f.group_nbytes, LINE):
            v.prefetch(b, v.pointer(b, later), b.add(runs[0].at, v.offset(line)))
    else:
        runs = [f.single(b, row, b.add(block, v.offset(start))) for start in range(0, 2, f.per_byte)]
    for n, run in enumerate(runs):
        part = run.size // f.per_byte
        for k in range(0, part, size):
            for half, w_J in enumerate(f.signed(b, run, k, size)):
                v.store(b, w_J, v.pointer(b, to), v.offset(n * run.size + k + half * part))
    for n, found in enumerate(f.beside(b, [v.pointer(b, scales)], offsets, block, 8 if group else 2)[:2]):
        v.store(b, found, v.pointer(b, beside), v.offset(n * TILE * 32))


_TILED = {code: f for code, f in BLOCK_FORMATS.items() if f.fmt.scales == 1}
TILED = tuple(_TILED)
"""Codes of the formats whose products tiles compute: those whose blocks have one scale."""
_unpack_group = emitted(_TILED, 7, partial(_emit_unpack, True))
_unpack_two = emitted({n: f for n, f in _TILED.items() if not f.fmt.grouped}, 7, partial(_emit_unpack, False))


@emits(types.void(*[types.intp] * 4))
def _transpose_fours(b: Any, source: Any, stride: Any, to: Any, step: Any) -> Any:
    """Write the first fours of bytes of 16 rows side by side, and the second … fourth ones each a step further."""
    quarters, four, rows, halves = range(0, TILE, 4), v.vec(v.I32, 4), [], []
    for r in range(4):  # every fourth row shares a register
        each = [b.mul(stride, v.offset(r + quarter)) for quarter in quarters]
        rows.append(v.join(b, [v.load(b, v.pointer(b, source), at, four) for at in each]))
    for low in (0, 2):
        lanes = [q + low + lane + row for q in quarters for lane in (0, 1) for row in (0, TILE)]
        halves.append([v.shuffle(b, rows[r], rows[r + 1], lanes) for r in (0, 2)])
    for n in range(4):
        lanes = [q + n % 2 * 2 + lane + row for q in quarters for row in (0, TILE) for lane in (0, 1)]
        one, other = halves[n // 2]
        v.store(b, v.shuffle(b, one, other, lanes), v.pointer(b, to), b.mul(step, v.offset(n)))


@device
def _row_of(rows: RowList, n: int) -> int:
    """The n-th of some rows; past the end the last one."""
    least = min(n, rows.rows - 1)
    return integers(rows.listed, rows.rows)[least] if rows.listed != 0 else rows.first + least


@device
def pack_rows(m: MatrixView, rows: RowList, first: int, begin: int, groups: int, singles: int, room: int) -> None:
    """Write some columns of 16 rows as tiles: so many groups from block `begin` on, and blocks outside the groups."""
    which, beside = first % ROWS // TILE, room + ROOM.unpacked_scales
    weights, scales = room + ROOM.weights + which * TILE * COPY, room + ROOM.scales + which * 2 * SCALES
    for n in range(groups + (singles + 1) // 2):
        grouped = n < groups
        block = 8 * n if grouped else 8 * groups + 2 * (n - groups)
        for r in range(TILE):
            row, later = _row_of(rows, first + r), values_of_row(m, _row_of(rows, first + ROWS + r))
            stored = values_of_row(m, row), m.scales + row * m.scales_stride, m.offsets, begin + block, later
            to = room + ROOM.unpacked + r * GROUP_COLUMNS, beside + 32 * r
            if grouped:
                _unpack_group(m.fmt, (*stored, *to))
            else:
                _unpack_two(m.fmt, (*stored, *to))
        for k in range(16 if grouped else 4):
            # A group has its fours of eight blocks in turn, two blocks outside have their own ones.
            place, step = (k % 2 * 4 * WEIGHTS_TILE + k // 2 * LINE, WEIGHTS_TILE) if grouped else (4 * k * LINE, LINE)
            source = room + ROOM.unpacked + k * _FOURS
            _transpose_fours(source, GROUP_COLUMNS, weights + block * WEIGHTS_TILE + place, step)
        for k in range(2 if grouped else 1):
            for part in range(2):  # scales, then offsets
                source, to_4 = beside + part * TILE * 32 + k * _FOURS, scales + part * SCALES + (block + 4 * k) * LINE
                _transpose_fours(source, 32, to_4, LINE)


@emits(types.void(*[types.intp] * 4))
def _copy_eights(b: Any, scales: Any, sums: Any, to: Any, count: Any) -> Any:
    """Copy so many times eight scales, and eight negative sums as float32."""
    scales, sums, to = (v.pointer(b, address) for address in (scales, sums, to))
    with cgutils.for_range(b, count) as loop:
        at = b.mul(loop.index, v.offset(32))
        v.store(b, v.load(b, scales, at, v.vec(v.F32, 8)), to, at)
        whole = v.load(b, sums, at, v.vec(v.I32, 8))
        v.store(b, b.sitofp(whole, v.vec(v.F32, 8)), to, b.add(at, v.offset(4 * BLOCKS)))


@device
def pack_vectors(
    x: Vectors, columns: int, first: int, begin: int, groups: int, singles: int, room: int
) -> tuple[int, int]:
    """Write scales and negative sums of some columns of 16 vectors; past the end of the last one.

    Returns where their bytes are, and how far apart. Vectors that do not follow each other are copied.
    """
    p, grouped, in_turn = padded_width(columns), 8 * groups, first + TILE <= x.tokens
    start = x.inputs + _vector_of(x, first) * x.stride
    for k in range(TILE):
        at = x.inputs + _vector_of(x, first + k) * x.stride
        in_turn &= at == start + k * x.stride
        beside = room + ROOM.beside + k * BESIDE
        _copy_eights(scales_at(at, p) + 4 * begin, block_sums_at(at, p) + 4 * begin, beside, groups)
        if singles > 0:
            _pack_singles(at, p, begin + grouped, singles, beside + 4 * grouped)
    if in_turn:
        return column_order_at(start, p) + begin * BLOCK, x.stride
    for k in range(TILE):
        q_J = carray(pointer_of(column_order_at(x.inputs + _vector_of(x, first + k) * x.stride, p)), (p,), np.int8)
        to_J = carray(pointer_of(room + ROOM.copies + k * COPY), (COPY,), np.int8)
        for j in range((grouped + singles) * BLOCK):
            to_J[j] = q_J[begin * BLOCK + j]
    return room + ROOM.copies, COPY


@device
def _vector_of(x: Vectors, n: int) -> int:
    """The number of the n-th vector; past the end of the last one."""
    least = min(n, x.tokens - 1)
    return integers(x.listed, x.tokens)[least] if x.listed != 0 else least


@device
def _pack_singles(at: int, p: int, begin: int, singles: int, beside: int) -> None:
    """Write scales of a vector's blocks outside the groups, and negative sums of their fours of columns."""
    q_J = carray(pointer_of(column_order_at(at, p) + begin * BLOCK), (singles * BLOCK,), np.int8)
    t_B = carray(pointer_of(scales_at(at, p) + 4 * begin), (singles,), np.float32)
    to_B = carray(pointer_of(beside), (BLOCKS + LANES * singles,), np.float32)
    for block in range(singles):
        to_B[block] = t_B[block]
    for four in range(LANES * singles):
        total = np.int32(0)
        for j in range(4 * four, 4 * four + 4):
            total -= np.int32(q_J[j])
        to_B[BLOCKS + four] = np.float32(total)
