"""Products of stored rows with vectors: rows in turn or from a list, times one vector or many.

    row · x = Σ_j w_j x_j                                    f32, f16, bf16: float32 throughout
    row · x = Σ_b s_b t_b Σ_{j in b} w_j q_j                 q8, q4: integer sums in blocks of 32, exact

A row times a vector is summed in one order, however many rows and vectors share a call: each lane of a vector register
adds up its columns from left to right, and the lanes are added in halves. So a token gets the same bits alone and in
any company. The vectors are quantised inputs (see `quantised_input`): q their integers and t their scales. Rows and
vectors are taken in tiles, so that a weight that was read serves several vectors. While rows are read, later ones are
prefetched.

Shape letters: R rows and T vectors of a tile, B blocks, J bytes and L lanes of a register, N rows of a call.
"""

# The signatures of `generate` are numba's.
# ruff: noqa: ARG001

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from pi_runtime.artifact.formats import BLOCK, FORMATS
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import (
    BF16,
    F16,
    F32,
    MatrixView,
    bfloat_to_float,
    half_to_float,
    is_quantised,
    pointer_of,
    values_of_row,
)
from pi_runtime.kernels.data.quantised_input import padded_columns, row_order_at, scales_at
from pi_runtime.kernels.data.row_loading import GROUP_COLUMNS, integer_weight, stored_index

ROWS = 4
"""Rows of a tile."""
AHEAD_NBYTES = 16384
"""How far ahead of the row that is read to prefetch: far enough for the memory, near enough for the second-level
cache."""
LONG = 1024
"""Columns of a long row."""
_FLOAT_TILES, _BLOCK_TILES = ((6, 4, 2, 1), (3, 2, 1)) if ISA.lanes == 16 else ((2, 1), (1,))
"""Vectors of a tile: as many as there are registers for the sums, and fewer for those that are left."""
_BITS = {f.code: f.bits for f in FORMATS.values() if f.quantised}
"""The block formats: code → bits of a weight."""
_FLOATS = {F32: "f32", F16: "f16", BF16: "bf16"}


@dataclass
class _Rows:
    """Pointers to some rows, to their scales, and to the rows that are prefetched meanwhile."""

    values: list[Any]
    scales: list[Any]
    later: list[Any]
    later_scales: list[Any]


Sums = list[list[Any]]
"""[T][R] places of float registers, one for each product of a tile."""


def _float_tile(fmt: str, b: Any, rows: _Rows, inputs: list[Any], columns: Any, sums: Sums) -> None:
    """Emit a tile of a float format: add the products to `sums`."""
    lanes, size = ISA.lanes, 4 if fmt == "f32" else 2

    def add(w: list[Any], x: list[Any]) -> None:
        for x_L, into in zip(x, sums, strict=True):
            for w_L, total in zip(w, into, strict=True):
                b.store(v.fma(b, w_L, x_L, b.load(total)), total)

    def whole(column: Any) -> None:
        at = b.mul(column, v.offset(4))
        w = [v.floats_of(b, fmt, row, column, lanes) for row in rows.values]
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
        w = [v.floats_of(b, fmt, row, column, lanes, left) for row in rows.values]
        add(w, [v.load_some(b, x, at, left, v.vec(v.F32, lanes)) for x in inputs])


class _Input:
    """Pointers into a quantised input: its bytes, its scales, and the negative sums of its blocks."""

    def __init__(self, b: Any, base: Any, columns: Any) -> None:
        p = b.and_(b.add(columns, v.offset(127)), v.offset(-128))
        self.bytes = b.gep(base, [b.mul(p, v.offset(4))])
        self.scales = b.gep(base, [b.mul(p, v.offset(5))])
        self.block_sums = b.gep(self.scales, [b.udiv(p, v.offset(8))])


class _BlockTile:
    """Emits a tile of a block format.

    In a group of eight blocks, lane l of a register belongs to block l % 8 (see `artifact.formats`). The bytes that are
    multiplied are unsigned, 8 (q4) or 128 (q8) above the weights: so a sum starts at −8 or −128 times that of q. Where
    signed bytes can be multiplied, those of q8 are.
    """

    def __init__(self, bits: int, b: Any, rows: _Rows, inputs: list[Any], columns: Any, sums: Sums) -> None:
        self.bits, self.b, self.rows, self.sums = bits, b, rows, sums
        self.inputs = [_Input(b, x, columns) for x in inputs]
        self.unsigned = bits == 4 or ISA.dot
        blocks = b.udiv(b.add(columns, v.offset(BLOCK - 1)), v.offset(BLOCK))
        groups = b.udiv(blocks, v.offset(8))
        with cgutils.for_range(b, b.udiv(b.add(blocks, v.offset(31)), v.offset(32))) as loop:
            for row in rows.later_scales:
                v.prefetch(b, row, b.mul(loop.index, v.offset(v.LINE)))
        with cgutils.for_range(b, groups) as loop:
            self._group(loop.index)
        done, at_once = b.mul(groups, v.offset(8)), 8 // bits  # of q4, two blocks outside the groups share their bytes
        left = b.udiv(b.add(b.sub(blocks, done), v.offset(at_once - 1)), v.offset(at_once))
        with cgutils.for_range(b, left) as loop:
            self._single(b.add(done, b.mul(loop.index, v.offset(at_once))))

    def _start(self, x: _Input, block: Any, count: int, lanes: int) -> Any:
        """What the integer sums of `count` blocks start at, in the first of the lanes."""
        if not self.unsigned:
            return v.const(v.I32, lanes, 0)
        found = v.load(self.b, x.block_sums, self.b.mul(block, v.offset(4)), v.vec(v.I32, count))
        found = self.b.shl(found, v.const(v.I32, count, 7 if self.bits == 8 else 3))
        zeros = ir.Constant(found.type, [0] * count)
        return v.shuffle(self.b, found, zeros, [min(k, count) for k in range(lanes)])

    def _weights(self, row: Any, at: Any, n: int) -> list[Any]:
        """Registers of n bytes as they are multiplied: one of q8, two of q4 (lower and upper nibbles)."""
        found = v.load(self.b, row, at, v.vec(v.I8, n))
        if self.bits == 4:
            return [self.b.and_(found, v.const(v.I8, n, 15)), self.b.lshr(found, v.const(v.I8, n, 4))]
        return [self.b.xor(found, v.const(v.I8, n, -128)) if self.unsigned else found]

    def _multiply(self, found: list[Any], w: list[list[Any]], half: int, x: _Input, at: Any) -> list[Any]:
        """The integer sums `found` plus the products of one register of each row with the input's bytes."""
        q_J = v.load(self.b, x.bytes, at, w[0][half].type)
        signed = self.bits == 8
        return [v.dot_bytes(self.b, one, w_r[half], q_J, signed=signed) for one, w_r in zip(found, w, strict=True)]

    def _add(self, found: list[list[Any]], s: list[Any], t: list[Any]) -> None:
        """Add integer sums times the scales of their blocks."""
        for found_t, t_L, into in zip(found, t, self.sums, strict=True):
            for one, s_L, total in zip(found_t, s, into, strict=True):
                value = self.b.sitofp(one, s_L.type)
                self.b.store(v.fma(self.b, value, self.b.fmul(s_L, t_L), self.b.load(total)), total)

    def _group(self, group: Any) -> None:
        b, lanes, size = self.b, ISA.lanes, 4 * ISA.lanes
        nbytes = GROUP_COLUMNS * self.bits // 8
        block, stored = b.mul(group, v.offset(8)), b.mul(group, v.offset(nbytes))
        for line, row in product(range(0, nbytes, v.LINE), self.rows.later):
            v.prefetch(b, row, b.add(stored, v.offset(line)))
        found = [[self._start(x, block, 8, lanes)] * len(self.rows.values) for x in self.inputs]
        for k in range(0, nbytes, size):
            w = [self._weights(row, b.add(stored, v.offset(k)), size) for row in self.rows.values]
            for half, (n, x) in product(range(len(w[0])), enumerate(self.inputs)):
                at = b.add(b.mul(group, v.offset(GROUP_COLUMNS)), v.offset(k + half * GROUP_COLUMNS // 2))
                found[n] = self._multiply(found[n], w, half, x, at)

        def every_lane(eight: Any) -> Any:
            return v.shuffle(b, eight, eight, [k % 8 for k in range(lanes)])

        floats = v.vec(v.F32, 8)
        s = [b.fpext(v.load(b, row, b.mul(block, v.offset(2)), v.vec(v.HALF, 8)), floats) for row in self.rows.scales]
        t = [v.load(b, x.scales, b.mul(block, v.offset(4)), floats) for x in self.inputs]
        self._add(found, [every_lane(s_8) for s_8 in s], [every_lane(t_8) for t_8 in t])

    def _single(self, block: Any) -> None:
        """A block outside the groups, at most seven a row, or two of q4."""
        b, lanes, at_once = self.b, ISA.lanes, 8 // self.bits
        at = b.udiv(b.mul(block, v.offset(BLOCK)), v.offset(at_once))
        w = [self._weights(row, at, BLOCK) for row in self.rows.values]
        for half in range(at_once):
            one, found = b.add(block, v.offset(half)), []
            for x in self.inputs:
                eight = [self._start(x, one, 1, 8)] * len(w)
                eight = self._multiply(eight, w, half, x, b.mul(one, v.offset(BLOCK)))
                zeros = v.const(v.I32, 8, 0)
                found.append([v.shuffle(b, sums_8, zeros, [min(k, 8) for k in range(lanes)]) for sums_8 in eight])
            s = [b.fpext(v.load(b, row, b.mul(one, v.offset(2)), v.HALF), v.F32) for row in self.rows.scales]
            t = [v.load(b, x.scales, b.mul(one, v.offset(4)), v.F32) for x in self.inputs]
            self._add(found, [v.splat(b, s_1, lanes) for s_1 in s], [v.splat(b, t_1, lanes) for t_1 in t])


def _lane_sums(b: Any, four: Sequence[Any]) -> Any:
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


@dataclass
class _Call:
    """Emits the loops over rows and vectors of one call; the values are those of `row_products`."""

    b: Any
    values: Any
    scales: Any
    stride: Any
    scales_stride: Any
    columns: Any
    slots: Any
    first: Any
    index: Any
    count: Any
    known: Any
    inputs: Any
    input_stride: Any
    tokens: Any
    token_count: Any
    out: Any
    out_stride: Any

    def _least(self, n: Any, count: Any) -> Any:
        """n, but the last of `count` things where n is past it."""
        last = self.b.sub(count, v.offset(1))
        return self.b.select(self.b.icmp_signed("<", n, last), n, last)

    def _rows(self, n: Any, rows: int) -> _Rows:
        """Rows from the n-th on (past the end the last one again), and the rows that are prefetched meanwhile."""
        b = self.b
        ahead = b.udiv(b.add(self.stride, v.offset(AHEAD_NBYTES - 1)), self.stride)
        now, later = [], []
        for k in range(rows):
            one = self._least(b.add(n, v.offset(k)), self.count)
            now.append(v.listed(b, self.index, one, b.add(self.first, one)))
            one = b.add(b.add(n, ahead), v.offset(k))
            later.append(v.listed(b, self.index, self._least(one, self.known), b.add(self.first, one)))

        def pointers(numbers: list[Any], base: Any, stride: Any) -> list[Any]:
            return [v.pointer(b, b.add(base, b.mul(row, stride))) for row in numbers]

        def values(numbers: list[Any]) -> list[Any]:
            return pointers([v.listed(b, self.slots, row, row) for row in numbers], self.values, self.stride)

        return _Rows(
            values(now),
            pointers(now, self.scales, self.scales_stride),
            values(later),
            pointers(later, self.scales, self.scales_stride),
        )

    def _tile(self, tile: Callable[..., Any], rows: _Rows, row: Any, t: Any, size: int) -> None:
        """Emit one tile: its products go where the rows from `row` on, and the vectors from t on, have theirs."""
        b, lanes, inputs = self.b, ISA.lanes, []
        for k in range(size):
            which = self._least(b.add(t, v.offset(k)), self.token_count)
            token = v.listed(b, self.tokens, which, which)
            inputs.append(v.pointer(b, b.add(self.inputs, b.mul(token, self.input_stride))))
        zeros, count = v.const(v.F32, lanes, 0.0), len(rows.values)
        sums = [[cgutils.alloca_once_value(b, zeros) for _ in range(count)] for _ in range(size)]
        for place in (place for into in sums for place in into):
            b.store(zeros, place)
        tile(b, rows, inputs, self.columns, sums)
        for k, into in enumerate(sums):
            found = _lane_sums(b, [b.load(place) for place in into] + [zeros] * (ROWS - count))
            token = b.add(t, v.offset(k))
            at = b.add(b.add(self.out, b.mul(token, self.out_stride)), b.mul(row, v.offset(4)))
            with b.if_then(b.icmp_signed("<", token, self.token_count)):
                self._write(found, v.pointer(b, at), row, count)

    def _write(self, four: Any, at: Any, row: Any, count: int) -> None:
        b = self.b
        with b.if_else(b.icmp_signed("<=", b.add(row, v.offset(count)), self.count)) as (whole, part):
            with whole:
                v.store(b, v.shuffle(b, four, four, range(count)), at, v.offset(0))
            with part:
                for r in range(count - 1):
                    with b.if_then(b.icmp_signed("<", b.add(row, v.offset(r)), self.count)):
                        v.store(b, b.extract_element(four, ir.Constant(v.I32, r)), at, v.offset(4 * r))

    def emit(self, tile: Callable[..., Any], sizes: tuple[int, ...], alone_rows: int) -> None:
        """Emit a format's loops. `alone_rows`: a vector alone takes so many long rows at once; memory prefers few."""
        b = self.b
        long = b.icmp_signed(">=", self.columns, v.offset(LONG))
        with b.if_else(b.and_(long, b.icmp_signed("==", self.token_count, v.offset(1)))) as (alone, company):
            with alone, cgutils.for_range_slice(b, v.offset(0), self.count, v.offset(alone_rows)) as (row, _):
                self._tile(tile, self._rows(row, alone_rows), row, v.offset(0), 1)
            with company:
                self._many(tile, sizes)

    def _many(self, tile: Callable[..., Any], sizes: tuple[int, ...]) -> None:
        b = self.b
        with cgutils.for_range_slice(b, v.offset(0), self.count, v.offset(ROWS)) as (row, _):
            rows, t = self._rows(row, ROWS), v.offset(0)
            for size in sizes:
                # The largest tile also takes one vector less: its last is then computed twice.
                spare = 1 if size == sizes[0] > 2 else 0
                tiles = b.sdiv(b.add(b.sub(self.token_count, t), v.offset(spare)), v.offset(size))
                with cgutils.for_range(b, tiles) as loop:
                    self._tile(tile, rows, row, b.add(t, b.mul(loop.index, v.offset(size))), size)
                t = b.add(t, b.mul(tiles, v.offset(size)))


@intrinsic
def _emit_row_products(typing_context: Any, fmt: Any, call: Any) -> Any:
    """Emit `row_products`; `call` is a tuple of the values of `_Call`, in order."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        call = _Call(b, *cgutils.unpack_tuple(b, arguments[1]))
        cases: dict[int, Callable[[], None]] = {}
        for code, name in _FLOATS.items():
            cases[code] = partial(call.emit, partial(_float_tile, name), _FLOAT_TILES, 2)
        for code, bits in _BITS.items():
            cases[code] = partial(call.emit, partial(_BlockTile, bits), _BLOCK_TILES, 1)
        v.switch(b, arguments[0], cases)
        return context.get_dummy_value()

    return types.void(types.intp, types.UniTuple(types.intp, 16)), generate


@public
def vector_row_products(
    m: MatrixView, first: int, index: int, count: int, known: int, inputs: int, input_stride: int, tokens: int,
    token_count: int, out: int, out_stride: int,
) -> None:  # fmt: skip
    """`row_products` by vector instructions."""
    matrix = m.values, m.scales, m.stride, m.scales_stride, m.columns, m.slots
    _emit_row_products(
        m.fmt, (*matrix, first, index, count, known, inputs, input_stride, tokens, token_count, out, out_stride)
    )


@public
def _float_product(fmt: int, row: int, input_at: int, columns: int) -> np.float32:
    x_D = carray(pointer_of(input_at), (columns,), np.float32)
    total = np.float32(0)
    if fmt == F32:
        full_D = carray(pointer_of(row), (columns,), np.float32)
        for j in range(columns):
            total += full_D[j] * x_D[j]
    else:
        half_D = carray(pointer_of(row), (columns,), np.uint16)
        for j in range(columns):
            total += (half_to_float(half_D[j]) if fmt == F16 else bfloat_to_float(half_D[j])) * x_D[j]
    return total


@public
def _block_product(fmt: int, row: int, scales: int, input_at: int, columns: int) -> np.float32:
    p, blocks = padded_columns(columns), (columns + BLOCK - 1) // BLOCK
    s_B = carray(pointer_of(scales), (blocks,), np.uint16)
    q_P = carray(pointer_of(row_order_at(input_at, p)), (p,), np.int8)
    t_B = carray(pointer_of(scales_at(input_at, p)), (blocks,), np.float32)
    total = np.float32(0)
    for block in range(blocks):
        whole = np.int32(0)
        for column in range(block * BLOCK, (block + 1) * BLOCK):
            at = stored_index(column, blocks)
            whole += np.int32(integer_weight(fmt, row, at, blocks)) * np.int32(q_P[at])
        total += half_to_float(s_B[block]) * t_B[block] * np.float32(whole)
    return total


@public
def portable_row_products(
    m: MatrixView, first: int, index: int, count: int, known: int, inputs: int, input_stride: int, tokens: int,
    token_count: int, out: int, out_stride: int,
) -> None:  # fmt: skip
    """The definition of `row_products` in plain loops."""
    for n in range(count):
        row = carray(pointer_of(index), (count,), np.int64)[n] if index != 0 else first + n
        values, scales = values_of_row(m, row), m.scales + row * m.scales_stride
        for t in range(token_count):
            token = carray(pointer_of(tokens), (token_count,), np.int64)[t] if tokens != 0 else t
            x = inputs + token * input_stride
            if is_quantised(m.fmt):
                found = _block_product(m.fmt, values, scales, x, m.columns)
            else:
                found = _float_product(m.fmt, values, x, m.columns)
            carray(pointer_of(out + t * out_stride), (count,), np.float32)[n] = found


_row_products = by_address(vector_row_products if ISA.lanes else portable_row_products)


@device
def row_products(
    m: MatrixView, first: int, index: int, count: int, known: int, inputs: int, input_stride: int, tokens: int,
    token_count: int, out: int, out_stride: int,
) -> None:  # fmt: skip
    """out[t, n] ← row_n · x_t for `count` rows and `token_count` vectors. All places are addresses, strides in bytes.

    Row n is number index[n] of m, or first + n where there is no list (0). A list has `known` numbers, and those after
    the first `count` are prefetched. Vector t is the input number tokens[t] of those that lie `input_stride` apart from
    `inputs` on, or number t. Results of one vector are consecutive.
    """
    if count > 0 and token_count > 0:
        _row_products(m, first, index, count, known, inputs, input_stride, tokens, token_count, out, out_stride)
