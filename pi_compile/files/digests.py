"""sha256 of files and of plain values."""

import hashlib
import json
from pathlib import Path


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(value: object) -> str:
    """sha256 of a plain value's JSON with sorted keys, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
