"""Stored matrices in the memory of a torch device, as kernels take them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from pi_runtime.artifact.formats import BLOCK, FORMATS

DTYPES: Mapping[str, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "q8": torch.int8,
    "q4": torch.uint8,
    "u64": torch.int64,
}
"""What the stored values of each format are to torch; scales are float16."""


@dataclass(frozen=True)
class Matrix:
    """Rows of a stored matrix, or every k-th of them: the bytes of the artifact, padding included."""

    format: str
    values: torch.Tensor
    """(rows, stored width); rows may lie apart."""
    scales: torch.Tensor | None
    """(rows, ⌈columns / 32⌉ and padding), float16; None where the format has none."""
    columns: int

    def __post_init__(self) -> None:
        assert self.values.dtype == DTYPES[self.format], (self.values.dtype, self.format)
        assert self.values.ndim == 2, self.values.shape
        assert self.values.stride(1) == 1
        assert FORMATS[self.format].quantised == (self.scales is not None)

    @property
    def code(self) -> int:
        """What kernels switch on."""
        return FORMATS[self.format].code

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def strides(self) -> tuple[int, int]:
        """From one row to the next: of values and of scales, in elements."""
        return self.values.stride(0), 0 if self.scales is None else self.scales.stride(0)

    @property
    def width(self) -> int:
        """Stored elements that hold columns; q4 has two columns in one."""
        if self.format != "q4":
            return self.columns
        # Groups of eight blocks, then the blocks left over in pairs.
        blocks = -(-self.columns // BLOCK)
        return blocks // 8 * 128 + -(-(blocks % 8) // 2) * 32

    @property
    def words(self) -> int | None:
        """Words of 32 bits in the whole groups of a q8 or q4 row."""
        per_group = {"q8": 64, "q4": 32}.get(self.format)
        return None if per_group is None else -(-self.columns // BLOCK) // 8 * per_group

    def every(self, k: int, which: int) -> "Matrix":
        """The rows `which`, `which` + k, …"""
        scales = None if self.scales is None else self.scales[which::k]
        return replace(self, values=self.values[which::k], scales=scales)

    def slice(self, low: int, high: int) -> "Matrix":
        """The rows [low, high)."""
        scales = None if self.scales is None else self.scales[low:high]
        return replace(self, values=self.values[low:high], scales=scales)
