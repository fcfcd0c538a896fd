"""Times of reads, from a machine profile's disk."""

import pytest

from pi_compile.cost_model.row_options import DiskReads
from pi_compile.machine import Disk

DISK = Disk(
    name="d",
    sizes_kib=[4, 16, 64],
    depths=[1, 32, 128],
    read_mb_per_s=[[40.96, 100.0, 200.0], [409.6, 819.2, 1024.0], [500.0, 900.0, 1100.0]],
)


def test_reads_are_timed_at_a_runs_depth_and_linear_between_sizes() -> None:
    reads = DiskReads.of(DISK)
    assert reads.row_ps(4096) == 10**7  # 4 KiB at 409.6 MB/s: 10 µs
    assert reads.row_ps(16384) == 2 * 10**7
    assert reads.row_ps(10240) == 15 * 10**6
    assert reads.latency_ps(4096) == 10**8
    assert reads.range_ps(1 << 20) == 1024 * 10**6  # at the rate of the largest read


def test_small_reads_take_as_long_as_the_smallest_and_large_ones_go_on() -> None:
    reads = DiskReads.of(DISK)
    assert reads.row_ps(512) == reads.row_ps(4096)
    assert reads.row_ps(1 << 18) == reads.range_ps(1 << 18)


@pytest.mark.parametrize(("row", "spanned"), [(4096, 4096), (1088, 1088 + 448), (2176, 2176 + 384), (1, 512)])
def test_a_row_lies_anywhere_among_sectors(row: int, spanned: int) -> None:
    reads = DiskReads.of(DISK)
    starts = range(0, 512 * row, row)
    mean = sum(-(-(s + row) // 512) * 512 - s // 512 * 512 for s in starts) / 512
    assert reads.spanned(row) == spanned == mean


def test_a_disk_that_was_measured_deeper_than_runs_read() -> None:
    deep = DISK.model_copy(update={"depths": [64], "read_mb_per_s": [[500.0, 900.0, 1100.0]]})
    assert DiskReads.of(deep).each_ps == DiskReads.of(deep).alone_ps


def test_at_the_largest_size_that_was_measured_its_own_time_counts() -> None:
    reads = DiskReads.of(DISK)
    assert reads._between(reads.alone_ps, reads.sizes[-1]) == reads.alone_ps[-1]
    assert reads._between(reads.alone_ps, 2 * reads.sizes[-1]) == 2 * reads.alone_ps[-1]
