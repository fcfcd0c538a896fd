"""Tiles of products of rows with vectors, emitted for one format: `row_products` goes through rows and vectors in them.

Shape letters: R rows and T vectors of a tile, B blocks, J bytes and L lanes of a register.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from pi_runtime.artifact.footprint import INPUT, PAD
from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.data.weight_formats import GROUP_COLUMNS, BlockFormat, FloatFormat


@dataclass
class Rows:
    """Pointers to some rows, to their scales, and to the rows that are prefetched meanwhile."""

    values: list[Any]
    scales: list[Any]
    later: list[Any]
    later_scales: list[Any]


Sums = list[list[Any]]
"""[T][R] places of float registers, one for each product of a tile."""


def float_tile(f: FloatFormat, b: Any, rows: Rows, inputs: list[Any], columns: Any, sums: Sums) -> None:
    """Emit a tile of a float format: add the products to `sums`."""
    lanes, size = ISA.lanes, f.nbytes

    def add(w: list[Any], x: list[Any]) -> None:
        for x_L, into in zip(x, sums, strict=True):
            for w_L, total in zip(w, into, strict=True):
                b.store(v.fma(b, w_L, x_L, b.load(total)), total)

    def whole(column: Any) -> None:
        at = b.mul(column, v.offset(4))
        w = [f.load(b, row, column, lanes) for row in rows.values]
        add(w, [v.load(b, x, at, v.vec(v.F32, lanes)) for x in inputs])

    at_once = 4 * lanes
    with cgutils.for_range(b, b.udiv(columns, v.offset(at_once))) as loop:
        first = b.mul(loop.index, v.offset(at_once))
        for line, row in product(range(0, at_once * size, v.LINE), rows.later):
            v.prefetch(b, row, b.add(b.mul(first, v.offset(size)), v.offset(line)))
        for k in range(4):
            whole(b.add(first, v.offset(k * lanes)))
    done = b.and_(columns, v.offset(-at_once))
    with cgutils.for_range(b, b.udiv(b.sub(columns, done), v.offset(lanes))) as loop:
        whole(b.add(done, b.mul(loop.index, v.offset(lanes))))
    column = b.and_(columns, v.offset(-lanes))
    with b.if_then(b.icmp_signed("<", column, columns)):
        left = b.sub(columns, column)
        at = b.mul(column, v.offset(4))
        w = [f.load(b, row, column, lanes, left) for row in rows.values]
        add(w, [v.load_some(b, x, at, left, v.vec(v.F32, lanes)) for x in inputs])


class _Input:
    """Pointers into a quantised input: its bytes, its scales, and the negative sums of its blocks."""

    def __init__(self, b: Any, base: Any, columns: Any) -> None:
        pads = b.udiv(b.add(columns, v.offset(PAD - 1)), v.offset(PAD))
        parts = INPUT.row_order, INPUT.scales, INPUT.block_sums
        self.bytes, self.scales, self.block_sums = (b.gep(base, [b.mul(pads, v.offset(at))]) for at in parts)


class BlockTile:
    """Emits a tile of a block format.

    In a group of eight blocks, lane l of a register belongs to block l % 8 (see `artifact.formats`).
    """

    def __init__(self, f: BlockFormat, b: Any, rows: Rows, inputs: list[Any], columns: Any, sums: Sums) -> None:
        self.f, self.b, self.rows, self.sums = f, b, rows, sums
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
        with cgutils.for_range(b, left) as loop:
            self._single(b.add(done, b.mul(loop.index, v.offset(at_once))))

    def _start(self, x: _Input, block: Any, count: int, lanes: int) -> Any:
        """What the integer sums of `count` blocks start at, in the first of the lanes."""
        found = v.load(self.b, x.block_sums, self.b.mul(block, v.offset(4)), v.vec(v.I32, count))
        found = self.f.start(self.b, found)
        zeros = ir.Constant(found.type, [0] * count)
        return v.shuffle(self.b, found, zeros, [min(k, count) for k in range(lanes)])

    def _weights(self, row: Any, at: Any, n: int) -> list[Any]:
        """Registers of n bytes as they are multiplied, from a place of a row on."""
        return self.f.factors(self.b, v.load(self.b, row, at, v.vec(v.I8, n)))

    def _multiply(self, found: list[Any], w: list[list[Any]], half: int, x: _Input, at: Any) -> list[Any]:
        """The integer sums `found` plus the products of one register of each row with the input's bytes."""
        q_J = v.load(self.b, x.bytes, at, w[0][half].type)
        signed = not self.f.unsigned
        return [v.dot_bytes(self.b, one, w_r[half], q_J, signed=signed) for one, w_r in zip(found, w, strict=True)]

    def _add(self, found: list[list[Any]], s: list[Any], t: list[Any]) -> None:
        """Add integer sums times the scales of their blocks."""
        for found_t, t_L, into in zip(found, t, self.sums, strict=True):
            for one, s_L, total in zip(found_t, s, into, strict=True):
                value = self.b.sitofp(one, s_L.type)
                self.b.store(v.fma(self.b, value, self.b.fmul(s_L, t_L), self.b.load(total)), total)

    def _group(self, group: Any) -> None:
        b, lanes, size = self.b, ISA.lanes, 4 * ISA.lanes
        nbytes = self.f.group_nbytes
        block, stored = b.mul(group, v.offset(8)), b.mul(group, v.offset(nbytes))
        for line, row in product(range(0, nbytes, v.LINE), self.rows.later):
            v.prefetch(b, row, b.add(stored, v.offset(line)))
        found = [[self._start(x, block, 8, lanes)] * len(self.rows.values) for x in self.inputs]
        for k in range(0, nbytes, size):
            w = [self._weights(row, b.add(stored, v.offset(k)), size) for row in self.rows.values]
            for half, (n, x) in product(range(len(w[0])), enumerate(self.inputs)):
                at = b.add(b.mul(group, v.offset(GROUP_COLUMNS)), v.offset(k + half * nbytes))
                found[n] = self._multiply(found[n], w, half, x, at)

        def every_lane(eight: Any) -> Any:
            return v.shuffle(b, eight, eight, [k % 8 for k in range(lanes)])

        s = [self.f.scales(b, row, block, 8) for row in self.rows.scales]
        t = [v.load(b, x.scales, b.mul(block, v.offset(4)), v.vec(v.F32, 8)) for x in self.inputs]
        self._add(found, [every_lane(s_8) for s_8 in s], [every_lane(t_8) for t_8 in t])

    def _single(self, block: Any) -> None:
        """The blocks outside the groups that share their bytes; a row has at most seven."""
        b, lanes, at_once = self.b, ISA.lanes, self.f.per_byte
        at = b.udiv(b.mul(block, v.offset(BLOCK)), v.offset(at_once))
        w = [self._weights(row, at, BLOCK) for row in self.rows.values]
        for half in range(at_once):
            one, found = b.add(block, v.offset(half)), []
            for x in self.inputs:
                eight = [self._start(x, one, 1, 8)] * len(w)
                eight = self._multiply(eight, w, half, x, b.mul(one, v.offset(BLOCK)))
                zeros = v.const(v.I32, 8, 0)
                found.append([v.shuffle(b, sums_8, zeros, [min(k, 8) for k in range(lanes)]) for sums_8 in eight])
            s = [self.f.scales(b, row, one, 1) for row in self.rows.scales]
            t = [v.load(b, x.scales, b.mul(one, v.offset(4)), v.vec(v.F32, 1)) for x in self.inputs]
            s, t = ([v.shuffle(b, one_1, one_1, [0] * lanes) for one_1 in some] for some in (s, t))
            self._add(found, s, t)


def lane_sums(b: Any, four: Sequence[Any]) -> Any:
    """A register with the lane sums of `ROWS` = 4 registers; each is added in halves."""

    def halved(one: Any, other: Any, part: int) -> Any:
        """Lower plus upper half of each part of so many lanes, of two registers side by side."""
        low = [k for k in range(2 * one.type.count) if k % part < part // 2]
        return b.fadd(v.shuffle(b, one, other, low), v.shuffle(b, one, other, [k + part // 2 for k in low]))

    lanes = four[0].type.count
    found = halved(halved(four[0], four[1], lanes), halved(four[2], four[3], lanes), lanes // 2)
    part = lanes // 4
    while part > 1:
        low = [k for k in range(4 * part) if k % part < part // 2]
        found = b.fadd(v.shuffle(b, found, found, low), v.shuffle(b, found, found, [k + part // 2 for k in low]))
        part //= 2
    return found
