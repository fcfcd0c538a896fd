"""How a file is known that is open for long: a mapped artifact, or one of which rows are read.

A file that is replaced as it should be, by renaming a new one over it, stays as it was for those who have it open.
"""

import os
from pathlib import Path

from pi_runtime.errors import ArtifactError


class FileIdentity:
    """What an open file was when it was opened: its size and the time of its last change. Looking costs a microsecond.

    What is written through a mapping, or twice within the resolution of the file system's clock, may not be seen.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self._path, self._found = path, _found(fd)

    def check(self, fd: int) -> None:
        """Raise ArtifactError where the open file is no longer what it was."""
        if _found(fd) != self._found:
            raise ArtifactError(
                f"{self._path}: was changed while it was in use",
                remedy="load it again; to replace an artifact, write a new file and rename it",
            )


def _found(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns
