"""A file that appears whole or not at all: written beside its target under a hidden name, then moved over it.

The hidden file is `.NAME.PID-N.tmp`; N is random, because processes on two machines may have the same PID. Its writer
holds an exclusive flock on it for as long as it lives, so the next writer of the same target can tell what a killed one
left behind (lock free: removed) from a live one's (lock held: left alone). Windows has no flock, but refuses to remove
a file that someone has open, which comes to the same.
"""

import errno
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from secrets import randbits
from typing import Any, Self

if sys.platform != "win32":
    import fcntl

TEXT = (".txt", ".md", ".raw")
"""Endings of files of text."""
CHARACTERS = 16
"""Characters of text that are read for each token wanted, where there is more: about four times as many as it has."""

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)

_HIDDEN = re.compile(r"\.(.+)\.\d+-\d+\.tmp", re.DOTALL)


class WholeFile(io.FileIO):
    """A file whose `write` writes all: libraries that are given one do not ask how much a write has written."""

    def write(self, data: Any) -> int:
        """Write all of `data`, as many calls of the system as that takes."""
        rest = memoryview(data).cast("B")
        nbytes = len(rest)
        while rest:
            rest = rest[os.write(self.fileno(), rest) :]
        return nbytes


class Replacement:
    """A new file on its way to `target`. Everything may raise OSError; whatever happens, `target` is old or new.

    `mode`: who may do what with it, less what the process's umask takes away.
    """

    def __init__(self, target: Path, mode: int = 0o666) -> None:
        self.target = Path(os.path.realpath(target))  # a link keeps pointing to what it points to
        with suppress(OSError):  # a folder that cannot be listed may still be written to
            remove_unfinished(self.target.parent, self.target.name)
        self.path, fd = _create(self.target, mode)
        self.file = WholeFile(fd, "r+")
        self._pending = True

    def write(self, data: bytes | memoryview) -> None:
        """Write all of `data` at the file's position."""
        self.file.write(data)

    def publish(self) -> None:
        """Bring the bytes to the disk and move the file to its target."""
        os.fsync(self.file.fileno())
        if sys.platform == "win32":
            self.file.close()  # an open file cannot be moved there
        self.path.replace(self.target)
        self._pending = False
        self.file.close()  # only now: the lock guards the hidden name
        _sync_folder(self.target.parent)

    def discard(self) -> None:
        """Remove the hidden file; nothing if it has been published."""
        if sys.platform == "win32":
            self.file.close()
        if self._pending:
            self._pending = False
            with suppress(OSError):  # the next writer of this target will remove it
                self.path.unlink()
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def shown_files(folder: Path) -> list[Path]:
    """The files below a folder, sorted; not hidden ones, such as a file on its way, nor what is in hidden folders."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


@contextmanager
def locked(target: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Keep other processes of this machine from making `target` at the same time; `waits` is called where one does.

    Without locks (Windows, some network file systems) several may make it; each makes it whole.
    """
    path = target.with_name(f".{target.name}.lock")
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(fd, wait=False)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                waits()
                _lock(fd, wait=True)
        if os.fstat(fd).st_nlink:
            break
        os.close(fd)  # its holder has just removed it
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(fd)


def hold(mark: Path) -> None:
    """Tell other processes of this machine, until this one ends, that what `mark` stands for is in use.

    The file is made and touched. Without locks nothing is told. Raises OSError where it cannot be made.
    """
    while True:
        fd = os.open(mark, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)  # stays open
        os.utime(mark)
        if sys.platform == "win32":
            os.close(fd)  # an open file cannot be removed there
            return
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink:
            return
        os.close(fd)  # who removes what is not in use was quicker


@contextmanager
def unused(mark: Path) -> Iterator[bool]:
    """Whether no process holds `mark`; none begins to while this lasts."""
    try:
        fd = os.open(mark, os.O_RDWR | os.O_CREAT, 0o666)  # one that nobody ever held, somebody may begin to
    except OSError:  # it is another's
        yield True
        return
    try:
        _lock(fd, wait=False)
    except OSError as error:
        yield error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    else:
        yield True
    finally:
        os.close(fd)


def remove_unfinished(folder: Path, name: str | None = None) -> None:
    """Remove the hidden files that killed writers left in a folder: of a file of this name, or of all."""
    for path in folder.iterdir():
        found = _HIDDEN.fullmatch(path.name)
        if found and name in (None, found[1]) and path.is_file() and not path.is_symlink():
            with suppress(OSError):  # gone meanwhile, locked, or not ours to remove
                _remove_unlocked(path)


def user_cache() -> Path:
    """Where packed models and the like are kept: `$PI_CACHE_DIR`, else a folder in the user's cache folder.

    Raises RuntimeError for a user without a home.
    """
    if named := os.environ.get("PI_CACHE_DIR"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pi-runtime"


def _create(target: Path, mode: int) -> tuple[Path, int]:
    for n in count(randbits(48)):
        path = target.with_name(f".{target.name}.{os.getpid()}-{n}.tmp")
        try:
            fd = os.open(path, _FLAGS, mode)
        except FileExistsError:
            continue
        with suppress(OSError):  # a file system without locks: others will leave the file alone
            _lock(fd, wait=True)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)  # another writer took the file for a stale one between the two calls
    raise AssertionError


def _lock(fd: int, *, wait: bool) -> None:
    """Take the lock on an open file. Raises OSError where another has it, and where there are no locks."""
    if sys.platform != "win32":
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _remove_unlocked(path: Path) -> None:
    if sys.platform == "win32":
        path.unlink()
    else:
        with path.open("rb") as file:
            _lock(file.fileno(), wait=False)
            if os.fstat(file.fileno()).st_nlink:  # else another writer was quicker, and the name may be a new file's
                path.unlink()


def _sync_folder(folder: Path) -> None:
    if sys.platform != "win32":
        fd = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # some network file systems cannot
                os.fsync(fd)
        finally:
            os.close(fd)
