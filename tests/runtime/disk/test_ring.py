"""Reads by io_uring: whole at their places, repeated where they are cut short, and clear errors for every fault."""

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi_runtime.disk import ring as ring_module
from pi_runtime.disk.kernels import reading, ring_reading
from pi_runtime.disk.reader import Reader, page_aligned
from pi_runtime.disk.ring import OpenRing
from pi_runtime.errors import ArtifactError

ROWS, NBYTES = 300, 1024
SYSCALL = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_long] * 7, use_errno=True)
USLEEP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)
Enter = Callable[[int], int]
"""`io_uring_enter` for so many reads; returns how many it took, or −1."""

granted = OpenRing.several(1, 1)
for found in granted:
    found.close()
pytestmark = pytest.mark.skipif(not granted, reason="the system refuses io_uring")


@pytest.fixture(scope="module")
def rows_N(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (ROWS, NBYTES), np.uint8)


@pytest.fixture(scope="module")
def path(rows_N: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.bin"
    path.write_bytes(rows_N.tobytes())
    return path


@pytest.fixture
def open_with(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Reader]]:
    """Opens a reader with one ring of some places, for which `fault(reader, enter, wanted)` calls the system.

    In place of each of its naps it calls `nap`.
    """
    opened, kept, libc = [], [], ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype, libc.syscall.argtypes = SYSCALL._restype_, SYSCALL._argtypes_  # type: ignore[attr-defined]

    def open_with(
        fault: Callable[[Reader, Enter, int], int],
        *,
        depth: int = 4,
        nap: Callable[[], object] = lambda: None,
        **settings: Any,
    ) -> Reader:
        def usleep(_microseconds: int) -> int:
            nap()
            return 0

        def syscall(number: int, fd: int, wanted: int, *more: int) -> int:
            return fault(opened[-1], lambda n: int(libc.syscall(number, fd, n, *more)), wanted)

        fakes = {"syscall": SYSCALL(syscall), "usleep": USLEEP(usleep)}
        kept.append(fakes)
        addresses = {name: ctypes.cast(fake, ctypes.c_void_p).value for name, fake in fakes.items()}
        monkeypatch.setattr(ring_module, "c_address", addresses.__getitem__)
        monkeypatch.setattr("pi_runtime.disk.reader.RING_THREADS", 1)
        opened.append(Reader(path, ROWS, workers=depth, gap=0, **settings))
        assert len(opened[-1]._rings) == 1
        return opened[-1]

    yield open_with
    for reader in opened:
        reader.close()


def read(reader: Reader, rows: list[int]) -> np.ndarray:
    memory = page_aligned(len(rows) * NBYTES)[: len(rows) * NBYTES].reshape(-1, NBYTES)
    reader.hold(memory)
    reader.add_rows(0, np.array(rows, np.int64), np.arange(len(rows)), 0, NBYTES, memory.ctypes.data)
    reader.submit(0)
    reader.wait(0)
    return memory


def shorten(reader: Reader, nbytes: int) -> None:
    """Make the read that was last handed over ask for fewer bytes."""
    control = reader._rings[0].shared.control
    tail = ctypes.c_uint32.from_address(int(control[ring_reading.WANTED_TAIL])).value
    entry = int(control[ring_reading.WANTED]) + 64 * ((tail - 1) & int(control[ring_reading.WANTED_MASK]))
    ctypes.c_uint32.from_address(entry + 24).value = nbytes


@pytest.mark.parametrize("depth", [1, 4, 32])
def test_more_reads_than_places(path: Path, rows_N: np.ndarray, depth: int) -> None:
    reader = Reader(path, ROWS, workers=depth, gap=0)
    rows = list(range(0, ROWS, 2))
    for _ in range(20):  # the rings' ends are passed
        np.testing.assert_array_equal(read(reader, rows), rows_N[rows])
    assert (reader.reads, reader.bytes_read) == (20 * len(rows), 20 * len(rows) * NBYTES)
    reader.close()


def test_a_system_that_refuses(path: Path, rows_N: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "_SETUP", 100_000)
    reader = Reader(path, ROWS, workers=4)
    assert reader._rings == []
    np.testing.assert_array_equal(read(reader, [3, 299]), rows_N[[3, 299]])
    reader.close()


def test_rings_that_lack_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    monkeypatch.setattr(ring_module, "_PLAIN_READS", 1 << 31)
    assert OpenRing.several(2, 4) == []
    assert set(Path("/proc/self/fd").iterdir()) <= before


def test_interrupted_calls_are_repeated_and_short_reads_go_on(
    rows_N: np.ndarray, open_with: Callable[..., Reader]
) -> None:
    calls = [0]

    def fault(reader: Reader, enter: Enter, wanted: int) -> int:
        calls[0] += 1
        if calls[0] % 3 == 1:
            ctypes.set_errno(errno.EINTR)
            return -1
        if wanted and calls[0] % 3 == 2:
            shorten(reader, 512)
        return enter(min(wanted, 2))  # the system may take fewer

    reader = open_with(fault)
    np.testing.assert_array_equal(read(reader, [0, 10, 20, 30, 40, 299]), rows_N[[0, 10, 20, 30, 40, 299]])
    assert reader.reads == 6


def test_a_read_that_fails(rows_N: np.ndarray, open_with: Callable[..., Reader]) -> None:
    reader = open_with(lambda _reader, enter, wanted: enter(wanted))
    row_I = np.array([5, 9], np.int64)
    reader.add_rows(0, row_I, np.arange(2), 0, NBYTES, 4096)  # nothing is mapped there
    reader.submit(0)
    with pytest.raises(ArtifactError, match="cannot be read at byte") as found:
        reader.wait(0)
    assert found.value.found == os.strerror(errno.EFAULT)
    np.testing.assert_array_equal(read(reader, [5, 9]), rows_N[[5, 9]])


def test_a_ring_that_breaks(open_with: Callable[..., Reader]) -> None:
    def fault(_reader: Reader, _enter: Enter, _wanted: int) -> int:
        ctypes.set_errno(errno.EBADF)
        return -1

    reader = open_with(fault)
    for _ in range(2):
        with pytest.raises(ArtifactError, match="cannot be read at byte") as found:
            read(reader, [1, 3, 5, 7, 9, 11])
        assert found.value.found == os.strerror(errno.EBADF)


def failed(code: int) -> int:
    ctypes.set_errno(code)
    return -1


def word(reader: Reader, name: int) -> ctypes.c_uint32:
    """A number that a reader's ring and the system share."""
    return ctypes.c_uint32.from_address(int(reader._rings[0].shared.control[name]))


def test_a_ring_that_breaks_while_a_read_is_under_way(open_with: Callable[..., Reader]) -> None:
    """Its slot is not given away before it has ended."""
    unseen, naps = ctypes.c_uint32(0), threading.Semaphore(0)

    def fault(reader: Reader, enter: Enter, _wanted: int) -> int:
        enter(1)  # of two; that it has ended is not seen
        reader._rings[0].shared.control[ring_reading.ENDED_TAIL] = ctypes.addressof(unseen)
        return failed(errno.EBADF)

    reader, memory = open_with(fault, nap=naps.release), page_aligned(2 * NBYTES)
    reader.hold(memory)
    reader.add_rows(0, np.array([4, 9]), np.arange(2), 0, NBYTES, memory.ctypes.data)
    reader.submit(0)
    for _ in range(3):
        assert naps.acquire(timeout=30)
    assert reader.shared.batch_N4[0, reading.PENDING] == 1
    unseen.value = 1
    with pytest.raises(ArtifactError, match="cannot be read at byte") as found:
        reader.wait(0)
    assert found.value.found == os.strerror(errno.EBADF)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY])
def test_a_system_without_room_is_asked_again(code: int, rows_N: np.ndarray, open_with: Callable[..., Reader]) -> None:
    calls, naps = [0], [0]

    def fault(_reader: Reader, enter: Enter, wanted: int) -> int:
        calls[0] += 1
        return failed(code) if calls[0] <= 5 else enter(wanted)

    def nap() -> None:
        naps[0] += 1

    reader = open_with(fault, nap=nap)
    np.testing.assert_array_equal(read(reader, [1, 3, 5]), rows_N[[1, 3, 5]])
    assert naps == [5]


def test_a_system_that_has_no_room_before_ended_reads_are_seen(
    rows_N: np.ndarray, open_with: Callable[..., Reader]
) -> None:
    def fault(reader: Reader, enter: Enter, wanted: int) -> int:
        if wanted:
            enter(wanted)
        if word(reader, ring_reading.ENDED_HEAD).value != word(reader, ring_reading.ENDED_TAIL).value:
            return failed(errno.EBUSY)
        return 0

    reader = open_with(fault, stall_seconds=5)
    np.testing.assert_array_equal(read(reader, list(range(0, 40, 2))), rows_N[0:40:2])


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY])
def test_a_system_that_never_has_room(code: int, open_with: Callable[..., Reader]) -> None:
    calls = [0]

    def fault(_reader: Reader, _enter: Enter, _wanted: int) -> int:
        calls[0] += 1
        return failed(code)

    reader = open_with(fault, stall_seconds=20)
    for _ in range(2):
        with pytest.raises(ArtifactError, match="cannot be read at byte") as found:
            read(reader, [1, 3, 5])
        assert found.value.found == os.strerror(code)
    assert calls == [ring_reading.MOST_NAPS]


def test_reads_that_always_ask_to_be_repeated(open_with: Callable[..., Reader]) -> None:
    def fault(reader: Reader, enter: Enter, wanted: int) -> int:
        taken = enter(wanted)
        head, tail = (word(reader, name).value for name in (ring_reading.ENDED_HEAD, ring_reading.ENDED_TAIL))
        control = reader._rings[0].shared.control
        for position in range(head, tail):
            entry = int(control[ring_reading.ENDED]) + 16 * (position & int(control[ring_reading.ENDED_MASK]))
            ctypes.c_int32.from_address(entry + 8).value = -errno.EAGAIN
        return taken

    reader = open_with(fault, stall_seconds=20)
    with pytest.raises(ArtifactError, match="cannot be read at byte") as found:
        read(reader, [1, 3, 5])
    assert found.value.found == os.strerror(errno.EAGAIN)


def test_a_file_that_ends_early(path: Path, open_with: Callable[..., Reader]) -> None:
    reader = open_with(lambda _reader, enter, wanted: enter(wanted))
    with pytest.raises(ArtifactError, match="ends too early"):
        read(reader, [0, ROWS])
    np.testing.assert_array_equal(read(reader, [0])[0], np.frombuffer(path.read_bytes()[:NBYTES], np.uint8))


def test_a_disk_that_stalls(rows_N: np.ndarray, open_with: Callable[..., Reader]) -> None:
    def fault(_reader: Reader, enter: Enter, wanted: int) -> int:
        assert gate.wait(60)
        return enter(wanted)

    gate, reader = threading.Event(), open_with(fault, stall_seconds=0.3)
    memory = page_aligned(NBYTES)
    reader.hold(memory)
    reader.add_rows(0, np.array([5]), np.zeros(1, np.int64), 0, NBYTES, memory.ctypes.data)
    reader.submit(0)
    with pytest.raises(ArtifactError, match="does not answer"):
        reader.wait(0)
    gate.set()
    while reader.is_pending(0):
        time.sleep(0.001)
    reader.drain()  # it came after all
    np.testing.assert_array_equal(memory[:NBYTES], rows_N[5])
