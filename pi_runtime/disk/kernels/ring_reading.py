"""Compiled reading by io_uring: one thread keeps many reads under way, where `reading.serve` keeps one.

The thread and the system share two rings in memory: one for reads that are wanted, one for those that have ended. One
system call hands over the former and waits for some of the latter, which takes a third of the processor's time that a
call for each read takes.

Shape letters: D reads under way.
"""

from typing import NamedTuple

import numpy as np
from numba import carray

from pi_runtime.disk.kernels.c_calls import call_syscall, load_acquire
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
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import Ints, pointer_of

# What `Ring.control` holds: the descriptor, the address of C's `syscall`, then addresses and masks of the rings.
RING_FD, SYSCALL, WANTED_TAIL, WANTED_MASK, WANTED, ENDED_HEAD, ENDED_TAIL, ENDED_MASK, ENDED = range(9)
ENTER = 426
"""The system call's number, on every processor."""
_GET_EVENTS = 1
_READ = 22
_WANTED_WORDS, _ENDED_WORDS = 8, 2
_WAITED_SHARE = 4
"""One in so many of the reads under way is waited for at once: waking for each one would take as long as reading it."""
_EAGAIN, _EBUSY = 11, 16
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
def _want(s: Shared, ring: Ring, place: int, buffer: int) -> None:
    """Ask for the rest of the request in a place."""
    control, request_5, done = ring.control, request_of(s, ring.code_D[place]), ring.done_D[place]
    tail_1 = carray(pointer_of(control[WANTED_TAIL]), (1,), np.uint32)
    tail = np.int64(tail_1[0])
    entry = control[WANTED] + 8 * _WANTED_WORDS * (tail & control[WANTED_MASK])
    entry_8 = carray(pointer_of(entry), (_WANTED_WORDS,), np.int64)
    entry_8[:] = 0
    entry_8[0] = s.control[FD] << 32 | _READ
    entry_8[1] = request_5[OFFSET] + done
    entry_8[2] = target_of(s, ring.code_D[place], buffer) + done
    entry_8[3] = request_5[LENGTH] - done
    entry_8[4] = place
    tail_1[0] = np.uint32((tail + 1) & _ALL_ONES)


@device
def _enter(s: Shared, ring: Ring, wanted: int, least: int) -> int:
    """Hand over so many reads and wait until at least some have ended; returns 0 or an errno."""
    control = ring.control
    while True:
        taken = call_syscall(control[SYSCALL], ENTER, control[RING_FD], wanted, least, _GET_EVENTS)
        if taken >= wanted:
            return 0
        if taken >= 0:
            wanted -= taken
        else:
            error = last_error(s)
            if error not in (EINTR, _EAGAIN, _EBUSY):
                return error


@device
def _ended(s: Shared, ring: Ring, place: int, found: int) -> tuple[bool, int]:
    """Take notice of a read that found so many bytes, or minus an errno: is the request done, and with which error."""
    if found < 0:
        again = -found == EINTR or -found == _EAGAIN
        return not again, 0 if again else -found
    request_5 = request_of(s, ring.code_D[place])
    done, error = advance(s.control, ring.done_D[place], found, request_5[NEEDED])
    ring.done_D[place] = done
    if error == 0 and done >= request_5[NEEDED]:
        count_read(s.control, done)
        return True, 0
    return error == END_OF_FILE, error


@public
def serve_ring(s: Shared, ring: Ring, buffers: int, buffer_nbytes: int) -> None:
    """Work off requests, each place with a buffer of its own, until `reading.STOP` is set."""
    control, busy, wanted = ring.control, 0, 0
    head_1 = carray(pointer_of(control[ENDED_HEAD]), (1,), np.uint32)
    while True:
        while busy < ring.free_D.shape[0]:
            code, place = take(s), ring.free_D[busy]
            if code < 0:
                break
            if has_failed(s, code):
                finish(s, code, 0, buffers + place * buffer_nbytes)
                continue
            ring.code_D[place], ring.done_D[place] = code, 0
            _want(s, ring, place, buffers + place * buffer_nbytes)
            busy, wanted = busy + 1, wanted + 1
        if busy == 0:
            if not wait_for_work(s):
                return
            continue
        refused = _enter(s, ring, wanted, max(1, busy // _WAITED_SHARE))
        wanted = 0
        if refused != 0:
            for place in ring.free_D[:busy]:
                finish(s, ring.code_D[place], refused, buffers)
            _refuse_all(s, refused)
            return
        head, tail = np.int64(head_1[0]), load_acquire(control[ENDED_TAIL])
        while head != tail:
            entry = control[ENDED] + 8 * _ENDED_WORDS * (head & control[ENDED_MASK])
            entry_2 = carray(pointer_of(entry), (_ENDED_WORDS,), np.int64)
            place, found = entry_2[0], np.int64(np.int32(entry_2[1] & _ALL_ONES))
            head = (head + 1) & _ALL_ONES
            is_done, error = _ended(s, ring, place, found)
            if is_done:
                finish(s, ring.code_D[place], error, buffers + place * buffer_nbytes)
                busy -= 1
                _free(ring, place, busy)
            else:
                _want(s, ring, place, buffers + place * buffer_nbytes)
                wanted += 1
        head_1[0] = np.uint32(head)


@device
def _refuse_all(s: Shared, error: int) -> None:
    """Note an error for all requests to come: what the ring still has under way may end at any time."""
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
