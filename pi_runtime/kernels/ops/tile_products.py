"""Products of rows of block formats with many vectors, by AMX's tiles: the same sums as `row_products`, bit for bit.

A tile has the integer sums of one block for 16 rows and 16 vectors; they are exact in any order. What follows is in
floats, in the order of `row_products`: each of eight lanes takes a block of each group, then a four of columns of each
block outside the groups. So lanes are gone through one after the other, each with its sums in registers:

    for some columns:   `GROUPS` groups, the last of them with the blocks outside the groups
        rows as tiles, scales and sums of vectors                                (`tile_packing`)
        for each lane, for each of its blocks:   sums ← rows · vectors;   lane ← lane + s t · sums
    row · x = the lanes, added in halves

Tiles compute a lane's sums while vector instructions add those of the lane before.
"""

# The signature of `generate` is numba's.
# ruff: noqa: ARG001

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen import amx
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.intrinsics import emits, padded_width
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import MatrixView, RowList, Vectors
from pi_runtime.kernels.data.quantised_input import column_order_at
from pi_runtime.kernels.data.weight_formats import BLOCK_FORMATS, BlockFormat
from pi_runtime.kernels.ops.product_tiles import LANES
from pi_runtime.kernels.ops.tile_packing import (
    BESIDE,
    BLOCKS,
    FOURS_TILE,
    GROUPS,
    LINE,
    ROOM,
    ROWS,
    SINGLES,
    SUMS_TILE,
    TILE,
    VECTORS,
    WEIGHTS_TILE,
    emitted,
    pack_beside,
    pack_rows,
    turned,
)


@dataclass
class _Lanes:
    """Emits what blocks of some columns add to the lanes of 16 rows and 16 vectors; most values are addresses."""

    f: BlockFormat
    b: Any
    room: Any
    vectors: Any
    stride: Any
    beside: Any
    lanes: Any
    begun: Any
    groups: Any
    singles: Any

    def emit(self) -> None:
        b = self.b
        with cgutils.for_range(b, v.offset(LANES + 1)) as loop:
            with b.if_then(b.icmp_signed("<", loop.index, v.offset(LANES))):
                self._multiply_lane(loop.index)
            with b.if_then(b.icmp_signed(">", loop.index, v.offset(0))):
                self._add_lane(b.sub(loop.index, v.offset(1)))

    def _multiply_lane(self, lane: Any) -> None:
        b, vectors, slot = self.b, self._fours(lane), self._slot(lane, v.offset(0))
        weights = self._at(self.room, (v.offset(1), ROOM.weights), (lane, GROUPS * WEIGHTS_TILE))
        for n, tiles in enumerate(amx.PRODUCTS):
            with b.if_then(b.icmp_signed(">", self.groups, v.offset(n))):
                steps = n * WEIGHTS_TILE, n * LANES // 2 * FOURS_TILE, n * SUMS_TILE
                places = [b.gep(at, [v.offset(step)]) for at, step in zip((weights, vectors, slot), steps, strict=True)]
                self._multiply(tiles, *places)
        with cgutils.for_range(b, self.singles) as loop:
            single = b.add(v.offset(LANES * GROUPS), b.add(self._times(loop.index, LANES), lane))
            weights = self._at(self.room, (v.offset(1), ROOM.weights), (single, WEIGHTS_TILE))
            slot = self._slot(lane, b.add(loop.index, v.offset(GROUPS)))
            self._multiply(amx.PRODUCTS[0], weights, self._fours(self._outside(loop.index)), slot)

    def _multiply(self, tiles: tuple[int, int, int], weights: Any, vectors: Any, slot: Any) -> None:
        amx.multiply(self.b, tiles, weights, v.offset(BLOCK), vectors, self.stride)
        amx.store(self.b, tiles[0], slot)

    def _fours(self, block: Any, four: Any = None) -> Any:
        """Pointer to a block of the vectors, or to one of its fours."""
        b = self.b
        line = self._times(b.and_(block, v.offset(1)), LANES)
        if four is not None:
            line = b.add(line, four)
        at = b.add(b.mul(line, self.stride), self._times(b.lshr(block, v.offset(1)), FOURS_TILE))
        return v.pointer(b, b.add(self.vectors, at))

    def _add_lane(self, lane: Any) -> None:
        b, kind, places = self.b, v.vec(v.F32, TILE), [v.offset(r * LINE) for r in range(TILE)]
        own, totals = self._at(self.lanes, (lane, SUMS_TILE)), []
        begun = v.splat(b, b.icmp_signed("!=", self.begun, v.offset(0)), TILE)
        for at in places:
            before = b.select(begun, v.load(b, own, at, kind), v.const(v.F32, TILE, 0.0))
            totals.append(cgutils.alloca_once_value(b, before))
            b.store(before, totals[-1])
        with cgutils.for_range(b, self.groups) as loop:
            block = b.add(self._times(loop.index, LANES), lane)
            at = self._at(self.beside, (v.offset(1), BESIDE), (block, LINE))
            self._add(self._slot(lane, loop.index), block, v.load(b, at, v.offset(0), v.vec(v.I32, TILE)), totals)
        with cgutils.for_range(b, self.singles) as loop:
            block, negative = self._outside(loop.index), v.const(v.I32, TILE, 0)
            fours = v.load(b, self._fours(block, lane), v.offset(0), negative.type)
            for bit in range(0, 32, 8):
                upper = b.shl(fours, v.const(v.I32, TILE, bit))
                negative = b.sub(negative, b.ashr(upper, v.const(v.I32, TILE, 24)))
            self._add(self._slot(lane, b.add(loop.index, v.offset(GROUPS))), block, negative, totals)
        for at, total in zip(places, totals, strict=True):
            v.store(b, b.load(total), own, at)

    def _add(self, slot: Any, block: Any, negative: Any, totals: list[Any]) -> None:
        """Add sums times the scales of a block; the vectors' negative sums are given."""
        b, kind = self.b, v.vec(v.F32, TILE)
        scales = self._at(self.room, (v.offset(1), ROOM.scales), (block, 4))
        t = v.load(b, self._at(self.beside, (block, LINE)), v.offset(0), kind)
        for r, total in enumerate(totals):
            whole = b.sitofp(v.load(b, slot, v.offset(r * LINE), v.vec(v.I32, TILE)), kind)
            places = [v.offset(part + 4 * r * BLOCKS) for part in (0, BESIDE)]
            s, offset = (v.splat(b, v.load(b, scales, place, v.F32), TILE) for place in places)
            b.store(self.f.scaled(b, b.load(total), whole, b.sitofp(negative, kind), s, t, offset), total)

    def _outside(self, n: Any) -> Any:
        """The n-th block outside the groups."""
        return self.b.add(self._times(self.groups, LANES), n)

    def _slot(self, lane: Any, n: Any) -> Any:
        """Pointer to the sums of a lane's n-th block."""
        turn = self._times(self.b.and_(lane, v.offset(1)), GROUPS + SINGLES)
        return self._at(self.room, (v.offset(1), ROOM.sums), (self.b.add(turn, n), SUMS_TILE))

    def _times(self, count: Any, nbytes: int) -> Any:
        return self.b.mul(count, v.offset(nbytes))

    def _at(self, base: Any, *steps: tuple[Any, int]) -> Any:
        """The pointer so many steps of some bytes behind an address."""
        for count, nbytes in steps:
            base = self.b.add(base, self._times(count, nbytes))
        return v.pointer(self.b, base)


def _emit_lanes(f: BlockFormat, b: Any, call: Sequence[Any]) -> None:
    _Lanes(f, b, *call).emit()


_KINDS = {f.offset: code for code, f in BLOCK_FORMATS.items()}
_KIND_OF = tuple(
    _KINDS[BLOCK_FORMATS[code].offset] if code in BLOCK_FORMATS else 0 for code in range(max(BLOCK_FORMATS) + 1)
)
"""A format whose blocks have the same beside their scales: once they are unpacked, there is no other difference."""
_add_products = emitted({code: BLOCK_FORMATS[code] for code in _KINDS.values()}, 8, _emit_lanes)


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


@emits(types.void(*[types.intp] * 3))
def _write_sums(b: Any, lanes: Any, out: Any, step: Any) -> Any:
    """Write products of 16 rows and 16 vectors: the lanes, added in halves."""
    found, lanes, out = [], v.pointer(b, lanes), v.pointer(b, out)
    for r in range(TILE):
        places = [v.offset(lane * SUMS_TILE + r * LINE) for lane in range(LANES)]
        sums = [v.load(b, lanes, at, v.vec(v.F32, TILE)) for at in places]
        while len(sums) > 1:
            sums = [b.fadd(*both) for both in zip(sums[: len(sums) // 2], sums[len(sums) // 2 :], strict=True)]
        found += sums
    for t, products in enumerate(turned(b, found)):
        v.store(b, products, out, b.mul(step, v.offset(t)))


@device
def _lanes_at(room: int, part: int, tile: int) -> int:
    """Where the lanes of 16 rows and 16 vectors are, by the number of each tile."""
    return room + ROOM.lanes + (part * (VECTORS // TILE) + tile) * LANES * SUMS_TILE


@public
def tile_row_products(m: MatrixView, rows: RowList, x: Vectors, out: int, out_stride: int) -> None:
    """`row_products` of a block format, of whole tiles: so many rows, and vectors that are laid as tiles."""
    room, blocks, p = _begin(), (m.columns + BLOCK - 1) // BLOCK, padded_width(m.columns)
    groups = blocks // LANES
    for row in range(0, rows.rows, ROWS):
        for first in range(0, x.tokens, VECTORS):
            parts, tiles = min(rows.rows - row, ROWS) // TILE, min(x.tokens - first, VECTORS) // TILE
            for group in range(0, max(groups, 1), GROUPS):
                some, begin = min(GROUPS, groups - group), LANES * group
                singles = blocks - LANES * groups if group + some == groups else 0
                for tile in range(tiles):
                    vectors, to = x.inputs + (first + tile * TILE) * x.stride, room + ROOM.beside + tile * 2 * BESIDE
                    pack_beside(m.fmt, vectors, m.columns, begin, LANES * some + singles, to)
                for part in range(parts):
                    pack_rows(m, rows, row + part * TILE, begin, some, singles, room)
                    for tile in range(tiles):
                        vectors = column_order_at(x.inputs + (first + tile * TILE) * x.stride, p) + begin * BLOCK
                        own = room + ROOM.beside + tile * 2 * BESIDE, _lanes_at(room, part, tile)
                        _add_products(_KIND_OF[m.fmt], (room, vectors, x.stride, *own, group, some, singles))
            for part in range(parts):
                for tile in range(tiles):
                    to = out + (first + tile * TILE) * out_stride + 4 * (row + part * TILE)
                    _write_sums(_lanes_at(room, part, tile), to, out_stride)
    _end()
