"""Files a command is told to write: checked before hours of work go into them, written whole or not at all."""

import os
from pathlib import Path

from pi_runtime.artifact.replacement import Replacement
from pi_runtime.errors import UsageError

_FIRST_ENTRY = b"embedding/c/0/0"
"""Name of an artifact's first entry, which stands in its first bytes."""

_LOOKED_AT = 128
PAGE_MARK = '<meta name="generator" content="pi-compile report">'
"""Stands in the first bytes of a report page."""


def check_output(path: Path) -> None:
    """Raises UsageError where no file can be written: a folder, or in a folder that is not there or not ours."""
    folder = Path(os.path.realpath(path)).parent
    if path.is_dir():
        raise UsageError(f"-o {path}: is a folder", expected="a file to write", remedy=f"-o {path / 'NAME'}")
    if not folder.is_dir():
        raise UsageError(f"-o {path}: no folder {folder}", remedy="create it, or name another output")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"-o {path}: no permission to write in {folder}", remedy="name an output elsewhere")


def artifact_path(recipe: Path, output: Path | None) -> Path:
    """`output`, or the recipe's name with `.pi` in the working folder; checked.

    Raises UsageError as `check_output`, and for an existing file that is no artifact: only artifacts are replaced.
    """
    path = Path(recipe.stem + ".pi") if output is None else output
    check_output(path)
    if path.exists() and not _holds(path, _FIRST_ENTRY):
        raise UsageError(
            f"-o {path}: exists and is no artifact",
            expected="a new file, or an artifact to replace",
            remedy="name another output, or remove the file",
        )
    return path


def check_page(path: Path) -> None:
    """Raises UsageError as `check_output`, and for an existing file that is no report page: only those are replaced."""
    check_output(path)
    if path.exists() and not _holds(path, PAGE_MARK.encode()):
        raise UsageError(
            f"-o {path}: exists and is no report",
            expected="a new file, or a report to replace",
            remedy="name another output, or remove the file",
        )


def write_text(path: Path, text: str) -> None:
    """Write a small file. Raises UsageError where the system refuses."""
    try:
        with Replacement(path) as out:
            out.write(text.encode())
            out.publish()
    except OSError as error:
        raise UsageError(f"-o {path}: cannot be written", found=error.strerror, remedy="name another output") from None


def _holds(path: Path, mark: bytes) -> bool:
    """Whether a file has the mark in its first bytes, or is empty."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_LOOKED_AT)
    return not head or mark in head
