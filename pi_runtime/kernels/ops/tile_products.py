"""Products of rows of block formats with many vectors, by AMX's tiles: the same sums as `row_products`, bit for bit.

A tile has the integer sums of one block for 16 rows and 16 vectors; they are exact in any order. What follows is in
floats, in the order of `row_products`: each of eight lanes takes a block of each group, then a four of columns of each
block outside the groups. So lanes are gone through one after the other, each with its sums in registers:

    for some columns:   `GROUPS` groups, the last of them with the blocks outside the groups
        rows as tiles, scales and sums of vectors                                (`tile_packing`)
        for each lane, for each of its blocks:   sums ← vectors · rows;   lane ← lane + s t · sums
    row · x = the lanes, added in halves
"""

# The signature of `generate` is numba's.
# ruff: noqa: ARG001

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen import amx
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.intrinsics import emits
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import MatrixView, RowList, Vectors, pointer_of
from pi_runtime.kernels.data.weight_formats import BLOCK_FORMATS, BlockFormat
from pi_runtime.kernels.ops.product_tiles import LANES
from pi_runtime.kernels.ops.tile_packing import (
    BESIDE,
    BLOCKS,
    COPY,
    GROUPS,
    LINE,
    ROOM,
    ROWS,
    SCALES,
    SUMS_TILE,
    TILE,
    VECTORS,
    WEIGHTS_TILE,
    emitted,
    pack_rows,
    pack_vectors,
)


@dataclass
class _Lanes:
    """Emits what blocks of some columns add to the lanes of 16 rows and 16 vectors; most values are addresses."""

    f: BlockFormat
    b: Any
    vectors: Any
    stride: Any
    beside: Any
    weights: Any
    scales: Any
    lanes: Any
    sums: Any
    groups: Any
    singles: Any

    def emit(self) -> None:
        b, places, kind = self.b, [v.offset(m * LINE) for m in range(TILE)], v.vec(v.F32, TILE)
        with cgutils.for_range(b, v.offset(LANES)) as loop:
            own = self._at(self.lanes, (loop.index, SUMS_TILE))
            totals = [cgutils.alloca_once_value(b, v.load(b, own, at, kind)) for at in places]
            self._add_blocks(loop.index, totals)
            for at, total in zip(places, totals, strict=True):
                v.store(b, b.load(total), own, at)

    def _add_blocks(self, lane: Any, totals: list[Any]) -> None:
        b, grouped = self.b, self._times(self.groups, 8)
        with cgutils.for_range(b, b.lshr(self.groups, v.offset(1))) as loop:
            # Two at once, so that tiles and vectors work at the same time.
            blocks = [b.add(self._times(loop.index, 16), b.add(lane, v.offset(other))) for other in (0, 8)]
            for n, block in enumerate(blocks):
                self._multiply(n, block)
            for n, block in enumerate(blocks):
                self._add(n, block, block, totals)
        with b.if_then(b.trunc(self.groups, ir.IntType(1))):
            block = b.add(b.sub(grouped, v.offset(8)), lane)
            self._multiply(0, block)
            self._add(0, block, block, totals)
        with cgutils.for_range(b, self.singles) as loop:
            block = b.add(grouped, loop.index)
            self._multiply(0, block, lane)
            self._add(0, block, b.add(grouped, b.add(self._times(loop.index, LANES), lane)), totals)

    def _times(self, count: Any, nbytes: int) -> Any:
        return self.b.mul(count, v.offset(nbytes))

    def _at(self, base: Any, *steps: tuple[Any, int]) -> Any:
        """The pointer so many steps of some bytes behind an address."""
        for count, nbytes in steps:
            base = self.b.add(base, self._times(count, nbytes))
        return v.pointer(self.b, base)

    def _multiply(self, n: int, block: Any, four: Any = None) -> None:
        """The n-th sums of a block, or of one of its fours."""
        left, right, tiles = [(block, BLOCK)], [(block, WEIGHTS_TILE)], (amx.LEFT[n], amx.RIGHT[n])
        if four is not None:
            left, right, tiles = [*left, (four, 4)], [*right, (four, LINE)], (amx.FOUR_LEFT, amx.FOUR_RIGHT)
        factors = self._at(self.vectors, *left), self.stride, self._at(self.weights, *right)
        amx.multiply(self.b, (amx.SUMS[n], *tiles), *factors)
        amx.store(self.b, amx.SUMS[n], self._at(self.sums, (v.offset(n), SUMS_TILE)))

    def _add(self, n: int, block: Any, taken: Any, totals: list[Any]) -> None:
        """Add the n-th sums times the scales of a block; the vectors' negative sums are the `taken`-th."""
        b, kind, at = self.b, v.vec(v.F32, TILE), self._times(block, LINE)
        s, offset = (v.load(b, v.pointer(b, self.scales), b.add(at, v.offset(part)), kind) for part in (0, SCALES))
        places = self._times(block, 4), b.add(self._times(taken, 4), v.offset(4 * BLOCKS))
        for m, total in enumerate(totals):
            at = v.offset((n * TILE + m) * LINE)
            whole = b.sitofp(v.load(b, v.pointer(b, self.sums), at, v.vec(v.I32, TILE)), kind)
            beside = self._at(self.beside, (v.offset(m), BESIDE))
            t, negative = (v.splat(b, v.load(b, beside, place, v.F32), TILE) for place in places)
            b.store(self.f.scaled(b, b.load(total), whole, negative, s, t, offset), total)


def _emit_lanes(f: BlockFormat, b: Any, call: Sequence[Any]) -> None:
    _Lanes(f, b, *call).emit()


_KINDS = {f.offset: code for code, f in BLOCK_FORMATS.items()}
_KIND_OF = tuple(
    _KINDS[BLOCK_FORMATS[code].offset] if code in BLOCK_FORMATS else 0 for code in range(max(BLOCK_FORMATS) + 1)
)
"""A format whose blocks have the same beside their scales: once they are unpacked, there is no other difference."""
_add_products = emitted({code: BLOCK_FORMATS[code] for code in _KINDS.values()}, 9, _emit_lanes)


@intrinsic
def _begin(typing_context: Any) -> Any:
    """Give tiles their shapes, and return the address of memory to work in, on the stack."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        amx.configure(context, b)
        place = cgutils.alloca_once(b, v.I8, v.offset(ROOM.end))
        place.align = LINE
        return b.ptrtoint(place, v.I64)

    return types.intp(), generate


@emits(types.void())
def _end(b: Any) -> Any:
    """Forget tiles."""
    amx.release(b)


@device
def _lanes_at(room: int, tile: int, part: int) -> int:
    """Where the lanes of 16 vectors and 16 rows are, by the number of each tile."""
    return room + ROOM.lanes + (tile * (ROWS // TILE) + part) * LANES * SUMS_TILE


@device
def _write_sums(lanes: int, count: int, out: int) -> None:
    """Write products of the first of 16 rows with a vector: their lanes, added in halves."""
    z = carray(pointer_of(lanes), (LANES, SUMS_TILE // 4), np.float32)
    y = carray(pointer_of(out), (count,), np.float32)
    for r in range(count):
        y[r] = ((z[0, r] + z[4, r]) + (z[2, r] + z[6, r])) + ((z[1, r] + z[5, r]) + (z[3, r] + z[7, r]))


@public
def tile_row_products(m: MatrixView, rows: RowList, x: Vectors, out: int, out_stride: int) -> None:
    """`row_products` of a block format."""
    room, blocks = _begin(), (m.columns + BLOCK - 1) // BLOCK
    groups = blocks // 8
    for row in range(0, rows.rows, ROWS):
        for first in range(0, x.tokens, VECTORS):
            parts, count = (min(rows.rows - row, ROWS) + TILE - 1) // TILE, min(x.tokens - first, VECTORS)
            tiles = (count + TILE - 1) // TILE
            sums = carray(pointer_of(room + ROOM.lanes), (tiles * ROWS * TILE * LANES,), np.float32)
            for k in range(sums.shape[0]):
                sums[k] = np.float32(0)
            for group in range(0, max(groups, 1), GROUPS):
                some = min(GROUPS, groups - group)
                singles = blocks - 8 * groups if group + some == groups else 0
                for part in range(parts):
                    pack_rows(m, rows, row + part * TILE, 8 * group, some, singles, room)
                for tile in range(tiles):
                    vectors = pack_vectors(x, m.columns, first + tile * TILE, 8 * group, some, singles, room)
                    for part in range(parts):
                        weights = room + ROOM.weights + part * TILE * COPY, room + ROOM.scales + part * 2 * SCALES
                        others = *vectors, room + ROOM.beside, *weights, _lanes_at(room, tile, part)
                        _add_products(_KIND_OF[m.fmt], (*others, room + ROOM.sums, some, singles))
            for t in range(count):
                for part in range(parts):
                    lanes, own = _lanes_at(room, t // TILE, part) + t % TILE * LINE, row + part * TILE
                    _write_sums(lanes, min(rows.rows - own, TILE), out + (first + t) * out_stride + 4 * own)
    _end()
