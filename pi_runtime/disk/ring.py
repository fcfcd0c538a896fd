"""The rings of io_uring that the system shares with a thread, where it grants them.

Many containers refuse them, and so do old systems. Linux's `io_uring_setup(2)` describes what is laid out here.
"""

import ctypes
import errno
import mmap
import os
from typing import Self

import numpy as np

from pi_runtime.disk.kernels import ring_reading
from pi_runtime.disk.kernels.c_calls import c_address

_SETUP = 425
_PARAMETERS = 30
"""32-bit numbers of `struct io_uring_params`. Their places:"""
_FEATURES = 5
_SQ_HEAD, _SQ_TAIL, _SQ_MASK, _SQ_ENTRIES, _SQ_ARRAY = 10, 11, 12, 0, 16
_CQ_HEAD, _CQ_TAIL, _CQ_MASK, _CQ_ENTRIES, _CQ_CQES = 20, 21, 22, 1, 25
_SINGLE_MAP, _PLAIN_READS = 1 << 0, 1 << 3
"""Features: one map holds both rings; and a release, 5.6, that knows reads without vectors."""
_SQES_OFFSET = 0x10000000
_SQE_NBYTES, _CQE_NBYTES = 64, 16


class OpenRing:
    """One thread's rings, for some reads under way at once; `shared` is what `ring_reading.serve_ring` takes."""

    def __init__(self, depth: int) -> None:
        """Raises OSError where the system refuses."""
        parameters = np.zeros(_PARAMETERS, np.uint32)
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = int(libc.syscall(_SETUP, depth, ctypes.c_void_p(parameters.ctypes.data)))
        if self.fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        found = parameters.tolist()
        try:
            if ~found[_FEATURES] & (_SINGLE_MAP | _PLAIN_READS):
                raise OSError(errno.ENOSYS, "io_uring is too old")
            wanted_nbytes = found[_SQ_ARRAY] + 4 * found[_SQ_ENTRIES]
            ended_nbytes = found[_CQ_CQES] + _CQE_NBYTES * found[_CQ_ENTRIES]
            rings_n = self._mapped(max(wanted_nbytes, ended_nbytes), 0)
            entries_n = self._mapped(_SQE_NBYTES * found[_SQ_ENTRIES], _SQES_OFFSET)
        except OSError:
            self.close()
            raise
        # The system reads which entry stands in which place of the ring: always the one of the same number.
        places_n = rings_n[found[_SQ_ARRAY] :][: 4 * found[_SQ_ENTRIES]].view(np.uint32)
        places_n[:] = np.arange(found[_SQ_ENTRIES])
        base = rings_n.ctypes.data
        control = np.zeros(ring_reading.CONTROL_NUMBERS, np.int64)
        control[ring_reading.RING_FD], control[ring_reading.SYSCALL] = self.fd, c_address("syscall")
        control[ring_reading.USLEEP] = c_address("usleep")
        control[ring_reading.WANTED_HEAD] = base + found[_SQ_HEAD]
        control[ring_reading.WANTED_TAIL] = base + found[_SQ_TAIL]
        control[ring_reading.WANTED_MASK] = found[_SQ_ENTRIES] - 1
        control[ring_reading.WANTED] = entries_n.ctypes.data
        control[ring_reading.ENDED_HEAD] = base + found[_CQ_HEAD]
        control[ring_reading.ENDED_TAIL] = base + found[_CQ_TAIL]
        control[ring_reading.ENDED_MASK] = found[_CQ_ENTRIES] - 1
        control[ring_reading.ENDED] = base + found[_CQ_CQES]
        self.shared = ring_reading.Ring(
            control, np.zeros(depth, np.int64), np.zeros(depth, np.int64), np.arange(depth, dtype=np.int64)
        )
        self._kept = rings_n, entries_n

    def _mapped(self, nbytes: int, offset: int) -> np.ndarray:
        return np.frombuffer(mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED, offset=offset), np.uint8)

    @classmethod
    def several(cls, count: int, depth: int) -> list[Self]:
        """Rings for some threads; none where the system refuses."""
        found: list[Self] = []
        try:
            for _ in range(count):
                found.append(cls(depth))  # noqa: PERF401  those that were granted are given back where one is not
        except OSError:
            for ring in found:
                ring.close()
            return []
        return found

    def close(self) -> None:
        """Give the rings back."""
        os.close(self.fd)
