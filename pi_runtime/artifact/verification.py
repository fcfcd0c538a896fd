"""Verification: whether every byte of an artifact is what was written."""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

from pi_runtime.artifact.layout import CHUNK, DIGEST_NBYTES, combine, workers
from pi_runtime.artifact.reader import open_file
from pi_runtime.artifact.records import Entry
from pi_runtime.artifact.structure import Structure, damaged, read_structure
from pi_runtime.errors import ArtifactError


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """Result of `verify` for an artifact that is undamaged."""

    path: Path
    nbytes: int
    digest: str
    """Digest of the file, as its end record has it."""
    arrays: int
    files: int


def verify(path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Read the file once and check every byte against structure, checksums and digests.

    `progress` is called with bytes done and bytes in total. Raises ArtifactError naming each damaged part.
    """
    path = Path(path)
    with open_file(path) as file:
        structure = read_structure(file, path)
        parts = _parts(structure)
        digest = _sweep(file, path, structure.nbytes - DIGEST_NBYTES, parts, progress or (lambda _done, _total: None))
    wrong = [part.name for part in parts if not part.whole]
    if digest != structure.digest:
        # The structure has been compared byte by byte and each part hashed: what is left is the digest's own text.
        wrong = wrong or ["the digest in the end record"]
    if wrong:
        raise ArtifactError(f"{path}: damaged in {len(wrong)} parts", found=_shortened(wrong))
    manifest = structure.manifest
    return VerifyReport(
        path=path, nbytes=structure.nbytes, digest=digest, arrays=len(manifest.arrays), files=len(manifest.files)
    )


class _Part:
    """One array or plain file: its expected checksums, and those of its bytes so far."""

    def __init__(self, name: str, entry: Entry, sha256: str) -> None:
        self.name, self.start, self.end = name, entry.data, entry.data + entry.size
        self._crc, self._expected, self._sha256 = 0, (entry.crc, sha256), hashlib.sha256()

    def update(self, data: memoryview) -> None:
        self._crc = crc32(data, self._crc)
        self._sha256.update(data)

    @property
    def whole(self) -> bool:
        return (self._crc, self._sha256.hexdigest()) == self._expected


def _parts(structure: Structure) -> list[_Part]:
    """The parts of an artifact, in the order of the file."""
    arrays, files = structure.manifest.arrays, structure.manifest.files
    return [
        *(_Part(f"array {name}", entry, arrays[name].sha256) for name, entry in structure.arrays.items()),
        *(_Part(f"file {name}", entry, files[name].sha256) for name, entry in structure.files.items()),
    ]


def _sweep(file: BinaryIO, path: Path, nbytes: int, parts: list[_Part], progress: Callable[[int, int], None]) -> str:
    """Feed the first `nbytes` bytes to the parts, and return their digest.

    A pool hashes chunks in any order; one thread hashes the parts in file order. A few chunks are under way at once.
    """
    chunks: list[Future[bytes]] = []
    underway: deque[Future[None]] = deque()
    with ThreadPoolExecutor(workers()) as pool, ThreadPoolExecutor(1) as lane:
        rest = deque(parts)
        for offset, chunk in _chunks(file, path, nbytes):
            chunks.append(pool.submit(_sha256, chunk))
            underway.append(lane.submit(_feed, rest, offset, chunk))
            if len(underway) > workers():
                underway.popleft().result()
                chunks[-len(underway) - 1].result()
            progress(offset + len(chunk), nbytes)
        for fed in underway:
            fed.result()
        return combine(chunk.result() for chunk in chunks)


def _chunks(file: BinaryIO, path: Path, nbytes: int) -> Iterator[tuple[int, memoryview]]:
    file.seek(0)
    for offset in range(0, nbytes, CHUNK):
        chunk = file.read(min(CHUNK, nbytes - offset))
        if len(chunk) != min(CHUNK, nbytes - offset):
            raise damaged(path, f"byte {offset + len(chunk):,}", found="the file became shorter while it was read")
        yield offset, memoryview(chunk)


def _sha256(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def _feed(rest: deque[_Part], offset: int, chunk: memoryview) -> None:
    """Give each part its bytes of a chunk; `rest` has the parts that end behind the chunk's beginning."""
    end = offset + len(chunk)
    while rest and rest[0].start < end:
        part = rest[0]
        part.update(chunk[max(0, part.start - offset) : part.end - offset])
        if part.end > end:
            return
        rest.popleft()


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(names[:20]) + more
