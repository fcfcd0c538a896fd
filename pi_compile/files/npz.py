"""Named arrays in one `.npz` file (NumPy's own container), written whole or not at all, checked when read."""

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
    """Write a file; the same arrays give the same bytes, because NumPy gives every entry the same date."""
    with Replacement(path) as new:
        (np.savez_compressed if compressed else np.savez)(new.file, **arrays)  # type: ignore[arg-type]
        new.publish()


def read_arrays(path: Path, prefix: str = "") -> dict[str, npt.NDArray[Any]]:
    """Read all arrays whose names start with `prefix`.

    Raises FileNotFoundError where there is no file, ProfileError where it is damaged or of another kind.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files if name.startswith(prefix)}
    except FileNotFoundError:
        raise
    # RuntimeError: a flipped bit may make a ZIP file encrypted, or one of a later version.
    except (OSError, ValueError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ProfileError(
            f"{path}: not a whole .npz file", found=error, remedy="remove it and make it again"
        ) from None
