"""Compiled reading by io_uring: one thread keeps many reads under way, where `reading.serve` keeps one.

The thread and the system share two rings in memory: one for reads that are wanted, one for those that have ended. One
system call hands over the former and waits for some of the latter, which takes a third of the processor's time that a
call for each read takes.

A read that the system has taken may write to its place until it has ended, whatever else goes wrong. So a request is
finished when its read has ended, or is taken back before the system took it. Where the system has no room (EAGAIN,
EBUSY) the thread takes notice of what has ended, naps, and tries again. After `MOST_NAPS` in vain, or another error, it
hands over nothing more, waits for what is under way, and refuses all requests to come.

Shape letters: D reads under way.
"""

from typing import NamedTuple

import numpy as np
from numba import carray

from pi_runtime.disk.kernels.c_calls import call_c, call_syscall
from pi_runtime.disk.kernels.reading import (
    EINTR,
    END_OF_FILE,
    FD,
    LENGTH,
    NEEDED,
    OFFSET,
    Shared,
    advance,
    count_read,
    finish,
    has_failed,
    last_error,
    request_of,
    take,
    target_of,
    wait_for_work,
)
from pi_runtime.kernels.codegen.intrinsics import load_acquire_32, store_release_32
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import Ints, pointer_of

# What `Ring.control` holds: the descriptor, the addresses of C's `syscall` and `usleep`, then addresses and masks of
# the rings.
RING_FD, SYSCALL, USLEEP, WANTED_HEAD, WANTED_TAIL, WANTED_MASK, WANTED = range(7)
ENDED_HEAD, ENDED_TAIL, ENDED_MASK, ENDED = range(7, 11)
CONTROL_NUMBERS = 11
ENTER = 426
"""The system call's number, on every processor."""
MOST_NAPS = 10_000
"""So many naps in a row without a read that ended, some ten seconds, and the system counts as one that refuses."""
_NAP_MICROSECONDS = 1000
_GET_EVENTS = 1
_READ = 22
_WANTED_WORDS, _ENDED_WORDS = 8, 2
_WAITED_SHARE = 4
"""One in so many of the reads under way is waited for at once: waking for each one would take as long as reading it."""
EAGAIN, EBUSY = 11, 16
_ALL_ONES = 0xFFFFFFFF
"""Positions in the rings have 32 bits."""


class Ring(NamedTuple):
    """What a thread and the system share, and the thread's own notes."""

    control: Ints
    code_D: Ints
    """The request in each place, as `reading.take` names it."""
    done_D: Ints
    """Bytes of it that are there."""
    free_D: Ints
    """The places: first those that are taken, then those that are free."""


@device
def _entry(ring: Ring, position: int) -> Ints:
    """An entry of the ring of reads that are wanted."""
    entry = ring.control[WANTED] + 8 * _WANTED_WORDS * (position & ring.control[WANTED_MASK])
    return carray(pointer_of(entry), (_WANTED_WORDS,), np.int64)


@device
def _want(s: Shared, ring: Ring, place: int, buffer: int) -> None:
    """Ask for the rest of the request in a place."""
    request_5, done = request_of(s, ring.code_D[place]), ring.done_D[place]
    tail = load_acquire_32(ring.control[WANTED_TAIL])
    entry_8 = _entry(ring, tail)
    entry_8[:] = 0
    entry_8[0] = s.control[FD] << 32 | _READ
    entry_8[1] = request_5[OFFSET] + done
    entry_8[2] = target_of(s, ring.code_D[place], buffer) + done
    entry_8[3] = request_5[LENGTH] - done
    entry_8[4] = place
    store_release_32(ring.control[WANTED_TAIL], tail + 1)


@device
def _hand_over(s: Shared, ring: Ring, least: int) -> int:
    """Hand over the reads that are wanted, and wait until at least some have ended; returns 0 or an errno.

    The system may take fewer of them, and then does not wait. Its own count says how many.
    """
    control = ring.control
    wanted = (load_acquire_32(control[WANTED_TAIL]) - load_acquire_32(control[WANTED_HEAD])) & _ALL_ONES
    if call_syscall(control[SYSCALL], ENTER, control[RING_FD], wanted, least, _GET_EVENTS) >= 0:
        return 0
    error = last_error(s)
    return 0 if error == EINTR else error


@device
def _take_back(s: Shared, ring: Ring, busy: int, error: int) -> int:
    """Finish the requests whose reads the system has not taken, with an error; returns how many places are taken."""
    head, tail = load_acquire_32(ring.control[WANTED_HEAD]), load_acquire_32(ring.control[WANTED_TAIL])
    store_release_32(ring.control[WANTED_TAIL], head)
    while head != tail:
        place = _entry(ring, head)[4]
        finish(s, ring.code_D[place], error, 0)
        busy -= 1
        _free(ring, place, busy)
        head = (head + 1) & _ALL_ONES
    return busy


@device
def _ended(s: Shared, ring: Ring, place: int, found: int) -> tuple[bool, int]:
    """Take notice of a read that found so many bytes, or minus an errno: is the request done, and with which error."""
    if found < 0:
        again = -found == EINTR or -found == EAGAIN
        return not again, 0 if again else -found
    request_5 = request_of(s, ring.code_D[place])
    done, error = advance(s.control, ring.done_D[place], found, request_5[NEEDED])
    ring.done_D[place] = done
    if error == 0 and done >= request_5[NEEDED]:
        count_read(s.control, done)
        return True, 0
    return error == END_OF_FILE, error


@device
def _reap(s: Shared, ring: Ring, busy: int, refused: int, buffers: int, buffer_nbytes: int) -> tuple[int, int]:
    """Take notice of all reads that have ended, and ask for what is missing of them, or give it up where `refused`.

    Returns how many places are taken, and how many reads came forward.
    """
    control, moved = ring.control, 0
    head, tail = load_acquire_32(control[ENDED_HEAD]), load_acquire_32(control[ENDED_TAIL])
    while head != tail:
        entry = control[ENDED] + 8 * _ENDED_WORDS * (head & control[ENDED_MASK])
        entry_2 = carray(pointer_of(entry), (_ENDED_WORDS,), np.int64)
        place, found = entry_2[0], np.int64(np.int32(entry_2[1] & _ALL_ONES))
        head = (head + 1) & _ALL_ONES
        buffer = buffers + place * buffer_nbytes
        is_done, error = _ended(s, ring, place, found)
        moved += 1 if is_done or found > 0 else 0
        if is_done or refused != 0:
            finish(s, ring.code_D[place], error if is_done else refused, buffer)
            busy -= 1
            _free(ring, place, busy)
        else:
            _want(s, ring, place, buffer)
    store_release_32(control[ENDED_HEAD], head)
    return busy, moved


@device
def _take_requests(s: Shared, ring: Ring, busy: int, buffers: int, buffer_nbytes: int) -> int:
    """Ask for the reads of as many requests as there are, and places; returns how many places are taken."""
    while busy < ring.free_D.shape[0]:
        code, place = take(s), ring.free_D[busy]
        if code < 0:
            break
        buffer = buffers + place * buffer_nbytes
        if has_failed(s, code):
            finish(s, code, 0, buffer)
            continue
        ring.code_D[place], ring.done_D[place] = code, 0
        _want(s, ring, place, buffer)
        busy += 1
    return busy


@public
def serve_ring(s: Shared, ring: Ring, buffers: int, buffer_nbytes: int) -> None:
    """Work off requests, each place with a buffer of its own, until `reading.STOP` is set and none is under way."""
    busy, naps, refused = 0, 0, 0
    while True:
        if refused == 0:
            busy = _take_requests(s, ring, busy, buffers, buffer_nbytes)
        if busy == 0:
            if refused != 0:
                break
            if not wait_for_work(s):
                return
            continue
        error = _hand_over(s, ring, max(1, busy // _WAITED_SHARE)) if refused == 0 else 0
        busy, moved = _reap(s, ring, busy, refused, buffers, buffer_nbytes)
        if moved > 0:
            naps = 0
        else:
            call_c(ring.control[USLEEP], _NAP_MICROSECONDS, 0, 0, 0)
            naps += 1
        if refused == 0 and ((error != 0 and error != EAGAIN and error != EBUSY) or naps >= MOST_NAPS):  # noqa: PLR1714
            refused = error if error != 0 else EAGAIN
            busy = _take_back(s, ring, busy, refused)
    _refuse_all(s, refused)


@device
def _refuse_all(s: Shared, error: int) -> None:
    """Note an error for all requests to come."""
    code = take(s)
    while code >= 0 or wait_for_work(s):
        if code >= 0:
            finish(s, code, error, 0)
        code = take(s)


@device
def _free(ring: Ring, place: int, busy: int) -> None:
    """Put a place behind the `busy` ones that are still taken."""
    at = 0
    while ring.free_D[at] != place:
        at += 1
    ring.free_D[at], ring.free_D[busy] = ring.free_D[busy], place
