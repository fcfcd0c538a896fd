"""Named arrays in one `.npz` file (NumPy's own container), written whole or not at all, checked when read."""

import struct
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_compile.errors import ProfileError
from pi_compile.files.shared import is_stale, tried_again
from pi_runtime.files import Replacement

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
