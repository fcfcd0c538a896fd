"""Reading an artifact: it is checked, then memory-mapped; arrays are views of the file.

A file that is replaced as it should be, by renaming a new one over it, stays as it was for those who have it open. One
that was written over is known by its `FileIdentity`.
"""

import difflib
import hashlib
import mmap
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from pi_runtime.artifact.formats import FORMATS, Array
from pi_runtime.artifact.quantisation import dequantise
from pi_runtime.artifact.schema import Manifest
from pi_runtime.artifact.sizes import scales_name
from pi_runtime.artifact.structure import Structure, damaged, pack_command, read_structure
from pi_runtime.errors import ArtifactError, read_error


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


class Artifact:
    """An artifact on disk, memory-mapped read-only; processes that open the same file share its pages."""

    def __init__(self, path: Path, structure: Structure, mapping: mmap.mmap, fd: int, identity: FileIdentity) -> None:
        self.path = path
        self.manifest: Manifest = structure.manifest
        self.nbytes = structure.nbytes
        self.digest = structure.digest
        self._mapping, self._fd, self._identity = mapping, fd, identity
        self._close_file = weakref.finalize(self, os.close, fd)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Check the structure and map the file. The data is not read (see `verify`).

        Raises ArtifactError: no such file, not an artifact, damaged, of another version.
        """
        path = Path(path)
        with open_file(path) as file:
            identity = FileIdentity(path, file.fileno())
            structure = read_structure(file, path)
            mapping = _mapped(file, structure.nbytes)
            return cls(path, structure, mapping, os.dup(file.fileno()), identity)

    def array(self, name: str) -> Array:
        """The stored array, rows padded: a read-only view of the file. Raises KeyError for a name that is not there."""
        entry = self.manifest.arrays[name]
        fmt = FORMATS[entry.format]
        shape = fmt.stored_shape(entry.shape)
        count = entry.nbytes // fmt.itemsize
        return np.frombuffer(self._mapping, fmt.stored, count, entry.offset).reshape(shape)

    def values(self, name: str) -> Array:
        """The values of an array in its logical shape: float32 for weights, integers for order and counts."""
        entry = self.manifest.arrays[name]
        fmt = FORMATS[entry.format]
        if fmt.quantised:
            return dequantise(fmt, self.array(name), self.array(scales_name(name)), entry.shape[-1])
        return fmt.decode(self.array(name), entry.shape[-1])

    def file(self, name: str) -> bytes:
        """The content of a plain file, compared with its digest. Raises KeyError, or ArtifactError if it is damaged."""
        entry = self.manifest.files[name]
        data = self._mapping[entry.offset : entry.offset + entry.nbytes]
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise damaged(self.path, name, f"sha256 {entry.sha256}", hashlib.sha256(data).hexdigest())
        return data

    def let_go(self) -> None:
        """Give back the memory of pages that were read; they come again from the system's cache."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def check_unchanged(self) -> None:
        """Raise ArtifactError where the open file is no longer as it was when it was opened.

        To be called before and after the arrays are used: what lies behind the end of a file that was cut off cannot be
        read without ending the process, and what was written over it would be taken for the model.
        """
        self._identity.check(self._fd)

    def close(self) -> None:
        """Unmap the file, or leave that to the last array that still views it."""
        self._close_file()
        with suppress(BufferError):
            self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _mapped(file: BinaryIO, nbytes: int) -> mmap.mmap:
    """Map the file into memory, in huge pages where system and file system have them for files.

    Without them, scattered rows of a model of gigabytes wait as long for address translation as for the data.
    """
    mapping = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; an error of the operating system becomes an ArtifactError that says what to do."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            found = "a folder" if stat.S_ISDIR(mode) else "no regular file"
            raise ArtifactError(f"{path}: not an artifact", expected="a .pi file", found=found, remedy=_suggested(path))
        with path.open("rb", buffering=0) as file:
            yield file
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(f"{path}: no such file", remedy=_suggested(path)) from None
    except OSError as error:
        raise read_error(path, error, "see that you may read it, and its disk is sound", ArtifactError) from None


def _suggested(path: Path) -> str:
    """Suggest what the user may have meant: a model with a similar name, or any artifact of a folder that was named."""
    folder = path if path.is_dir() else path.parent
    if (folder / "config.json").is_file() and folder == path:
        return f"this looks like a checkpoint: {pack_command(path)}"
    kinds = ("*.pi",) if path.is_dir() else ("*.pi", "*.gguf")
    there = sorted(other.name for kind in kinds for other in folder.glob(kind)) if folder.is_dir() else []
    best = difflib.get_close_matches(path.name, there, 1, 0 if path.is_dir() else 0.5) or (
        there if path.is_dir() else ()
    )
    if not best:
        return "name an artifact that `pi-compile build` wrote, a GGUF file, a checkpoint or a hub name"
    return f"did you mean {folder / best[0]}?"
