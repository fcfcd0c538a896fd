"""Stored matrices in the memory of a torch device, as kernels take them.

What they do with a format follows from its object in `artifact.formats`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton.language as tl

from pi_runtime.artifact.formats import BLOCK, FORMATS, WEIGHT_FORMATS

DTYPES: Mapping[str, torch.dtype] = {
    "u64": torch.int64,
    **{name: getattr(torch, FORMATS[name].number or FORMATS[name].stored.name) for name in WEIGHT_FORMATS},
}
"""Torch's dtype for the stored values of each format; scales are float16."""
_GROUP = 8
"""Blocks of a group, in which columns are interleaved."""
VALUES_PER_ELEMENT: Mapping[str, int] = {name: 2 if 0 < f.block_bits < 8 else 1 for name, f in FORMATS.items()}
"""Values in one stored element; below 8 bits an element is a byte with the lower bits of two."""
WORDS_PER_GROUP: Mapping[str, int] = {
    name: _GROUP * BLOCK // VALUES_PER_ELEMENT[name] // 4 for name in DTYPES if FORMATS[name].quantised
}
"""Words of 32 bits in a group of each block format; upper bits are not counted."""


class StoredRows(NamedTuple):
    """A `DeviceMatrix` as kernels take it, in one argument."""

    elements: torch.Tensor
    scales: torch.Tensor | None
    stride: int
    """Elements from one row to the next."""
    scales_stride: int
    offsets: int
    """Elements from a block's scale to its minimum or zero."""
    rows: int
    columns: int
    width: int
    """Stored elements that hold columns, upper bits not counted."""
    fmt: tl.constexpr
    """The format's number, which kernels branch on when they are compiled."""


@dataclass(frozen=True)
class DeviceMatrix:
    """Rows of a stored matrix, or every n-th of them: the bytes of the artifact, padding included."""

    format: str
    values: torch.Tensor
    """(rows, stored width); rows need not follow each other without a gap."""
    scales: torch.Tensor | None
    """(rows, ⌈columns / 32⌉ and padding), float16, and as many minima or zeros; None where the format has none."""
    columns: int

    def __post_init__(self) -> None:
        assert self.values.dtype == DTYPES[self.format], (self.values.dtype, self.format)
        assert self.values.ndim == 2, self.values.shape
        assert self.values.stride(1) == 1
        assert FORMATS[self.format].quantised == (self.scales is not None)

    @property
    def stored(self) -> StoredRows:
        """The matrix as an argument of a kernel."""
        scales_stride = 0 if self.scales is None else self.scales.stride(0)
        offsets = 0 if self.scales is None else self.scales.shape[1] // 2
        fmt, strides = tl.constexpr(FORMATS[self.format].code), (self.values.stride(0), scales_stride)
        return StoredRows(self.values, self.scales, *strides, offsets, self.rows, self.columns, self.width, fmt)

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def width(self) -> int:
        """Stored elements that hold columns, upper bits not counted."""
        per_element = VALUES_PER_ELEMENT[self.format]
        if per_element == 1:
            return self.columns
        # In a group an element holds columns of two halves of the group, behind the last one columns of two blocks.
        blocks = -(-self.columns // BLOCK)
        grouped, left = blocks // _GROUP * _GROUP, blocks % _GROUP
        return grouped * BLOCK // per_element + -(-left // per_element) * BLOCK

    @property
    def words(self) -> int | None:
        """Words of 32 bits in the whole groups of a row, upper bits not counted; None for a format without blocks."""
        per_group = WORDS_PER_GROUP.get(self.format)
        return None if per_group is None else -(-self.columns // BLOCK) // _GROUP * per_group

    def __getitem__(self, rows: slice) -> "DeviceMatrix":
        """Some of the rows: m[low:high], or every n-th one with m[first::n]."""
        return replace(self, values=self.values[rows], scales=None if self.scales is None else self.scales[rows])
