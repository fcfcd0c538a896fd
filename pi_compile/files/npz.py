"""Named arrays in one `.npz` file, NumPy's own container: written whole or not at all, checked when read."""

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_compile.errors import ProfileError
from pi_runtime.artifact.replacement import Replacement

Arrays = Mapping[str, npt.NDArray[Any]]


def write_arrays(path: Path, arrays: Arrays, *, compressed: bool = False) -> None:
    """The same arrays make the same bytes: NumPy gives every entry the same date."""
    with Replacement(path) as new:
        (np.savez_compressed if compressed else np.savez)(new.file, **arrays)  # type: ignore[arg-type]
        new.publish()


def read_arrays(path: Path, start: str = "") -> dict[str, npt.NDArray[Any]]:
    """All arrays of a file whose names start so.

    Raises ProfileError where it is damaged or something else, FileNotFoundError without it.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files if name.startswith(start)}
    except FileNotFoundError:
        raise
    # A flipped bit of a ZIP may make it encrypted or of a later version: RuntimeError.
    except (OSError, ValueError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ProfileError(
            f"{path}: not a whole .npz file", found=error, remedy="remove it and make it again"
        ) from None
