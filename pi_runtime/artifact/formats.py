"""Number formats of stored arrays: what the bytes mean.

A matrix is stored row by row, each row padded with zero bytes to a multiple of `ROW_ALIGN` bytes, so that every row of
a mapped array starts on a cache line. A vector is stored as it is. All formats are little-endian.

    name  value                                   stored as
    f32   IEEE 754 binary32                       float32
    f16   IEEE 754 binary16                       float16
    bf16  the upper half of a binary32,           uint16
          rounded to nearest, ties to even
    u32   unsigned integer                        uint32
    u64   unsigned integer                        uint64

`code` is what kernels switch on. q8 and q4 (blocks of 32 with an f16 scale) will take the codes 3 and 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ROW_ALIGN = 64
# Smallest value that rounds to infinity: half a unit above the largest finite one (the tie goes to even, so upwards).
_TOO_LARGE = {"f16": 65520.0, "bf16": 2.0**128 - 2.0**119}


@dataclass(frozen=True)
class Format:
    """One number format: its name, its code for kernels, and the dtype its bytes are stored as."""

    name: str
    code: int
    stored: np.dtype[Any]

    @property
    def itemsize(self) -> int:
        return self.stored.itemsize

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Logical shape → stored shape: the last axis of a matrix is padded to whole cache lines."""
        if len(shape) < 2:
            return tuple(shape)
        per_line = ROW_ALIGN // self.itemsize
        return (*shape[:-1], -(-shape[-1] // per_line) * per_line)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Stored bytes of an array of this logical shape, padding included."""
        count = self.itemsize
        for n in self.stored_shape(shape):
            count *= n
        return count

    def encode(self, values: Array) -> Array:
        """Values of the logical shape → stored array, C order, padded; may share memory with `values`.

        Values must be finite and representable (see `overflows`).
        """
        rounded = _to_bf16(values) if self.name == "bf16" else values
        shape = self.stored_shape(values.shape)
        if shape == values.shape:
            return np.ascontiguousarray(rounded, self.stored)
        out = np.zeros(shape, self.stored)
        out[..., : values.shape[-1]] = rounded
        return out

    def decode(self, stored: Array, columns: int) -> Array:
        """Stored array → values: float32 for float formats, else stored integers; padding dropped; maybe a view."""
        cut = stored[..., :columns]
        if self.name == "bf16":
            return (cut.astype(np.uint32) << 16).view(np.float32)
        return cut.astype(np.float32, copy=False) if self.stored.kind == "f" else cut

    def overflows(self, values: Array) -> bool:
        """Whether a finite value would become infinite in this format."""
        limit = _TOO_LARGE.get(self.name)
        return limit is not None and bool(np.any((np.abs(values) >= np.float32(limit)) & np.isfinite(values)))


def _to_bf16(values: Array) -> Array:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)


FORMATS = {
    name: Format(name, code, np.dtype(stored))
    for name, code, stored in (
        ("f32", 0, "<f4"),
        ("f16", 1, "<f2"),
        ("bf16", 2, "<u2"),
        ("u32", 16, "<u4"),
        ("u64", 17, "<u8"),
    )
}
WEIGHT_FORMATS = ("f32", "f16", "bf16")
