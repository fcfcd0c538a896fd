"""The sum of rows of a block format, each times a factor, in integers:  y ← y + Σ_k h_k row_k.

With s_k,b the scale of row k's block b, for at most `SUM_NEURONS` rows at a time:

    c_k,b = h_k s_k,b      g_b = max_k |c_k,b| / 32767      n_k,b = round(c_k,b / g_b)
    y_j += g_b Σ_k n_k,b q_k,j                              j in block b, two rows a multiplication

Where a block has a zero z of its own, q − z is in place of q; where it has a minimum m, its columns get Σ_k h_k m_k,b
first, in float32 and in the order of the rows. So no weight is converted by itself, and the integer sums are exact in
any order of the rows. The rounding to 16 bits is off by at most half of 1 / 32767 of the largest term; it depends on
the rows of this sum alone.

One multiplication takes two rows: their 16-bit words are interleaved as they are stored, which gives pairs of one
column. A word holds an even and an odd column of a four (below 8 bits: of two fours), so its bytes or nibbles are
separated first, and a last interleaving brings even and odd columns together. A cache line of each row is read at a
time, and the upper bits that belong to it.

Shape letters: K rows, B blocks of a strip of columns, J columns of one block, P padded columns.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils

from pi_runtime.artifact.footprint import BLOCK_SUM, STRIP
from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.intrinsics import emits, widen_half
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import (
    Floats,
    MatrixView,
    address_of,
    columns_from,
    integers,
    multiply_add,
    values_of_row,
    vector,
)
from pi_runtime.kernels.data.row_loading import offset_of, scale_of, single_block, stored_index
from pi_runtime.kernels.data.weight_formats import GROUP_COLUMNS, SUMMED_FORMATS, BlockFormat, Run, integer_weight

_LOW = [lane for k in (0, 8) for j in range(4) for lane in (k + j, 16 + k + j)]
WORDS = [_LOW, [lane + 4 for lane in _LOW]]
"""Lanes of the words of blocks 0, 1, 4, 5, and of blocks 2, 3, 6, 7."""
OWNERS = [[0, 0, 1, 1, 4, 4, 5, 5], [2, 2, 3, 3, 6, 6, 7, 7]]
"""Block of each lane after that."""
_HALVES = 2 if ISA.lanes == 16 else 1
"""Halves of a line that a register takes at once."""
_HAS_VECTORS = ISA.lanes > 0
_SINGLE_TOKENS, _SINGLES_AHEAD = ((8, 2, 1) if ISA.lanes == 16 else (2, 1)), 16
"""Tokens whose sums of a block outside the groups stay in registers; how many rows ahead these blocks are fetched."""
_BLOCKS = STRIP // BLOCK
TINY = 2.0**-126
WITH_ZEROS = tuple(code for code, f in SUMMED_FORMATS.items() if f.offset == "zero")
"""Codes of the formats whose blocks have zeros of their own."""


@public
def add_block_rows(m: MatrixView, index: int, count: int, known: int, h: int, y_P: Floats, scratch: int) -> None:
    """y ← y + Σ_k h_k row(index_k), for at most `SUM_NEURONS` rows of a block format.

    `index` and `h` are addresses. A list has `known` numbers, and as many as `count` of those after the first `count`
    are prefetched. y has room to the end of the last block; `scratch` is the address of memory that
    `footprint.BLOCK_SUM` divides.
    """
    if count == 0:
        return
    for first in range(0, m.columns, STRIP):
        some = columns_from(m, first, min(STRIP, m.columns - first))
        _add_strip(some, index, count, known, h, y_P[first:], scratch)


@device
def _add_strip(m: MatrixView, index: int, count: int, known: int, h: int, y_P: Floats, scratch: int) -> None:
    groups = (m.columns + BLOCK - 1) // GROUP_COLUMNS
    add_singles(m, index, count, h, 0, 1, address_of(y_P), 0)
    if not _HAS_VECTORS:
        for block in range(8 * groups):
            _add_block(m, block, index, count, h, y_P[block * BLOCK : (block + 1) * BLOCK], scratch)
        return
    row_K, later_K = scratch + BLOCK_SUM.rows, scratch + BLOCK_SUM.later
    blocks = (m.columns + 4 * BLOCK - 1) // (4 * BLOCK) * 4
    matrix = m.values, m.stride, m.scales, m.scales_stride, m.offsets, m.slots
    _quantise_factors(m.fmt, (*matrix, index, h, count, known, scratch, blocks))
    if count % 2:  # a last row without a partner is paired with itself, times zero
        for rows in (row_K, later_K):
            integers(rows, count + 1)[count] = integers(rows, count)[count - 1]
    n_PB, g_B, start_B = scratch + BLOCK_SUM.n, scratch + BLOCK_SUM.g, scratch + BLOCK_SUM.sums
    pairs, minimum_B = (count + 1) // 2, scratch + BLOCK_SUM.c
    _sum_groups(m.fmt, (row_K, pairs, n_PB, g_B, start_B, minimum_B, _BLOCKS, groups, address_of(y_P), later_K))


@device
def add_singles(
    m: MatrixView, index: int, count: int, h: int, h_stride: int, tokens: int, y: int, y_stride: int
) -> None:
    """Add blocks outside the groups, at most seven a row, in float32 and in the order of the rows, for some tokens."""
    blocks = (m.columns + BLOCK - 1) // BLOCK
    matrix = m.values, m.stride, m.scales, m.scales_stride, m.offsets, m.slots
    if blocks % 8 > 0 and count > 0:
        _add_single_blocks(m.fmt, (*matrix, blocks // 8 * 8, blocks, index, count, h, h_stride, tokens, y, y_stride))


@device
def _add_block(m: MatrixView, block: int, index: int, count: int, h: int, y_J: Floats, scratch: int) -> None:
    """Add one block inside a group in plain loops."""
    index_K, h_K, blocks = integers(index, count), vector(h, count), (m.columns + BLOCK - 1) // BLOCK
    n_K, largest, wrong = vector(scratch + BLOCK_SUM.c, count), np.float32(0), np.float32(0)
    has_zeros, minima = m.fmt in WITH_ZEROS, np.float32(0)
    for k in range(count):
        n_K[k] = h_K[k] * scale_of(m, index_K[k], block)
        if not has_zeros:
            minima = multiply_add(h_K[k], offset_of(m, index_K[k], block), minima)
        largest = max(largest, abs(n_K[k]))
        wrong += h_K[k] * np.float32(0)
    unit = largest / np.float32(32767)
    usable = unit >= np.float32(TINY)
    inverse, unit = (np.float32(1) / unit, unit) if usable else (np.float32(0), np.float32(0))
    for j in range(BLOCK):
        total, at = np.int32(0), stored_index(block * BLOCK + j, blocks)
        for k in range(count):
            q = integer_weight(m.fmt, values_of_row(m, index_K[k]), at, blocks)
            if has_zeros:
                q -= np.int32(offset_of(m, index_K[k], block))
            total += np.int32(np.rint(n_K[k] * inverse)) * q
        before = y_J[j] if m.offsets == 0 or has_zeros else y_J[j] + minima
        y_J[j] = multiply_add(np.float32(total), unit + wrong, before)


@dataclass
class _Singles:
    """Emits the sums of `add_singles`; the values are those of `_add_single_blocks`."""

    b: Any
    values: Any
    stride: Any
    scales: Any
    scales_stride: Any
    offsets: Any
    slots: Any
    first: Any
    end: Any
    index: Any
    count: Any
    h: Any
    h_stride: Any
    tokens: Any
    y: Any
    y_stride: Any

    def emit(self, f: BlockFormat) -> None:
        """Take each block for as many tokens at once as there are registers for their sums."""
        b = self.b
        with cgutils.for_range_slice(b, self.first, self.end, v.offset(1)) as (block, _):
            done = v.offset(0)
            for size in _SINGLE_TOKENS:
                tiles = b.udiv(b.sub(self.tokens, done), v.offset(size))
                with cgutils.for_range(b, tiles) as loop:
                    token = b.add(done, b.mul(loop.index, v.offset(size)))
                    self._tile(f, block, [b.add(token, v.offset(t)) for t in range(size)])
                done = b.add(done, b.mul(tiles, v.offset(size)))

    def _tile(self, f: BlockFormat, block: Any, numbers: list[Any]) -> None:
        """Add one block of each row to the sums of some tokens."""
        b, at, kind = self.b, self.b.mul(block, v.offset(4 * BLOCK)), v.vec(v.F32, BLOCK)
        y = [v.pointer(b, b.add(self.y, b.mul(t, self.y_stride))) for t in numbers]
        h = [v.pointer(b, b.add(self.h, b.mul(t, self.h_stride))) for t in numbers]
        sums = [cgutils.alloca_once(b, kind) for _ in numbers]
        for y_t, total in zip(y, sums, strict=True):
            b.store(v.load(b, y_t, at, kind), total)
        with cgutils.for_range(b, self.count) as loop:
            later = b.add(loop.index, v.offset(_SINGLES_AHEAD))
            later = self._row(b.select(b.icmp_signed("<", later, self.count), later, loop.index))
            v.prefetch(b, self._values(later), b.udiv(b.mul(block, v.offset(BLOCK * f.bits)), v.offset(8)))
            row = self._row(loop.index)
            beside = v.pointer(b, b.add(self.scales, b.mul(row, self.scales_stride)))
            place = b.mul(block, v.offset(2))
            scale = widen_half(b, v.load(b, beside, place, v.I16))
            offset = widen_half(b, v.load(b, beside, b.add(place, self.offsets), v.I16)) if f.offset else scale
            value_J = single_block(f, b, self._values(row), block, scale, offset)
            for h_t, total in zip(h, sums, strict=True):
                h_J = v.splat(b, v.load(b, h_t, b.mul(loop.index, v.offset(4)), v.F32), BLOCK)
                b.store(v.fma(b, h_J, value_J, b.load(total)), total)
        for y_t, total in zip(y, sums, strict=True):
            v.store(b, b.load(total), y_t, at)

    def _row(self, k: Any) -> Any:
        """The number of a listed row."""
        return v.load(self.b, v.pointer(self.b, self.index), self.b.mul(k, v.offset(8)), v.I64)

    def _values(self, row: Any) -> Any:
        """The pointer to a row's values."""
        b = self.b
        return v.pointer(b, b.add(self.values, b.mul(v.listed(b, self.slots, row, row), self.stride)))


@emits(types.void(types.intp, types.UniTuple(types.intp, 15)))
def _add_single_blocks(b: Any, fmt: Any, arguments: Any) -> Any:
    """Emit `add_singles`; the tuple has the values of `_Singles`, in order."""
    call = _Singles(b, *cgutils.unpack_tuple(b, arguments))
    v.switch(b, fmt, {code: partial(call.emit, f) for code, f in SUMMED_FORMATS.items()})


@dataclass
class _Factors:
    """Emits c, g, n, −Σ n z, and Σ h m, of a strip for `lanes` of its blocks.

    The values are those of `_quantise_factors`, and `first` is the first of the blocks.
    """

    b: Any
    lanes: int
    fmt: Any
    arguments: Any
    first: Any

    def emit(self) -> None:
        b, lanes = self.b, self.lanes
        values, stride, scales, scales_stride, _, slots, index, h, count, known, scratch, _ = self.arguments
        floats, ints = v.vec(v.F32, lanes), v.vec(v.I32, lanes)
        at = b.mul(self.first, v.offset(4))
        c, n, g, starts, rows, later = (v.pointer(b, b.add(scratch, v.offset(at))) for at in BLOCK_SUM[:-1])
        listed, factors = v.pointer(b, index), v.pointer(b, h)
        largest, wrong = (cgutils.alloca_once_value(b, v.const(v.F32, lanes, 0.0)) for _ in range(2))
        for place in (largest, wrong):
            b.store(v.const(v.F32, lanes, 0.0), place)
        with cgutils.for_range(b, count) as loop:
            row = v.load(b, listed, b.mul(loop.index, v.offset(8)), v.I64)
            address = b.add(values, b.mul(v.listed(b, slots, row, row), stride))
            v.store(b, address, rows, b.mul(loop.index, v.offset(8)))
            following = b.add(loop.index, count)
            following = b.select(b.icmp_signed("<", following, known), following, loop.index)
            following = v.load(b, listed, b.mul(following, v.offset(8)), v.I64)
            place = v.listed(b, slots, following, following)
            v.store(b, b.add(values, b.mul(place, stride)), later, b.mul(loop.index, v.offset(8)))
            v.prefetch(b, v.pointer(b, b.add(scales, b.mul(following, scales_stride))), b.mul(self.first, v.offset(2)))
            s_at = b.add(b.add(scales, b.mul(row, scales_stride)), b.mul(self.first, v.offset(2)))
            s = b.fpext(v.load(b, v.pointer(b, s_at), v.offset(0), v.vec(v.HALF, lanes)), floats)
            h_L = v.splat(b, v.load(b, factors, b.mul(loop.index, v.offset(4)), v.F32), lanes)
            c_L = b.fmul(h_L, s)
            v.store(b, c_L, c, b.add(b.mul(loop.index, v.offset(4 * _BLOCKS)), at))
            magnitude = v.call(b, f"llvm.fabs.v{lanes}f32", floats, [c_L])
            most = b.load(largest)
            b.store(b.select(b.fcmp_ordered(">", magnitude, most), magnitude, most), largest)
            # NaN where h is infinite or NaN, which integers cannot express.
            b.store(b.fadd(b.load(wrong), b.fmul(h_L, v.const(v.F32, lanes, 0.0))), wrong)
        unit = b.fdiv(b.load(largest), v.const(v.F32, lanes, 32767.0))
        usable = b.fcmp_ordered(">=", unit, v.const(v.F32, lanes, TINY))
        zeros = v.const(v.F32, lanes, 0.0)
        v.store(b, b.fadd(b.select(usable, unit, zeros), b.load(wrong)), g, at)
        inverse = b.select(usable, b.fdiv(v.const(v.F32, lanes, 1.0), unit), zeros)
        total = cgutils.alloca_once_value(b, v.const(v.I32, lanes, 0))
        b.store(v.const(v.I32, lanes, 0), total)
        with cgutils.for_range_slice(b, v.offset(0), count, v.offset(2)) as (k, _):

            def rounded(row: Any) -> Any:
                c_L = v.load(b, c, b.add(b.mul(row, v.offset(4 * _BLOCKS)), at), floats)
                return b.fptosi(v.call(b, f"llvm.rint.v{lanes}f32", floats, [b.fmul(c_L, inverse)]), ints)

            one = rounded(k)
            partner = b.add(k, v.offset(1))
            paired = v.splat(b, b.icmp_signed("<", partner, count), lanes)
            other = b.select(paired, rounded(partner), v.const(v.I32, lanes, 0))
            both = b.or_(b.shl(other, v.const(v.I32, lanes, 16)), b.and_(one, v.const(v.I32, lanes, 0xFFFF)))
            v.store(b, both, n, b.add(b.mul(k, v.offset(2 * _BLOCKS)), at))
            b.store(b.sub(b.load(total), b.add(one, other)), total)

        cases = {
            code: partial(self._finish, f, b.load(total), rounded, starts, c) for code, f in SUMMED_FORMATS.items()
        }
        v.switch(b, self.fmt, cases)

    def _finish(self, f: BlockFormat, total: Any, rounded: Callable[[Any], Any], starts: Any, c: Any) -> None:
        """Store −Σ n z, which for a constant z is z times the total −Σ n; and Σ h m in place of c."""
        b, at = self.b, self.b.mul(self.first, v.offset(4))
        start = b.mul(total, v.const(v.I32, self.lanes, f.zero))
        if f.offset == "zero":
            sums = cgutils.alloca_once_value(b, start)
            b.store(start, sums)
            with self._each_row() as (k, _, zeros):
                each = b.mul(rounded(k), b.fptosi(zeros, start.type))
                b.store(b.sub(b.load(sums), each), sums)
            start = b.load(sums)
        v.store(b, start, starts, at)
        if f.offset == "minimum":
            nothing = v.const(v.F32, self.lanes, 0.0)
            added = cgutils.alloca_once_value(b, nothing)
            b.store(nothing, added)
            with self._each_row() as (_, h_L, minima):
                b.store(v.fma(b, h_L, minima, b.load(added)), added)
            v.store(b, b.load(added), c, at)

    @contextmanager
    def _each_row(self) -> Iterator[tuple[Any, Any, Any]]:
        """A loop over the rows: their numbers in the list, factors, and minima or zeros."""
        b = self.b
        _, _, scales, scales_stride, offsets, _, index, h, count, *_ = self.arguments
        with cgutils.for_range(b, count) as loop:
            row = v.load(b, v.pointer(b, index), b.mul(loop.index, v.offset(8)), v.I64)
            place = b.add(b.add(scales, b.mul(row, scales_stride)), b.add(offsets, b.mul(self.first, v.offset(2))))
            found = v.load(b, v.pointer(b, place), v.offset(0), v.vec(v.HALF, self.lanes))
            h_L = v.splat(b, v.load(b, v.pointer(b, h), b.mul(loop.index, v.offset(4)), v.F32), self.lanes)
            yield loop.index, h_L, b.fpext(found, v.vec(v.F32, self.lanes))


@emits(types.void(types.intp, types.UniTuple(types.intp, 12)))
def _quantise_factors(b: Any, fmt: Any, arguments: Any) -> Any:
    """Write c, g, n and −Σ n z of a strip, Σ h m in place of c, and the addresses of its rows and of those to prefetch.

    The tuple: values, stride, scales, scales' stride, offsets, slots, list, factors, count, known, scratch, blocks of
    the strip (padded to fours).
    """
    blocks = (values := cgutils.unpack_tuple(b, arguments))[-1]
    with b.if_else(b.icmp_signed("==", blocks, v.offset(_BLOCKS))) as (strip, part):
        with strip:
            _Factors(b, _BLOCKS, fmt, values, v.offset(0)).emit()
        with part, cgutils.for_range_slice(b, v.offset(0), blocks, v.offset(4)) as (first, _):
            _Factors(b, 4, fmt, values, first).emit()


def _parts(f: BlockFormat, b: Any, groups: list[Run], line: Any, half: int, n: Any) -> Iterator[tuple[Any, Any]]:
    """Some halves of a line of two rows as vectors of pairs, each with the pairs of factors n for its lanes."""
    two = list(zip(*[f.words(b, group, line, half, _HALVES) for group in groups], strict=True))
    for words, owners in zip(WORDS, OWNERS, strict=True):
        lanes = [16 * (k + lane // 16 * _HALVES) + lane % 16 for k in range(_HALVES) for lane in words]
        factors = v.shuffle(b, n, n, owners * _HALVES)
        for part in f.pairs(b, [v.shuffle(b, one, other, lanes) for one, other in two], half):
            yield part, factors


def add_finished(f: BlockFormat, b: Any, sums: list[Any], scales: Any, minima: Any, y: Any, first: Any) -> None:
    """Add the finished sums of one vector to y; the first block's columns begin at `first`."""
    for k, half in itertools.product(range(2), range(f.per_byte)):
        even, odd = (b.load(sums[(k * f.per_byte + half) * 2 + part]) for part in range(2))
        lanes = even.type.count
        for which in range(2):
            block = 2 * k + which  # in the lower lanes, and block + 4 in the upper ones
            owners = [block] * (lanes // 2) + [block + 4] * (lanes // 2)
            factors, minimum = v.shuffle(b, scales, scales, owners), v.shuffle(b, minima, minima, owners)
            # Even and odd columns are brought together: those of each half of a line are in its lanes of the sums.
            twos = [8 * part + 4 * upper + 2 * which for upper in range(2) for part in range(lanes // 8)]
            each = [column for two in twos for column in (two, lanes + two, two + 1, lanes + two + 1)]
            value = b.sitofp(v.shuffle(b, even, odd, each), factors.type)
            for part in range(2):
                column = b.add(first, v.offset((block + 4 * part) * BLOCK + BLOCK // f.per_byte * half))
                at, some = b.mul(column, v.offset(4)), range(lanes // 2 * part, lanes // 2 * (part + 1))
                sum_J, scale_J, minimum_J = (v.shuffle(b, one, one, some) for one in (value, factors, minimum))
                before = v.load(b, y, at, sum_J.type)
                before = b.fadd(before, minimum_J) if f.offset == "minimum" else before
                v.store(b, v.fma(b, sum_J, scale_J, before), y, at)


class _Prefetch:
    """Emits the fetching of rows, two lines a step and row after row: what lies in turn the processor fetches along."""

    def __init__(self, f: BlockFormat, b: Any, rows: Any, lines: Any) -> None:
        """`rows`: where the rows' addresses are; `lines`: how many of each are read, upper bits not counted."""
        self._f, self._b, self._rows, self._lines = f, b, rows, lines
        self._row, self._line = (cgutils.alloca_once_value(b, v.offset(0)) for _ in range(2))
        for place in (self._row, self._line):
            b.store(v.offset(0), place)

    def step(self) -> None:
        """Fetch the next two lines, and the lines of their upper bits."""
        f, b, row = self._f, self._b, self._b.load(self._row)
        pointer = v.pointer(b, v.load(b, self._rows, b.mul(row, v.offset(8)), v.I64))
        inside = v.offset(GROUP_COLUMNS // f.per_byte // v.LINE)
        line = b.load(self._line)
        group = f.group(b, pointer, b.udiv(line, inside)).at
        places = [b.add(group, v.offset(at)) for at in range(GROUP_COLUMNS // f.per_byte, f.group_nbytes, v.LINE)]
        at = b.add(group, b.mul(b.urem(line, inside), v.offset(v.LINE)))  # both lines lie in one group
        for place in (at, b.add(at, v.offset(v.LINE)), *places):
            v.prefetch(b, pointer, place)
        line = b.add(line, v.offset(2))
        done = b.icmp_signed("==", line, self._lines)
        b.store(b.select(done, v.offset(0), line), self._line)
        b.store(b.select(done, b.add(row, v.offset(1)), row), self._row)


def _emit_sum(f: BlockFormat, b: Any, arguments: Any) -> None:
    """Emit the sum for one format; `arguments` as those of `_sum_groups` without the format."""
    lines, halves = GROUP_COLUMNS // f.per_byte // v.LINE, range(0, 2, _HALVES)
    at_once = lines if _HALVES == 2 else 1
    rows, n, g, starts_at, minima, y, later = (v.pointer(b, arguments[k]) for k in (0, 2, 3, 4, 5, 8, 9))
    pairs, blocks, groups, ints = arguments[1], arguments[6], arguments[7], v.vec(v.I32, 8)
    ahead = _Prefetch(f, b, later, b.mul(groups, v.offset(lines)))
    with cgutils.for_range(b, b.mul(groups, v.offset(lines // at_once))) as loop:
        group, inside = b.udiv(loop.index, v.offset(lines // at_once)), b.urem(loop.index, v.offset(lines // at_once))
        eight = b.mul(group, v.offset(32))
        start = v.load(b, starts_at, eight, ints)
        starts = [v.shuffle(b, start, start, owners * _HALVES) for owners in OWNERS for _ in range(2 * f.per_byte)]
        each = [(b.add(inside, v.offset(line)), half) for line in range(at_once) for half in halves]
        found = [[cgutils.alloca_once_value(b, one) for one in starts] for _ in each]
        for place, one in ((p, o) for vector in found for p, o in zip(vector, starts, strict=True)):
            b.store(one, place)
        with cgutils.for_range(b, pairs) as pair:
            for _ in range(at_once):
                ahead.step()
            at = [b.add(b.mul(pair.index, v.offset(16)), v.offset(8 * k)) for k in range(2)]
            two = [f.group(b, v.pointer(b, v.load(b, rows, place, v.I64)), group) for place in at]
            factors = v.load(b, n, b.add(b.mul(b.mul(pair.index, blocks), v.offset(4)), eight), ints)
            for (line, half), places in zip(each, found, strict=True):
                for into, (part, owned) in zip(places, _parts(f, b, two, line, half, factors), strict=True):
                    b.store(v.dot_words(b, b.load(into), part, owned), into)
        scales, added = (v.load(b, place, eight, v.vec(v.F32, 8)) for place in (g, minima))
        for (line, half), places in zip(each, found, strict=True):
            four = b.add(b.mul(line, v.offset(8)), v.offset(4 * half))
            first = b.add(b.mul(group, v.offset(GROUP_COLUMNS)), four)
            add_finished(f, b, places, scales, added, y, first)


@emits(types.void(types.intp, types.UniTuple(types.intp, 10)))
def _sum_groups(b: Any, fmt: Any, arguments: Any) -> Any:
    """y ← y + the sum over whole groups.

    The tuple: address of the rows' addresses, two a pair; pairs; addresses of n [pairs, blocks, 2] in 16 bits, g,
    −Σ n z and Σ h m [blocks]; blocks; groups; y's address, and that of the addresses of rows to prefetch.
    """
    values = cgutils.unpack_tuple(b, arguments)
    v.switch(b, fmt, {code: partial(_emit_sum, f, b, values) for code, f in SUMMED_FORMATS.items()})
