"""Reading rows of a file past the page cache, by threads that keep the device busy.

Two threads keep many reads under way by io_uring; where the system refuses that, many threads have one each. The file
is opened with O_DIRECT. Where the file system refuses it, reads are buffered, and the pages are dropped after
each read. Every fault becomes an error that names the file: a device's error, a file that ends too early, that was
changed, or that does not answer.
"""

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.reader import FileIdentity
from pi_runtime.artifact.rows import BATCHES, PIECE_NBYTES, WORKERS
from pi_runtime.disk.kernels import reading, ring_reading
from pi_runtime.disk.kernels.c_calls import c_address
from pi_runtime.disk.kernels.reading import SEMAPHORE_NBYTES, Shared
from pi_runtime.disk.ring import OpenRing
from pi_runtime.errors import ArtifactError, Setting, UsageError, read_error
from pi_runtime.kernels.codegen.threads import advance_progress
from pi_runtime.kernels.data.matrix_view import Ints

GAP_NBYTES = 8192
"""Rows with at most so many bytes between them are read together: a further read takes as long as about 11 KiB."""
RING_THREADS = 2
"""One of them copies rows while the other one asks for more."""
PREAD_THREADS = 32
"""Without io_uring each read under way takes a thread."""
STALL_SECONDS = 60.0
"""After so long without an answer the disk counts as stalled."""
_SLICE_NANOSECONDS = 200_000_000
_ALIGNMENTS = (512, 4096)
"""Where a direct read may begin: sectors of most devices, and of those with large ones."""
_C_FUNCTIONS = {
    reading.PREAD: "pread",
    reading.SEM_WAIT: "sem_wait",
    reading.SEM_POST: "sem_post",
    reading.SEM_TIMEDWAIT: "sem_timedwait",
    reading.ERRNO: "__errno_location",
    reading.ADVISE: "posix_fadvise",
    reading.CLOCK: "clock_gettime",
    reading.COPY: "memcpy",
}


_ABANDONED: list[object] = []
"""Memory that a read which never ended may still write to."""


def page_aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory that begins at a page and holds zeros, which take no room until they are written."""
    # Memory that could be shared, which is mmap's default, gets no huge pages: kernels would be a third slower.
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class Reader:
    """Reads rows of one file into memory, in batches that are waited for; see `reading`.

    `workers` is how many reads are under way at once (None: as many as suit the way of reading), `direct` whether to
    try O_DIRECT, `ring` whether to try io_uring, `pread` the address of the function that reads without it,
    `stall_seconds` how long to wait for an answer. No row may take more than `piece` bytes, the most of one read.
    """

    def __init__(
        self,
        path: Path,
        rows: int,
        *,
        workers: int | None = None,
        direct: bool = True,
        ring: bool = True,
        align: int | None = None,
        gap: int = GAP_NBYTES,
        piece: int = PIECE_NBYTES,
        pread: int | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """`rows`: most rows of a batch."""
        self.path, self.rows, self.piece, self._stall_seconds = path, rows, piece, stall_seconds
        self.seconds_waited = 0.0
        control = np.zeros(reading.READS + 1, np.int64)
        try:
            for place, name in _C_FUNCTIONS.items():
                control[place] = c_address(name)
            self._fd, self.direct, self.align = _opened(path, direct, align)
        except AttributeError:
            raise UsageError(
                (Setting("ram_budget"), " needs Linux"), remedy=("run it without ", Setting("ram_budget"))
            ) from None
        control[reading.PREAD] = pread or control[reading.PREAD]
        control[reading.FD], control[reading.DIRECT], control[reading.ALIGN] = self._fd, self.direct, self.align
        control[reading.GAP], control[reading.MOST] = gap, piece
        self._identity = FileIdentity(path, self._fd)
        self.shared = Shared(
            control,
            np.zeros(BATCHES * rows, np.int64),
            np.zeros((BATCHES, 4), np.int64),
            np.zeros((BATCHES, rows, 5), np.int64),
            np.zeros((BATCHES, rows, 3), np.int64),
            np.zeros((BATCHES, 2), np.int64),
            np.zeros((1 + BATCHES) * SEMAPHORE_NBYTES, np.uint8),
        )
        for n in range(1 + BATCHES):
            ctypes.CDLL(None).sem_init(
                ctypes.c_void_p(self.shared.semaphores[n * SEMAPHORE_NBYTES :].ctypes.data), 0, 0
            )
        batch_N4 = self.shared.batch_N4
        self._pending = [batch_N4.ctypes.data + n * batch_N4.strides[0] + 8 * reading.PENDING for n in range(BATCHES)]
        """Where the requests of each batch that are not done are counted."""
        self._targets: list[object] = []
        self._threads: list[Thread] = []
        depth = WORKERS if workers is None else workers
        threads = min(depth, RING_THREADS)
        self._rings = OpenRing.several(threads, depth // threads) if ring and self.direct and pread is None else []
        if workers is None and not self._rings:
            depth = PREAD_THREADS
        self._start(depth, page_aligned(depth * (piece + 2 * self.align)))

    def hold(self, memory: object) -> None:
        """Name memory that rows go to: it must outlive reads that do not end."""
        self._targets.append(memory)

    def _start(self, workers: int, buffers: npt.NDArray[np.uint8]) -> None:
        nbytes, address = len(buffers) // workers, int(buffers.ctypes.data)
        if self._rings:
            depth = workers // len(self._rings)
            works: list[Callable[[], None]] = [
                partial(ring_reading.serve_ring, self.shared, ring.shared, address + n * depth * nbytes, nbytes)
                for n, ring in enumerate(self._rings)
            ]
        else:
            works = [partial(reading.serve, self.shared, address + n * nbytes) for n in range(workers)]
        reading.stop(self.shared, 1)
        works[0]()  # compiles it, or loads it, and returns
        self.shared.control[reading.STOP] = 0
        for n, work in enumerate(works):
            # They hold what they write to, as long as they live; a stalled one must not keep the process from ending.
            thread = Thread(target=_serve, args=(work, buffers, self._rings), name=f"pi-disk-{n}", daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def bytes_read(self) -> int:
        """Bytes that the file was asked for since the beginning."""
        return int(self.shared.control[reading.BYTES])

    @property
    def reads(self) -> int:
        """Reads that these took."""
        return int(self.shared.control[reading.READS])

    def add_rows(
        self, batch: int, row_I: Ints, slot_I: Ints, offset: int, nbytes: int, target: int, slot_nbytes: int = 0
    ) -> None:
        """Append ascending rows of `nbytes` to a batch: row i is at `offset` + i · `nbytes` and goes to its slot.

        Slots are as long as rows, unless told.
        """
        reading.add_rows(self.shared, batch, row_I, slot_I, offset, nbytes, target, slot_nbytes or nbytes)

    def add_range(self, batch: int, offset: int, nbytes: int, target: int) -> None:
        """Append consecutive bytes to a batch, which has room for a row of each piece and one more."""
        whole, one = np.arange(nbytes // self.piece), np.zeros(1, np.int64)
        self.add_rows(batch, whole, whole, offset, self.piece, target)
        if left := nbytes % self.piece:
            self.add_rows(batch, one, one, offset + nbytes - left, left, target + nbytes - left)

    def submit(self, batch: int) -> None:
        """Begin to read what was appended to a batch."""
        reading.submit(self.shared, batch, self.threads)

    @property
    def threads(self) -> int:
        """Threads that read."""
        return len(self._threads)

    def wait(self, batch: int) -> None:
        """Wait until a batch is read. Raises ArtifactError where it cannot be; a signal's handler runs meanwhile."""
        if self.is_pending(batch):
            self._wait_for_reads(batch)
        batch_4 = self.shared.batch_N4[batch]
        if batch_4[reading.ERROR]:
            error = self._error(*batch_4[reading.ERROR : reading.ERROR_AT + 1].tolist())
            batch_4[reading.ERROR] = 0
            raise error

    def is_pending(self, batch: int) -> bool:
        """Whether reads of a batch are still under way, which may write to its rows' places."""
        return bool(reading.pending(self._pending[batch]) > 0)

    def _wait_for_reads(self, batch: int) -> None:
        began = moved = time.monotonic()
        before = self.bytes_read
        while (ended := reading.wait(self.shared, batch, _SLICE_NANOSECONDS)) != reading.DONE:
            if ended == reading.WOKEN_EARLY:
                continue
            now = time.monotonic()
            if self.bytes_read != before:
                before, moved = self.bytes_read, now
                advance_progress()
            if now - moved > self._stall_seconds:
                raise ArtifactError(
                    f"{self.path}: the disk does not answer",
                    expected=f"data within {self._stall_seconds:g} s",
                    remedy="look at the system's log (dmesg) for faults of the device",
                )
        self.seconds_waited += time.monotonic() - began

    def _error(self, code: int, offset: int) -> ArtifactError:
        if code == reading.END_OF_FILE:
            return ArtifactError(
                f"{self.path}: the file ends too early",
                found=f"its end before byte {offset}",
                remedy="it was cut off while it was in use: copy it again",
            )
        return ArtifactError(
            f"{self.path}: cannot be read at byte {offset}",
            found=os.strerror(code),
            remedy="pi-compile verify FILE reads all of it; for an I/O error see the system's log (dmesg)",
        )

    def drain(self) -> None:
        """Wait for all that is under way, read or not: afterwards nobody writes to the rows' places.

        Raises ArtifactError where the disk does not answer.
        """
        for batch in range(BATCHES):
            try:
                self.wait(batch)
            except ArtifactError:
                if self.is_pending(batch):
                    raise
        self.shared.filled_N2[:] = 0

    def read_range(self, offset: int, nbytes: int, target: int) -> None:
        """Read consecutive bytes to an address, in large pieces."""
        piece = self.piece - self.align
        whole = np.arange(nbytes // piece)
        most = self.rows - 1
        for first in range(0, max(1, len(whole)), most):
            some = whole[first : first + most]
            self.add_rows(0, some, some, offset, piece, target)
            if first + most >= len(whole) and nbytes % piece:
                done, one = len(whole) * piece, np.zeros(1, np.int64)
                self.add_rows(0, one, one, offset + done, nbytes % piece, target + done)
            self.submit(0)
            self.wait(0)

    def check_unchanged(self) -> None:
        """Raise ArtifactError where the open file is no longer the one that was opened."""
        self._identity.check(self._fd)

    def close(self) -> None:
        """Let the threads return, and close the file; where one is stalled, it keeps the file until it returns."""
        if not self._threads:
            return
        reading.stop(self.shared, len(self._threads))
        for thread in self._threads:
            thread.join(0.1 if any(map(self.is_pending, range(BATCHES))) else self._stall_seconds)
        if any(thread.is_alive() for thread in self._threads):
            _ABANDONED.append(self._targets)
        else:
            os.close(self._fd)
            for ring in self._rings:
                ring.close()
        self._threads, self._targets, self._rings = [], [], []


def _serve(work: Callable[[], None], *_kept: object) -> None:
    work()


def _opened(path: Path, direct: bool, align: int | None) -> tuple[int, bool, int]:
    """Open a file; returns its descriptor, whether reads are direct, and to what they are aligned."""
    try:
        for to in _ALIGNMENTS if align is None else (align,):
            if not direct:
                break
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                break
            buffer = mmap.mmap(-1, 2 * _ALIGNMENTS[-1])
            try:
                os.preadv(fd, [memoryview(buffer)[to : 2 * to]], to)
                return fd, True, to
            except OSError as error:
                os.close(fd)
                if error.errno != errno.EINVAL:
                    raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False, 1
    except OSError as error:
        raise read_error(path, error, "see that you may read it, and its disk is sound", ArtifactError) from None
