"""Sums of stored rows, each times a factor, for one token or many:  y_t ← y_t + Σ_k h_t,k row_k.

For the float formats; those of blocks have `block_sums`. Each column is summed in the order of the rows, rounded once a
row, and a factor of 0 leaves a sum as it is. So a token gets the same bits from its own rows alone, and among rows that
that only others need. Rows are taken `SUM_ROWS` at a time: their weights are read once for all tokens, and a sum stays
in its register meanwhile.

Shape letters: T tokens, K rows, D columns, L lanes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils

from pi_runtime.artifact.footprint import SUM_ROWS
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.emits import emits
from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import MatrixView, RowList, integers, multiply_add, vector
from pi_runtime.kernels.data.row_loading import load_row
from pi_runtime.kernels.data.weight_formats import FLOAT_FORMATS, FloatFormat

_HAS_VECTORS = ISA.lanes > 0


@dataclass
class _SumCall:
    """Emits the loops of one call; the values are those of `row_sums`."""

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

    def emit(self, f: FloatFormat) -> None:
        """Emit a format's loops over rows, once for one token and once for several."""
        b = self.b
        with b.if_else(b.icmp_signed("==", self.tokens, v.offset(1))) as branches:
            for branch, alone in zip(branches, (True, False), strict=True):
                with branch, cgutils.for_range_slice(b, v.offset(0), self.count, v.offset(SUM_ROWS)) as (first, _):
                    later = self._rows(b.add(first, v.offset(SUM_ROWS)), self.known)
                    self._some_rows(f, first, self._rows(first, self.count), later, alone)

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

    def _some_rows(self, f: FloatFormat, first: Any, rows: list[Any], later: list[Any], alone: bool) -> None:
        """Add `SUM_ROWS` rows from `first` on, and fetch later ones."""
        b, lanes = self.b, ISA.lanes
        per_line = v.LINE // f.nbytes

        def register(column: Any) -> None:
            self._add([f.load(b, row, column, lanes) for row in rows], first, column, alone)

        with cgutils.for_range(b, b.udiv(self.columns, v.offset(per_line))) as loop:
            for row in later:
                v.prefetch(b, row, b.mul(loop.index, v.offset(v.LINE)))
            for part in range(0, per_line, lanes):
                register(b.add(b.mul(loop.index, v.offset(per_line)), v.offset(part)))
        done = b.and_(self.columns, v.offset(-per_line))
        with cgutils.for_range(b, b.udiv(b.sub(self.columns, done), v.offset(lanes))) as loop:
            register(b.add(done, b.mul(loop.index, v.offset(lanes))))
        column = b.and_(self.columns, v.offset(-lanes))
        with b.if_then(b.icmp_signed("<", column, self.columns)):
            left = b.sub(self.columns, column)
            self._add([f.load(b, row, column, lanes, left) for row in rows], first, column, alone, left)


@emits(types.void(types.intp, types.UniTuple(types.intp, 13)))
def _emit_row_sums(b: Any, fmt: Any, call: Any) -> Any:
    """Emit `row_sums`; `call` is a tuple of the values of `_SumCall`, in order."""
    call = _SumCall(b, *cgutils.unpack_tuple(b, call))
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
