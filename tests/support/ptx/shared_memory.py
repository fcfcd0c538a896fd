"""Shared memory of some programs, with what is written, what is on its way, and who used it last."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from support.ptx.faults import OutsideError, PendingError, RaceError, UnwrittenError
from support.ptx.races import Numbers, Places

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_WRITTEN, _PENDING = 1, 2


@dataclass
class _Copy:
    """Bytes that an instruction of `cp.async` brings: for each thread where to, and which of its groups."""

    at: Numbers
    data: npt.NDArray[np.uint8]
    thread: Numbers
    group: Numbers


class SharedMemory:
    """`size` bytes for each of some programs. `piece` is the least that the kernel reads or writes at once."""

    def __init__(self, programs: int, size: int, piece: int, threads: int) -> None:
        self._size, self._piece = (size + 15) // 16 * 16, piece
        self._bytes = np.zeros(programs * self._size, np.uint8)
        self._state = np.zeros_like(self._bytes)
        self._places = Places(len(self._bytes) // piece)
        self._copies: list[_Copy] = []
        self._committed = np.zeros(threads, np.int64)

    def load(self, program: Numbers, address: Numbers, size: int, count: int, now: Numbers) -> npt.NDArray[np.generic]:
        """[threads, count] numbers of `size` bytes; `program` counts among these programs."""
        at = self._at(program, address, size * count)
        index = (at // size)[:, None] + np.arange(count)
        state = self._state.view(_UNSIGNED[size])[index]
        wanted = _repeated(_WRITTEN, size)
        if (state != wanted).any():
            if (state & _repeated(_PENDING, size)).any():
                raise PendingError("read of shared memory before the wait for the copy into it")
            raise UnwrittenError("read of shared memory that nothing wrote")
        self._places.note_reads(*self._pieces(at, size * count, now))
        found: npt.NDArray[np.generic] = self._bytes.view(_UNSIGNED[size])[index]
        return found

    def store(
        self, program: Numbers, address: Numbers, size: int, value: npt.NDArray[np.generic], now: Numbers
    ) -> None:
        """`value`: [threads, count]."""
        at = self._at(program, address, size * value.shape[1])
        self._write(at, np.ascontiguousarray(value).view(np.uint8).reshape(len(at), -1), now, _WRITTEN)

    def _write(self, at: Numbers, data: npt.NDArray[np.uint8], now: Numbers, state: int) -> None:
        count = data.shape[1]
        index = at[:, None] + np.arange(count)
        if state == _WRITTEN and (self._state[index] == _PENDING).any():
            raise PendingError("write to shared memory before the wait for the copy into it")
        per = (self._bytes[index] == data).reshape(-1, self._piece).all(1)
        self._places.note_writes(*self._pieces(at, count, now), per)
        self._bytes[index] = data
        if (self._bytes[index] != data).any():
            raise RaceError("two threads write a place of shared memory in one instruction")
        self._state[index] = state

    def copy(
        self, thread: Numbers, program: Numbers, address: Numbers, data: npt.NDArray[np.uint8], now: Numbers
    ) -> None:
        """Begin to copy these bytes of each thread. They are there after a wait."""
        at = self._at(program, address, data.shape[1])
        self._write(at, data, now, _PENDING)
        self._copies.append(_Copy(at, data, thread, self._committed[thread]))

    def commit(self, thread: Numbers) -> None:
        """What these threads began to copy is a group."""
        self._committed[thread] += 1

    def wait(self, thread: npt.NDArray[np.bool_], most: int, now: Numbers) -> None:
        """Until at most that many groups of each of these threads are on their way; `now` is of every thread."""
        left = []
        for c in self._copies:
            done = thread[c.thread] & (c.group < self._committed[c.thread] - most)
            if done.any():
                at = c.at[done]
                self._state[at[:, None] + np.arange(c.data.shape[1])] = 0
                self._write(at, c.data[done], now[c.thread[done]], _WRITTEN)
            if not done.all():
                left.append(_Copy(c.at[~done], c.data[~done], c.thread[~done], c.group[~done]))
        self._copies = left

    def _at(self, program: Numbers, address: Numbers, size: int) -> Numbers:
        if ((address < 0) | (address > self._size - size)).any():
            raise OutsideError(f"shared memory has {self._size} bytes; {address.min()} to {address.max()} + {size}")
        if (address % size).any():
            raise OutsideError(f"an address in shared memory is no multiple of {size}")
        return program * self._size + address

    def _pieces(self, at: Numbers, size: int, now: Numbers) -> tuple[Numbers, Numbers]:
        count = size // self._piece
        return ((at // self._piece)[:, None] + np.arange(count)).ravel(), np.repeat(now, count)


def _repeated(byte: int, size: int) -> np.unsignedinteger:
    found: np.unsignedinteger = np.frombuffer(bytes([byte] * size), _UNSIGNED[size])[0]
    return found
