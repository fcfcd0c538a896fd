"""Every file that is bundled and is no code stands in NOTICE.md, with its licence."""

import re
from pathlib import Path, PurePosixPath

from support.paths import ROOT

CODE = {".py", ".typed", ".pyc"}


def bundled_files() -> list[str]:
    """What a wheel holds beside code, by its paths in a clone."""
    folders = [ROOT / name for name in ("pi_runtime", "pi_compile", "profiles", "recipes")]
    files = [path.relative_to(ROOT) for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in files if path.suffix not in CODE and not _ignored(path)]


def _ignored(path: Path) -> bool:
    return ".pi-build" in path.parts or path.suffix == ".pi"


def rows() -> list[list[str]]:
    """The table's rows: pattern, what, from, licence."""
    text = (ROOT / "NOTICE.md").read_text(encoding="utf-8")
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]


def test_every_bundled_file_is_in_one_row() -> None:
    patterns = [re.fullmatch(r"`(.+)`", row[0])[1] for row in rows()]  # type: ignore[index]
    found = {name: [p for p in patterns if PurePosixPath("/", name).match(f"/{p}")] for name in bundled_files()}
    assert len(found) > 70
    assert {name: matching for name, matching in found.items() if len(matching) != 1} == {}
    unused = set(patterns) - {pattern for matching in found.values() for pattern in matching}
    assert unused == set()


def test_every_row_says_all() -> None:
    assert all(len(row) == 4 and all(row) for row in rows())
