"""The storey on disk of the store of prefixes: pages that memory has no room for, found again by what they hold.

A page's name is the digest of all positions up to its end, each with how it was computed, and of all else that its bits
depend on: artifact, mode, placement, salt, format of the cache, version of the sums. So names tell nothing of a text,
whoever has the text finds its pages, and no others match. Only whole pages are kept.

Files lie side by side in a folder, `RUN-NUMBER.pages`, where RUN is the digest of what all pages of a run have in
common. Each holds some pages that were written together:

    magic, bytes of the header (8, little-endian), header (canonical JSON: the run, the number of pages)
    for each page its name, its class of layers, and the CRC-32 of its bytes; the CRC-32 of all before
    the pages

A file appears whole or not at all. It is removed when the budget is used up, those first that were used longest ago.
Several servers may share a folder, and its one budget. Who may write there is trusted.

A thread writes: `offer` copies a page into its queue, or refuses where that is full. A page in the queue is found too.
"""

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.decoding import canonical_json, decode, parse_json
from pi_runtime.artifact.layer_classes import LayerClass
from pi_runtime.errors import NO_ROOM, Setting, UsageError
from pi_runtime.files import Replacement, locked, remove_unfinished

MAGIC = b"pi-pages-1\n"
ENDING = ".pages"
SIZE, CHECK = 8, 4
NAME = "name"
"""What a run says besides of its model."""
MODE = 0o600
"""Keys and values tell what was written, so they are their owner's alone."""
FILE_NBYTES, QUEUE_NBYTES = 16 << 20, 128 << 20
"""Most bytes of pages in a file, and of those that wait to be written."""
LONGEST_HEADER = 1 << 16
WAIT_S = 1.0
"""Time in which pages gather that are written together."""
LOOK_S = 5.0
"""Time after which a thread that has nothing to write looks for what others have written."""
PAUSE_S = 60.0
"""Time for which nothing is written after an error."""
Page = npt.NDArray[Any]
Name = bytes
ENTRY = np.dtype([("name", "V32"), ("kind", "<u4"), ("crc", "<u4")])


def name_below(name: Name, key: Iterable[int]) -> Name:
    """The name of a page, from that of the page before and its own positions."""
    return blake2b(name + np.array([*key], "<i8").tobytes(), digest_size=32).digest()


class Offered(NamedTuple):
    """A page that is to be written."""

    name: Name
    kind: int
    """Its class of layers."""
    values: Page


class _Place(NamedTuple):
    """Where a page lies."""

    path: Path
    at: int
    crc: int


@dataclass(frozen=True)
class Header:
    """The header of a file of pages."""

    run: Mapping[str, str]
    pages: int


class Damaged(Exception):  # noqa: N818  never leaves this module
    """A file, or a page in it, is not what was written."""


class PageFiles:
    """The pages of one run in a folder, and the thread that writes them.

    `run`: what bits depend on, in words, and the model's name, on which they do not. Only one thread may read; any may
    offer. `say` is told once of what fails.
    """

    def __init__(
        self,
        folder: Path,
        budget: int,
        run: Mapping[str, str],
        classes: Sequence[LayerClass],
        say: Callable[[str], object],
    ) -> None:
        self.folder, self.budget, self._run, self._say = folder, budget, run, say
        self._classes, self._most = classes, max(1, min(FILE_NBYTES, budget // 4))
        least = sum(one.page.nbytes for one in classes)
        if budget < 4 * least:
            raise UsageError(
                "no room for pages", setting=Setting("kv_disk_budget", budget), expected=f"at least {4 * least} bytes"
            )
        bits = {key: value for key, value in run.items() if key != NAME}
        self._digest = blake2b(MAGIC + canonical_json(bits), digest_size=32).digest()
        self._prefix = self._digest.hex()[:16]
        self._places: dict[tuple[Name, int], _Place] = {}
        self._files: dict[Path, list[tuple[Name, int]]] = {}
        self._queue: dict[tuple[Name, int], Page] = {}
        """What is to be written, oldest first."""
        self._queued = 0
        self._said: set[str] = set()
        self._silent_until = 0.0
        self.written = 0
        """Pages that were written."""
        # Guards all of these; `_changed` also says that something was queued, or that this is to end.
        self._changed = threading.Condition(threading.RLock())
        self._ends: float | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(folder / "budget", lambda: None):
                self._make_room(0)
            found = [path.name.startswith(self._prefix) for path in folder.glob(f"*{ENDING}")]
            self._look()
        except OSError as error:
            raise UsageError(
                "no folder for pages", setting=Setting("kv_disk", folder), found=error.strerror, remedy="name another"
            ) from None
        if found and not any(found):
            self._say_once(f"{folder}: what is stored there is of other models or runs, or of another version")
        self._thread = threading.Thread(target=self._write_all, name="pi-pages", daemon=True)
        self._thread.start()

    def root(self, salt: str) -> Name:
        """The name of what stands before all pages of a salt."""
        return blake2b(self._digest + salt.encode(errors="surrogatepass"), digest_size=32).digest()

    def has(self, name: Name, kind: int) -> bool:
        """Whether a page is there, or in the queue."""
        return (name, kind) in self._places or (name, kind) in self._queue

    def offer(self, page: Offered) -> bool:
        """Have a page written, unless it is there; False where the queue is full."""
        with self._changed:
            if self.has(page.name, page.kind):
                return True
            if (self._queued and self._queued + page.values.nbytes > QUEUE_NBYTES) or self._ends is not None:
                return False
            self._queue[page.name, page.kind] = page.values.copy()
            self._queued += page.values.nbytes
            if self._queued >= self._most:
                self._changed.notify_all()
            return True

    def read(self, wanted: Sequence[Offered]) -> bool:
        """Fill pages with what is stored by their names; False where any cannot be read, and is then forgotten."""
        by_file: dict[Path, list[tuple[_Place, Page]]] = {}
        with self._changed:
            for page in wanted:
                queued = self._queue.get((page.name, page.kind))
                if queued is not None:
                    page.values[:] = queued
                elif (place := self._places.get((page.name, page.kind))) is not None:
                    by_file.setdefault(place.path, []).append((place, page.values))
                else:
                    return False
        for path, pages in by_file.items():
            try:
                _read(path, sorted(pages, key=lambda one: one[0].at))
            except FileNotFoundError:  # the budget was used up: perhaps by another server
                self._forget(path)
                return False
            except (OSError, Damaged) as error:
                self._give_up(path, error)
                return False
        return True

    def write(self, pages: Sequence[Offered]) -> bool:
        """Write some pages as one file; False where that fails, which is said once."""
        try:
            path, places = self._written(pages)
        except OSError as error:
            why = NO_ROOM.get(error.errno or 0, error.strerror)
            self._say_once(f"{self.folder}: keys and values are not stored: {why}")
            self._silent_until = time.monotonic() + PAUSE_S
            return False
        with self._changed:
            self._know(path, places)
            self.written += len(pages)
        return True

    @property
    def size(self) -> int:
        """How many pages are there. Any thread may ask."""
        return len(self._places)

    @property
    def most_nbytes(self) -> int:
        """Bytes of pages that one file takes."""
        return self._most

    def close(self, seconds: float) -> None:
        """Write what is queued, as far as that takes no longer, and end the thread."""
        with self._changed:
            self._ends = time.monotonic() + seconds
            self._changed.notify_all()
        self._thread.join()

    # Files.

    def _written(self, pages: Sequence[Offered]) -> tuple[Path, dict[tuple[Name, int], _Place]]:
        """Write a file within the budget; returns where its pages are. Raises OSError."""
        path = self.folder / f"{self._prefix}-{token_hex(8)}{ENDING}"
        table = np.zeros(len(pages), ENTRY)
        for n, page in enumerate(pages):
            table[n] = np.void(page.name), page.kind, zlib.crc32(_bytes(page.values))
        header = canonical_json({"run": self._run, "pages": len(pages)})
        head = MAGIC + len(header).to_bytes(SIZE, "little") + header + table.tobytes()
        head += zlib.crc32(head).to_bytes(CHECK, "little")
        nbytes = len(head) + sum(page.values.nbytes for page in pages)
        with locked(self.folder / "budget", lambda: None):
            self._make_room(nbytes)
            with Replacement(path, MODE) as new:
                new.write(head)
                for page in pages:
                    new.write(_bytes(page.values))
                new.publish()
        places, at = {}, len(head)
        for page, crc in zip(pages, table["crc"].tolist(), strict=True):
            places[page.name, page.kind] = _Place(path, at, crc)
            at += page.values.nbytes
        return path, places

    def _make_room(self, nbytes: int) -> None:
        """Remove files, those first that were used longest ago, until so many bytes fit the budget."""
        remove_unfinished(self.folder)  # nobody else writes now
        found, left = [], self.budget - nbytes
        for path in self.folder.glob(f"*{ENDING}"):
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime_ns, path, status.st_size))
                left -= status.st_size
        for _, path, size in sorted(found):
            if left >= 0:
                return
            path.unlink(missing_ok=True)
            self._forget(path)
            left += size

    def _look(self) -> None:
        """Learn what others have written of this run, and what is gone."""
        found = {*self.folder.glob(f"{self._prefix}-*{ENDING}")}
        for path in self._files.keys() - found:
            self._forget(path)
        for path in found - self._files.keys():
            try:
                places = self._places_of(path)
            except FileNotFoundError:
                continue
            except (OSError, Damaged) as error:
                self._give_up(path, error)
            else:
                with self._changed:
                    self._know(path, places)

    def _places_of(self, path: Path) -> dict[tuple[Name, int], _Place]:
        """Where the pages of a file are. Raises Damaged, and OSError."""
        with path.open("rb") as file:
            header, head = _read_header(file)
            table = file.read(header.pages * ENTRY.itemsize)
            checked = zlib.crc32(head + table).to_bytes(CHECK, "little") == file.read(CHECK)
            if not checked or len(table) != header.pages * ENTRY.itemsize:
                raise Damaged("its table is damaged")
            at, places = file.tell(), {}
            for name, kind, crc in np.frombuffer(table, ENTRY).tolist():
                if kind >= len(self._classes):
                    raise Damaged("its table is damaged")
                places[name, kind] = _Place(path, at, crc)
                at += self._classes[kind].page.nbytes
            if os.fstat(file.fileno()).st_size != at:
                raise Damaged("it has another length than its table says")
        return places

    def _know(self, path: Path, places: Mapping[tuple[Name, int], _Place]) -> None:
        self._places.update(places)
        self._files[path] = [*places]

    def _forget(self, path: Path) -> None:
        with self._changed:
            for name in self._files.pop(path, ()):
                if self._places[name].path == path:
                    del self._places[name]

    def _give_up(self, path: Path, error: Exception) -> None:
        """Do without a file that cannot be used."""
        self._forget(path)
        if isinstance(error, Damaged):
            with suppress(OSError):
                path.unlink()
        why = error.strerror if isinstance(error, OSError) else error
        self._say_once(f"{path}: stored keys and values cannot be used, and are computed again: {why}")

    def _say_once(self, message: str) -> None:
        """Say what fails, once for each kind."""
        kind = message.partition(": ")[2]
        if kind not in self._said:
            self._said.add(kind)
            self._say(message)

    # The thread.

    def _write_all(self) -> None:
        while (batch := self._batch()) is not None:
            if not batch:
                with suppress(OSError):
                    self._look()
                continue
            if time.monotonic() >= self._silent_until:
                self.write(batch)
            with self._changed:
                for page in batch:
                    del self._queue[page.name, page.kind]
                    self._queued -= page.values.nbytes

    def _batch(self) -> list[Offered] | None:
        """The pages to be written next, once there are enough, or some time has gone; None at the end."""
        with self._changed:
            if self._ends is None and not self._queue:
                self._changed.wait(LOOK_S)
            if self._ends is None and 0 < self._queued < self._most:
                self._changed.wait(WAIT_S)
            if self._ends is not None and (not self._queue or time.monotonic() >= self._ends):
                return None
            batch, nbytes = list[Offered](), 0
            for (name, kind), values in self._queue.items():
                nbytes += values.nbytes
                if batch and nbytes > self._most:
                    break
                batch.append(Offered(name, kind, values))
            return batch


@dataclass
class StoredRun:
    """What a folder has of one run."""

    name: str
    """What its files' names begin with."""
    run: Mapping[str, str]
    """What made it, in words; empty where that cannot be read."""
    paths: list[Path]
    nbytes: int = 0
    used_s: float = 0.0
    """When any of it was used last, in seconds since 1970."""


def stored_runs(folder: Path) -> list[StoredRun]:
    """What a folder has, run by run, the one used last first. Raises OSError."""
    found: dict[str, StoredRun] = {}
    for path in folder.glob(f"*-*{ENDING}"):
        with suppress(FileNotFoundError):  # a server removes it
            status, name = path.stat(), path.name.partition("-")[0]
            one = found.setdefault(name, StoredRun(name, {}, []))
            one.paths.append(path)
            one.nbytes += status.st_size
            one.used_s = max(one.used_s, status.st_mtime)
            with suppress(OSError, Damaged), path.open("rb") as file:
                one.run = one.run or _read_header(file)[0].run
    return sorted(found.values(), key=lambda one: -one.used_s)


def _read_header(file: BinaryIO) -> tuple[Header, bytes]:
    """The header of a file of pages, and all bytes up to its end. Raises Damaged, and OSError."""
    start = file.read(len(MAGIC) + SIZE)
    length = int.from_bytes(start[len(MAGIC) :], "little")
    if not start.startswith(MAGIC) or length > LONGEST_HEADER:
        raise Damaged("it does not begin as such a file does")
    text, problems = file.read(length), list[str]()
    try:
        header: Header = decode(Header, parse_json(text), "header", problems)
    except ValueError as error:
        raise Damaged(str(error)) from None
    if problems or header.pages < 0:
        raise Damaged("its header is damaged")
    return header, start + text


def _read(path: Path, pages: Sequence[tuple[_Place, Page]]) -> None:
    """Fill pages from a file, and mark it as used. Raises Damaged, and OSError."""
    with path.open("rb", buffering=0) as file:
        for place, values in pages:
            view = _bytes(values)
            file.seek(place.at)
            if _filled(file, view) != len(view) or zlib.crc32(view) != place.crc:
                raise Damaged("its bytes are not those that were written")
    with suppress(OSError):
        os.utime(path)


def _filled(file: Any, view: memoryview) -> int:
    """Read as many bytes as a view has; returns how many there were."""
    done = 0
    while done < len(view) and (count := file.readinto(view[done:])):
        done += count
    return done


def _bytes(page: Page) -> memoryview:
    return memoryview(page.reshape(-1).view(np.uint8).data)
