"""Where text comes from: files, data sets through `datasets`, and the documentation of the Python that runs.

A source is a path or glob (text, JSON, JSON lines or Parquet), `python`, or `hub:OWNER/NAME@REVISION`. Of sources with
more text than is wanted a sample is read, the same each time: passages from all over a file of text, whole topics and
modules of Python's, the first rows of a file of rows, and so many of the files.
"""

import glob
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pi_compile.corpus import python_docs
from pi_compile.errors import CorpusError
from pi_runtime.files import TEXT, shown_files

PASSAGE = 4096
"""Characters of a passage."""
READERS = dict.fromkeys(TEXT, "text") | {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
PYTHON, HUB = "python", "hub:"

Notice = Callable[[str], None]


@dataclass(frozen=True)
class Unit:
    """What is read in one piece: a file, a data set, or a topic or module of Python's documentation."""

    name: str
    nbytes: int | None
    """About its size; None where that is not known, which may be any."""
    read: Callable[[int | None, np.random.Generator], Iterable[str]]
    """Its documents, or a sample of about so many characters."""


def units(sources: Sequence[str], folder: Path, field: str, split: str, notice: Notice) -> list[Unit]:
    """What the sources have, in a fixed order. Raises CorpusError for a hub name without a revision, or no text."""
    found = []
    for source in dict.fromkeys(sources):
        if source == PYTHON:
            found += [_python(piece) for piece in python_docs.pieces(split)]
        elif source.startswith(HUB):
            found.append(_hub(source, field))
    # `datasets` fails on an empty JSON file with an internal error.
    files = [file for file in source_files(sources, folder, notice) if file.stat().st_size]
    return found + [_text(file, notice) if _reader(file) == "text" else _rows(file, field, notice) for file in files]


def sampled(found: Sequence[Unit], characters: int, seed: int) -> Iterator[str]:
    """The documents of some units in their order; of more than `characters` a sample, and of each hub so many.

    Which units and which passages of them are read depends on the seed and the sizes alone.
    """
    total = sum(unit.nbytes or 0 for unit in found)
    if total <= characters:
        for unit in found:
            yield from unit.read(characters if unit.nbytes is None else None, _generator(seed))
        return
    left = characters
    for index in np.random.default_rng([seed, 1]).permutation(len(found)):
        unit = found[index]
        if unit.nbytes is None:
            yield from unit.read(characters, _generator(seed))
        elif left > 0:
            share = max(PASSAGE, -(-unit.nbytes * characters // total))
            for text in unit.read(share if share < unit.nbytes else None, _generator(seed + int(index))):
                yield text
                left -= len(text)


def documents(sources: Sequence[str], folder: Path, field: str, split: str = python_docs.TRAIN) -> Iterator[str]:
    """The texts of the sources, one by one: always the same in the same order.

    `split` is the part of Python's documentation that is wanted. Raises CorpusError for a source that cannot be read,
    and for a hub name without a revision.
    """
    for unit in units(sources, folder, field, split, lambda _line: None):
        yield from unit.read(None, _generator(0))


def source_files(sources: Sequence[str], folder: Path, notice: Notice = lambda _line: None) -> list[Path]:
    """The local files of the sources, in a fixed order; of a folder those that are not hidden.

    `notice` gets files that are passed over. Raises CorpusError for a source without any.
    """
    found: dict[Path, Path] = {}
    passed: Counter[str] = Counter()
    for source in sources:
        if source == PYTHON or source.startswith(HUB):
            continue
        every = [
            file for match in _matches(source, folder) for file in (shown_files(match) if match.is_dir() else [match])
        ]
        files = [file for file in every if _reader(file)]
        passed.update(file.suffix or file.name for file in every if not _reader(file))
        if not files:
            raise CorpusError(
                f"{folder / source}: no text found",
                expected=f"files ending in {', '.join(READERS)}",
                found=_counted(passed) if passed else None,
                remedy="name a file or folder that holds text",
            )
        for file in files:
            # A file of two sources counts once: twice in the stream, it could be in `fit` and in `tune`.
            found.setdefault(file.resolve(), file)
    if passed:
        notice(f"files passed over, which are not read as text: {_counted(passed)}")
    return list(found.values())


def check_disjoint(text: Sequence[str], report: Sequence[str], folder: Path) -> None:
    """Raise CorpusError where a file or data set is in both corpora."""
    shared = _origins(text, folder) & _origins(report, folder)
    if shared:
        raise CorpusError(
            f"{min(shared)}: is in [corpus] text and in report, which must be disjoint",
            remedy="take it out of one of them",
        )


def _origins(sources: Sequence[str], folder: Path) -> set[str]:
    """Names of local files and hub data sets, without revisions; the two corpora must not share any."""
    hub = {source.partition("@")[0] for source in sources if source.startswith(HUB)}
    return hub | {str(file.resolve()) for file in source_files(sources, folder)}


def _matches(source: str, folder: Path) -> list[Path]:
    """Paths that a path or pattern names; an existing name is no pattern, even with brackets."""
    if (folder / source).exists():
        return [folder / source]
    # `Path.glob` takes no absolute pattern.
    return sorted(folder / p for p in glob.glob(source, root_dir=folder, recursive=True))  # noqa: PTH207


def _reader(file: Path) -> str | None:
    return READERS.get(file.suffix.lower())


def _counted(suffixes: Counter[str]) -> str:
    return ", ".join(f"{number:,} {suffix}" for suffix, number in sorted(suffixes.items(), key=lambda s: (-s[1], s[0])))


def _generator(seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, 2])


def _python(piece: python_docs.Piece) -> Unit:
    def read(most: int | None, generator: np.random.Generator) -> Iterator[str]:
        for document in piece.read():
            yield from [document] if most is None else _some(document, most, generator)

    return Unit(piece.name, piece.nbytes, read)


def _some(document: str, characters: int, generator: np.random.Generator) -> Iterator[str]:
    """About so many characters of a document, in passages of it."""
    count = -(-len(document) // PASSAGE)
    for n in sorted(generator.choice(count, min(count, -(-characters // PASSAGE)), replace=False)):
        yield document[n * PASSAGE : (n + 1) * PASSAGE]


def _text(file: Path, notice: Notice) -> Unit:
    """A file of text is one document."""

    def read(most: int | None, generator: np.random.Generator) -> Iterator[str]:
        try:
            if most is None:
                yield _one_line_end(file.read_bytes().decode("utf-8-sig"), notice)
                return
            size = file.stat().st_size
            with file.open("rb") as stream:
                count = size // PASSAGE
                for n in sorted(generator.choice(count, min(count, -(-most // PASSAGE)), replace=False)):
                    stream.seek(int(n) * PASSAGE)
                    yield _one_line_end(_cut(stream.read(PASSAGE)), notice)
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(f"{file}: cannot be read", error) from None

    return Unit(str(file), file.stat().st_size, read)


def _cut(data: bytes) -> str:
    """The text of bytes that may begin and end within a character."""
    start = next((n for n, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)
    for stop in range(len(data), max(len(data) - 4, start), -1):
        try:
            return data[start:stop].decode("utf-8")
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                raise
    return ""


def _rows(file: Path, field: str, notice: Notice) -> Unit:
    """Each row of a file is a document."""

    def read(most: int | None, _generator: np.random.Generator) -> Iterator[str]:
        if file.suffix.lower() == ".parquet" and not _has_rows(file):
            return
        # `data_files` are patterns: brackets in a name are escaped.
        rows = _load(str(file), path=READERS[file.suffix.lower()], data_files=glob.escape(str(file)), split="train")
        texts = (_one_line_end(text, notice) for text in _column(rows, field, str(file)))
        yield from _head(texts, most)

    return Unit(str(file), file.stat().st_size, read)


def _hub(source: str, field: str) -> Unit:
    name, _, revision = source.removeprefix(HUB).partition("@")
    if not revision:
        expected = f"{HUB}OWNER/NAME@REVISION, which means one text"
        raise CorpusError(f"{source}: no revision", expected=expected, remedy="add @ and the commit of its files")

    def read(most: int | None, _generator: np.random.Generator) -> Iterator[str]:
        yield from _head(_column(_load(source, path=name, revision=revision, split="train"), field, source), most)

    return Unit(source, None, read)


def _one_line_end(text: str, notice: Notice) -> str:
    """The text with lines that end in a line feed, as nearly all text that models learn from has them."""
    if "\r" not in text:
        return text
    notice("text has lines that end in CR LF: they are read as if they ended in LF")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _head(found: Iterator[str], characters: int | None) -> Iterator[str]:
    """The first documents, up to the one with which they have a number of characters; None for all."""
    left = math.inf if characters is None else characters
    for document in found:
        yield document
        left -= len(document)
        if left <= 0:
            return


def _has_rows(file: Path) -> bool:
    import pyarrow  # noqa: PLC0415
    import pyarrow.parquet  # noqa: PLC0415

    try:
        return bool(pyarrow.parquet.read_metadata(file).num_rows)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(f"{file}: cannot be read", error) from None


def _load(source: str, **arguments: Any) -> Any:
    import datasets  # noqa: PLC0415  seconds to import

    try:
        return datasets.load_dataset(streaming=True, **arguments)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise _unreadable(f"{source}: cannot be read as a dataset", error) from None


def _column(rows: Any, field: str, source: str) -> Iterator[str]:
    import datasets  # noqa: PLC0415
    import pyarrow  # noqa: PLC0415

    try:
        for row in rows:
            if field not in row:
                raise CorpusError(
                    f"{source}: no text column {field!r}",
                    found=", ".join(row),
                    remedy="set [corpus] field, or name the files by a pattern such as docs/**/*.md",
                )
            if not isinstance(row[field], str):
                raise CorpusError(
                    f"{source}: column {field!r}",
                    expected="text in every row",
                    found=repr(row[field]),
                    remedy="set [corpus] field to a column of text, or take the row out",
                )
            yield row[field]
    except (OSError, ValueError, datasets.exceptions.DatasetsError, pyarrow.ArrowException) as error:
        raise _unreadable(f"{source}: cannot be read", error) from None


def _unreadable(what: str, error: Exception) -> CorpusError:
    return CorpusError(what, found=error, remedy="see that it is whole, and that its name says what it is")
