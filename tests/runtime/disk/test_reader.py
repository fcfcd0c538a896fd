"""Reads come whole and to their places; every fault of a file or a disk is a clear error, never a hang."""

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
from hypothesis import given, settings
from hypothesis import strategies as st

from pi_runtime.disk.reader import Reader, page_aligned
from pi_runtime.errors import ArtifactError

ROWS, NBYTES, OFFSET = 300, 700, 1234
PREAD = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, use_errno=True
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.bin"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, OFFSET + ROWS * NBYTES, np.uint8).tobytes())
    return path


def stored(path: Path, row: int) -> np.ndarray:
    return np.frombuffer(path.read_bytes(), np.uint8)[OFFSET + row * NBYTES :][:NBYTES]


def read(reader: Reader, rows: list[int], memory: np.ndarray, batch: int = 0) -> None:
    """Read rows to the slots 0, 1, 2, …"""
    row_I, slot_I = np.array(rows, np.int64), np.arange(len(rows))
    reader.add_rows(batch, row_I, slot_I, OFFSET, NBYTES, memory.ctypes.data)
    reader.submit(batch)
    reader.wait(batch)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    rows=st.sets(st.integers(0, ROWS - 1), min_size=1),
    direct=st.booleans(),
    ring=st.booleans(),
    gap=st.sampled_from([0, 700, 8192]),
)
def test_rows_come_whole(path: Path, rows: set[int], direct: bool, ring: bool, gap: int) -> None:
    reader = Reader(path, ROWS, workers=3, direct=direct, ring=ring, gap=gap)
    memory = np.zeros((len(rows), NBYTES), np.uint8)
    try:
        read(reader, sorted(rows), memory)
    finally:
        reader.close()
    np.testing.assert_array_equal(memory, [stored(path, row) for row in sorted(rows)])


def test_a_range(path: Path) -> None:
    reader, memory = Reader(path, 2, workers=2), np.zeros(ROWS * NBYTES, np.uint8)
    reader.read_range(OFFSET, len(memory), memory.ctypes.data)
    reader.close()
    np.testing.assert_array_equal(memory, np.frombuffer(path.read_bytes(), np.uint8)[OFFSET:])


def faulty(fault: Callable[[Any, int], int | None]) -> Any:
    """A `pread` in which `fault(real, calls)` may answer in place of the real one, which it gets ready to call."""
    libc, calls = ctypes.CDLL(None, use_errno=True), [0]
    libc.pread.restype, libc.pread.argtypes = ctypes.c_ssize_t, PREAD._argtypes_  # type: ignore[attr-defined]

    def pread(fd: int, buffer: int, count: int, offset: int) -> int:
        calls[0] += 1
        answer = fault(lambda n: int(libc.pread(fd, buffer, min(n, count), offset)), calls[0])
        return int(libc.pread(fd, buffer, count, offset)) if answer is None else answer

    return PREAD(pread)


def failing(code: int) -> Callable[[Any, int], int]:
    def fault(_real: Any, _calls: int) -> int:
        ctypes.set_errno(code)
        return -1

    return fault


@pytest.fixture
def open_with(path: Path) -> Iterator[Callable[..., Reader]]:
    opened, kept = [], []

    def open_with(fault: Callable[[Any, int], int | None], **settings: Any) -> Reader:
        kept.append(faulty(fault))
        address = ctypes.cast(kept[-1], ctypes.c_void_p).value
        opened.append(Reader(path, ROWS, workers=2, pread=address, **settings))
        return opened[-1]

    yield open_with
    for reader in opened:
        reader.close()


def test_an_error_of_the_device(open_with: Callable[..., Reader]) -> None:
    reader, memory = open_with(failing(errno.EIO)), np.zeros((3, NBYTES), np.uint8)
    with pytest.raises(ArtifactError, match="cannot be read at byte") as found:
        read(reader, [0, 50, 100], memory)
    assert found.value.found == os.strerror(errno.EIO)


def test_interrupted_reads_are_repeated_and_short_ones_go_on(path: Path, open_with: Callable[..., Reader]) -> None:
    def fault(real: Any, calls: int) -> int | None:
        if calls % 3 == 1:
            ctypes.set_errno(errno.EINTR)
            return -1
        return int(real(512)) if calls % 3 == 2 else None

    reader, memory = open_with(fault), np.zeros((3, NBYTES), np.uint8)
    read(reader, [0, 1, 299], memory)
    np.testing.assert_array_equal(memory, [stored(path, row) for row in (0, 1, 299)])


def test_a_file_that_ends_early(open_with: Callable[..., Reader]) -> None:
    reader = open_with(lambda _real, _calls: 0)
    with pytest.raises(ArtifactError, match="ends too early"):
        read(reader, [5], np.zeros((1, NBYTES), np.uint8))


def test_a_disk_that_stalls(open_with: Callable[..., Reader]) -> None:
    def fault(_real: Any, _calls: int) -> None:
        assert gate.wait(60)

    gate, reader, memory = threading.Event(), open_with(fault, stall_seconds=0.3), np.zeros((1, NBYTES), np.uint8)
    with pytest.raises(ArtifactError, match="does not answer"):
        read(reader, [5], memory)
    gate.set()
    while reader.is_pending(0):
        time.sleep(0.001)
    reader.drain()  # it came after all


def test_a_fault_is_forgotten_with_its_batch(path: Path, open_with: Callable[..., Reader]) -> None:
    reader = open_with(lambda _real, calls: failing(errno.EIO)(_real, calls) if calls == 1 else None)
    memory = np.zeros((1, NBYTES), np.uint8)
    with pytest.raises(ArtifactError):
        read(reader, [7], memory)
    read(reader, [7], memory)
    np.testing.assert_array_equal(memory[0], stored(path, 7))


def test_a_file_system_without_direct_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(name: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real(name, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    reader, memory = Reader(path, ROWS, workers=1), np.zeros((1, NBYTES), np.uint8)
    read(reader, [9], memory)
    reader.close()
    assert not reader.direct
    np.testing.assert_array_equal(memory[0], stored(path, 9))


def test_a_file_that_changes(tmp_path: Path) -> None:
    path = tmp_path / "rows.bin"
    path.write_bytes(bytes(OFFSET + ROWS * NBYTES))
    reader = Reader(path, ROWS, workers=1)
    reader.check_unchanged()
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ArtifactError, match="was changed while it was in use"):
        reader.check_unchanged()
    with pytest.raises(ArtifactError, match="ends too early"):
        read(reader, [200], np.zeros((1, NBYTES), np.uint8))
    reader.close()


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such file"):
        Reader(tmp_path / "none", 1)


def test_memory_for_rows_may_have_huge_pages() -> None:
    memory = page_aligned(8 << 20)
    address, flags = memory.ctypes.data, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif first == "VmFlags:" and inside:
            flags = rest
    assert "hg" in flags.split()
    assert "sh" not in flags.split()
