"""How compiled code reads each number format of weights: one object a format, for products, sums and rows alike.

A format is known by its code (see `artifact.formats`). Kernels that are compiled for all formats ask `v.switch` for the
one that a matrix has. A further block format is one more class here: how many bits a weight takes, which stored integer
stands for 0, and how stored bytes become registers of weights.
"""

# The signatures of `generate` are numba's.
# ruff: noqa: ARG001

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from numba import types
from numba.extending import intrinsic

from pi_runtime.artifact.formats import BLOCK, FORMATS
from pi_runtime.kernels.codegen import float16
from pi_runtime.kernels.codegen import simd as v
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
            return float16.widen(b, v.load(b, base, at, v.I16))
        found = v.load(b, base, at, self.stored)
        return found if self.stored == v.F32 else b.bitcast(b.shl(b.zext(found, v.I32), v.I32(16)), v.F32)


class BlockFormat(ABC):
    """Integers in blocks of `BLOCK` columns that share a scale; a weight is scale · (stored integer − `zero`).

    A stored byte holds `8 / bits` weights: in a group, those of a register's lower bits come half a group before those
    of its upper bits, and behind the groups a block before.
    """

    bits: int
    """Bits of one weight."""
    zero: int
    """The unsigned integer that stands for 0."""
    unsigned: bool
    """Whether `factors` are unsigned bytes, as `unpack` gives them, or signed ones."""

    @abstractmethod
    def unpack(self, b: Any, stored: Any) -> list[Any]:
        """A register of stored bytes as registers of unsigned bytes, one weight each, `zero` above what they mean."""

    @abstractmethod
    def pairs(self, b: Any, words: Any) -> list[Any]:
        """A register of 16-bit words as unsigned words of one weight: for each register of `unpack`, those of its even
        bytes, then those of its odd ones."""

    def factors(self, b: Any, stored: Any) -> list[Any]:
        """A register of stored bytes as registers that `v.dot_bytes` multiplies."""
        return self.unpack(b, stored)

    def signed(self, b: Any, stored: Any) -> list[Any]:
        """A register of stored bytes as registers of signed bytes: the integers that multiply the scale."""
        zero = self.zero - 256 * (self.zero > 127)  # the same byte as a signed one
        return [b.sub(w_J, v.const(v.I8, w_J.type.count, zero)) for w_J in self.unpack(b, stored)]

    @property
    def per_byte(self) -> int:
        """Weights in a stored byte."""
        return 8 // self.bits

    @property
    def group_nbytes(self) -> int:
        """Stored bytes of a group."""
        return GROUP_COLUMNS // self.per_byte

    def scales(self, b: Any, rows: Sequence[Any], block: Any, n: int) -> Any:
        """The scales of n blocks from `block` on, of some rows side by side, as float32."""
        found = v.join(b, [v.load(b, row, b.mul(block, v.offset(2)), v.vec(v.HALF, n)) for row in rows])
        return b.fpext(found, v.vec(v.F32, n * len(rows)))

    def start(self, b: Any, negative_sums: Any) -> Any:
        """What sums of `factors` times integers start at, whose negative sums are given: −zero times their sum."""
        return b.mul(negative_sums, v.const(v.I32, negative_sums.type.count, self.zero if self.unsigned else 0))

    def load_one(self, b: Any, row: Any, index: Any, apart: Any) -> Any:
        """The integer at a stored index; weights of the same byte are `apart` indices from each other."""
        both = b.mul(apart, v.offset(self.per_byte))
        at = b.add(b.mul(b.udiv(index, both), apart), b.urem(index, apart))
        some, which = self.signed(b, v.load(b, row, at, v.vec(v.I8, 1))), b.udiv(b.urem(index, both), apart)
        found = some[0]
        for k, other in enumerate(some[1:], 1):
            found = b.select(b.icmp_signed("==", which, v.offset(k)), other, found)
        return b.sext(b.extract_element(found, v.I32(0)), v.I32)


class _Q8(BlockFormat):
    bits, zero, unsigned = 8, 128, ISA.dot

    def unpack(self, b: Any, stored: Any) -> list[Any]:
        return [b.xor(stored, v.const(v.I8, stored.type.count, -128))]

    def factors(self, b: Any, stored: Any) -> list[Any]:
        return self.unpack(b, stored) if self.unsigned else [stored]

    def pairs(self, b: Any, words: Any) -> list[Any]:
        turned = b.xor(words, v.const(v.I16, 16, 0x8080 - 0x10000))
        return [b.and_(turned, v.const(v.I16, 16, 255)), b.lshr(turned, v.const(v.I16, 16, 8))]


class _Q4(BlockFormat):
    bits, zero, unsigned = 4, 8, True

    def unpack(self, b: Any, stored: Any) -> list[Any]:
        n = stored.type.count
        return [b.and_(stored, v.const(v.I8, n, 15)), b.lshr(stored, v.const(v.I8, n, 4))]

    def pairs(self, b: Any, words: Any) -> list[Any]:
        def nibble(k: int) -> Any:
            return b.and_(b.lshr(words, v.const(v.I16, 16, 4 * k)) if k else words, v.const(v.I16, 16, 15))

        return [nibble(0), nibble(2), nibble(1), b.lshr(words, v.const(v.I16, 16, 12))]


def _by_code(formats: Mapping[str, Any]) -> dict[int, Any]:
    return {FORMATS[name].code: each for name, each in formats.items()}


FLOAT_FORMATS: dict[int, FloatFormat] = _by_code(
    {
        "f32": FloatFormat(v.F32, 4, FLOAT_LANES),
        "f16": FloatFormat(v.HALF, 2, REGISTER),
        "bf16": FloatFormat(v.I16, 2, REGISTER),
    }
)
"""By code."""
BLOCK_FORMATS: dict[int, BlockFormat] = _by_code({"q8": _Q8(), "q4": _Q4()})
"""By code."""


@intrinsic
def float_weight(typing_context: Any, fmt: Any, row: Any, column: Any) -> Any:
    """One number of a row of a float format, as float32."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        fmt, row, column = arguments
        cases = {code: partial(f.load_one, b, v.pointer(b, row), column) for code, f in FLOAT_FORMATS.items()}
        return v.switch(b, fmt, cases)

    return types.float32(types.intp, types.intp, types.intp), generate


@intrinsic
def integer_weight(typing_context: Any, fmt: Any, row: Any, index: Any, blocks: Any) -> Any:
    """The signed integer at a stored index of a row of `blocks` blocks."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        fmt, row, index, blocks = arguments
        grouped = b.icmp_signed("<", b.udiv(index, v.offset(GROUP_COLUMNS)), b.udiv(blocks, v.offset(8)))
        cases = {}
        for code, f in BLOCK_FORMATS.items():
            apart = b.select(grouped, v.offset(GROUP_COLUMNS // f.per_byte), v.offset(BLOCK))
            cases[code] = partial(f.load_one, b, v.pointer(b, row), index, apart)
        return v.switch(b, fmt, cases)

    return types.int32(*[types.intp] * 4), generate
