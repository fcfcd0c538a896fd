"""Compiled reading: worker loops, requests that are sorted and merged, and waiting for them.

A *batch* is a list of requests that are waited for together. A request reads consecutive bytes of the file into its
worker's own buffer, then copies the wanted rows to their places; where all of it is for one aligned place, it reads
straight to there. Workers that a semaphore wakes take requests from a ring until it is empty. Everything is numbers in
memory (`Shared`), so the loops need neither Python nor its lock. What several threads read and write has an order
(`atomics`): `HEAD`, `TAIL`, `STOP`, and a batch's `PENDING` and `ERROR`.

Shape letters: N batches, Q requests, K copies, R places of the ring, I rows.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import carray

from pi_runtime.disk.kernels.c_calls import call_c
from pi_runtime.kernels.codegen.intrinsics import atomic_add, atomic_replace, load_acquire, store_release
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.data.matrix_view import Ints, address_of, pointer_of

WOKEN = 4, 2
"""Workers that a batch wakes, and that each of these wakes while there are requests: waking all takes long."""
SEMAPHORE_NBYTES = 64
"""More than any C library's semaphore takes, and a cache line, so that two do not share one."""
# What `Shared.control` holds.
PREAD, SEM_WAIT, SEM_POST, SEM_TIMEDWAIT, ERRNO, ADVISE, CLOCK, COPY, FD, DIRECT, ALIGN, GAP, MOST = range(13)
STOP, HEAD, TAIL, BYTES, READS = range(13, 18)
# What a row of `Shared.batch_N4` holds: requests that are not done, an error, and where in the file the first one was.
PENDING, ERROR, ERROR_AT = range(3)
# What a row of `Shared.request_NQ5` holds. The last `NEEDED` bytes may lie behind the end of the file.
OFFSET, LENGTH, NEEDED, FIRST_COPY, COPIES = range(5)
# What a row of `Shared.copy_NK3` holds.
SOURCE, TARGET, NBYTES = range(3)
END_OF_FILE = -1
"""Stands for an errno: the file ended before the rows did."""
DONE, WOKEN_EARLY, LATER, INTERRUPTED = range(4)
"""How waiting ended."""
EINTR = 4
_DONT_NEED = 4


class Shared(NamedTuple):
    """What the workers and those who ask them share."""

    control: Ints
    ring_R: Ints
    batch_N4: Ints
    request_NQ5: Ints
    copy_NK3: Ints
    filled_N2: Ints
    """Requests and copies of a batch that is not submitted yet."""
    semaphores: npt.NDArray[np.uint8]
    """One for work, then one for each batch."""


@device
def _place(numbers: Ints, index: int) -> int:
    """The address of a number."""
    return int(address_of(numbers) + 8 * index)


@device
def last_error(s: Shared) -> int:
    """The `errno` of this thread."""
    place = call_c(s.control[ERRNO], 0, 0, 0, 0)
    return int(carray(pointer_of(place), (1,), np.int32)[0])


@device
def _semaphore(s: Shared, number: int) -> int:
    return int(address_of(s.semaphores) + number * SEMAPHORE_NBYTES)


@device
def _low(result: int) -> int:
    """The `int` in the lower half of a result."""
    return int(np.int32(result & 0xFFFFFFFF))


@device
def advance(control: Ints, done: int, found: int, needed: int) -> tuple[int, int]:
    """How much of a range there is after a read that found so many bytes; and 0, or `END_OF_FILE`."""
    done += found
    if done < needed and control[DIRECT] != 0:  # goes on where a direct read may begin
        done = done // control[ALIGN] * control[ALIGN]
        if found < control[ALIGN]:
            return done, END_OF_FILE
    return done, END_OF_FILE if found == 0 else 0


@device
def count_read(control: Ints, nbytes: int) -> None:
    """Count one read."""
    atomic_add(_place(control, BYTES), nbytes)
    atomic_add(_place(control, READS), 1)


@device
def _read_once(s: Shared, offset: int, length: int, needed: int, buffer: int) -> int:
    """Read a range of the file into a buffer; returns 0, an errno, or `END_OF_FILE`."""
    control, done = s.control, 0
    while done < needed:
        found = call_c(control[PREAD], control[FD], buffer + done, length - done, offset + done)
        if found < 0:
            error = last_error(s)
            if error != EINTR:
                return error
        else:
            done, error = advance(control, done, found, needed)
            if error != 0:
                return error
    count_read(control, done)
    if control[DIRECT] == 0:
        call_c(control[ADVISE], control[FD], offset, length, _DONT_NEED)
    return 0


@device
def wait_for_work(s: Shared) -> bool:
    """Sleep until a batch is submitted; False where the thread has to return instead."""
    while _low(call_c(s.control[SEM_WAIT], _semaphore(s, 0), 0, 0, 0)) != 0:
        pass  # a signal came
    return load_acquire(_place(s.control, STOP)) == 0


@public
def serve(s: Shared, buffer: int) -> None:
    """Work off requests with a buffer of one's own, until `STOP` is set."""
    control = s.control
    while wait_for_work(s):
        there = load_acquire(_place(control, TAIL)) - load_acquire(_place(control, HEAD))
        for _ in range(min(WOKEN[1], there - 1)):
            call_c(control[SEM_POST], _semaphore(s, 0), 0, 0, 0)
        code = take(s)
        while code >= 0:
            _serve_one(s, code, buffer)
            code = take(s)


@device
def take(s: Shared) -> int:
    """The next request, as batch · 2³² + number, or −1 where there is none."""
    head_place, tail_place = _place(s.control, HEAD), _place(s.control, TAIL)
    head = load_acquire(head_place)
    while head < load_acquire(tail_place):
        code = s.ring_R[head % s.ring_R.shape[0]]
        if atomic_replace(head_place, head, head + 1):
            return int(code)
        head = load_acquire(head_place)
    return -1


@device
def request_of(s: Shared, code: int) -> Ints:
    """What a request asks for."""
    return s.request_NQ5[code >> 32, code & 0xFFFFFFFF]


@device
def target_of(s: Shared, code: int, buffer: int) -> int:
    """Where a request reads to: the place of its only row where that may be read to straight, else the buffer."""
    request_5 = request_of(s, code)
    only_3 = s.copy_NK3[code >> 32, request_5[FIRST_COPY]]
    straight = request_5[COPIES] == 1 and only_3[NBYTES] == request_5[LENGTH]
    straight &= s.control[DIRECT] != 0 and only_3[TARGET] % s.control[ALIGN] == 0
    return int(only_3[TARGET] if straight else buffer)


@device
def has_failed(s: Shared, code: int) -> bool:
    """Whether another request of the same batch has failed."""
    return load_acquire(_place(s.batch_N4[code >> 32], ERROR)) != 0


@device
def finish(s: Shared, code: int, error: int, buffer: int) -> None:
    """Bring what a request has read to its places, or note its error; the last one of a batch wakes who waits."""
    batch_4, request_5 = s.batch_N4[code >> 32], request_of(s, code)
    if error != 0:
        if atomic_replace(_place(batch_4, ERROR), 0, error):
            batch_4[ERROR_AT] = request_5[OFFSET]
    elif not has_failed(s, code) and target_of(s, code, buffer) == buffer:
        _copy_rows(s.control[COPY], s.copy_NK3[code >> 32], request_5[FIRST_COPY], request_5[COPIES], buffer)
    if atomic_add(_place(batch_4, PENDING), -1) == 1:
        call_c(s.control[SEM_POST], _semaphore(s, 1 + (code >> 32)), 0, 0, 0)


@device
def _serve_one(s: Shared, code: int, buffer: int) -> None:
    request_5, error = request_of(s, code), 0
    if not has_failed(s, code):
        to = target_of(s, code, buffer)
        error = _read_once(s, request_5[OFFSET], request_5[LENGTH], request_5[NEEDED], to)
    finish(s, code, error, buffer)


@device
def _copy_rows(memcpy: int, copy_K3: Ints, first: int, copies: int, buffer: int) -> None:
    for k in range(first, first + copies):
        call_c(memcpy, copy_K3[k, TARGET], buffer + copy_K3[k, SOURCE], copy_K3[k, NBYTES], 0)


@public
def submit(s: Shared, batch: int, workers: int) -> None:
    """Hand what was appended to a batch to the workers, if anything was, and wake some of them."""
    control, requests = s.control, s.filled_N2[batch, 0]
    if requests == 0:
        return
    s.filled_N2[batch] = 0
    s.batch_N4[batch, PENDING], s.batch_N4[batch, ERROR] = requests, 0
    tail = control[TAIL]  # only the thread that submits writes it
    for n in range(requests):
        s.ring_R[(tail + n) % s.ring_R.shape[0]] = batch << 32 | n
    store_release(_place(control, TAIL), tail + requests)
    for _ in range(min(requests, workers, WOKEN[0])):
        call_c(control[SEM_POST], _semaphore(s, 0), 0, 0, 0)


@public
def pending(place: int) -> int:
    """Requests of a batch that are not done, by the address of the number. At 0 all that was read is seen."""
    return load_acquire(place)


@public
def wait(s: Shared, batch: int, nanoseconds: int) -> int:
    """Wait for a batch that was submitted; returns `DONE`, `LATER` after so long, or `INTERRUPTED` by a signal.

    The count decides: a semaphore may be left from an earlier batch, whose waiting Ctrl-C ended (`WOKEN_EARLY`).
    """
    control, time_2 = s.control, np.empty(2, np.int64)
    call_c(control[CLOCK], 0, address_of(time_2), 0, 0)
    time_2[1] += nanoseconds
    time_2[0] += time_2[1] // 1_000_000_000
    time_2[1] %= 1_000_000_000
    if _low(call_c(control[SEM_TIMEDWAIT], _semaphore(s, 1 + batch), address_of(time_2), 0, 0)) == 0:
        return WOKEN_EARLY if load_acquire(_place(s.batch_N4[batch], PENDING)) > 0 else DONE
    return INTERRUPTED if last_error(s) == EINTR else LATER


@public
def stop(s: Shared, workers: int) -> None:
    """Let the workers return."""
    store_release(_place(s.control, STOP), 1)
    for _ in range(workers):
        call_c(s.control[SEM_POST], _semaphore(s, 0), 0, 0, 0)


@public
def add_rows(
    s: Shared, batch: int, row_I: Ints, slot_I: Ints, offset: int, nbytes: int, target: int, slot_nbytes: int
) -> None:
    """Append reads of ascending rows to a batch.

    Row i lies at `offset` + i · `nbytes` of the file, and goes to `target` + slot · `slot_nbytes`. Rows with at
    most `control[GAP]` bytes between them are read together, up to `control[MOST]` bytes, or one row, at once.
    """
    request_Q5, copy_K3, align = s.request_NQ5[batch], s.copy_NK3[batch], s.control[ALIGN]
    gap, most = s.control[GAP], max(s.control[MOST], nbytes)
    requests, copies = s.filled_N2[batch, 0], s.filled_N2[batch, 1]
    n, behind = 0, 0
    while n < row_I.shape[0]:
        at = offset + row_I[n] * nbytes
        begin = at // align * align
        if n == 0 or at > behind + gap or at + nbytes - request_Q5[requests - 1, OFFSET] > most:
            request_Q5[requests, OFFSET], request_Q5[requests, FIRST_COPY] = begin, copies
            request_Q5[requests, COPIES] = 0
            requests += 1
        request_5 = request_Q5[requests - 1]
        behind = at + nbytes
        request_5[NEEDED] = behind - request_5[OFFSET]
        request_5[LENGTH] = (request_5[NEEDED] + align - 1) // align * align
        source, to = at - request_5[OFFSET], target + slot_I[n] * slot_nbytes
        last = copies - 1
        joined = request_5[COPIES] > 0 and copy_K3[last, SOURCE] + copy_K3[last, NBYTES] == source
        if joined and copy_K3[last, TARGET] + copy_K3[last, NBYTES] == to:
            copy_K3[last, NBYTES] += nbytes
        else:
            copy_K3[copies, SOURCE], copy_K3[copies, TARGET], copy_K3[copies, NBYTES] = source, to, nbytes
            copies += 1
            request_5[COPIES] += 1
        n += 1
    s.filled_N2[batch, 0], s.filled_N2[batch, 1] = requests, copies
