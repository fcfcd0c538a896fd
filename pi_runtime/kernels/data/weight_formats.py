"""How compiled code reads each number format of weights: one object a format, for products, sums and rows alike.

A format is known by its code (see `artifact.formats`). Kernels that are compiled for all formats ask `v.switch` for the
one that a matrix has. A further block format is one more class here: how many bits a weight takes, which stored integer
stands for 0, and how stored bytes become registers of weights. Scales of one byte become float32 by integer arithmetic.
"""

# A format does not need all that another one does.
# ruff: noqa: ARG002

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pi_runtime.artifact.formats import BLOCK, FORMATS, Format
from pi_runtime.kernels.codegen import simd as v
from pi_runtime.kernels.codegen.intrinsics import emits, widen_half
from pi_runtime.kernels.codegen.isa import ISA

GROUP_COLUMNS = 8 * BLOCK
"""Columns of a group: eight blocks, whose fours of columns are interleaved."""
REGISTER = ISA.lanes or 8
"""Float32 numbers of a register."""
FLOAT_LANES = 16
"""Lanes of products in float32. Those in 16-bit floats have as many as a register: with two registers a row, prompts
took a sixth longer in AVX2."""


@dataclass(frozen=True)
class FloatFormat:
    """Numbers that become float32 each by itself."""

    stored: Any
    """LLVM's type of a stored number."""
    nbytes: int
    lanes: int
    """Lanes that a product of a row and a vector is summed in."""

    def load(self, b: Any, base: Any, column: Any, n: int, count: Any = None) -> Any:
        """Load n numbers from `column` on, as float32; or only the first `count`, then zeros."""
        at, kind = b.mul(column, v.offset(self.nbytes)), v.vec(self.stored, n)
        found = v.load(b, base, at, kind) if count is None else v.load_some(b, base, at, count, kind)
        if self.stored == v.I16:
            return b.bitcast(b.shl(b.zext(found, v.vec(v.I32, n)), v.const(v.I32, n, 16)), v.vec(v.F32, n))
        return found if self.stored == v.F32 else b.fpext(found, v.vec(v.F32, n))

    def load_one(self, b: Any, base: Any, column: Any) -> Any:
        """Load one number as float32, on every processor."""
        at = b.mul(column, v.offset(self.nbytes))
        if self.stored == v.HALF:
            return widen_half(b, v.load(b, base, at, v.I16))
        found = v.load(b, base, at, self.stored)
        return found if self.stored == v.F32 else b.bitcast(b.shl(b.zext(found, v.I32), v.I32(16)), v.F32)


class Run(NamedTuple):
    """Integers of a row of blocks that are stored together: a group, or blocks outside the groups."""

    row: Any
    """Pointer to the row."""
    at: Any
    """Bytes from there to the first integer."""
    size: int
    """How many integers they are."""


class Beside(NamedTuple):
    """What blocks of some rows side by side have beside their integers, as float32."""

    scales: Any
    offsets: Any
    """Minima or zeros; the scales again where they have none."""
    halves: Sequence[Any] = ()
    """What the sums of each half of a block are multiplied by before they are added, where halves have scales."""

    def folded(self, b: Any, sums: Sequence[Any]) -> Any:
        """The sum of products of whole blocks, from those of their halves, as float32: each product is exact, and with
        integers as scales the sum too. Parts of halves have sums of their own."""
        if not self.halves:
            return sums[0]
        first = b.fmul(sums[0], self.halves[0])
        return v.fma(b, sums[1], self.halves[1], first) if len(sums) > 1 else first

    @property
    def each(self) -> tuple[Any, Any, Any, Any]:
        """Scale and offset, and the factors of both halves."""
        one, other = self.halves or [v.const(v.F32, self.scales.type.count, 1.0)] * 2
        return self.scales, self.offsets, one, other


class BlockFormat(ABC):
    """Integers in blocks of `BLOCK` columns that share a scale; a weight is scale · (stored integer − `zero`).

    Where blocks have an `offset` of their own, `zero` is 0: a minimum is added to scale · integer, a zero is subtracted
    from the integer.

    The integers of a run lie in `per_byte` parts: byte k holds index k of each part (see `artifact.formats`).
    """

    unsigned: bool
    """Whether `factors` are unsigned bytes, as `unpack` gives them, or signed ones."""
    per_byte: int
    """Weights that share a byte."""

    def __init__(self, fmt: Format) -> None:
        self.fmt, self.bits, self.zero, self.offset = fmt, fmt.bits, fmt.zero, fmt.offset

    @abstractmethod
    def unpack(self, b: Any, run: Run, k: int, n: int) -> list[Any]:
        """The integers k to k + n of each part, as a register of unsigned bytes, `zero` above what they mean."""

    def words(self, b: Any, group: Run, line: Any, half: int, halves: int = 1) -> list[Any]:
        """The lower or the upper half of a line of a group, or both, as a register of 16-bit words; then, if there are
        upper bits, a register with those of the same integers."""
        at = b.add(b.add(group.at, b.mul(line, v.offset(v.LINE))), v.offset(32 * half))
        return [v.load(b, group.row, at, v.vec(v.I16, 16 * halves))]

    @abstractmethod
    def pairs(self, b: Any, words: Sequence[Any], half: int) -> list[Any]:
        """What `words` gives, its words in any order, as unsigned words of one weight: for each part, those of its even
        bytes, then those of its odd ones."""

    @abstractmethod
    def integer(self, b: Any, row: Any, at: Any, inside: Any, count: Any) -> Any:
        """One unsigned integer, 32 bits wide: index `inside` of the run of `count` integers from `at` on."""

    def factors(self, b: Any, run: Run, k: int, n: int) -> list[Any]:
        """The same integers as `unpack`'s as registers that `v.dot_bytes` multiplies."""
        return self.unpack(b, run, k, n) if self.unsigned else self.signed(b, run, k, n)

    def signed(self, b: Any, run: Run, k: int, n: int) -> list[Any]:
        """The same integers as `unpack`'s as registers of signed bytes: the integers that multiply the scale."""
        zero = self.zero - 256 * (self.zero > 127)  # the same byte as a signed one
        return [b.sub(w_J, v.const(v.I8, n, zero)) for w_J in self.unpack(b, run, k, n)]

    @property
    def most(self) -> int:
        """The largest magnitude of what `factors` gives."""
        return self.fmt.highest if self.unsigned else self.zero

    @property
    def group_nbytes(self) -> int:
        """Stored bytes of a group."""
        return GROUP_COLUMNS * self.bits // 8

    def group(self, b: Any, row: Any, group: Any) -> Run:
        """A group of a row."""
        return Run(row, b.mul(group, v.offset(self.group_nbytes)), GROUP_COLUMNS)

    def single(self, b: Any, row: Any, block: Any) -> Run:
        """The blocks outside the groups that share their bytes, from `block` on."""
        return Run(row, b.mul(block, v.offset(BLOCK * self.bits // 8)), BLOCK * self.per_byte)

    def scales(self, b: Any, rows: Sequence[Any], block: Any, n: int) -> Any:
        """The scales of n blocks from `block` on, of some rows side by side, as float32."""
        found = v.join(b, [v.load(b, row, b.mul(block, v.offset(2)), v.vec(v.HALF, n)) for row in rows])
        return b.fpext(found, v.vec(v.F32, n * len(rows)))

    def beside(self, b: Any, rows: Sequence[Any], offsets: Any, block: Any, n: int) -> Beside:
        """What n blocks from `block` on of some rows side by side have; minima or zeros lie `offsets` bytes behind
        scales. Where groups have them, the blocks are a group."""
        if self.fmt.byte_scale:
            return self._of_bytes(b, rows, block, n)
        if self.fmt.grouped:
            at = b.mul(b.udiv(block, v.offset(8)), v.offset(self.fmt.record_nbytes))
            fields = v.join(b, [self._fields(b, row, at) for row in rows])
            shifts = [shift for _ in rows for _, shift in self.fmt.fields]
            return self._of_record(b, [b.gep(row, [at]) for row in rows], v.moved(b, fields, shifts))
        scales = self.scales(b, rows, block, n)
        if not self.offset:
            return Beside(scales, scales)
        return Beside(scales, self.scales(b, [b.gep(row, [offsets]) for row in rows], block, n))

    def beside_one(self, b: Any, row: Any, offsets: Any, block: Any) -> Beside:
        """The same of one block, in vectors of one lane, on every processor."""
        if self.fmt.byte_scale:
            return self._of_bytes(b, [row], block, 1)
        if self.fmt.grouped:
            at = b.mul(b.udiv(block, v.offset(8)), v.offset(self.fmt.record_nbytes))
            bit, last = b.mul(b.urem(block, v.offset(8)), v.offset(self.fmt.field_bits)), self.fmt.field_bits - 2
            start = b.udiv(bit, v.offset(8))
            start = b.select(b.icmp_signed("<", start, v.offset(last)), start, v.offset(last))
            field = v.load(b, row, b.add(b.add(at, start), v.offset(self.fmt.head_nbytes)), v.I16)
            moved = b.lshr(b.zext(field, v.I32), b.trunc(b.sub(bit, b.mul(start, v.offset(8))), v.I32))
            return self._of_record(b, [b.gep(row, [at])], v.splat(b, moved, 1))
        at = b.mul(block, v.offset(2))
        found = [v.load(b, row, place, v.I16) for place in ((at, b.add(at, offsets)) if self.offset else (at,))]
        ones = [v.splat(b, widen_half(b, one), 1) for one in found]
        return Beside(ones[0], ones[-1])

    def _fields(self, b: Any, row: Any, at: Any) -> Any:
        """The fields of a record as eight words of 32 bits, whose lower halves they begin in."""
        nbytes = min(16, self.fmt.record_nbytes)
        head = nbytes - self.fmt.field_bits
        kind = v.vec(v.I8, nbytes)
        stored = v.load(b, row, b.add(at, v.offset(self.fmt.record_nbytes - nbytes)), kind)
        lanes = [lane for start, _ in self.fmt.fields for lane in (head + start, head + start + 1, nbytes, nbytes)]
        return b.bitcast(v.shuffle(b, stored, v.const(v.I8, nbytes, 0), lanes), v.vec(v.I32, 8))

    def _of_record(self, b: Any, records: Sequence[Any], fields: Any) -> Beside:
        """What lies beside blocks, from pointers to records and the fields of their blocks."""
        lanes, n = fields.type.count // len(records), fields.type.count

        def head(at: int) -> Any:
            halves = [widen_half(b, v.load(b, record, v.offset(at), v.I16)) for record in records]
            return v.join(b, [v.splat(b, half, lanes) for half in halves])

        def integers(bit: int, zero: int) -> Any:
            mask = v.const(v.I32, n, (1 << self.fmt.scale_bits) - 1)
            part = b.and_(v.moved(b, fields, [bit] * n), mask)
            return b.sitofp(b.sub(part, v.const(v.I32, n, zero)), v.vec(v.F32, n))

        first = integers(0, self.fmt.scale_zero)
        if self.fmt.scales > 1:
            d = head(0)
            return Beside(d, d, (first, integers(self.fmt.scale_bits, self.fmt.scale_zero)))
        scales = b.fmul(head(0), first)
        return Beside(scales, b.fmul(head(2), integers(self.fmt.scale_bits, 0)) if self.offset else scales)

    def _of_bytes(self, b: Any, rows: Sequence[Any], block: Any, n: int) -> Beside:
        """What lies beside n blocks whose scales are bytes."""
        scales, lanes = self.fmt.scales, n * len(rows)
        at = b.add(b.mul(block, v.offset(scales)), v.offset(4 * self.fmt.row_scaled))
        stored = v.join(b, [v.load(b, row, at, v.vec(v.I8, n * scales)) for row in rows])
        found = _BYTE_SCALES[self.fmt.byte_scale](b, b.zext(stored, v.vec(v.I32, stored.type.count)))
        if not self.fmt.row_scaled:
            return Beside(found, found)
        own = v.join(b, [v.splat(b, v.load(b, row, v.offset(0), v.F32), n) for row in rows])
        halves = [v.shuffle(b, found, found, range(half, lanes * scales, scales)) for half in range(scales)]
        return Beside(own, own, halves)

    def value(self, b: Any, q: Any, scale: Any, offset: Any) -> Any:
        """Signed integers, as float32, as weights."""
        if self.offset == "zero":
            q = b.fsub(q, offset)
        product = b.fmul(q, scale)
        return b.fadd(product, offset) if self.offset == "minimum" else product

    def scaled(self, b: Any, total: Any, whole: Any, negative: Any, s: Any, t: Any, offset: Any) -> Any:
        """`total` plus a block's sum of products: the integers of weights and of an input have the sum of products
        `whole`, those of the input the negative sum `negative`; s and t are their scales. All are float32."""
        if self.offset == "zero":
            whole = v.fma(b, offset, negative, whole)  # exact
        total = v.fma(b, whole, b.fmul(s, t), total)
        return v.fma(b, b.fneg(offset), b.fmul(t, negative), total) if self.offset == "minimum" else total

    def start(self, b: Any, negative_sums: Any) -> Any:
        """What sums of `factors` times integers start at, whose negative sums are given: −zero times their sum."""
        return b.mul(negative_sums, v.const(v.I32, negative_sums.type.count, self.zero if self.unsigned else 0))

    def load_one(self, b: Any, row: Any, index: Any, count: Any) -> Any:
        """The signed integer at a stored index, in a run of `count` integers."""
        inside = b.urem(index, count)
        at = b.udiv(b.mul(b.sub(index, inside), v.offset(self.bits)), v.offset(8))
        return b.sub(self.integer(b, row, at, inside, count), v.I32(self.zero))


class _Bytes(BlockFormat):
    unsigned, per_byte = ISA.dot, 1

    def unpack(self, b: Any, run: Run, k: int, n: int) -> list[Any]:
        stored = v.load(b, run.row, b.add(run.at, v.offset(k)), v.vec(v.I8, n))
        return [b.xor(stored, v.const(v.I8, n, -128))]

    def pairs(self, b: Any, words: Sequence[Any], half: int) -> list[Any]:
        n = words[0].type.count
        turned = b.xor(words[0], v.const(v.I16, n, 0x8080 - 0x10000))
        return [b.and_(turned, v.const(v.I16, n, 255)), b.lshr(turned, v.const(v.I16, n, 8))]

    def integer(self, b: Any, row: Any, at: Any, inside: Any, count: Any) -> Any:
        return b.zext(b.xor(v.load(b, row, b.add(at, inside), v.I8), v.I8(-128)), v.I32)


class _HalfBytes(BlockFormat):
    """Lower four bits two by two, and behind them the upper bits of a run."""

    unsigned, per_byte = True, 2

    def __init__(self, fmt: Format) -> None:
        super().__init__(fmt)
        self._upper = fmt.bits - 4

    def unpack(self, b: Any, run: Run, k: int, n: int) -> list[Any]:
        stored = v.load(b, run.row, b.add(run.at, v.offset(k)), v.vec(v.I8, n))
        parts = [b.and_(stored, v.const(v.I8, n, 15)), b.lshr(stored, v.const(v.I8, n, 4))]
        if not self._upper:
            return parts
        half = run.size // 2
        return [b.or_(part, self._raised(b, run, first, n)) for part, first in zip(parts, (k, half + k), strict=True)]

    def _upper_nbytes(self, run: Run) -> int:
        """Bytes of a run's upper bits."""
        return run.size * self._upper // 8

    def _raised(self, b: Any, run: Run, first: int, n: int) -> Any:
        """The upper bits of the integers `first` to `first` + n of a run, where they belong in a byte."""
        nbytes = self._upper_nbytes(run)
        width = min(n, nbytes)
        at = b.add(run.at, v.offset(run.size // 2 + first % nbytes))
        stored = v.load(b, run.row, at, v.vec(v.I8, width))
        if width < n:
            stored = v.shuffle(b, stored, stored, [k % width for k in range(n)])
        # Eight bytes are moved at once; what comes from a neighbour is masked out.
        eights = b.bitcast(stored, v.vec(v.I64, n // 8))
        moved = v.moved(b, eights, [(first + k) // nbytes * self._upper - 4 for k in range(0, n, 8)])
        return b.and_(b.bitcast(moved, stored.type), v.const(v.I8, n, (1 << self.bits) - 16))

    def words(self, b: Any, group: Run, line: Any, half: int, halves: int = 1) -> list[Any]:
        found = super().words(b, group, line, half, halves)
        if self._upper:
            stored = []
            for each in range(half, half + halves):
                at = b.add(group.at, v.offset(GROUP_COLUMNS // 2 + 32 * each % self._upper_nbytes(group)))
                stored.append(v.load(b, group.row, at, v.vec(v.I16, 16)))
            # Two more bits of each byte belong to each line before.
            passed = v.splat(b, b.trunc(b.mul(line, v.offset(2)), v.I16), 16 * halves)
            found.append(b.lshr(v.join(b, stored), passed))
        return found

    def pairs(self, b: Any, words: Sequence[Any], half: int) -> list[Any]:
        lower, *upper = words
        n = lower.type.count
        nibbles = [b.lshr(lower, v.const(v.I16, n, bit)) for bit in (0, 8, 4, 12)]
        found = [b.and_(each, v.const(v.I16, n, 15)) for each in nibbles[:-1]] + nibbles[-1:]
        if not upper:
            return found
        first = [(half + k // 16) // self._upper * self._upper for k in range(n)]
        mask = v.const(v.I16, n, (1 << self.bits) - 16)
        raised = [b.and_(v.moved(b, upper[0], [k + bit - 4 for k in first]), mask) for bit in (0, 8, 4, 12)]
        return [b.or_(*both) for both in zip(found, raised, strict=True)]

    def integer(self, b: Any, row: Any, at: Any, inside: Any, count: Any) -> Any:
        half = b.lshr(count, v.offset(1))
        stored = v.load(b, row, b.add(at, b.urem(inside, half)), v.I8)
        found = b.and_(b.lshr(stored, b.trunc(b.mul(b.udiv(inside, half), v.offset(4)), v.I8)), v.I8(15))
        if self._upper:
            nbytes = b.lshr(b.mul(count, v.offset(self._upper)), v.offset(3))
            stored = v.load(b, row, b.add(b.add(at, half), b.urem(inside, nbytes)), v.I8)
            moved = b.lshr(stored, b.trunc(b.mul(b.udiv(inside, nbytes), v.offset(self._upper)), v.I8))
            found = b.or_(found, b.shl(b.and_(moved, v.I8((1 << self._upper) - 1)), v.I8(4)))
        return b.zext(found, v.I32)


class _Table(_HalfBytes):
    """Indices of a table of integers; the least of them is `zero` below 0."""

    def __init__(self, fmt: Format) -> None:
        super().__init__(fmt)
        self.unsigned = ISA.dot or fmt.highest < 128

    def unpack(self, b: Any, run: Run, k: int, n: int, below: int = 0) -> list[Any]:
        table = [(entry + self.zero - below + 128) % 256 - 128 for entry in self.fmt.table]
        return [v.look_up(b, table, part) for part in super().unpack(b, run, k, n)]

    def signed(self, b: Any, run: Run, k: int, n: int) -> list[Any]:
        return self.unpack(b, run, k, n, self.zero)

    def integer(self, b: Any, row: Any, at: Any, inside: Any, count: Any) -> Any:
        table = ir.Constant(v.vec(v.I32, 16), [entry + self.zero for entry in self.fmt.table])
        return b.extract_element(table, super().integer(b, row, at, inside, count))


def _powers(b: Any, stored: Any) -> Any:
    """2 to the bytes less 128, as float32: the first two have no exponent."""
    n = stored.type.count
    one, small = v.const(v.I32, n, 1), v.const(v.I32, n, 1 << 21)
    few = b.icmp_unsigned("<=", stored, one)
    bits = b.select(few, b.shl(small, b.and_(stored, one)), b.shl(b.sub(stored, one), v.const(v.I32, n, 23)))
    return b.bitcast(bits, v.vec(v.F32, n))


def _small_floats(b: Any, stored: Any) -> Any:
    """Half of the numbers without sign of four bits of exponent and three of mantissa, as float32; 127 is 0."""
    n = stored.type.count
    bits = b.shl(b.and_(stored, v.const(v.I32, n, 127)), v.const(v.I32, n, 20))
    # The exponents of the two formats begin 120 apart; the product is exact, of subnormal numbers too.
    number = b.fmul(b.bitcast(bits, v.vec(v.F32, n)), v.const(v.F32, n, 2.0**119))
    return b.select(b.icmp_unsigned("==", stored, v.const(v.I32, n, 127)), v.const(v.F32, n, 0.0), number)


_BYTE_SCALES = {"e8m0": _powers, "ue4m3": _small_floats}
"""How words of 32 bits become what their bytes stand for (see `formats.BYTE_SCALES`)."""
_NUMBERS = {
    "float32": FloatFormat(v.F32, 4, FLOAT_LANES),
    "float16": FloatFormat(v.HALF, 2, REGISTER),
    "bfloat16": FloatFormat(v.I16, 2, REGISTER),
}
FLOAT_FORMATS = {f.code: _NUMBERS[f.number] for f in FORMATS.values() if f.number}
"""By code."""
BLOCK_FORMATS: dict[int, BlockFormat] = {
    f.code: _Bytes(f) if f.bits == 8 else _Table(f) if f.table else _HalfBytes(f)
    for f in FORMATS.values()
    if f.quantised
}
"""By code."""
SUMMED_FORMATS = {code: f for code, f in BLOCK_FORMATS.items() if f.fmt.summed}
"""Those whose rows are summed."""


@emits(types.float32(types.intp, types.intp, types.intp))
def float_weight(b: Any, fmt: Any, row: Any, column: Any) -> Any:
    """One number of a row of a float format, as float32."""
    cases = {code: partial(f.load_one, b, v.pointer(b, row), column) for code, f in FLOAT_FORMATS.items()}
    return v.switch(b, fmt, cases)


@emits(types.float32(types.intp, *[types.float32] * 3))
def block_weight(b: Any, fmt: Any, q: Any, scale: Any, offset: Any) -> Any:
    """A signed integer of a block format, as float32, as a weight."""
    return v.switch(b, fmt, {code: partial(f.value, b, q, scale, offset) for code, f in BLOCK_FORMATS.items()})


@emits(types.float32(types.intp, types.float32, types.UniTuple(types.float32, 2), types.UniTuple(types.float32, 3)))
def block_product(b: Any, fmt: Any, total: Any, sums: Any, scales: Any) -> Any:
    """`BlockFormat.scaled` of one block: sums are (whole, negative), scales (s, t, offset)."""
    values = total, *(value for some in (sums, scales) for value in cgutils.unpack_tuple(b, some))
    ones = [v.splat(b, value, 1) for value in values]
    cases = {code: partial(f.scaled, b, *ones) for code, f in BLOCK_FORMATS.items()}
    return b.extract_element(v.switch(b, fmt, cases), v.I32(0))


@emits(types.UniTuple(types.float32, 4)(*[types.intp] * 4))
def beside_block(b: Any, fmt: Any, scales: Any, offsets: Any, block: Any) -> Any:
    """What a block of a row has beside its integers, whose scales are given: `Beside.each`."""

    def emit(f: BlockFormat) -> Any:
        found = f.beside_one(b, v.pointer(b, scales), offsets, block).each
        array = ir.Constant(ir.ArrayType(v.F32, 4), ir.Undefined)
        for k, one in enumerate(found):
            array = b.insert_value(array, b.extract_element(one, v.I32(0)), k)
        return array

    return v.switch(b, fmt, {code: partial(emit, f) for code, f in BLOCK_FORMATS.items()})


@emits(types.int32(*[types.intp] * 4))
def integer_weight(b: Any, fmt: Any, row: Any, index: Any, blocks: Any) -> Any:
    """The signed integer at a stored index of a row of `blocks` blocks."""
    grouped = b.icmp_signed("<", b.udiv(index, v.offset(GROUP_COLUMNS)), b.udiv(blocks, v.offset(8)))
    cases = {}
    for code, f in BLOCK_FORMATS.items():
        count = b.select(grouped, v.offset(GROUP_COLUMNS), v.offset(BLOCK * f.per_byte))
        cases[code] = partial(f.load_one, b, v.pointer(b, row), index, count)
    return v.switch(b, fmt, cases)
