"""Sums of stored rows, each times a factor, for one token or many:  y_t ← y_t + Σ_k h_t,k row_k.

For the float formats; those of blocks have `block_sums`. Each column is summed in the order of the rows, rounded once a
row, and a factor of 0 leaves a sum as it is. So a token gets the same bits from its own rows alone, and among rows that
that only others need. One token whose next rows are fetched ahead takes `SUM_ROWS` rows at a time, line by line. All
others take up to `_ROWS` rows, with sums that stay in their registers meanwhile: one token some columns at a time, and
several the columns of a panel, whose weights become float32 once for all of them.

Shape letters: T tokens, K rows, D columns, L lanes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils

from pi_runtime.artifact.footprint import SUM_ROWS
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.intrinsics import emits
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import MatrixView, RowList, integers, multiply_add, vector
from pi_runtime.kernels.data.row_loading import load_row
from pi_runtime.kernels.data.weight_formats import FLOAT_FORMATS, FloatFormat

_HAS_VECTORS = ISA.lanes > 0
_ROWS, _PANEL = 128, 32
"""Rows and columns of a panel: its float32 numbers leave half of the first-level cache to the rest."""
_ALONE = 8
"""Registers of sums of one token."""
_WIDTH, _TILES = 2, ((8, 4, 2, 1) if ISA.lanes == 16 else (6, 4, 2, 1))
"""Registers of a tile's columns, and tokens of a tile: as many as there are registers for the sums, and fewer for those
that are left."""


@dataclass
class _SumCall:
    """Emits the loops of one call; the values are those of `row_sums`, and memory for pointers and a panel."""

    b: Any
    values: Any
    stride: Any
    columns: Any
    slots: Any
    first: Any
    index: Any
    count: Any
    known: Any
    h: Any
    h_stride: Any
    tokens: Any
    y: Any
    y_stride: Any
    pointers: Any
    panel: Any

    def emit(self, f: FloatFormat) -> None:
        """Emit a format's ways: a token whose later rows are known, another token alone, and several."""
        b, few = self.b, self.b.and_(self.columns, v.offset(-_PANEL))
        one = b.icmp_signed("==", self.tokens, v.offset(1))
        with b.if_else(one) as (alone, company):
            with alone, b.if_else(b.icmp_signed(">", self.known, self.count)) as (ahead, known):
                with ahead:
                    self._by_lines(f, v.offset(0), True)
                with known:
                    wide = b.and_(self.columns, v.offset(-_ALONE * ISA.lanes))
                    self._by_registers(f, wide)
                    self._by_lines(f, wide, True)
            with company:
                self._by_panels(f, few)
                self._by_lines(f, few, False)

    def _by_lines(self, f: FloatFormat, begin: Any, alone: bool) -> None:
        """Add the rows to the sums from column `begin` on, `SUM_ROWS` rows at a time."""
        b = self.b
        count = b.select(b.icmp_signed("<", begin, self.columns), self.count, v.offset(0))
        with cgutils.for_range_slice(b, v.offset(0), count, v.offset(SUM_ROWS)) as (first, _):
            later = self._rows(b.add(first, v.offset(SUM_ROWS)), self.known) if alone else []
            self._some_rows(f, first, self._rows(first, self.count), later, alone, begin)

    @contextmanager
    def _each_part(self) -> Iterator[tuple[Any, Any]]:
        """A loop over parts of the rows, whose pointers are in memory then: the first number, and how many they are."""
        b = self.b
        with cgutils.for_range_slice(b, v.offset(0), self.count, v.offset(_ROWS)) as (first, _):
            left = b.sub(self.count, first)
            count = b.select(b.icmp_signed("<", left, v.offset(_ROWS)), left, v.offset(_ROWS))
            with cgutils.for_range(b, count) as loop:
                n = b.add(first, loop.index)
                row = v.listed(b, self.index, n, b.add(self.first, n))
                row = v.listed(b, self.slots, row, row)
                at = b.mul(loop.index, v.offset(8))
                v.store(b, b.add(self.values, b.mul(row, self.stride)), self.pointers, at)
            yield first, count

    def _row(self, k: Any) -> Any:
        """The pointer to a row of the part."""
        return v.pointer(self.b, v.load(self.b, self.pointers, self.b.mul(k, v.offset(8)), v.I64))

    def _sums(self, y: list[Any], at: Any, width: int, count: Any, add: Callable[[Any, list[list[Any]]], None]) -> None:
        """Load `width` registers of the sums of each token, let `add` add `count` rows one by one, and store them."""
        b, kind = self.b, v.vec(v.F32, ISA.lanes)
        sums = [[cgutils.alloca_once(b, kind) for _ in range(width)] for _ in y]
        places = [b.add(at, v.offset(4 * ISA.lanes * k)) for k in range(width)]
        for y_t, into in zip(y, sums, strict=True):
            for place, total in zip(places, into, strict=True):
                b.store(v.load(b, y_t, place, kind), total)
        with cgutils.for_range(b, count) as loop:
            add(loop.index, sums)
        for y_t, into in zip(y, sums, strict=True):
            for place, total in zip(places, into, strict=True):
                v.store(b, b.load(total), y_t, place)

    def _add_row(self, w: list[Any], h: list[Any], at: Any, sums: list[list[Any]]) -> None:
        """Add a row's registers times each token's factor `at` bytes behind its first one."""
        b = self.b
        for h_t, into in zip(h, sums, strict=True):
            h_L = v.splat(b, v.load(b, h_t, at, v.F32), ISA.lanes)
            for w_L, total in zip(w, into, strict=True):
                b.store(v.fma(b, w_L, h_L, b.load(total)), total)

    def _by_registers(self, f: FloatFormat, columns: Any) -> None:
        """Add the rows to the first columns of one token."""
        b, lanes = self.b, ISA.lanes
        y, h = v.pointer(b, self.y), v.pointer(b, self.h)
        with (
            self._each_part() as (first, count),
            cgutils.for_range_slice(b, v.offset(0), columns, v.offset(_ALONE * lanes)) as (column, _),
        ):

            def add(k: Any, sums: list[list[Any]]) -> None:
                row = self._row(k)
                w = [f.load(b, row, b.add(column, v.offset(lanes * n)), lanes) for n in range(_ALONE)]
                self._add_row(w, [h], b.mul(b.add(first, k), v.offset(4)), sums)

            self._sums([y], b.mul(column, v.offset(4)), _ALONE, count, add)

    def _by_panels(self, f: FloatFormat, columns: Any) -> None:
        """Add the rows to the first columns of several tokens."""
        b, wide = self.b, _WIDTH * ISA.lanes
        with (
            self._each_part() as (first, count),
            cgutils.for_range_slice(b, v.offset(0), columns, v.offset(_PANEL)) as (column, _),
        ):
            with cgutils.for_range(b, count) as loop:
                row = self._row(loop.index)
                at = b.mul(column, v.offset(f.nbytes))
                for line in range(0, _PANEL * f.nbytes, v.LINE):
                    v.prefetch(b, row, b.add(at, v.offset(_PANEL * f.nbytes + line)))
                for k in range(0, _PANEL, ISA.lanes):
                    inside = b.mul(loop.index, v.offset(4 * wide))
                    place = b.add(inside, v.offset(4 * (k // wide * wide * _ROWS + k % wide)))
                    v.store(b, f.load(b, row, b.add(column, v.offset(k)), ISA.lanes), self.panel, place)
            done = v.offset(0)
            for size in _TILES:
                tiles = b.udiv(b.sub(self.tokens, done), v.offset(size))
                with cgutils.for_range(b, tiles) as loop:
                    self._tile(b.add(done, b.mul(loop.index, v.offset(size))), size, first, count, column)
                done = b.add(done, b.mul(tiles, v.offset(size)))

    def _tile(self, token: Any, size: int, first: Any, count: Any, column: Any) -> None:
        """Add a panel to the sums of some tokens."""
        b, lanes, wide = self.b, ISA.lanes, _WIDTH * ISA.lanes
        numbers = [b.add(token, v.offset(t)) for t in range(size)]
        y = [v.pointer(b, b.add(self.y, b.mul(t, self.y_stride))) for t in numbers]
        h = [v.pointer(b, b.add(self.h, b.mul(t, self.h_stride))) for t in numbers]
        for part in range(0, _PANEL, wide):

            def add(k: Any, sums: list[list[Any]], part: int = part) -> None:
                at = b.add(b.mul(k, v.offset(4 * wide)), v.offset(4 * part * _ROWS))
                places = [b.add(at, v.offset(4 * lanes * n)) for n in range(_WIDTH)]
                w = [v.load(b, self.panel, place, v.vec(v.F32, lanes)) for place in places]
                self._add_row(w, h, b.mul(b.add(first, k), v.offset(4)), sums)

            self._sums(y, b.mul(b.add(column, v.offset(part)), v.offset(4)), _WIDTH, count, add)

    def _rows(self, first: Any, count: Any) -> list[Any]:
        """Pointers to the rows from `first` on; past `count` the last one again."""
        b, found = self.b, []
        for k in range(SUM_ROWS):
            n, last = b.add(first, v.offset(k)), b.sub(count, v.offset(1))
            n = b.select(b.icmp_signed("<", n, last), n, last)
            row = v.listed(b, self.index, n, b.add(self.first, n))
            row = v.listed(b, self.slots, row, row)
            found.append(v.pointer(b, b.add(self.values, b.mul(row, self.stride))))
        return found

    def _add(self, w: list[Any], first: Any, column: Any, alone: bool, left: Any = None) -> None:
        """Add a register of each row, from row `first` on, to the sums from `column` on, or to only `left` of them."""
        b, at = self.b, self.b.mul(column, v.offset(4))
        with self._each_token(alone) as (y, h):
            total = v.load(b, y, at, w[0].type) if left is None else v.load_some(b, y, at, left, w[0].type)
            for w_L, h_L in zip(w, self._factors(h, first), strict=True):
                total = v.fma(b, w_L, h_L, total)
            if left is None:
                v.store(b, total, y, at)
            else:
                v.store_some(b, total, y, at, left)

    def _factors(self, h: Any, first: Any) -> list[Any]:
        """A token's factors of the rows from `first` on, each in all lanes."""
        b = self.b
        each = [b.mul(b.add(first, v.offset(k)), v.offset(4)) for k in range(SUM_ROWS)]
        return [v.splat(b, v.load(b, h, at, v.F32), ISA.lanes) for at in each]

    @contextmanager
    def _each_token(self, alone: bool) -> Iterator[tuple[Any, Any]]:
        """A loop over the tokens: pointers to their sums and factors."""
        b = self.b
        if alone:
            yield v.pointer(b, self.y), v.pointer(b, self.h)
            return
        with cgutils.for_range(b, self.tokens) as loop:
            y, h = b.mul(loop.index, self.y_stride), b.mul(loop.index, self.h_stride)
            yield v.pointer(b, b.add(self.y, y)), v.pointer(b, b.add(self.h, h))

    def _some_rows(
        self, f: FloatFormat, first: Any, rows: list[Any], later: list[Any], alone: bool, begin: Any
    ) -> None:
        """Add `SUM_ROWS` rows from `first` on to the columns from `begin` on, and fetch later ones."""
        b, lanes = self.b, ISA.lanes
        per_line = v.LINE // f.nbytes

        def register(column: Any) -> None:
            self._add([f.load(b, row, column, lanes) for row in rows], first, column, alone)

        done = b.and_(self.columns, v.offset(-per_line))
        with cgutils.for_range_slice(b, begin, done, v.offset(per_line)) as (column, _):
            for row in later:
                v.prefetch(b, row, b.mul(column, v.offset(f.nbytes)))
            for part in range(0, per_line, lanes):
                register(b.add(column, v.offset(part)))
        with cgutils.for_range(b, b.udiv(b.sub(self.columns, done), v.offset(lanes))) as loop:
            register(b.add(done, b.mul(loop.index, v.offset(lanes))))
        column = b.and_(self.columns, v.offset(-lanes))
        with b.if_then(b.icmp_signed("<", column, self.columns)):
            left = b.sub(self.columns, column)
            self._add([f.load(b, row, column, lanes, left) for row in rows], first, column, alone, left)


@emits(types.void(types.intp, types.UniTuple(types.intp, 13)))
def _emit_row_sums(b: Any, fmt: Any, call: Any) -> Any:
    """Emit `row_sums`; `call` is a tuple of the values of `_SumCall`, in order."""
    pointers, panel = (cgutils.alloca_once(b, v.vec(v.I64, 8), n) for n in (_ROWS // 8, _ROWS * _PANEL // 16))
    memory = [b.bitcast(place, v.I8.as_pointer()) for place in (pointers, panel)]
    call = _SumCall(b, *cgutils.unpack_tuple(b, call), *memory)
    v.switch(b, fmt, {code: partial(call.emit, f) for code, f in FLOAT_FORMATS.items()})


@public
def vector_row_sums(m: MatrixView, rows: RowList, h: int, h_stride: int, tokens: int, y: int, y_stride: int) -> None:
    """`row_sums` by vector instructions."""
    matrix, listed = (m.values, m.stride, m.columns, m.slots), (rows.first, rows.listed, rows.rows, rows.known)
    _emit_row_sums(m.fmt, (*matrix, *listed, h, h_stride, tokens, y, y_stride))


@public
def portable_row_sums(m: MatrixView, rows: RowList, h: int, h_stride: int, tokens: int, y: int, y_stride: int) -> None:
    """The definition of `row_sums` in plain loops."""
    row_D = np.empty(m.columns, np.float32)
    for k in range(rows.rows):
        row = integers(rows.listed, rows.rows)[k] if rows.listed != 0 else rows.first + k
        load_row(m, row, 0, row_D)
        for t in range(tokens):
            h_K, y_D = vector(h + t * h_stride, rows.rows), vector(y + t * y_stride, m.columns)
            for j in range(m.columns):
                y_D[j] = multiply_add(h_K[k], row_D[j], y_D[j])


_row_sums = by_address(vector_row_sums if _HAS_VECTORS else portable_row_sums)


@device
def row_sums(m: MatrixView, rows: RowList, h: int, h_stride: int, tokens: int, y: int, y_stride: int) -> None:
    """y[t] ← y[t] + Σ_k h[t, k] row_k over some rows of m. All places are addresses, strides are in bytes.

    A token's factors are followed by zeros up to a multiple of `SUM_ROWS`.
    """
    if rows.rows > 0:
        _row_sums(m, rows, h, h_stride, tokens, y, y_stride)
