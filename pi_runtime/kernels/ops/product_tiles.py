"""Tiles of products of rows with vectors, emitted for one format: `row_products` goes through rows and vectors in them.

A product is summed in as many lanes on every processor, whatever its registers have: several rows share a register, or
a row has several registers. Only in 16-bit floats it has as many as a register.

Shape letters: R rows and T vectors of a tile, B blocks, J bytes and L lanes of a register.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from pi_runtime.artifact.footprint import INPUT, PAD
from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.data.weight_formats import GROUP_COLUMNS, REGISTER, Beside, BlockFormat, FloatFormat

LANES = 8
"""Lanes that a product of a row of a block format and a vector is summed in."""


@dataclass
class Rows:
    """Pointers to some rows, to their scales, and to the rows that are prefetched meanwhile."""

    values: list[Any]
    scales: list[Any]
    later: list[Any]
    later_scales: list[Any]
    offsets: Any
    """Bytes from a block's scale to its minimum or zero."""
    beside: Any = None
    """Pointer to what groups of the rows have beside their integers, where `write_beside` wrote that for all tiles."""
    level: int = 2
    """The cache that they are fetched to."""

    @property
    def a_register(self) -> int:
        """How many rows share a register of sums."""
        return min(len(self.values), REGISTER // LANES)


Sums = list[list[Any]]
"""[T][registers of R] places of float registers: a tile's products have their lanes there side by side."""


def by_register(rows: Rows, each: Sequence[Any]) -> list[Sequence[Any]]:
    """What each row has, for the rows of one register after those of another."""
    return [each[k : k + rows.a_register] for k in range(0, len(each), rows.a_register)]


def float_tile(f: FloatFormat, b: Any, rows: Rows, inputs: list[Any], columns: Any, sums: Sums) -> None:
    """Emit a tile of a float format: add the products to `sums`.

    Where a register has fewer than `f.lanes`, and several vectors need them all, the columns are gone through once
    for each part of the lanes.
    """
    every = range(0, f.lanes, REGISTER)
    for parts in [every] if len(inputs) == 1 else [[part] for part in every]:
        _FloatTile(f, b, rows, inputs, columns, sums, parts).emit()


@dataclass
class _FloatTile:
    """Emits a tile of a float format for some parts of the lanes, by the first lane of each."""

    f: FloatFormat
    b: Any
    rows: Rows
    inputs: list[Any]
    columns: Any
    sums: Sums
    parts: Sequence[int]

    def emit(self) -> None:
        b, columns, nbytes, at_once = self.b, self.columns, self.f.nbytes, 4 * self.f.lanes
        with cgutils.for_range(b, b.udiv(columns, v.offset(at_once))) as loop:
            first = b.mul(loop.index, v.offset(at_once))
            for line, row in product(range(0, at_once * nbytes, v.LINE), self.rows.later if 0 in self.parts else []):
                v.prefetch(b, row, b.add(b.mul(first, v.offset(nbytes)), v.offset(line)), self.rows.level)
            for k in range(0, at_once, self.f.lanes):
                self._add(b.add(first, v.offset(k)))
        done = b.and_(columns, v.offset(-at_once))
        with cgutils.for_range(b, b.udiv(b.sub(columns, done), v.offset(self.f.lanes))) as loop:
            self._add(b.add(done, b.mul(loop.index, v.offset(self.f.lanes))))
        column = b.and_(columns, v.offset(-self.f.lanes))
        with b.if_then(b.icmp_signed("<", column, columns)):
            self._add(column, b.sub(columns, column))

    def _add(self, column: Any, left: Any = None) -> None:
        """Add the products of a column for each lane, or of those that are left."""
        b, f, kind = self.b, self.f, v.vec(v.F32, REGISTER)
        for part in self.parts:
            first, count = b.add(column, v.offset(part)), None if left is None else b.sub(left, v.offset(part))
            at, which = b.mul(first, v.offset(4)), part // REGISTER
            x = [v.load(b, x, at, kind) if count is None else v.load_some(b, x, at, count, kind) for x in self.inputs]
            for r, row in enumerate(self.rows.values):
                w_L = f.load(b, row, first, REGISTER, count)
                for x_L, into in zip(x, self.sums, strict=True):
                    total = into[which + r * (f.lanes // REGISTER)]
                    b.store(v.fma(b, w_L, x_L, b.load(total)), total)


_BESIDE_NBYTES = 4 * REGISTER * 4
"""Bytes of what a group has beside its integers, for the rows of one register: four registers."""


def beside_room(b: Any, rows: int, columns: Any) -> Any:
    """Memory of this call for what `write_beside` writes of so many rows."""
    groups = b.udiv(columns, v.offset(GROUP_COLUMNS))
    registers = v.offset(rows * LANES // REGISTER * _BESIDE_NBYTES // v.LINE)
    place = b.alloca(ir.ArrayType(v.I8, v.LINE), b.mul(groups, registers))
    place.align = v.LINE
    return b.bitcast(place, v.I8.as_pointer())


def write_beside(f: BlockFormat, b: Any, rows: Rows, columns: Any, place: Any) -> Rows:
    """The rows, with what their groups have beside their integers at `place`: so several tiles need not unpack it."""
    registers = by_register(rows, rows.scales)
    with cgutils.for_range(b, b.udiv(columns, v.offset(GROUP_COLUMNS))) as loop:
        for k, some in enumerate(registers):
            beside = f.beside(b, some, rows.offsets, b.mul(loop.index, v.offset(8)), LANES)
            at = b.mul(loop.index, v.offset(_BESIDE_NBYTES * len(registers)))
            for n, one in enumerate((*beside[:2], *beside.halves)):
                v.store(b, one, place, b.add(at, v.offset(_BESIDE_NBYTES * k + 4 * REGISTER * n)))
    return replace(rows, beside=place)


class _Input:
    """Pointers into a quantised input: its bytes, its scales, and the negative sums of its blocks and of their first
    halves."""

    def __init__(self, b: Any, base: Any, columns: Any) -> None:
        pads = b.udiv(b.add(columns, v.offset(PAD - 1)), v.offset(PAD))
        places = (b.gep(base, [b.mul(pads, v.offset(at))]) for at in INPUT[:4])
        self.bytes, self.scales, self.block_sums, self.half_sums = places


class BlockTile:
    """Emits a tile of a block format.

    In a group of eight blocks, lane l of a register belongs to block l % 8 (see `artifact.formats`), so that sums of
    eight whole blocks are converted at once. A block outside the groups has its eight fours of columns in the lanes.
    """

    def __init__(self, f: BlockFormat, b: Any, rows: Rows, inputs: list[Any], columns: Any, sums: Sums) -> None:
        self.f, self.b, self.rows, self.sums = f, b, rows, sums
        self.scales = by_register(rows, rows.scales)
        self.inputs = [_Input(b, x, columns) for x in inputs]
        blocks = b.udiv(b.add(columns, v.offset(BLOCK - 1)), v.offset(BLOCK))
        groups = b.udiv(blocks, v.offset(8))
        with cgutils.for_range(b, b.udiv(b.add(blocks, v.offset(31)), v.offset(32))) as loop:
            for row in rows.later_scales:
                v.prefetch(b, row, b.mul(loop.index, v.offset(v.LINE)))
        with cgutils.for_range(b, groups) as loop:
            self._group(loop.index)
        done, at_once = b.mul(groups, v.offset(8)), f.per_byte  # blocks outside the groups that share their bytes
        left = b.udiv(b.add(b.sub(blocks, done), v.offset(at_once - 1)), v.offset(at_once))
        if not f.fmt.grouped:
            with cgutils.for_range(b, left) as loop:
                self._single(b.add(done, b.mul(loop.index, v.offset(at_once))))

    def _sums(self, start: Any, count: int) -> list[v.ByteSums]:
        """Integer sums of so many rows."""
        return [v.ByteSums(start, self.f.most, signed=not self.f.unsigned) for _ in range(count)]

    def _multiply(self, found: list[v.ByteSums], w: list[list[Any]], half: int, x: _Input, at: Any) -> None:
        """Add the products of one register of each row with the input's bytes."""
        q_J = v.load(self.b, x.bytes, at, w[0][half].type)
        for one, w_r in zip(found, w, strict=True):
            one.add(self.b, w_r[half], q_J)

    def _add(self, found: list[Any], beside: list[Beside], t: list[Any], negative: list[Any]) -> None:
        """Add integer sums [T][registers of R][of a block, or of its halves] times the scales of their blocks: of each
        register, and of a vector. `negative` are the negative sums of each vector's integers.
        """
        b = self.b
        for found_t, t_8, negative_8, into in zip(found, t, negative, self.sums, strict=True):
            t_L = v.join(b, [t_8] * self.rows.a_register)
            negative_L = v.join(b, [b.sitofp(negative_8, t_8.type)] * self.rows.a_register)
            for sums, own, total in zip(found_t, beside, into, strict=True):
                value = own.folded(b, [b.sitofp(one, own.scales.type) for one in sums])
                found_L = self.f.scaled(b, b.load(total), value, negative_L, own.scales, t_L, own.offsets)
                b.store(found_L, total)

    def _group(self, group: Any) -> None:
        b, size, part = self.b, 4 * REGISTER, GROUP_COLUMNS // self.f.per_byte
        block, runs = b.mul(group, v.offset(8)), [self.f.group(b, row, group) for row in self.rows.values]
        for line, row in product(range(0, self.f.group_nbytes, v.LINE), self.rows.later):
            v.prefetch(b, row, b.add(runs[0].at, v.offset(line)), self.rows.level)
        at = b.mul(block, v.offset(4))
        negative = [v.load(b, x.block_sums, at, v.vec(v.I32, LANES)) for x in self.inputs]
        found = [
            [self._sums(self._start(half), len(runs)) for half in self._by_half(x, at, whole)]
            for x, whole in zip(self.inputs, negative, strict=True)
        ]
        # Where halves of blocks have scales, sums of one half are done before those of the other: registers are few.
        for halves in [range(self.f.per_byte)] if self.f.fmt.scales == 1 else [[h] for h in range(self.f.per_byte)]:
            for k in range(0, part, size):
                w = [self.f.factors(b, run, k, size) for run in runs]
                for half, (n, x) in product(halves, enumerate(self.inputs)):
                    at = b.add(b.mul(group, v.offset(GROUP_COLUMNS)), v.offset(k + half * part))
                    self._multiply(found[n][half % self.f.fmt.scales], w, half, x, at)
        beside = self._beside(group)
        t = [v.load(b, x.scales, b.mul(block, v.offset(4)), v.vec(v.F32, LANES)) for x in self.inputs]
        whole = [zip(*[self._whole(half) for half in found_t], strict=True) for found_t in found]
        self._add(whole, beside, t, negative)

    def _beside(self, group: Any) -> list[Beside]:
        """What the blocks of a group have beside their integers, for the rows of each register."""
        b, rows = self.b, self.rows
        if rows.beside is None:
            block = b.mul(group, v.offset(8))
            return [self.f.beside(b, some, rows.offsets, block, LANES) for some in self.scales]
        found, at = [], b.mul(group, v.offset(_BESIDE_NBYTES * len(self.scales)))
        for k in range(len(self.scales)):
            places = [b.add(at, v.offset(_BESIDE_NBYTES * k + 4 * REGISTER * n)) for n in range(4)]
            scales, offsets, *halves = [v.load(b, rows.beside, place, v.vec(v.F32, REGISTER)) for place in places]
            found.append(Beside(scales, offsets, halves if self.f.fmt.scales > 1 else ()))
        return found

    def _by_half(self, x: _Input, at: Any, whole: Any) -> list[Any]:
        """The negative sums of a group's blocks, or of their halves where these have scales: a group has the first
        halves of all its blocks before the second ones."""
        if self.f.fmt.scales == 1:
            return [whole]
        first = v.load(self.b, x.half_sums, at, whole.type)
        return [first, self.b.sub(whole, first)]

    def _start(self, negative: Any) -> Any:
        """What the integer sums of a group start at, in the first of the lanes."""
        zeros = v.const(v.I32, LANES, 0)
        return v.join(self.b, [self.f.start(self.b, negative), *[zeros] * (REGISTER // LANES - 1)])

    def _whole(self, found: list[v.ByteSums]) -> list[Any]:
        """The rows' sums of whole blocks by register: in a wide one of a row, blocks lie in two halves."""
        joined = [v.join(self.b, some) for some in by_register(self.rows, [one.total(self.b) for one in found])]
        if REGISTER == LANES:
            return joined
        low = [row * REGISTER + lane for row in range(self.rows.a_register) for lane in range(LANES)]
        halves = low, [lane + LANES for lane in low]
        return [self.b.add(*[v.shuffle(self.b, one, one, half) for half in halves]) for one in joined]

    def _single(self, block: Any) -> None:
        """The blocks outside the groups that share their bytes; a row has at most seven."""
        b, at_once = self.b, self.f.per_byte
        w = [self.f.factors(b, self.f.single(b, row, block), 0, BLOCK) for row in self.rows.values]
        for half in range(at_once):
            one, found, negative = b.add(block, v.offset(half)), [], []
            place = b.mul(one, v.offset(BLOCK))
            for x in self.inputs:
                negative.append(self._fours(x, place))
                eight = self._sums(self.f.start(b, negative[-1]), len(w))
                self._multiply(eight, w, half, x, place)
                found.append([[v.join(b, some)] for some in by_register(self.rows, [one.total(b) for one in eight])])
            each = [0] * LANES
            beside = [self._of_single(self.f.beside(b, some, self.rows.offsets, one, 1)) for some in self.scales]
            t = [v.load(b, x.scales, b.mul(one, v.offset(4)), v.vec(v.F32, 1)) for x in self.inputs]
            self._add(found, beside, [v.shuffle(b, t_1, t_1, each) for t_1 in t], negative)

    def _of_single(self, found: Beside) -> Beside:
        """What a block has for each of its fours, from what it has in one lane a row: the first four of eight belong to
        its first half."""
        b, rows = self.b, range(self.rows.a_register)
        scales, offsets = (v.shuffle(b, one, one, [row for row in rows for _ in range(LANES)]) for one in found[:2])
        if not found.halves:
            return Beside(scales, offsets)
        first, second = found.halves
        lanes = [row + half * len(rows) for row in rows for half in range(2) for _ in range(LANES // 2)]
        return Beside(scales, offsets, [v.shuffle(b, first, second, lanes)])

    def _fours(self, x: _Input, at: Any) -> Any:
        """The negative sums of the fours of one block's integers."""
        b, zeros, ones = self.b, v.const(v.I32, LANES, 0), v.const(v.I8, BLOCK, 1)
        q_J = v.load(b, x.bytes, at, ones.type)
        return b.sub(zeros, v.dot_bytes(b, zeros, ones, q_J, signed=False))
