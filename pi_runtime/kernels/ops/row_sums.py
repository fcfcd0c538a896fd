"""Sums of stored rows, each times a factor, for one token or many:  y_t ← y_t + Σ_k h_t,k row_k.

Each column is summed in the order of the rows, rounded once a row. A weight becomes float32 exactly; of q4 only its
integer does, and its factor is h times the scale of the block, rounded: a multiplication less for each weight. A factor
of 0 leaves a sum as it is. So a token gets the same bits from its own rows alone, and among rows that only others need.
Rows are taken `SUM_ROWS` at a time: their weights are read once for all tokens, and a sum stays in its register
meanwhile.

The sums of block formats lie in the order in which vector registers take the weights of a row;
`row_loading.sum_columns` says which columns they are. Shape letters: T tokens, K rows, D columns, L lanes, P sums.
"""

# The signatures of `generate` are numba's.
# ruff: noqa: ARG001

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from pi_runtime.artifact.footprint import SUM_ROWS
from pi_runtime.artifact.formats import BLOCK, FORMATS
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import BF16, F16, F32, MatrixView, pointer_of
from pi_runtime.kernels.data.row_loading import GROUP_COLUMNS, load_row

_BITS = {f.code: f.bits for f in FORMATS.values() if f.quantised}
_FLOATS = {F32: "f32", F16: "f16", BF16: "bf16"}
_HAS_VECTORS = ISA.lanes > 0
_TOKENS = (2, 1) if ISA.lanes == 16 else (1,)
"""Tokens that a register of integers serves at once: as many as there are registers for their factors."""


@dataclass
class _Rows:
    """Pointers to `SUM_ROWS` rows and their scales."""

    values: list[Any]
    scales: list[Any]


@dataclass
class _Register:
    """One register of each row, as float32 but for the blocks' scales."""

    weights: list[Any]
    blocks: Sequence[int]
    """Block of each lane, in a group."""
    behind: int
    """How many sums behind the first that of its first lane is."""


def _nibbles(b: Any, words: Any, shift: int) -> Any:
    """The four bits of each lane from bit `shift` (up to 16) on, minus 8, as float32.

    They are put into the mantissa of 2^(23 − shift), where they count from 1 on; then that number is taken off again.
    """
    lanes = ISA.lanes
    found = b.and_(words, v.const(v.I32, lanes, 15 << shift))
    found = b.or_(found, v.const(v.I32, lanes, (127 + 23 - shift) << 23))
    return b.fsub(b.bitcast(found, v.vec(v.F32, lanes)), v.const(v.F32, lanes, 2.0 ** (23 - shift) + 8))


def _bytes(b: Any, row: Any, at: Any) -> Any:
    """A register of signed bytes from byte `at` on, as float32."""
    found = b.sext(v.load(b, row, at, v.vec(v.I8, ISA.lanes)), v.vec(v.I32, ISA.lanes))
    return b.sitofp(found, v.vec(v.F32, ISA.lanes))


def _group_registers(bits: int, b: Any, rows: list[Any], line: Any) -> Iterator[_Register]:
    """The registers of one cache line inside a group of eight blocks; four of its bytes in turn belong to one block."""
    lanes, at = ISA.lanes, b.mul(line, v.offset(v.LINE))
    if bits == 8:
        for k in range(0, v.LINE, lanes):
            blocks = [(k + n) % 32 // 4 for n in range(lanes)]
            yield _Register([_bytes(b, row, b.add(at, v.offset(k))) for row in rows], blocks, k)
        return
    for k in range(0, v.LINE, 4 * lanes):
        words = [v.load(b, row, b.add(at, v.offset(k)), v.vec(v.I32, lanes)) for row in rows]
        upper = [b.lshr(w_L, v.const(v.I32, lanes, 12)) for w_L in words]
        for n in range(8):
            found = [_nibbles(b, w_L, 4 * n if n < 5 else 4 * n - 12) for w_L in (words if n < 5 else upper)]
            yield _Register(found, [lane % 8 for lane in range(lanes)], 2 * k + n * lanes)


def _single_registers(bits: int, b: Any, rows: list[Any], block: Any) -> Iterator[_Register]:
    """The registers of a block outside the groups, or of two blocks of q4, which share their bytes."""
    lanes, at_once = ISA.lanes, 8 // bits
    first = b.udiv(b.mul(block, v.offset(BLOCK)), v.offset(at_once))
    for half in range(at_once):
        for part in range(0, BLOCK, lanes):
            start = b.add(first, v.offset(part))
            if bits == 8:
                found = [_bytes(b, row, start) for row in rows]
            else:
                kind = v.vec(v.I32, lanes)
                words = [b.zext(v.load(b, row, start, v.vec(v.I8, lanes)), kind) for row in rows]
                found = [_nibbles(b, w_L, 4 * half) for w_L in words]
            yield _Register(found, [half] * lanes, half * BLOCK + part)


@dataclass
class _Call:
    """Emits the loops of one call; the values are those of `row_sums`."""

    b: Any
    values: Any
    scales: Any
    stride: Any
    scales_stride: Any
    columns: Any
    first: Any
    index: Any
    count: Any
    known: Any
    h: Any
    h_stride: Any
    tokens: Any
    y: Any
    y_stride: Any

    def __post_init__(self) -> None:
        self._alone = False

    def emit(self, lines: Callable[["_Call", Any, _Rows, list[Any]], None]) -> None:
        """Emit a format's loops over rows, once for one token and once for several."""
        b = self.b
        with b.if_else(b.icmp_signed("==", self.tokens, v.offset(1))) as branches:
            for branch, self._alone in zip(branches, (True, False), strict=True):
                with branch, cgutils.for_range_slice(b, v.offset(0), self.count, v.offset(SUM_ROWS)) as (first, _):
                    later = self._rows(b.add(first, v.offset(SUM_ROWS)), self.known).values
                    lines(self, first, self._rows(first, self.count), later)

    def _rows(self, first: Any, count: Any) -> _Rows:
        """Rows from `first` on; past `count` the last one again."""
        b, values, scales = self.b, [], []
        for k in range(SUM_ROWS):
            n, last = b.add(first, v.offset(k)), b.sub(count, v.offset(1))
            n = b.select(b.icmp_signed("<", n, last), n, last)
            row = v.listed(b, self.index, n, b.add(self.first, n))
            values.append(v.pointer(b, b.add(self.values, b.mul(row, self.stride))))
            scales.append(v.pointer(b, b.add(self.scales, b.mul(row, self.scales_stride))))
        return _Rows(values, scales)

    def _add(self, w: list[Any], first: Any, column: Any, left: Any = None) -> None:
        """Add a register of each row, from row `first` on, to the sums from `column` on, or to only `left` of them."""
        b, at = self.b, self.b.mul(column, v.offset(4))
        with self._each_token() as (y, h):
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

    def _add_scaled(
        self, bits: int, registers: Iterator[_Register], scales: list[Any], first: Any, column: Any
    ) -> None:
        """Add registers of block formats; `scales` are those of each row's blocks.

        q4 for several tokens is kept in memory meanwhile: so it is converted once, and read once for a few of them.
        """
        b, kept = self.b, []
        if bits == 8:
            for register in registers:
                s = [v.shuffle(b, s_B, s_B, register.blocks) for s_B in scales]
                weights = [b.fmul(*pair) for pair in zip(register.weights, s, strict=True)]
                self._add(weights, first, b.add(column, v.offset(register.behind)))
            return
        if self._alone:
            self._add_registers(registers, scales, first, column, [(v.pointer(b, self.y), v.pointer(b, self.h))])
            return
        for register in registers:
            places = [cgutils.alloca_once(b, w_L.type) for w_L in register.weights]
            for w_L, place in zip(register.weights, places, strict=True):
                b.store(w_L, place)
            kept.append(replace(register, weights=places))
        done = v.offset(0)
        for size in _TOKENS:
            count = b.udiv(b.sub(self.tokens, done), v.offset(size))
            with cgutils.for_range(b, count) as loop:
                t = b.add(done, b.mul(loop.index, v.offset(size)))
                some = [self._token(b.add(t, v.offset(k))) for k in range(size)]
                self._add_registers(kept, scales, first, column, some)
            done = b.add(done, b.mul(count, v.offset(size)))

    def _add_registers(
        self, registers: Iterable[_Register], scales: list[Any], first: Any, column: Any, tokens: list[tuple[Any, Any]]
    ) -> None:
        """Add registers, or places of registers, for some tokens, whose sums and factors are at these pointers."""
        b, kind, scaled = self.b, v.vec(v.F32, ISA.lanes), {}
        for register in registers:
            if (blocks := tuple(register.blocks)) not in scaled:
                s = [v.shuffle(b, s_B, s_B, blocks) for s_B in scales]
                factors = [self._factors(h, first) for _, h in tokens]
                scaled[blocks] = [[b.fmul(*pair) for pair in zip(each, s, strict=True)] for each in factors]
            at = b.mul(b.add(column, v.offset(register.behind)), v.offset(4))
            totals = [v.load(b, y, at, kind) for y, _ in tokens]
            for k, weights in enumerate(register.weights):
                w_L = weights if self._alone else b.load(weights)
                totals = [v.fma(b, w_L, f[k], total) for f, total in zip(scaled[blocks], totals, strict=True)]
            for (y, _), total in zip(tokens, totals, strict=True):
                v.store(b, total, y, at)

    def _token(self, t: Any) -> tuple[Any, Any]:
        """Pointers to a token's sums and factors."""
        b = self.b
        y, h = b.mul(t, self.y_stride), b.mul(t, self.h_stride)
        return v.pointer(b, b.add(self.y, y)), v.pointer(b, b.add(self.h, h))

    @contextmanager
    def _each_token(self) -> Iterator[tuple[Any, Any]]:
        """A loop over the tokens: pointers to their sums and factors."""
        if self._alone:
            yield v.pointer(self.b, self.y), v.pointer(self.b, self.h)
            return
        with cgutils.for_range(self.b, self.tokens) as loop:
            yield self._token(loop.index)

    def floats(self, fmt: str, first: Any, rows: _Rows, later: list[Any]) -> None:
        """Add rows of a float format."""
        b, lanes = self.b, ISA.lanes
        per_line = v.LINE // (4 if fmt == "f32" else 2)

        def register(column: Any) -> None:
            self._add([v.floats_of(b, fmt, row, column, lanes) for row in rows.values], first, column)

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
            self._add([v.floats_of(b, fmt, row, column, lanes, left) for row in rows.values], first, column, left)

    def blocks(self, bits: int, first: Any, rows: _Rows, later: list[Any]) -> None:
        """Add rows of a block format."""
        b, per_line = self.b, v.LINE * 8 // bits
        blocks = b.udiv(b.add(self.columns, v.offset(BLOCK - 1)), v.offset(BLOCK))
        groups = b.udiv(blocks, v.offset(8))
        with cgutils.for_range(b, b.mul(groups, v.offset(GROUP_COLUMNS // per_line))) as loop:
            for row in later:
                v.prefetch(b, row, b.mul(loop.index, v.offset(v.LINE)))
            self._add_scaled(
                bits,
                _group_registers(bits, b, rows.values, loop.index),
                self._scales(rows, b.udiv(loop.index, v.offset(GROUP_COLUMNS // per_line)), 8),
                first,
                b.mul(loop.index, v.offset(per_line)),
            )
        done, at_once = b.mul(groups, v.offset(8)), 8 // bits
        left = b.udiv(b.add(b.sub(blocks, done), v.offset(at_once - 1)), v.offset(at_once))
        with cgutils.for_range(b, left) as loop:
            block = b.add(done, b.mul(loop.index, v.offset(at_once)))
            single = _single_registers(bits, b, rows.values, block)
            scales = self._scales(rows, b.udiv(block, v.offset(at_once)), at_once)
            self._add_scaled(bits, single, scales, first, b.mul(block, v.offset(BLOCK)))

    def _scales(self, rows: _Rows, n: Any, count: int) -> list[Any]:
        """Each row's scales of the n-th `count` blocks."""
        b, at = self.b, self.b.mul(n, v.offset(2 * count))
        return [b.fpext(v.load(b, row, at, v.vec(v.HALF, count)), v.vec(v.F32, count)) for row in rows.scales]


@intrinsic
def _emit_row_sums(typing_context: Any, fmt: Any, call: Any) -> Any:
    """Emit `row_sums`; `call` is a tuple of the values of `_Call`, in order."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        call = _Call(b, *cgutils.unpack_tuple(b, arguments[1]))
        cases: dict[int, Callable[[], None]] = {}
        for code, name in _FLOATS.items():
            cases[code] = partial(call.emit, lambda c, *a, name=name: c.floats(name, *a))
        for code, bits in _BITS.items():
            cases[code] = partial(call.emit, lambda c, *a, bits=bits: c.blocks(bits, *a))
        v.switch(b, arguments[0], cases)
        return context.get_dummy_value()

    return types.void(types.intp, types.UniTuple(types.intp, 14)), generate


@public
def vector_row_sums(
    m: MatrixView,
    first: int,
    index: int,
    count: int,
    known: int,
    h: int,
    h_stride: int,
    tokens: int,
    y: int,
    y_stride: int,
) -> None:
    """`row_sums` by vector instructions."""
    matrix = m.values, m.scales, m.stride, m.scales_stride, m.columns
    _emit_row_sums(m.fmt, (*matrix, first, index, count, known, h, h_stride, tokens, y, y_stride))


@public
def portable_row_sums(
    m: MatrixView,
    first: int,
    index: int,
    count: int,
    known: int,
    h: int,
    h_stride: int,
    tokens: int,
    y: int,
    y_stride: int,
) -> None:
    """The definition of `row_sums` in plain loops; its sums lie in the order of the columns."""
    row_D = np.empty(m.columns, np.float32)
    for k in range(count):
        row = carray(pointer_of(index), (count,), np.int64)[k] if index != 0 else first + k
        load_row(m, row, 0, row_D)
        for t in range(tokens):
            h_K = carray(pointer_of(h + t * h_stride), (count,), np.float32)
            y_D = carray(pointer_of(y + t * y_stride), (m.columns,), np.float32)
            for j in range(m.columns):
                y_D[j] += h_K[k] * row_D[j]


_row_sums = by_address(vector_row_sums if _HAS_VECTORS else portable_row_sums)


@device
def row_sums(
    m: MatrixView,
    first: int,
    index: int,
    count: int,
    known: int,
    h: int,
    h_stride: int,
    tokens: int,
    y: int,
    y_stride: int,
) -> None:
    """y[t] ← y[t] + Σ_k h[t, k] row_k over `count` rows of m. All places are addresses, strides are in bytes.

    Row k is number index[k] of m, or first + k where there is no list (0). A list has `known` numbers, and those after
    the first `count` are prefetched. A token's factors are followed by zeros up
    to a multiple of `SUM_ROWS`. Sums of block formats go on to the end of the last block, or pair of blocks of q4.
    """
    if count > 0:
        _row_sums(m, first, index, count, known, h, h_stride, tokens, y, y_stride)
