"""The disk of a machine in integers, and the times of reading rows from it.

    read(s)  =  s ÷ rate at a run's depth of reads         latency(s)  =  s ÷ rate of one read alone

Both are linear in the size s of a read between the sizes that were measured. A smaller read takes as long as the
smallest one, a larger one is read at the rate of the largest one. A row of r bytes lies anywhere; reads begin and end
at multiples of a, so that on average r + a − gcd(r, a) bytes are read for it. Rows that lie close together are read in
one go: a layer's rows never take longer than all of them in large reads.
"""

from dataclasses import dataclass
from math import gcd
from typing import Self

from pi_compile.cost_model.processors import PICO
from pi_compile.machine import Disk, to_units
from pi_runtime.artifact.rows import WORKERS


@dataclass(frozen=True)
class DiskReads:
    """Times of reads from one disk, in picoseconds."""

    sizes: tuple[int, ...]
    """Sizes of a read, in bytes, rising."""
    each_ps: tuple[int, ...]
    """What a further read of each size adds while a run's other reads are under way."""
    alone_ps: tuple[int, ...]
    """How long a read of each size takes when it is alone."""
    align: int

    @classmethod
    def of(cls, disk: Disk) -> Self:
        """The deepest measurement up to a run's number of readers counts, and the shallowest for the latency."""
        deep = max((n for n, depth in enumerate(disk.depths) if depth <= WORKERS), default=0)
        sizes = tuple(kib << 10 for kib in disk.sizes_kib)
        each, alone = (
            tuple(-(-s * PICO // to_units(r, 10**6)) for s, r in zip(sizes, disk.read_mb_per_s[n], strict=True))
            for n in (deep, 0)
        )
        return cls(sizes, each, alone, disk.align_bytes)

    def spanned(self, row: int) -> int:
        """Mean bytes that are read for a row of so many bytes."""
        return row + self.align - gcd(row, self.align)

    def row_ps(self, row: int) -> int:
        """What a further row adds."""
        return self._between(self.each_ps, self.spanned(row))

    def latency_ps(self, row: int) -> int:
        """How long a row takes that is read alone."""
        return self._between(self.alone_ps, self.spanned(row))

    def range_ps(self, nbytes: int) -> int:
        """How long consecutive bytes take in large reads."""
        return -(-nbytes * self.each_ps[-1] // self.sizes[-1])

    def _between(self, time_ps: tuple[int, ...], size: int) -> int:
        if size <= self.sizes[0]:
            return time_ps[0]
        if size >= self.sizes[-1]:
            return -(-size * time_ps[-1] // self.sizes[-1])
        n = next(n for n, larger in enumerate(self.sizes) if size < larger)
        low, high = self.sizes[n - 1], self.sizes[n]
        return time_ps[n - 1] + (size - low) * (time_ps[n] - time_ps[n - 1]) // (high - low)
