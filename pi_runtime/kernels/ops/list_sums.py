"""Sums of a block's rows for several tokens, each with a list of its own:  y_t ← y_t + Σ_k h_t,k row(place_t,k).

For the float formats, with the bits of `row_sums`: each column is summed in the order of a token's list, rounded once a
row. `COLUMNS` columns at a time become float32 once, of those rows that any token needs. They stay in the cache while
the tokens go through their lists, with sums in registers.

Shape letters: T tokens, K places of a list, D columns, L lanes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from numba import types
from numba.core import cgutils

from pi_runtime.artifact.footprint import SUM_NEURONS
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.intrinsics import emits
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import public
from pi_runtime.kernels.data.matrix_view import MatrixView, RowList
from pi_runtime.kernels.data.weight_formats import FLOAT_FORMATS, FloatFormat

COLUMNS = 64
"""Columns of a panel: as many as there are registers for their sums."""
_ROW_NBYTES = 4 * COLUMNS


@dataclass
class _ListCall:
    """Emits the loops of one call; the values are those of `list_sums`, and memory for pointers, numbers, a panel."""

    b: Any
    values: Any
    stride: Any
    columns: Any
    slots: Any
    first: Any
    index: Any
    count: Any
    places: Any
    h: Any
    list_stride: Any
    counts: Any
    tokens: Any
    y: Any
    y_stride: Any
    pointers: Any
    numbers: Any
    panel: Any

    def emit(self, f: FloatFormat) -> None:
        """Emit a format's loops over columns and tokens."""
        b, needed = self.b, self._needed_rows()
        with cgutils.for_range_slice(b, v.offset(0), self.columns, v.offset(COLUMNS)) as (column, _):
            with cgutils.for_range(b, needed) as loop:
                at = b.mul(loop.index, v.offset(8))
                row = v.pointer(b, v.load(b, self.pointers, at, v.I64))
                following = b.mul(b.add(column, v.offset(COLUMNS)), v.offset(f.nbytes))
                for line in range(0, COLUMNS * f.nbytes, v.LINE):
                    v.prefetch(b, row, b.add(following, v.offset(line)))
                place = b.mul(v.load(b, self.numbers, at, v.I64), v.offset(_ROW_NBYTES))
                for k in range(0, COLUMNS, ISA.lanes):
                    w_L = f.load(b, row, b.add(column, v.offset(k)), ISA.lanes)
                    v.store(b, w_L, self.panel, b.add(place, v.offset(4 * k)))
            with cgutils.for_range(b, self.tokens) as loop:
                self._token(loop.index, column)

    def _needed_rows(self) -> Any:
        """Write the pointers and numbers of the rows that any token needs; returns how many they are."""
        b, found = self.b, cgutils.alloca_once_value(self.b, v.offset(0))
        b.store(v.offset(0), found)
        with cgutils.for_range(b, self.count) as loop:  # the panel holds marks meanwhile
            v.store(b, v.offset(0), self.panel, b.mul(loop.index, v.offset(8)))
        with cgutils.for_range(b, self.tokens) as token, cgutils.for_range(b, self._count(token.index)) as loop:
            place = b.mul(self._place(token.index, loop.index), v.offset(8))
            v.store(b, v.offset(1), self.panel, place)
        with cgutils.for_range(b, self.count) as loop:
            row = v.listed(b, self.index, loop.index, b.add(self.first, loop.index))
            row = v.listed(b, self.slots, row, row)
            at = b.mul(b.load(found), v.offset(8))
            v.store(b, b.add(self.values, b.mul(row, self.stride)), self.pointers, at)
            v.store(b, loop.index, self.numbers, at)
            marked = v.load(b, self.panel, b.mul(loop.index, v.offset(8)), v.I64)
            b.store(b.add(b.load(found), marked), found)
        return b.load(found)

    def _count(self, token: Any) -> Any:
        """How many rows a token needs."""
        return v.load(self.b, v.pointer(self.b, self.counts), self.b.mul(token, v.offset(8)), v.I64)

    def _place(self, token: Any, k: Any) -> Any:
        """The k-th place of a token's list."""
        b = self.b
        at = b.add(b.mul(token, self.list_stride), b.mul(k, v.offset(4)))
        return b.zext(v.load(b, v.pointer(b, self.places), at, v.I32), v.I64)

    def _token(self, token: Any, column: Any) -> None:
        """Add a token's rows of the panel to its sums."""
        b, kind = self.b, v.vec(v.F32, ISA.lanes)
        parts = [v.offset(4 * k) for k in range(0, COLUMNS, ISA.lanes)]
        y = v.pointer(b, b.add(b.add(self.y, b.mul(token, self.y_stride)), b.mul(column, v.offset(4))))
        h = v.pointer(b, b.add(self.h, b.mul(token, self.list_stride)))
        sums = [cgutils.alloca_once(b, kind) for _ in parts]
        for part, total in zip(parts, sums, strict=True):
            b.store(v.load(b, y, part, kind), total)
        with cgutils.for_range(b, self._count(token)) as loop:
            place = b.mul(self._place(token, loop.index), v.offset(_ROW_NBYTES))
            h_L = v.splat(b, v.load(b, h, b.mul(loop.index, v.offset(4)), v.F32), ISA.lanes)
            for part, total in zip(parts, sums, strict=True):
                w_L = v.load(b, self.panel, b.add(place, part), kind)
                b.store(v.fma(b, w_L, h_L, b.load(total)), total)
        for part, total in zip(parts, sums, strict=True):
            v.store(b, b.load(total), y, part)


@emits(types.void(types.intp, types.UniTuple(types.intp, 14)))
def _emit_list_sums(b: Any, fmt: Any, call: Any) -> Any:
    """Emit `list_sums`; `call` is a tuple of the values of `_ListCall`, in order."""
    sizes = SUM_NEURONS // 8, SUM_NEURONS // 8, SUM_NEURONS * _ROW_NBYTES // v.LINE
    memory = [cgutils.alloca_once(b, v.vec(v.I64, 8), size) for size in sizes]
    memory = [b.bitcast(place, v.I8.as_pointer()) for place in memory]
    call = _ListCall(b, *cgutils.unpack_tuple(b, call), *memory)
    v.switch(b, fmt, {code: partial(call.emit, f) for code, f in FLOAT_FORMATS.items()})


@public
def list_sums(
    m: MatrixView, rows: RowList, places: int, h: int, list_stride: int, counts: int, tokens: int, y: int, y_stride: int
) -> None:
    """y[t] ← y[t] + Σ_k h[t, k] row(places[t, k]) over k < counts[t], for places among at most `SUM_NEURONS` rows of m.

    All places are addresses, strides are in bytes; lists of places (int32) and factors have one stride. The columns of
    m are a multiple of `COLUMNS`. For vector instructions alone.
    """
    matrix, listed = (m.values, m.stride, m.columns, m.slots), (rows.first, rows.listed, rows.rows)
    _emit_list_sums(m.fmt, (*matrix, *listed, places, h, list_stride, counts, tokens, y, y_stride))
