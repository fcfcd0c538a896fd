"""Who used each place of a program's memory last, and whether anything orders two that did.

A barrier of the program orders all its threads, one of a warp the warp's lanes; shuffles order nothing. For each place
two stamps are kept: the last write, and the reads since the barrier. A stamp has the numbers of both barriers
that its thread has passed, and the thread; where several threads read, it says so.
"""

import numpy as np
import numpy.typing as npt

from support.ptx.faults import RaceError

Numbers = npt.NDArray[np.int64]
_PROGRAM, _WARP = 40, 20
_THREAD = (1 << _WARP) - 1
_LANES = 1 << 18
"""Several lanes of the warp beside it."""
_WARPS = 1 << 19
"""Several warps."""


def stamps(program_epoch: Numbers, warp_epoch: Numbers, thread: Numbers) -> Numbers:
    """Now, as seen by these threads."""
    return (program_epoch << _PROGRAM) | (warp_epoch << _WARP) | thread


def unordered(before: Numbers, now: Numbers) -> npt.NDArray[np.bool_]:
    """Where what a stamp names may happen at the same time as this."""
    other, own = before & _THREAD, now & _THREAD
    same_program = before >> _PROGRAM == now >> _PROGRAM
    other_warp = (other & _WARPS != 0) | ((other & (_LANES - 1)) >> 5 != own >> 5)
    return same_program & (other != own) & (other_warp | (before >> _WARP == now >> _WARP))


class Places:
    """Stamps of equal pieces of memory."""

    def __init__(self, count: int) -> None:
        self.written, self.read = np.zeros(count, np.int64), np.zeros(count, np.int64)

    def note_reads(self, at: Numbers, now: Numbers) -> None:
        """These places are read. Raises RaceError."""
        if unordered(self.written[at], now).any():
            raise RaceError("read of what another thread writes at the same time")
        before = self.read[at]
        self.read[at] = merged = _merged(before, now)
        # Of several threads that read a place in this very instruction one has stayed.
        lost = self.read[at] != merged
        if lost.any():
            at, again = at[lost], _merged(self.read[at[lost]], merged[lost])
            far = again & _WARPS != 0
            self.read[at[~far]] = again[~far]
            self.read[at[far]] = again[far]

    def note_writes(self, at: Numbers, now: Numbers, same: npt.NDArray[np.bool_]) -> None:
        """These places are written, some with the `same` bytes that are there. Raises RaceError."""
        if unordered(self.read[at], now).any():
            raise RaceError("write of what another thread reads at the same time")
        if (unordered(self.written[at], now) & ~same).any():
            raise RaceError("two threads write a place at the same time")
        self.written[at] = now


def _merged(before: Numbers, now: Numbers) -> Numbers:
    """Both reads as one stamp; a read that a barrier orders before this one is forgotten."""
    other, own = before & _THREAD, now & _THREAD
    same_program = before >> _PROGRAM == now >> _PROGRAM
    far = same_program & ((other & _WARPS != 0) | ((other & (_LANES - 1)) >> 5 != own >> 5))
    near = ~far & (before >> _WARP == now >> _WARP) & (other != own)
    return np.where(far, now | _WARPS, np.where(near, now | _LANES, now))
