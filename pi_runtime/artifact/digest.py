"""The digest of a whole file, defined so that it can be computed in parallel.

digest(data) = sha256( sha256(data[0 : 4 MiB]) ‖ sha256(data[4 MiB : 8 MiB]) ‖ … )        the last piece may be shorter
"""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

CHUNK = 4 << 20


def combine(chunk_digests: Iterable[bytes]) -> str:
    """The digest of a file from the sha256 of its chunks, as 64 hexadecimal digits."""
    return hashlib.sha256(b"".join(chunk_digests)).hexdigest()


def workers() -> int:
    """Number of threads that hash; hashlib releases the GIL."""
    return min(4, os.cpu_count() or 1)


class GrowingDigest:
    """Digest of a file that is being written: threads read back and hash the chunks that will not change any more.

    Reading back costs little: the bytes were just written and lie in the page cache.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._next = path, 0
        self._pool = ThreadPoolExecutor(workers(), thread_name_prefix="pi-digest")
        self._chunks: list[Future[bytes]] = []

    def advance(self, final: int) -> None:
        """Hash the whole chunks of the bytes [0, final), which will not change any more."""
        while self._next + CHUNK <= final:
            self._submit(CHUNK)

    def finish(self, nbytes: int) -> str:
        """The digest of the first `nbytes` bytes. Raises OSError where they cannot be read."""
        self.advance(nbytes)
        if self._next < nbytes:
            self._submit(nbytes - self._next)
        return combine(chunk.result() for chunk in self._chunks)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, nbytes: int) -> None:
        self._chunks.append(self._pool.submit(_hash_piece, self._path, self._next, nbytes))
        self._next += nbytes


def _hash_piece(path: Path, offset: int, nbytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(nbytes)
    if len(data) != nbytes:
        raise OSError(f"{path} became shorter while it was written")
    return hashlib.sha256(data).digest()
