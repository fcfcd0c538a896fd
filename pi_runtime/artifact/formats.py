"""Number formats of stored arrays: what the bytes mean.

A matrix is stored row by row, each row padded with zero bytes to a multiple of the format's `row_align`, so that every
row of weights in a mapped array starts on a cache line. A vector is stored as it is. All formats are little-endian.

    name   value                                    stored as
    f32    IEEE 754 binary32                        float32
    f16    IEEE 754 binary16                        float16
    bf16   the upper half of a binary32,            uint16
           rounded to nearest, ties to even
    q8     scale · q, q in −127…127                 int8, and scales beside it
    q4     scale · (q − 8), q in 0…15               uint8, two q in one, and scales beside it
    scale  binary16, one for 32 columns of a row    float16, rows padded to 8 bytes
    u32    unsigned integer                         uint32
    u64    unsigned integer                         uint64

q8 and q4 keep the scales of a matrix in an array of their own, `NAME_scales` (see `sizes`). Every eight blocks of a row
are a group, in which fours of columns are interleaved: place 32 k + 4 b + j holds column 32 b + 4 k + j (b, k < 8,
j < 4). So lane b of the k-th 256-bit vector belongs to block b, and eight blocks' sums of products take one conversion.
Up to seven blocks that are left at the end of a row lie in their own order. q4 puts two places into a byte: in a group
byte i has place i in its lower and place 128 + i in its upper four bits, among the blocks left over places i and 32 + i
of every 64.

`code` is what kernels switch on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ROW_ALIGN = 64
BLOCK = 32
"""Columns that share a scale in q8 and q4."""
# Smallest magnitude that rounds to infinity, or whose scale does: half a unit above the largest finite one (the tie
# goes to even, upwards).
_TOO_LARGE = {"f16": 65520.0, "bf16": 2.0**128 - 2.0**119, "q8": 65520.0 * 127, "q4": 65520.0 * 8}


@dataclass(frozen=True)
class Format:
    """One number format: its name, its code for kernels, and the dtype its bytes are stored as."""

    name: str
    code: int
    stored: np.dtype[Any]
    row_align: int = ROW_ALIGN
    """Rows of a matrix are padded to a multiple of this many bytes."""
    per_item: int = 1
    """Values in one stored item."""

    @property
    def quantised(self) -> bool:
        """Whether values are small integers times a scale that is stored elsewhere."""
        return self.name in ("q8", "q4")

    @property
    def itemsize(self) -> int:
        return self.stored.itemsize

    @property
    def columns_per_line(self) -> int:
        """Columns that fill `row_align` bytes: rows are padded to a multiple of them."""
        return self.row_align // self.itemsize * self.per_item

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Logical shape → stored shape: the last axis of a matrix is padded to `row_align`."""
        if len(shape) < 2:
            return tuple(shape)
        lines = -(-shape[-1] // self.columns_per_line)
        return (*shape[:-1], lines * self.columns_per_line // self.per_item)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Stored bytes of an array of this logical shape, padding included, scales not."""
        count = self.itemsize
        for n in self.stored_shape(shape):
            count *= n
        return count

    def encode(self, values: Array) -> Array:
        """Values of the logical shape → stored array, C order, padded; may share memory with `values`.

        Values must be finite and representable (see `overflows`). For q8 and q4 see `quantise`.
        """
        assert not self.quantised, self.name
        rounded = _to_bf16(values) if self.name == "bf16" else values
        shape = self.stored_shape(values.shape)
        if shape == values.shape:
            return np.ascontiguousarray(rounded, self.stored)
        out = np.zeros(shape, self.stored)
        out[..., : values.shape[-1]] = rounded
        return out

    def decode(self, stored: Array, columns: int) -> Array:
        """Stored array → values: float32 for float formats, else stored integers; padding dropped; maybe a view."""
        assert not self.quantised, self.name
        cut = stored[..., :columns]
        if self.name == "bf16":
            return (cut.astype(np.uint32) << 16).view(np.float32)
        return cut.astype(np.float32, copy=False) if self.stored.kind == "f" else cut

    def overflows(self, values: Array) -> bool:
        """Whether a finite value, or the scale it needs, would become infinite in this format."""
        limit = _TOO_LARGE.get(self.name)
        return limit is not None and bool(np.any((np.abs(values) >= np.float32(limit)) & np.isfinite(values)))


def _to_bf16(values: Array) -> Array:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)


FORMATS = {
    f.name: f
    for f in (
        Format("f32", 0, np.dtype("<f4")),
        Format("f16", 1, np.dtype("<f2")),
        Format("bf16", 2, np.dtype("<u2")),
        Format("q8", 3, np.dtype("<i1")),
        Format("q4", 4, np.dtype("<u1"), per_item=2),
        Format("scale", 15, np.dtype("<f2"), row_align=8),
        Format("u32", 16, np.dtype("<u4")),
        Format("u64", 17, np.dtype("<u8")),
    )
}
WEIGHT_FORMATS = ("f32", "f16", "bf16", "q8", "q4")
