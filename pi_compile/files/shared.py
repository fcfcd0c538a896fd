"""Files that other machines write too. On a network file system a handle may go stale (ESTALE).

A handle is stale when another machine has replaced or removed what it stands for. The name, looked up anew, leads to
what is there now. So everything here is tried again, a bounded number of times.
"""

import errno
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
PAUSES = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0)
"""Seconds before each further try. A server that is gone for longer is an error."""


def is_stale(error: BaseException) -> bool:
    """Whether an operation failed because of a stale handle."""
    return isinstance(error, OSError) and error.errno == errno.ESTALE


def tried_again(operation: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The operation, tried again while a handle is stale. It must be one that may be begun anew."""

    @wraps(operation)
    def persistent(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        for pause in PAUSES:
            try:
                return operation(*args, **kwargs)
            except OSError as error:
                if not is_stale(error):
                    raise
            time.sleep(pause)
        return operation(*args, **kwargs)

    return persistent


@tried_again
def exists(path: Path) -> bool:
    """Whether something is there."""
    return path.exists()


@tried_again
def names_in(folder: Path) -> list[str]:
    """The names in a folder; none if there is no such folder."""
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


@tried_again
def read(path: Path) -> str | None:
    """The text of a file; None if there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


@tried_again
def make(path: Path, text: str) -> bool:
    """Make a file that only one can make. False where it is there, or its folder is gone."""
    try:
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                path.unlink(missing_ok=True)  # without its text it would be nobody's
                raise
    except (FileExistsError, FileNotFoundError):
        return False
    return True


@tried_again
def replace(path: Path, text: str) -> None:
    """Put a file in its place, whole; its folder is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


@tried_again
def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    path.unlink(missing_ok=True)
