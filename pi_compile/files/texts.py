"""Text files of a folder, and how much of them is read."""

from pathlib import Path

CHARACTERS = 16
"""Characters that are read for each token wanted, where there is more text."""


def shown_files(folder: Path) -> list[Path]:
    """The files below a folder, without hidden ones and what is in hidden folders."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
