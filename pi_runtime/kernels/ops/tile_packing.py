"""What products by AMX's tiles read: rows of weights as left factors, vectors as right ones, and the scales beside.

A left tile has a block of 16 rows, as signed bytes in the order of the columns, whatever format they have. Fours of
columns of a stored group lie apart (see `artifact.formats`), so a group is unpacked and sorted. Of a block outside the
groups each lane has a tile in which only its own four is not 0.

A right tile has the fours of a block of 16 vectors, each four of all side by side. Vectors are laid so once, for all
rows: in 64 columns they have 16 fours in the order of the columns, and where these are transposed the n-th fours of all
are where the n-th vector's were. So tiles take no memory of their own.

Shape letters: R rows of a tile, M vectors of one, B blocks of some columns, L lanes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from numba import types
from numba.core import cgutils

from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen import amx
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.intrinsics import emits, input_nbytes, padded_width
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import MatrixView, RowList, integers, is_quantised, values_of_row
from pi_runtime.kernels.data.quantised_input import block_sums_at, column_order_at, scales_at
from pi_runtime.kernels.data.weight_formats import BLOCK_FORMATS, GROUP_COLUMNS, BlockFormat
from pi_runtime.kernels.ops.product_tiles import LANES

BY_TILES = ISA.tiles
"""A constant by itself, so that numba leaves out what depends on it."""
TILE, LINE = amx.ROWS, amx.ROW_NBYTES
"""Rows and vectors of a tile, and bytes of four columns of 16 vectors."""
FEWEST = 2 * TILE
"""Fewer vectors are not laid as tiles: vector instructions are quicker."""
ROWS, VECTORS = 2 * TILE, 4 * TILE
"""Rows that share scales of vectors, and vectors that share tiles of weights."""
GROUPS = 4
"""Groups of columns that are taken at once: tiles of weights of so many stay in the first-level cache."""
SINGLES = LANES
"""Room for blocks outside the groups, which are written by twos."""
BLOCKS = (LANES * GROUPS + SINGLES + TILE - 1) // TILE * TILE
"""Room for what lies beside blocks: that of vectors is written for sixteen at once."""
WEIGHTS_TILE, SUMS_TILE, FOURS_TILE = TILE * BLOCK, TILE * LINE, 2 * BLOCK
"""Bytes of a block of 16 rows, of sums of 16 rows and 16 vectors, and of two blocks of one vector."""
BESIDE = 4 * TILE * BLOCKS
"""Bytes of the scales of 16 rows or vectors; their offsets or negative sums follow."""


class Room(NamedTuple):
    """The memory to work in: where each part begins, in bytes."""

    weights: int
    """Tiles [L][GROUPS][R][32], then of blocks outside the groups [B][L][R][32]."""
    scales: int
    """Scales [R][B], then offsets."""
    beside: int
    """[VECTORS / TILE] of scales [B][M], then negative sums."""
    lanes: int
    """What lanes have summed up [ROWS / TILE][VECTORS / TILE][L][R][M]."""
    sums: int
    """Tiles of sums that were just computed: of two lanes."""
    end: int


def _room() -> Room:
    weights, lanes = LANES * (GROUPS + SINGLES) * WEIGHTS_TILE, 4 * LANES * ROWS * VECTORS
    sizes = weights, 2 * BESIDE, VECTORS // TILE * 2 * BESIDE, lanes, 2 * (GROUPS + SINGLES) * SUMS_TILE
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
    """Write a row's part of the tiles of a group, or of two blocks outside the groups, and the scales beside.

    A group of a later row is prefetched meanwhile.
    """
    values, scales, offsets, block, later, to, beside = call
    row, to = v.pointer(b, values), v.pointer(b, to)
    if group:
        run = f.group(b, row, b.udiv(block, v.offset(LANES)))
        for line in range(0, f.group_nbytes, LINE):
            v.prefetch(b, v.pointer(b, later), b.add(run.at, v.offset(line)))
        for lane, w_J in enumerate(_sorted(f, b, run)):
            v.store(b, w_J, to, v.offset(lane * GROUPS * WEIGHTS_TILE))
    else:
        runs = [f.single(b, row, b.add(block, v.offset(start))) for start in range(0, 2, f.per_byte)]
        two, zeros = [w_J for run in runs for w_J in f.signed(b, run, 0, BLOCK)], v.const(v.I8, BLOCK, 0)
        for n, w_J in enumerate(two):
            for lane in range(LANES):
                own = [k + BLOCK * (k // 4 != lane) for k in range(BLOCK)]
                v.store(b, v.shuffle(b, w_J, zeros, own), to, v.offset((n * LANES + lane) * WEIGHTS_TILE))
    for n, found in enumerate(f.beside(b, [v.pointer(b, scales)], offsets, block, LANES if group else 2)[:2]):
        v.store(b, found, v.pointer(b, beside), v.offset(n * BESIDE))


def _sorted(f: BlockFormat, b: Any, group: Any) -> list[Any]:
    """The eight blocks of a group as signed bytes, each in the order of its columns."""
    part, fours = GROUP_COLUMNS // f.per_byte, v.vec(v.I32, LINE // 4)
    found = [f.signed(b, group, k, LINE) for k in range(0, part, LINE)]
    lines = [b.bitcast(w_J, fours) for each in zip(*found, strict=True) for w_J in each]
    halves = []  # four fours of four blocks
    for first in (0, 4):
        lanes = [8 * k + block for block in range(first, first + 4) for k in range(4)]
        halves.append([v.shuffle(b, lines[n], lines[n + 1], lanes) for n in (0, 2)])
    blocks = []
    for one, other in halves:
        for first in (0, 8):
            lanes = [block + k + half for block in (first, first + 4) for half in (0, 16) for k in range(4)]
            two = v.shuffle(b, one, other, lanes)
            blocks += [v.shuffle(b, two, two, range(start, start + 8)) for start in (0, 8)]
    return blocks


_TILED = {code: f for code, f in BLOCK_FORMATS.items() if f.fmt.scales == 1}
TILED = tuple(_TILED)
"""Codes of the formats whose products tiles compute: those whose blocks have one scale."""
_WITH_OFFSETS = tuple(code for code, f in _TILED.items() if f.offset)
_unpack_group = emitted(_TILED, 7, partial(_emit_unpack, True))
_unpack_two = emitted({n: f for n, f in _TILED.items() if not f.fmt.grouped}, 7, partial(_emit_unpack, False))


def turned(b: Any, rows: Sequence[Any]) -> list[Any]:
    """Transpose 16 vectors of 16 numbers: quarters of ever larger squares change their places."""
    rows = list(rows)
    for step in (1, 2, 4, 8):
        upper = [n + TILE - step if n & step else n for n in range(TILE)]
        lower = [n + TILE if n & step else n + step for n in range(TILE)]
        for k in range(TILE):
            if not k & step:
                both = rows[k], rows[k + step]
                rows[k], rows[k + step] = v.shuffle(b, *both, upper), v.shuffle(b, *both, lower)
    return rows


@emits(types.void(*[types.intp] * 4))
def _transpose(b: Any, source: Any, stride: Any, to: Any, step: Any) -> Any:
    """Write 16 rows of 16 numbers of four bytes as 16 columns, maybe to the same place."""
    source, to, kind = v.pointer(b, source), v.pointer(b, to), v.vec(v.I32, TILE)
    rows = [v.load(b, source, b.mul(stride, v.offset(r)), kind) for r in range(TILE)]
    for n, column in enumerate(turned(b, rows)):
        v.store(b, column, to, b.mul(step, v.offset(n)))


@public
def tile_vectors(fmt: int, tokens: int) -> int:
    """How many of some inputs of a format are laid as tiles, where the processor has them: whole tiles of many."""
    return tokens // TILE * TILE if is_quantised(fmt) and tokens >= FEWEST else 0


@public
def lay_tiles(columns: int, tokens: int, inputs_at: int) -> None:
    """Lay so many inputs, whole tiles of them, as tiles."""
    p, stride = padded_width(columns), input_nbytes(columns)
    for first in range(0, tokens, TILE):
        at = column_order_at(inputs_at + first * stride, p)
        for fours in range(at, at + p, FOURS_TILE):
            _transpose(fours, stride, fours, stride)


@device
def _row_of(rows: RowList, n: int) -> int:
    """The n-th of some rows; past the end the last one that is known."""
    least = min(n, rows.known - 1)
    return integers(rows.listed, rows.known)[least] if rows.listed != 0 else rows.first + least


@device
def pack_rows(m: MatrixView, rows: RowList, first: int, begin: int, groups: int, singles: int, room: int) -> None:
    """Write some columns of 16 rows as tiles: so many groups from block `begin` on, and blocks outside the groups."""
    for r in range(TILE):
        row, later = _row_of(rows, first + r), values_of_row(m, _row_of(rows, first + TILE + r))
        values, scales = values_of_row(m, row), m.scales + row * m.scales_stride
        weights, beside = room + ROOM.weights + r * BLOCK, room + ROOM.scales + r * 4 * BLOCKS
        for group in range(groups):
            own = begin + LANES * group, later, weights + group * WEIGHTS_TILE, beside + group * 4 * LANES
            _unpack_group(m.fmt, (values, scales, m.offsets, *own))
        weights, beside = weights + LANES * GROUPS * WEIGHTS_TILE, beside + groups * 4 * LANES
        for single in range(0, singles, 2):
            own = begin + LANES * groups + single, later, weights + single * LANES * WEIGHTS_TILE, beside + 4 * single
            _unpack_two(m.fmt, (values, scales, m.offsets, *own))


@device
def pack_beside(fmt: int, vectors: int, columns: int, begin: int, blocks: int, to: int) -> None:
    """Write the scales of some blocks of 16 vectors, then their negative sums where the format needs them."""
    p, stride = padded_width(columns), input_nbytes(columns)
    for block in range(0, blocks, TILE):
        _transpose(scales_at(vectors, p) + 4 * (begin + block), stride, to + block * LINE, LINE)
        if fmt in _WITH_OFFSETS:
            sums = block_sums_at(vectors, p) + 4 * (begin + block)
            _transpose(sums, stride, to + BESIDE + block * LINE, LINE)
