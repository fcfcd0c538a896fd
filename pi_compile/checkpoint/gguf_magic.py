"""Which files are GGUF files: known by their first bytes, because a cache may name a file by its digest."""

from pathlib import Path

SUFFIX = ".gguf"
MAGICS = MAGIC, POWERINFER_MAGIC = b"GGUF", b"PWRI"
"""The first bytes, of llama.cpp's files and of PowerInfer's."""
_VERSION_BYTES = 4
"""Bytes of the version behind them, a small number."""


def is_gguf(path: Path) -> bool:
    """Whether a file begins like a GGUF file, or is at least named like one, so that its faults are looked for."""
    if not path.is_file():
        return False
    if path.suffix == SUFFIX:
        return True
    try:
        with path.open("rb") as file:
            head = file.read(len(MAGIC) + _VERSION_BYTES)
    except OSError:  # a folder may have other files that are not for everybody
        return False
    return head.startswith(MAGICS) and 0 in head[len(MAGIC) :]  # a text may begin with the same letters
