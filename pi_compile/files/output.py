"""Output files of commands: checked before hours of work go into them, written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pi_compile.files.shared import tried_again
from pi_runtime.errors import DoesNotFitError, PiError, Setting, UsageError, write_error
from pi_runtime.files import Replacement

_FIRST_ENTRY = b"embedding/c/0/0"
"""The name of an artifact's first entry, which is among its first bytes."""
_FIRST_BYTES = 128
_WRITING = ("I/O error", "inline_container", "os error", "iostream")
"""In the messages of safetensors and torch about files that they cannot write."""


def check_output(path: Path, name: str = "output") -> None:
    """Check that the file of a setting can be written. Raises UsageError for a folder, a missing or a read-only one."""
    folder = Path(os.path.realpath(path)).parent
    if path.is_dir():
        remedy = Setting(name, path / "NAME")
        raise UsageError("is a folder", setting=Setting(name, path), expected="a file to write", remedy=remedy)
    if not folder.is_dir():
        raise UsageError(f"no folder {folder}", setting=Setting(name, path), remedy="create it, or name another output")
    if not os.access(folder, os.W_OK):
        raise UsageError(
            f"no permission to write in {folder}", setting=Setting(name, path), remedy="name an output elsewhere"
        )


def artifact_path(recipe: Path, output: Path | None) -> Path:
    """The checked path of an artifact: `output`, or the recipe's name with `.pi` in the working folder.

    Raises UsageError like `check_output`, and for an existing file that is no artifact: only artifacts are replaced.
    """
    path = Path(recipe.stem + ".pi") if output is None else output
    check_replaced(path, _FIRST_ENTRY, "an artifact")
    return path


def check_replaced(path: Path, mark: bytes, kind: str) -> None:
    """Check the path of an output of a kind ("a report"), whose files have a mark among their first bytes.

    Another file is never replaced. Raises UsageError for it, and as `check_output` does.
    """
    check_output(path)
    if path.exists() and not _holds(path, mark):
        raise UsageError(
            f"exists and is no {kind.rsplit(maxsplit=1)[-1]}",
            setting=Setting("output", path),
            expected=f"a new file, or {kind} to replace",
            remedy="name another output, or remove the file",
        )


def write_text(path: Path, text: str) -> None:
    """Write a text file. Raises DoesNotFitError where there is no room for it, UsageError where the system refuses."""
    try:
        _replace(path, text.encode())
    except OSError as error:
        raise write_error(path, error) from None


@tried_again
def _replace(path: Path, data: bytes) -> None:
    with Replacement(path) as out:
        out.write(data)
        out.publish()


@contextmanager
def library_writes(path: Path) -> Iterator[None]:
    """Turn what torch and safetensors raise where they cannot write into errors in the user's terms.

    Both lose the number of the system's error: DoesNotFitError where their message names a full disk, else UsageError.
    """
    try:
        yield
    except Exception as error:  # safetensors' class is a bare Exception, torch's RuntimeError
        message = str(error)
        if isinstance(error, OSError | PiError) or not any(mark in message for mark in _WRITING):
            raise
        if "No space left" in message:
            raise DoesNotFitError(f"{path}: the disk is full", remedy="make room there; what is done is kept") from None
        raise UsageError(
            f"{path}: cannot be written", found=message[:200], remedy="see whether the disk is full or failing"
        ) from None


def _holds(path: Path, mark: bytes) -> bool:
    """Whether a file has the mark among its first bytes, or is empty."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_FIRST_BYTES)
    return not head or mark in head
