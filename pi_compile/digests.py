"""sha256 of what stages read."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np


def token_digest(tokens: np.ndarray[Any, Any]) -> str:
    """Of token ids, whatever integers hold them."""
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes()).hexdigest()


def file_digest(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
