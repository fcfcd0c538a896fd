"""Sums of the same rows of a block format for several tokens, each with its own factors:  y_t ← y_t + Σ_k h_t,k row_k.

A token's sum has the bits that `block_sums` gives it alone: integer sums are exact in any order, and a factor of 0
changes nothing. What is the same for all tokens is done once: finding a row, widening its scales, and separating its
integers. Columns are taken by groups of eight blocks, so that a group's factors stay in the first-level cache.

Shape letters: K rows, T tokens, B blocks of a group, P padded columns.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from numba import types
from numba.core import cgutils

from pi_runtime.artifact.footprint import BLOCK_SUM, SUM_NEURONS
from pi_runtime.artifact.formats import BLOCK
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.intrinsics import emits
from pi_runtime.kernels.codegen.isa import ISA
from pi_runtime.kernels.codegen.jit import public
from pi_runtime.kernels.data.matrix_view import Floats, MatrixView, address_of
from pi_runtime.kernels.data.weight_formats import GROUP_COLUMNS, SUMMED_FORMATS, BlockFormat
from pi_runtime.kernels.ops.block_sums import OWNERS, TINY, WORDS, add_block_rows, add_finished, add_singles

_HAS_VECTORS = ISA.lanes > 0
_LANES = 8
"""Blocks of a group, one a lane."""
_SUMS = 16 if ISA.lanes == 16 else 8
"""Registers of sums."""
_TOKEN_NBYTES = 2 * SUM_NEURONS * _LANES
"""Bytes of a token's rounded factors of one group."""


@dataclass
class _TileCall:
    """Emits a tile for one format; the values are those of `_emit_block_tile`, the addresses integers."""

    b: Any
    values: Any
    stride: Any
    scales: Any
    scales_stride: Any
    offsets: Any
    slots: Any
    index: Any
    count: Any
    h: Any
    h_stride: Any
    tokens: Any
    y: Any
    y_stride: Any
    scratch: Any
    groups: Any

    def emit(self, f: BlockFormat) -> None:
        """Take as many tokens at once as there are registers for their sums; past the end the last one again."""
        b, size = self.b, max(1, _SUMS // (4 * f.per_byte))
        self.rows, self.row_scales = (
            v.pointer(b, b.add(self.scratch, v.offset(at))) for at in (BLOCK_SUM.rows, BLOCK_SUM.later)
        )
        self.pairs = b.sdiv(b.add(self.count, v.offset(1)), v.offset(2))
        self._list_rows()
        with cgutils.for_range_slice(b, v.offset(0), self.tokens, v.offset(size)) as (first, _):
            numbers = [b.add(first, v.offset(t)) for t in range(size)]
            last = b.sub(self.tokens, v.offset(1))
            held = [b.select(b.icmp_signed("<", t, last), t, last) for t in numbers]
            h = [v.pointer(b, b.add(self.h, b.mul(t, self.h_stride))) for t in held]
            wrong = [self._wrong(h_t) for h_t in h]
            with cgutils.for_range(b, self.groups) as loop:
                beside = self._factors(f, loop.index, h, wrong)
                with cgutils.for_range(b, v.offset(GROUP_COLUMNS // f.per_byte // v.LINE)) as line:
                    for half in range(2):
                        self._sum(f, loop.index, line.index, half, numbers, beside)

    def _list_rows(self) -> None:
        """Write the addresses of the rows and of their scales; a last row without a partner is its own."""
        b = self.b
        with cgutils.for_range(b, b.mul(self.pairs, v.offset(2))) as loop:
            last = b.sub(self.count, v.offset(1))
            k = b.select(b.icmp_signed("<", loop.index, last), loop.index, last)
            row = v.load(b, v.pointer(b, self.index), b.mul(k, v.offset(8)), v.I64)
            address = b.add(self.values, b.mul(v.listed(b, self.slots, row, row), self.stride))
            v.prefetch(b, v.pointer(b, address), v.offset(0))
            at = b.mul(loop.index, v.offset(8))
            v.store(b, address, self.rows, at)
            v.store(b, b.add(self.scales, b.mul(row, self.scales_stride)), self.row_scales, at)

    def _wrong(self, h: Any) -> Any:
        """Σ 0 h in every lane: NaN where a factor is infinite or NaN, which integers cannot express."""
        b, zeros = self.b, v.const(v.F32, _LANES, 0.0)
        total = cgutils.alloca_once_value(b, zeros)
        b.store(zeros, total)
        with cgutils.for_range_slice(b, v.offset(0), self.count, v.offset(_LANES)) as (k, _):
            some = v.load_some(b, h, b.mul(k, v.offset(4)), b.sub(self.count, k), zeros.type)
            b.store(b.fadd(b.load(total), b.fmul(some, zeros)), total)
        found = v.halves_added(b, b.load(total), _LANES)
        return v.splat(b, b.extract_element(found, v.I32(0)), _LANES)

    def _beside(self, k: Any, at: Any) -> Any:
        """Eight float16 numbers `at` bytes behind the scales of a row, as float32."""
        row = v.pointer(self.b, v.load(self.b, self.row_scales, self.b.mul(k, v.offset(8)), v.I64))
        return self.b.fpext(v.load(self.b, row, at, v.vec(v.HALF, _LANES)), v.vec(v.F32, _LANES))

    def _times(self, h: Any, k: Any, s: Any) -> Any:
        """A token's factor of a row, times the row's scales."""
        return self.b.fmul(v.splat(self.b, v.load(self.b, h, self.b.mul(k, v.offset(4)), v.F32), _LANES), s)

    def _factors(self, f: BlockFormat, group: Any, h: list[Any], wrong: list[Any]) -> list[tuple[Any, Any, Any]]:
        """Write n of a group for each token; returns g, what its integer sums start at, and its sum of minima."""
        b, floats, ints = self.b, v.vec(v.F32, _LANES), v.vec(v.I32, _LANES)
        nothing, none, at = v.const(v.F32, _LANES, 0.0), v.const(v.I32, _LANES, 0), b.mul(group, v.offset(2 * _LANES))

        def places(initial: Any) -> list[Any]:
            found = [cgutils.alloca_once_value(b, initial) for _ in h]
            for place in found:
                b.store(initial, place)
            return found

        largest = places(nothing)
        with cgutils.for_range(b, self.count) as loop:
            s = self._beside(loop.index, at)
            for h_t, place in zip(h, largest, strict=True):
                magnitude = v.call(b, f"llvm.fabs.v{_LANES}f32", floats, [self._times(h_t, loop.index, s)])
                most = b.load(place)
                b.store(b.select(b.fcmp_ordered(">", magnitude, most), magnitude, most), place)
        units = [b.fdiv(b.load(place), v.const(v.F32, _LANES, 32767.0)) for place in largest]
        usable = [b.fcmp_ordered(">=", unit, v.const(v.F32, _LANES, TINY)) for unit in units]
        one = v.const(v.F32, _LANES, 1.0)
        inverse = [b.select(u, b.fdiv(one, unit), nothing) for u, unit in zip(usable, units, strict=True)]
        totals, minima = places(none), places(nothing)
        with cgutils.for_range(b, self.pairs) as loop:
            k = b.mul(loop.index, v.offset(2))
            partner = b.add(k, v.offset(1))
            paired = v.splat(b, b.icmp_signed("<", partner, self.count), _LANES)
            two, s = (k, partner), [self._beside(row, at) for row in (k, partner)]
            extra = [self._beside(row, b.add(self.offsets, at)) if f.offset else None for row in two]
            for t, h_t in enumerate(h):
                n = []
                for row, s_row, o_row, real in zip(two, s, extra, (None, paired), strict=True):
                    scaled = b.fmul(self._times(h_t, row, s_row), inverse[t])
                    rounded = b.fptosi(v.call(b, f"llvm.rint.v{_LANES}f32", floats, [scaled]), ints)
                    n.append(rounded if real is None else b.select(real, rounded, none))
                    if f.offset == "minimum":
                        each = v.splat(b, v.load(b, h_t, b.mul(row, v.offset(4)), v.F32), _LANES)
                        added = v.fma(b, each, o_row, b.load(minima[t]))
                        b.store(added if real is None else b.select(real, added, b.load(minima[t])), minima[t])
                    each = b.mul(n[-1], b.fptosi(o_row, ints)) if f.offset == "zero" else n[-1]
                    b.store(b.sub(b.load(totals[t]), each), totals[t])
                both = b.or_(b.shl(n[1], v.const(v.I32, _LANES, 16)), b.and_(n[0], v.const(v.I32, _LANES, 0xFFFF)))
                v.store(b, both, self._n(t), b.mul(loop.index, v.offset(4 * _LANES)))
        starts = [b.load(total) for total in totals]
        if f.offset != "zero":
            starts = [b.mul(start, v.const(v.I32, _LANES, f.zero)) for start in starts]
        g = [b.fadd(b.select(u, x, nothing), w) for u, x, w in zip(usable, units, wrong, strict=True)]
        return list(zip(g, starts, [b.load(place) for place in minima], strict=True))

    def _n(self, t: int) -> Any:
        """Where a token's rounded factors are."""
        return v.pointer(self.b, self.b.add(self.scratch, v.offset(t * _TOKEN_NBYTES)))

    def _sum(self, f: BlockFormat, group: Any, line: Any, half: int, numbers: list[Any], beside: list[Any]) -> None:
        """Half a line of a group for each token."""
        b, ints = self.b, v.vec(v.I32, _LANES)
        sums = []
        for _, start, _ in beside:
            each = [v.shuffle(b, start, start, owners) for owners in OWNERS for _ in range(2 * f.per_byte)]
            sums.append([cgutils.alloca_once_value(b, one) for one in each])
            for place, one in zip(sums[-1], each, strict=True):
                b.store(one, place)
        with cgutils.for_range(b, self.pairs) as loop:
            at = [b.add(b.mul(loop.index, v.offset(16)), v.offset(8 * k)) for k in range(2)]
            two = [f.group(b, v.pointer(b, v.load(b, self.rows, place, v.I64)), group) for place in at]
            for run in two:  # the next line of each row
                v.prefetch(b, run.row, b.add(run.at, b.mul(b.add(line, v.offset(1)), v.offset(v.LINE))))
            stored = list(zip(*[f.words(b, run, line, half) for run in two], strict=True))
            parts = [f.pairs(b, [v.shuffle(b, one, other, words) for one, other in stored], half) for words in WORDS]
            for t, into in enumerate(sums):
                n = v.load(b, self._n(t), b.mul(loop.index, v.offset(4 * _LANES)), ints)
                factors = [v.shuffle(b, n, n, owners) for owners in OWNERS]
                each = [(part, owned) for some, owned in zip(parts, factors, strict=True) for part in some]
                for place, (part, owned) in zip(into, each, strict=True):
                    b.store(v.dot_words(b, b.load(place), part, owned), place)
        four = b.add(b.mul(line, v.offset(2)), v.offset(half))
        first = b.add(b.mul(group, v.offset(GROUP_COLUMNS)), b.mul(four, v.offset(4)))
        for t, into, (g, _, minima) in zip(numbers, sums, beside, strict=True):
            with b.if_then(b.icmp_signed("<", t, self.tokens)):
                y = v.pointer(b, b.add(self.y, b.mul(t, self.y_stride)))
                add_finished(f, b, into, g, minima, y, first)


@emits(types.void(types.intp, types.UniTuple(types.intp, 15)))
def _emit_block_tile(b: Any, fmt: Any, call: Any) -> Any:
    """Emit the sums over whole groups; `call` is a tuple of the values of `_TileCall`, in order."""
    call = _TileCall(b, *cgutils.unpack_tuple(b, call))
    v.switch(b, fmt, {code: partial(call.emit, f) for code, f in SUMMED_FORMATS.items()})


@public
def add_block_tile(m: MatrixView, index: int, count: int, h: int, h_stride: int, y_TP: Floats, scratch: int) -> None:
    """y_t ← y_t + Σ_k h_t,k row(index_k), for at most `SUM_NEURONS` rows of a block format.

    `index` and `h` are addresses; a token's factors lie `h_stride` bytes behind those of the one before. y has room to
    the end of the last block; `scratch` is the address of memory that `footprint.BLOCK_SUM` divides.
    """
    tokens, width = y_TP.shape
    groups = (m.columns + BLOCK - 1) // GROUP_COLUMNS
    if not _HAS_VECTORS or tokens == 1:
        for t in range(tokens):
            add_block_rows(m, index, count, count, h + t * h_stride, y_TP[t], scratch)
        return
    add_singles(m, index, count, h, h_stride, tokens, address_of(y_TP), 4 * width)
    matrix = m.values, m.stride, m.scales, m.scales_stride, m.offsets, m.slots
    listed = index, count, h, h_stride, tokens
    _emit_block_tile(m.fmt, (*matrix, *listed, address_of(y_TP), 4 * width, scratch, groups))
