"""Files that are read and written whole, and the data that comes with the project.

Some are files that other machines write too. On a network file system a handle may go stale (ESTALE), when another
machine has replaced or removed what it stands for. The name, looked up anew, leads to what is there now. So what
workers share is tried again, a bounded number of times.

Output files of commands are checked before hours of work go into them, and written whole or not at all. Named arrays
are in one `.npz` file (NumPy's own container), checked when it is read.
"""

import errno
import hashlib
import json
import os
import struct
import time
import tokenize
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib.resources import files
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from pi_compile.errors import ProfileError
from pi_runtime.errors import DoesNotFitError, PiError, Setting, UsageError, write_error
from pi_runtime.files import Replacement


def bundled_folder(folder: str = "") -> Path:
    """A folder of that data by its path in a clone, such as `profiles/machines` or `recipes/demo`."""
    package = Path(str(files("pi_compile")))
    installed = package / "bundled"
    return (installed if installed.is_dir() else package.parent) / folder


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(value: object) -> str:
    """sha256 of a plain value's JSON with sorted keys, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def parse_toml(text: str, **options: Any) -> dict[str, Any]:
    """The tables of a TOML file, whose integers have 64 bits. Raises ValueError for anything else."""
    try:
        data = tomllib.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        is_path = "Unescaped" in str(error) or "hex value" in str(error)  # as "C:\\models" is read
        raise ValueError(f"{error}{'; write a path with /, or in single quotes' if is_path else ''}") from None
    level: list[Any] = [data]
    while level:
        if any(isinstance(node, int) and not -(2**63) <= node < 2**63 for node in level):
            raise ValueError("an integer of more than 64 bits")
        level = [child for node in level for child in _children(node)]
    return data


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


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


Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
_MAGIC = b"PK"
"""With which a ZIP file begins."""
_REMEDY = "remove it and make it again"


@tried_again
def write_arrays(path: Path, arrays: Arrays, *, compressed: bool = False) -> None:
    """Write a file; the same arrays give the same bytes, because NumPy gives every entry the same date."""
    with Replacement(path) as new:
        (np.savez_compressed if compressed else np.savez)(new.file, **arrays)  # type: ignore[arg-type]
        new.publish()


def write_array_stream(path: Path, arrays: Iterable[tuple[str, Array]]) -> None:
    """Write the bytes that `write_arrays` writes, with one array in memory."""
    with Replacement(path) as new:
        with zipfile.ZipFile(new.file, "w") as file:
            for name, array in arrays:
                # An entry by its name alone has the first date that ZIP knows, as NumPy's have.
                with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)
        new.publish()


@tried_again
def read_arrays(
    path: Path, prefix: str = "", names: Collection[str] | None = None, most: int | None = None
) -> dict[str, Array]:
    """Read all arrays whose names start with `prefix`, or those of `names`, of `most` bytes each.

    Raises FileNotFoundError where there is no file, ProfileError where it is damaged or of another kind.
    """
    with _whole(path), path.open("rb") as file:
        if file.read(len(_MAGIC)) not in (_MAGIC, b""):
            raise ProfileError(f"{path}: not an .npz file", remedy="name a file that pi-compile wrote")
        file.seek(0)
        with np.load(file, allow_pickle=False) as stored:
            found = [n for n in stored.files if (n.startswith(prefix) if names is None else n in names)]
            # A small file may be unpacked to a large one.
            wanted = [entry for entry in stored.zip.infolist() if entry.filename.removesuffix(".npy") in found]
            if most is not None and any(entry.file_size > most for entry in wanted):
                raise ValueError(f"an array of more than {most:,} bytes")
            arrays = {name: stored[name] for name in found}
    if wrong := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
        # NumPy gives the bytes of what is none.
        raise ProfileError(f"{path}: not a whole .npz file", found=f"{wrong[0]} is no array", remedy=_REMEDY)
    return arrays


@tried_again
def check_arrays(path: Path) -> None:
    """Read a file to its end, keeping nothing. Raises what `read_arrays` raises."""
    with _whole(path), zipfile.ZipFile(path) as file:
        damaged = file.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged} is damaged")


@contextmanager
def contents(path: Path, kind: str) -> Iterator[None]:
    """Take what cannot be understood of a file's arrays, a file that is not there too, for one that is no `kind`."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProfileError(f"{path}: not {kind}", found=error, remedy=_REMEDY) from None


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    # A flipped bit may make a ZIP file encrypted (RuntimeError), an array larger than memory (MemoryError), or its
    # header no Python (SyntaxError, TokenError).
    except (
        *(OSError, ValueError, TypeError, EOFError, RuntimeError, MemoryError, OverflowError, SyntaxError),
        *(KeyError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
    ) as error:
        if is_stale(error):  # not of this file
            raise
        raise ProfileError(f"{path}: not a whole .npz file", found=error, remedy=_REMEDY) from None
