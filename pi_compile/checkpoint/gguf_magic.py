"""Which files are GGUF files: known by their first bytes, because a cache may name a file by its digest."""

from pathlib import Path

SUFFIX = ".gguf"
MAGICS = MAGIC, POWERINFER_MAGIC = b"GGUF", b"PWRI"
"""The first bytes, of llama.cpp's files and of PowerInfer's."""


def is_gguf(path: Path) -> bool:
    """Whether a file begins like a GGUF file, or is at least named like one, so that its faults are looked for."""
    if not path.is_file():
        return False
    if path.suffix == SUFFIX:
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) in MAGICS
