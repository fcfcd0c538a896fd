"""A corpus in every Python installation: the documentation of the language and the standard library.

It has the language reference in `pydoc_data.topics`, IDLE's help and news, and the library's modules: of each module
the docstrings as running text, and the source (PSF licence). Tests and vendored packages are left out. A hash of a
document's *name* decides whether it is held out, so that the split is the same with every version of Python.
"""

import ast
import hashlib
import html
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

TRAIN, HELD_OUT = "train", "held out"
HELD_OUT_PER_MILLE = 30
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "ensurepip", "lib2to3", "__pycache__", "encodings"}
MOST_CHARACTERS = 120_000  # of a source file; the few larger files are tables


@dataclass(frozen=True)
class Piece:
    """A topic, a page or a module: what is read together, and held out or not by its name."""

    name: str
    nbytes: int
    """About the size of its documents."""
    documents: Callable[[], Iterator[tuple[str, str]]]
    """Name and text of each of its documents."""

    def read(self) -> Iterator[str]:
        """The texts of its documents."""
        return (text for _, text in self.documents())


def pieces(split: str) -> list[Piece]:
    """What one split, `TRAIN` or `HELD_OUT`, consists of, in a fixed order. No module is read for that."""
    return [piece for piece in _all_pieces() if is_held_out(piece.name) is (split == HELD_OUT)]


def split_documents(split: str) -> Iterator[str]:
    """The texts of one split."""
    return (text for piece in pieces(split) for text in piece.read())


def documents() -> Iterator[tuple[str, str]]:
    """Name and text of every document, in a fixed order."""
    return (document for piece in _all_pieces() for document in piece.documents())


def is_held_out(name: str) -> bool:
    """Whether a document is held out; a module's docstrings and its source are on the same side of the split."""
    stem = name.split("/", 1)[-1]
    return int.from_bytes(hashlib.sha256(stem.encode()).digest()[:4], "big") % 1000 < HELD_OUT_PER_MILLE


def _all_pieces() -> Iterator[Piece]:
    from pydoc_data.topics import topics  # noqa: PLC0415  700 KB of text

    for name, text in sorted(topics.items()):
        yield Piece(f"topic/{name}", len(text), partial(iter, [(f"topic/{name}", text)]))
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("idlelib/help.html", "idlelib/NEWS.txt", "LICENSE.txt"):
        path = library / name
        if path.exists():
            yield Piece(name, path.stat().st_size, partial(_page, name, path))
    for path in sorted(library.rglob("*.py")):
        module = path.relative_to(library)
        if not LEFT_OUT.intersection(module.parts):
            yield Piece(f"source/{module.as_posix()}", path.stat().st_size, partial(_module, module.as_posix(), path))


def _page(name: str, path: Path) -> Iterator[tuple[str, str]]:
    yield name, _plain(path.read_text(encoding="utf-8"))


def _module(name: str, path: Path) -> Iterator[tuple[str, str]]:
    source = path.read_text(encoding="utf-8", errors="replace")
    docs = "\n\n".join(_docstrings(source))
    if len(docs) > 200:
        yield f"doc/{name}", docs
    if len(source) <= MOST_CHARACTERS:
        yield f"source/{name}", source


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
