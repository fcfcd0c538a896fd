"""A session in a file: its tokens, and the pages of those that have been computed.

magic, bytes of the header (8, little-endian), header (canonical JSON), tokens (int64), kinds (uint8, 1 with selection),
pages, SHA-256 of all before. Keys and values belong to one model and one way to run it: the header names them.

The pages are those without which the text cannot go on, class after class of layers: of layers with a window only the
last ones. A page may hold more than a session's positions: what other requests or rolled-back tokens left there. Zeros
are written in its place. So a file holds nothing of others, and the same session has the same bytes.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.decoding import canonical_json, decode, parse_json
from pi_runtime.artifact.layer_classes import LayerClass, stored_nbytes
from pi_runtime.errors import InputError, UsageError, write_error
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import PAGE_POSITIONS, first_positions
from pi_runtime.files import Replacement

MAGIC = b"pi-session-1\n"
SIZE = 8
DIGEST = 32
MODE = 0o600
"""A session is what somebody wrote, so it is its owner's alone."""
Page = npt.NDArray[Any]
Pages = Callable[[int, int], Page]
"""The page of a class of layers, by its number, at a place."""


class Sink(Protocol):
    """Something that bytes are written to, all of them."""

    def write(self, data: memoryview, /) -> object:
        """Write bytes, all of them."""


@dataclass(frozen=True)
class _Header:
    """The header of a session file: what wrote it, how many tokens it has, and how many of them have pages."""

    run: Mapping[str, str]
    tokens: int
    held: int


@dataclass(frozen=True)
class StoredSession:
    """What a file holds: all tokens with their kinds, and pages for the first `held` of them."""

    tokens: list[int]
    selected: list[bool]
    held: int
    pages: npt.NDArray[np.uint8]


def write_pages(file: Sink, classes: Sequence[LayerClass], pages: Pages, positions: int) -> int:
    """Write the pages without which a text of so many positions cannot go on; returns the bytes."""
    for kind, of in enumerate(classes):
        for place in of.pages(positions):
            page, held = pages(kind, place), positions - place * PAGE_POSITIONS
            page = page if held >= PAGE_POSITIONS else first_positions(page, held)
            file.write(page.reshape(-1).view(np.uint8).data)
    return stored_nbytes(classes, positions)


def read_pages(file: BinaryIO, cache: KVCache) -> None:
    """Fill the pages of the tokens that a cache began with. Raises OSError for a file that is too short."""
    for table in cache.tables:
        for page in table.pages[: len(table.of.pages(cache.length))]:
            _fill(cache.pool.values(page), file)


def pages_of_cache(cache: KVCache) -> Pages:
    """The pages that a cache holds."""
    runs = cache.runs
    return lambda kind, place: cache.pool.values(runs[kind].pages[place - runs[kind].first])


def pages_of_file(file: BinaryIO, classes: Sequence[LayerClass], positions: int) -> Pages:
    """The pages of so many positions that `write_pages` wrote. Raises OSError for a file that is too short."""

    def page(kind: int, place: int) -> Page:
        of = classes[kind]
        file.seek(stored_nbytes(classes[:kind], positions) + (place - of.first_page(positions)) * of.page.nbytes)
        return _fill(of.page.in_ram(), file)

    return page


def _fill(page: Page, file: BinaryIO) -> Page:
    view = page.reshape(-1).view(np.uint8)
    if file.readinto(view.data) != view.nbytes:  # type: ignore[attr-defined]
        raise OSError("the file ends too early")
    return page


def save(
    path: Path,
    run: Mapping[str, Any],
    text: tuple[list[int], list[bool]],
    held: int,
    classes: Sequence[LayerClass],
    pages: Pages,
) -> None:
    """Write a session whole, or not at all. `run` names the model and how it runs; `pages` hold `held` positions."""
    tokens, selected = text
    header = canonical_json({"run": run, "tokens": len(tokens), "held": held})
    try:
        with Replacement(path, MODE) as new:
            new.write(MAGIC + len(header).to_bytes(SIZE, "little") + header)
            new.write(np.array(tokens, "<i8").tobytes() + np.array(selected, np.uint8).tobytes())
            write_pages(new, classes, pages, held)
            new.file.seek(0)
            new.write(hashlib.file_digest(new.file, "sha256").digest())  # which reads to the end
            new.publish()
    except OSError as error:
        raise write_error(path, error) from None


def load(path: Path, run: Mapping[str, Any], classes: Sequence[LayerClass]) -> StoredSession:
    """Read a session that was saved by the same model, run in the same way.

    Raises InputError for a file that cannot be read, is no session or is damaged, and UsageError where another model,
    or another way to run it, made it.
    """
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise InputError(f"{path}: cannot be read", found=error.strerror) from None
    head = data[: len(MAGIC) + SIZE].tobytes()
    if head[: len(MAGIC)] != MAGIC or len(head) < len(MAGIC) + SIZE:
        raise InputError(f"{path}: not a saved session", expected=MAGIC.decode().strip(), found=repr(head[:12]))
    if hashlib.sha256(data[:-DIGEST].data).digest() != data[-DIGEST:].tobytes():
        raise _damaged(path, "other bytes than those that were saved")
    at = len(head) + int.from_bytes(head[len(MAGIC) :], "little")
    header = _header(path, data[len(head) : at].tobytes())
    differing = [key for key in run if header.run.get(key) != run[key]]
    if differing:
        raise UsageError(
            f"{path}: the session was saved by another model or run: {', '.join(differing)} differ",
            expected=", ".join(f"{key} {run[key]}" for key in differing),
            found=", ".join(f"{key} {header.run.get(key)}" for key in differing),
            remedy="load it with the artifact, mode and cache format that saved it",
        )
    count, held = header.tokens, header.held
    kinds, pages = at + 8 * count, at + 9 * count
    if not 0 <= held <= count or len(data) != pages + stored_nbytes(classes, held) + DIGEST:
        raise _damaged(path, "other numbers of tokens and pages than its header says")
    return StoredSession(
        tokens=np.frombuffer(data[at:kinds].tobytes(), "<i8").tolist(),
        selected=[bool(kind) for kind in data[kinds:pages]],
        held=held,
        pages=data[pages:-DIGEST],
    )


def _header(path: Path, text: bytes) -> _Header:
    problems: list[str] = []
    try:
        header: _Header = decode(_Header, parse_json(text), "header", problems)
    except ValueError as error:
        raise _damaged(path, error) from None
    if problems:
        raise _damaged(path, problems[0])
    return header


def _damaged(path: Path, found: object) -> InputError:
    remedy = "save it again, or begin a new one"
    return InputError(f"{path}: the saved session is damaged", found=found, remedy=remedy)
