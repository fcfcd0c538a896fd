"""A memory cgroup, which counts the page cache too, and files that are dropped from the page cache."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class NoGroupError(RuntimeError):
    """No memory cgroup can be made here; the message says why."""


class MemoryGroup:
    """A cgroup whose processes, with the pages of files that they read, have a limit of memory."""

    def __init__(self, folder: Path, limit_name: str) -> None:
        self._folder, self._limit_name = folder, limit_name

    def limit(self, nbytes: int) -> None:
        """Set the limit; what is left of earlier processes is dropped first."""
        for name in ("memory.force_empty", "memory.reclaim"):
            with suppress(OSError):
                (self._folder / name).write_text("0" if name == "memory.force_empty" else str(1 << 40))
        (self._folder / self._limit_name).write_text(str(nbytes))

    def add(self, pid: int) -> None:
        """Put a process into the group: what it takes from now on counts."""
        (self._folder / "cgroup.procs").write_text(str(pid))


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A group that is removed at the end. Raises NoGroupError where none can be made."""
    parent, name = (_ROOT / "memory", "memory.limit_in_bytes") if (_ROOT / "memory").is_dir() else (_ROOT, "memory.max")
    folder = parent / f"pi-bench-{os.getpid()}"
    try:
        folder.mkdir()
        if not (folder / name).exists():
            folder.rmdir()
            raise NoGroupError(f"{folder / name} does not exist: the memory controller is off")
    except OSError as error:
        raise NoGroupError(f"{folder}: {error.strerror}") from None
    try:
        yield MemoryGroup(folder, name)
    finally:
        with suppress(OSError):
            folder.rmdir()


def evict(path: Path) -> None:
    """Drop a file's pages from the page cache, so that they are charged to who reads them next."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
