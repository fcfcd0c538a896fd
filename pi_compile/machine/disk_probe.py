"""Rates of a disk, measured as a run reads it: by the runtime's reader, at random places, past the page cache."""

import os
import tempfile
import time
from pathlib import Path

import numpy as np

from pi_compile.machine.profile import Disk
from pi_runtime.artifact.rows import WORKERS
from pi_runtime.disk.reader import Reader, page_aligned

SIZES_KIB = (4, 8, 16, 32, 64, 256)
DEPTHS = (1, WORKERS, 4 * WORKERS)
"""One read alone, whose time is the device's latency; as many as a run has under way; and more, to see the ceiling."""
SECONDS = 0.25
"""Least time of one measurement."""
_WRITTEN = 1 << 22


def probe_disk(folder: Path, nbytes: int, seconds: float = SECONDS) -> Disk | None:
    """Rates of the disk that a folder is on; None where its file system refuses reads past the page cache.

    A file of `nbytes`, in whole blocks of 4 MiB, is written there and removed again.
    """
    nbytes -= nbytes % _WRITTEN
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".pi-disk-") as file:
        block = np.random.default_rng(0).bytes(_WRITTEN)  # a device may compress what is alike
        for _ in range(nbytes // _WRITTEN):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        path = Path(file.name)
        rates = []
        for depth in DEPTHS:
            reader = Reader(path, _batch(depth), workers=depth, gap=0)
            try:
                if not reader.direct:
                    return None
                align = reader.align
                rates.append([_rate(reader, nbytes, kib << 10, reader.rows, seconds) for kib in SIZES_KIB])
            finally:
                reader.close()
    return Disk(
        name=str(folder.resolve()),
        sizes_kib=list(SIZES_KIB),
        depths=list(DEPTHS),
        read_mb_per_s=[[float(f"{rate / 1e6:.4g}") for rate in row] for row in rates],
        align_bytes=align,
    )


def _batch(depth: int) -> int:
    """Reads of one batch: so many that its beginning and end count little."""
    return 1 if depth == 1 else 8 * depth


def _rate(reader: Reader, file_nbytes: int, size: int, count: int, seconds: float) -> float:
    """Bytes a second at this size of a read."""
    memory = page_aligned(count * size)
    reader.hold(memory)
    # Every second place, so that no two reads are neighbours, which the reader would merge.
    places, rng = file_nbytes // size // 2, np.random.default_rng(size)
    count = min(count, places)
    slot_I = np.arange(count)
    target = int(memory.ctypes.data)

    def read() -> None:
        row_I = 2 * np.sort(rng.choice(places, count, replace=False))
        reader.add_rows(0, row_I, slot_I, 0, size, target)
        reader.submit(0)
        reader.wait(0)

    read()  # compiles, or loads, what it calls
    before, began, passed = reader.bytes_read, time.perf_counter(), 0.0
    while not passed or passed < seconds:
        read()
        passed = time.perf_counter() - began
    return (reader.bytes_read - before) / passed
