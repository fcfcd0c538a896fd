"""Number formats of stored arrays: what the bytes mean.

A matrix is stored row by row, each row padded with zero bytes to a multiple of the format's `row_align`: a cache line,
so that a row of weights in a mapped array touches no line more than it must, or half of one below 8 bits. A vector is
stored as it is. All formats are little-endian.

    name   value                                    stored as
    f32    IEEE 754 binary32                        float32
    f16    IEEE 754 binary16                        float16
    bf16   the upper half of a binary32,            uint16
           rounded to nearest, ties to even
    q8     scale · q, q in −127…127                 int8, and scales beside it
    q4     scale · (q − 8), q in 0…15               uint8, two q in one, and scales beside it
    q5     scale · (q − 16), q in 0…31              uint8, two q's lower bits in one, then fifth bits; scales beside it
    q6     scale · (q − 32), q in 0…63              the same, with two upper bits
    q4_1   scale · q + minimum, q in 0…15           as q4; scales and minima beside it
    q4z    scale · (q − zero), q and zero in 0…15   as q4; scales and zeros beside it
    q5_1   scale · q + minimum, q in 0…31           as q5, the rest as q4_1
    q4_k   d s · q + e m, q in 0…15, s, m in 0…63   as q4; d, e, s and m of groups beside it
    q5_k   d s · q + e m, q in 0…31, s, m in 0…63   as q5, the rest as q4_k
    q6_k   d s · (q − 32), s in −128…127            as q6, the rest likewise; s is one for each 16 columns
    iq4_nl scale · `IQ4`[q], q in 0…15              as q4
    iq4_xs d s · `IQ4`[q], s in −32…31              the same; d and s of groups beside it
    mxfp4  scale · `E2M1`[q] / 2                    the same; scales are 2ⁿ, n in −127…127, in a byte each
    nvfp4  r · s · `E2M1`[q] / 2                    the same; s in a byte is one for each 16 columns, r one of a row
    scale  binary16, one for 32 columns of a row    float16, rows padded to 8 bytes
    u8     bytes                                    uint8, rows padded to 8 bytes
    u32    unsigned integer                         uint32
    u64    unsigned integer                         uint64

Those with a q are block formats: `BLOCK` consecutive columns of a row share a scale, and the scales of a matrix stand
in an array of their own, `NAME_scales` (see `sizes`); a row's minima or zeros, binary16 too, follow its scales there.
Every eight blocks of a row form a group, in which fours of columns are interleaved: index 32 k + 4 b + j holds column
32 b + 4 k + j (b, k < 8, j < 4). So lane b of the k-th 256-bit vector belongs to block b, and the sums of eight blocks
are converted at once. Up to seven blocks left at the end of a row keep the order of their columns.

Below 8 bits, the indices of a group, and those of every two blocks left over, form a run of L = 256 or 64 integers
that are stored together. Byte i < L / 2 holds the lower four bits of index i in its lower and of index L / 2 + i in its
upper half. Behind these bytes the h upper bits of all integers follow in P = L h / 8 bytes: byte j holds those of the
indices j, P + j, 2 P + j, …, the first in the lowest bits.

In q4_k, q5_k, q6_k and iq4_xs a group has binary16 numbers d and e, and its blocks integers s and m. Rows are whole
groups. Of each group `NAME_scales` has a record: d, then e where there is one, then eight fields of equal width, one a
block and the first in the lowest bits of the first byte. A field holds s and m, or the two s of a block, from its
lowest bit on; s of q6_k 128 higher, of iq4_xs 32. So d s and e m are exact in float32, and the record takes the bytes
that it has in GGUF's Q4_K, Q5_K, Q6_K and IQ4_XS, where e has the other sign.

Where scales are bytes (`BYTE_SCALES`), those of a row stand in the order of the blocks and of their halves; nvfp4 has
r, binary32, before them. Tables have whole numbers, E2M1 twice what it is, so that byte scales stand for half of it.

A format is one object. NumPy, kernels, sizes, the cost model and the names in checkpoints derive from it what they do;
docs/how-to/extend.md says what a further one is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ROW_ALIGN = 64
BLOCK, GROUP = 32, 8
"""Columns that share a scale in block formats, and blocks of a group."""
RUN = 2 * BLOCK
"""Columns that are stored together behind the last whole group of a row."""
_LARGEST_HALF = 65520.0
"""What binary16 makes infinite: half a unit above the largest finite number, because the tie goes to even, upwards."""
_LEAST_HALF = 2.0**-22
"""Binary16 has 2⁻²⁴ and its multiples down there: four of them from here on, and an error of an eighth at most."""


IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""What integers of 4 bits stand for: in ggml's IQ4 types, and twice the numbers of two bits of exponent and one of
mantissa."""


def _byte_scales() -> dict[str, Array]:
    byte = np.arange(256)
    e8m0 = np.ldexp(np.float32(1), byte - 128)
    e8m0[255] = np.nan
    exponent, mantissa = byte >> 3 & 15, byte & 7
    ue4m3 = np.ldexp(np.where(exponent == 0, mantissa, 8 + mantissa).astype(np.float32), np.maximum(exponent, 1) - 11)
    ue4m3[127] = 0  # no number in other software
    return {"e8m0": e8m0, "ue4m3": ue4m3}


BYTE_SCALES = _byte_scales()
"""What a byte stands for as a scale: half of 2 to the byte less 127, and half of a number without sign that has four
bits of exponent and three of mantissa; float32 (256,)."""


@dataclass(frozen=True)
class Format:
    """One number format."""

    name: str
    stored: np.dtype[Any]
    """Type of the stored items."""
    number: str = ""
    """What a float format's values are, as NumPy or torch names it; "" for integers."""
    row_align: int = ROW_ALIGN
    """Rows of a matrix are padded to a multiple of this many bytes."""
    block_bits: int = 0
    """Bits of an integer of a block format, whose scale is stored elsewhere; 0 for other formats."""
    offset: Literal["", "minimum", "zero"] = ""
    """What a block has beside its scale: what is added to scale · q, or what is subtracted from q."""
    mirrored: bool = False
    """Whether integers reach as far below 0 as above it, so that the largest magnitude gives the scale; else it is the
    best of several (see `quantisation`)."""
    gguf: str = ""
    """The type of GGUF's tensors whose values it keeps."""
    scale_bits: int = 0
    """Bits of a block's scale and minimum where they are integers, times binary16 numbers that a group has; else 0."""
    scale_zero: int = 0
    """The stored unsigned integer that stands for a scale of 0."""
    scales: int = 1
    """Scales of a block: of two, each belongs to a half of its columns."""
    table: tuple[int, ...] = ()
    """The integers, below 128 in magnitude, that the stored ones stand for, where it is no constant less."""
    byte_scale: str = ""
    """What a scale of one byte is (see `BYTE_SCALES`); "" for other scales."""
    row_scaled: bool = False
    """Whether a row has a float32 number that multiplies all its scales."""
    timed_as: str = ""
    """The format whose speed stands for its own where a machine has no rate for it; "" where it needs one."""
    code: int = -1
    """Number that kernels tell formats apart by; a weight format's is its place among them."""

    @property
    def itemsize(self) -> int:
        return self.stored.itemsize

    @property
    def quantised(self) -> bool:
        """Whether values are small integers in blocks that share a scale."""
        return self.block_bits > 0

    @property
    def grouped(self) -> bool:
        """Whether scales belong to groups: such rows are whole groups."""
        return self.scale_bits > 0

    @property
    def summed(self) -> bool:
        """Whether rows are summed, too, and computed on a GPU; others are multiplied only."""
        return not (self.grouped or self.table)

    @property
    def head_nbytes(self) -> int:
        """Bytes of the binary16 numbers of a group, which its record begins with."""
        return 4 if self.offset else 2

    @property
    def field_bits(self) -> int:
        """Bits of a block's field in the record of a group."""
        return self.scale_bits * (self.scales + bool(self.offset))

    @property
    def record_nbytes(self) -> int:
        """Bytes of the record of a group."""
        return self.head_nbytes + self.field_bits

    @property
    def fields(self) -> list[tuple[int, int]]:
        """Where each block's field is behind the head of a record: in 16 bits from which byte on, and at which bit."""
        starts = [min(self.field_bits * block // 8, self.field_bits - 2) for block in range(GROUP)]
        return [(start, self.field_bits * block - 8 * start) for block, start in enumerate(starts)]

    @property
    def scale_format(self) -> str:
        """Format of the array of scales."""
        return "u8" if self.grouped or self.byte_scale else "scale"

    @property
    def scale_nbytes(self) -> tuple[int, int, int]:
        """Bytes of scales that a row has, each of its groups, and each of its blocks."""
        if self.grouped:
            return 0, self.record_nbytes, 0
        return 4 * self.row_scaled, 0, self.scales if self.byte_scale else 2

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Logical shape of the array of scales beside an array of this one."""
        blocks = -(-shape[-1] // BLOCK)
        if self.scale_format == "u8":
            row, group, block = self.scale_nbytes
            return (*shape[:-1], row + shape[-1] // (GROUP * BLOCK) * group + blocks * block)
        return (*shape[:-1], *((2,) if self.offset else ()), blocks)

    @property
    def zero(self) -> int:
        """What an integer's unsigned form is above it, as stored or as in a table; 0 where each block has its own."""
        if self.table:
            return -min(self.table)
        return 0 if self.offset else 1 << self.bits - 1

    @property
    def highest(self) -> int:
        """The largest integer in its unsigned form."""
        return max(self.table) + self.zero if self.table else (1 << self.bits) - 1

    @property
    def bits(self) -> int:
        """Bits of one value, its scale not counted."""
        return self.block_bits or 8 * self.itemsize

    @property
    def reach(self) -> float:
        """How many scales the largest magnitude of a block takes; half the range where that lies anywhere."""
        return self.highest / 2 if self.offset else self.zero - self.mirrored

    @property
    def overflows_from(self) -> float | None:
        """Smallest magnitude that becomes infinite, or whose scale or minimum does; None where every float32 number has
        a finite form."""
        if self.byte_scale:
            return None
        if self.quantised:
            return _LARGEST_HALF * (1 if self.offset == "minimum" else self.reach)
        return {"float16": _LARGEST_HALF, "bfloat16": 2.0**128 - 2.0**119}.get(self.number)

    @property
    def underflows_below(self) -> float:
        """Magnitudes below this, in block formats of the largest value of a block, have a form with less than three
        bits of precision, or 0: they, or their scale, are far below what binary16 has in full. 0 where that is no
        concern."""
        if self.byte_scale:
            return 0.0
        return _LEAST_HALF * (self.reach if self.quantised else self.number == "float16")

    @property
    def columns_per_line(self) -> int:
        """Columns that fill a cache line; in a block format whole blocks."""
        columns = 8 * ROW_ALIGN // self.bits
        return columns // BLOCK * BLOCK if self.quantised else columns

    def row_nbytes(self, columns: int) -> int:
        """Bytes of a row's values without padding; below 8 bits blocks are stored two by two."""
        run = RUN if self.quantised else 1
        return -(-columns // run) * run * self.bits // 8

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The stored shape of a logical one: the last axis of a matrix is padded to `row_align`."""
        if len(shape) < 2:
            return tuple(shape)
        lines = -(-self.row_nbytes(shape[-1]) // self.row_align)
        return (*shape[:-1], lines * self.row_align // self.itemsize)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Stored bytes of an array of this logical shape, with padding, without scales."""
        return self.itemsize * prod(self.stored_shape(shape))

    def encode(self, values: Array) -> Array:
        """Convert values of the logical shape to the stored array (C order, padded); it may share memory with `values`.

        Values must be finite and representable (see `overflows`). For block formats see `quantise`.
        """
        assert not self.quantised, self.name
        rounded = _upper_halves(values) if self.number == "bfloat16" else values
        shape = self.stored_shape(values.shape)
        if shape == values.shape:
            return np.ascontiguousarray(rounded, self.stored)
        out = np.zeros(shape, self.stored)
        out[..., : values.shape[-1]] = rounded
        return out

    def decode(self, stored: Array, columns: int) -> Array:
        """Convert a stored array to values without padding: float32 for float formats, else the stored integers.

        The result may be a view.
        """
        assert not self.quantised, self.name
        cut = stored[..., :columns]
        if self.number == "bfloat16":
            return (cut.astype(np.uint32) << 16).view(np.float32)
        if self.stored.kind != "f":
            return cut
        with np.errstate(invalid="ignore"):  # arm64 reports NaNs that signal
            return cut.astype(np.float32, copy=False)

    def overflows(self, values: Array) -> bool:
        """Whether a finite value, or the scale it needs, would become infinite in this format."""
        if self.overflows_from is None:
            return False
        return bool(np.any((np.abs(values) >= np.float32(self.overflows_from)) & np.isfinite(values)))

    def underflow(self, values: Array) -> float:
        """Σ w² of the values that underflow in this format."""
        if not self.underflows_below:
            return 0.0
        magnitudes = np.abs(values)
        if self.quantised and values.shape[-1]:
            starts = np.arange(0, values.shape[-1], BLOCK)
            largest = np.maximum.reduceat(magnitudes, starts, axis=-1)
            magnitudes = np.repeat(largest, BLOCK, axis=-1)[..., : values.shape[-1]]
        lost = values[magnitudes < np.float32(self.underflows_below)]
        return float(np.square(lost, dtype=np.float64).sum())


def _upper_halves(values: Array) -> Array:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)


FORMATS: dict[str, Format] = {}
WEIGHT_FORMATS: list[str] = []
"""Formats that weights may be stored in, in the order of their codes."""
ROW_FORMATS: list[str] = []
"""Those of them whose rows are of any width and can be summed."""


def add(fmt: Format) -> None:
    """Let weights be stored in one format more. Modules with tables of the formats are to be imported after that."""
    FORMATS[fmt.name] = replace(fmt, code=len(WEIGHT_FORMATS))
    WEIGHT_FORMATS.append(fmt.name)
    ROW_FORMATS.extend([fmt.name] if fmt.summed else [])


_BYTES = np.dtype("<u1")


def _of_table(name: str, table: tuple[int, ...], **scales: Any) -> Format:
    return Format(name, _BYTES, row_align=32, block_bits=4, table=table, gguf=name.upper(), timed_as="q4", **scales)


for _format in (
    Format("f32", np.dtype("<f4"), "float32", gguf="F32"),
    Format("f16", np.dtype("<f2"), "float16", gguf="F16"),
    Format("bf16", np.dtype("<u2"), "bfloat16", gguf="BF16"),
    Format("q8", np.dtype("<i1"), block_bits=8, mirrored=True, gguf="Q8_0"),
    Format("q4", _BYTES, row_align=32, block_bits=4, gguf="Q4_0"),
    Format("q5", _BYTES, row_align=32, block_bits=5, gguf="Q5_0", timed_as="q4"),
    Format("q6", _BYTES, row_align=32, block_bits=6, timed_as="q4"),
    Format("q4_1", _BYTES, row_align=32, block_bits=4, offset="minimum", gguf="Q4_1", timed_as="q4"),
    Format("q4z", _BYTES, row_align=32, block_bits=4, offset="zero", timed_as="q4"),
    Format("q5_1", _BYTES, row_align=32, block_bits=5, offset="minimum", gguf="Q5_1", timed_as="q4"),
    Format("q4_k", _BYTES, row_align=32, block_bits=4, offset="minimum", scale_bits=6, gguf="Q4_K", timed_as="q4"),
    Format("q5_k", _BYTES, row_align=32, block_bits=5, offset="minimum", scale_bits=6, gguf="Q5_K", timed_as="q4"),
    Format(
        "q6_k", _BYTES, row_align=32, block_bits=6, scale_bits=8, scale_zero=128, scales=2, gguf="Q6_K", timed_as="q4"
    ),
    _of_table("iq4_nl", IQ4),
    _of_table("iq4_xs", IQ4, scale_bits=6, scale_zero=32),
    _of_table("mxfp4", E2M1, byte_scale="e8m0"),
    _of_table("nvfp4", E2M1, byte_scale="ue4m3", scales=2, row_scaled=True),
):
    add(_format)
FORMATS |= {
    "scale": Format("scale", np.dtype("<f2"), row_align=8, code=28),
    "u8": Format("u8", _BYTES, row_align=8, code=29),
    "u32": Format("u32", np.dtype("<u4"), code=30),
    "u64": Format("u64", np.dtype("<u8"), code=31),
}
