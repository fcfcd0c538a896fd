"""Reading the JSON files of a checkpoint, with a remedy for those that cannot be read."""

import json
from pathlib import Path
from typing import Any

from pi_compile.errors import CheckpointError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises CheckpointError if the file cannot be read or holds something else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON", found=error, remedy=remedy_for(path)) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object", found=type(value).__name__)
    return value


def remedy_for(path: Path) -> str:
    """What to do about a file of a checkpoint that cannot be read."""
    try:
        with path.open("rb") as file:
            pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        pointer = False
    if pointer:
        return "this is a Git LFS pointer, not the file: run `git lfs pull` in the checkpoint's folder"
    return "the file is damaged or was not fetched whole: fetch it again"
