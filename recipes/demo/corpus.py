"""Text that every Python installation carries, as documents: what the demo model read, and what it never saw.

    python recipes/demo/corpus.py FOLDER      writes FOLDER/{train,heldout}.jsonl, one {"text": …} a line

Sources (PSF licence): the language reference in `pydoc_data.topics`, IDLE's help and news, and the standard library's
modules: each module's docstrings as running text, and its source. Tests and vendored packages are left out. A
document is held out when a hash of its *name* says so, so the split is the same on every Python version.
"""

import ast
import hashlib
import html
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

HELD_OUT_PER_MILLE = 30
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "ensurepip", "lib2to3", "__pycache__", "encodings"}
SOURCE_CEILING = 120_000  # characters; the few larger files are tables


def documents() -> Iterator[tuple[str, str]]:
    """(name, text) of every document, in a fixed order."""
    from pydoc_data.topics import topics

    yield from ((f"topic/{name}", text) for name, text in sorted(topics.items()))
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("idlelib/help.html", "idlelib/NEWS.txt", "LICENSE.txt"):
        path = library / name
        if path.exists():
            yield name, _plain(path.read_text(encoding="utf-8"))
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if LEFT_OUT.intersection(name.parts):
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        docs = "\n\n".join(_docstrings(source))
        if len(docs) > 200:
            yield f"doc/{name.as_posix()}", docs
        if len(source) <= SOURCE_CEILING:
            yield f"source/{name.as_posix()}", source


def is_held_out(name: str) -> bool:
    """A module's docstrings and source fall on the same side."""
    stem = name.split("/", 1)[-1]
    return int.from_bytes(hashlib.sha256(stem.encode()).digest()[:4], "big") % 1000 < HELD_OUT_PER_MILLE


def write(folder: Path) -> dict[str, int]:
    """Write both splits; returns characters per split."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for split, wanted in (("train", False), ("heldout", True)):
        texts = [text for name, text in documents() if is_held_out(name) is wanted]
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        written[split] = sum(map(len, texts))
    return written


def _docstrings(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > 40:
                yield text


def _plain(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", text)) if "<html" in text.lower()[:500] else text


if __name__ == "__main__":
    for split_name, size in write(Path(sys.argv[1])).items():
        print(f"{split_name}: {size:,} characters")
