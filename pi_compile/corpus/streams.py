"""Reading corpora with `datasets`, and splitting them into three disjoint token streams.

A source is a path or glob (text, JSON, JSON lines or Parquet), `python` for the documentation that comes with Python,
or `hub:OWNER/NAME@REVISION`. Documents are split into passages, which are shuffled: any stretch of the stream is a
sample of the whole.
"""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import tokenizers

from pi_compile.corpus import python_docs
from pi_compile.errors import CorpusError
from pi_compile.files import read_arrays, write_arrays

PASSAGE = 4096
"""Characters of a passage."""
HUB_CHARACTERS = 16
"""Characters that are read from a hub data set for each token wanted: a data set may be of any size."""
READERS = {".txt": "text", ".md": "text", ".raw": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
PYTHON, HUB = "python", "hub:"

Stream = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class CorpusSpec:
    """The sources of a corpus, and how much of their text is taken."""

    text: tuple[str, ...]
    """Sources to fit on; the tune stream is a part of theirs."""
    report: tuple[str, ...]
    """Sources to report on; () to report on a part of the first stream."""
    field: str
    """The column with the text, in JSON, Parquet and hub data."""
    fit_tokens: int
    tune_tokens: int
    report_tokens: int
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Streams:
    """Three disjoint token streams."""

    fit: Stream
    tune: Stream
    report: Stream

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        write_arrays(path, {"fit": self.fit, "tune": self.tune, "report": self.report})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote. Raises ProfileError for a damaged one."""
        stored = read_arrays(path)
        return cls(stored["fit"], stored["tune"], stored["report"])


def source_files(sources: Sequence[str], folder: Path) -> list[Path]:
    """The local files of the sources, in a fixed order. Raises CorpusError for a source without any."""
    found: dict[Path, Path] = {}
    for source in sources:
        if source == PYTHON or source.startswith(HUB):
            continue
        matches = _matches(source, folder)
        files = [f for m in matches for f in (sorted(m.rglob("*")) if m.is_dir() else [m]) if f.suffix in READERS]
        if not files:
            raise CorpusError(
                f"{folder / source}: no text found",
                expected=f"files ending in {', '.join(READERS)}",
                remedy="name a file or folder that holds text",
            )
        for file in files:
            # A file of two sources counts once: twice in the stream, it could be in `fit` and in `tune`.
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _matches(source: str, folder: Path) -> list[Path]:
    """Paths that a path or pattern names; an existing name is no pattern, even with brackets."""
    if (folder / source).exists():
        return [folder / source]
    # `Path.glob` takes no absolute pattern.
    return sorted(folder / p for p in glob.glob(source, root_dir=folder, recursive=True))  # noqa: PTH207


def _origins(sources: Sequence[str], folder: Path) -> set[str]:
    """Names of local files and hub data sets, without revisions; the two corpora must not share any."""
    hub = {source.partition("@")[0] for source in sources if source.startswith(HUB)}
    return hub | {str(file.resolve()) for file in source_files(sources, folder)}


def check_disjoint(text: Sequence[str], report: Sequence[str], folder: Path) -> None:
    """Raise CorpusError where a file or data set is in both corpora."""
    shared = _origins(text, folder) & _origins(report, folder)
    if shared:
        raise CorpusError(
            f"{min(shared)}: is in [corpus] text and in report, which must be disjoint",
            remedy="take it out of one of them",
        )


def read_streams(spec: CorpusSpec, folder: Path, tokenizer: tokenizers.Tokenizer, window: int) -> Streams:
    """Tokenise the corpus. Relative paths start from `folder`; each stream must have at least `window` tokens.

    Raises CorpusError if there is no text, a file cannot be read, a text is in both corpora, or one is too short.
    """
    check_disjoint(spec.text, spec.report, folder)
    for name in ("fit_tokens", "tune_tokens", "report_tokens"):
        if getattr(spec, name) < window:
            raise CorpusError(
                f"[corpus] {name}",
                expected=f"at least one window of {window} tokens",
                found=getattr(spec, name),
                remedy=f"raise {name}, or lower [profile] window",
            )
    held_out = 0 if spec.report else spec.report_tokens
    wanted = spec.fit_tokens + spec.tune_tokens + held_out
    stream = _tokens(spec, spec.text, folder, tokenizer, wanted, python_docs.TRAIN)
    least = spec.tune_tokens + held_out + window
    if len(stream) < least:
        raise CorpusError(
            f"[corpus] text has {len(stream):,} tokens",
            expected=f"at least {least:,}: tune_tokens, report_tokens and one window",
            remedy="add text, or lower tune_tokens and report_tokens",
        )
    tune, rest = stream[: spec.tune_tokens], stream[spec.tune_tokens :]
    if not spec.report:
        return Streams(rest[held_out:], tune, rest[:held_out])
    report = _tokens(spec, spec.report, folder, tokenizer, spec.report_tokens, python_docs.HELD_OUT)
    if len(report) < window:
        raise CorpusError(
            f"[corpus] report has {len(report):,} tokens",
            expected=f"at least one window of {window}",
            remedy="add text to it, or lower [profile] window",
        )
    return Streams(rest, tune, report)


def _tokens(
    spec: CorpusSpec, sources: Sequence[str], folder: Path, tokenizer: tokenizers.Tokenizer, wanted: int, split: str
) -> Stream:
    """The first `wanted` tokens of the shuffled passages."""
    passages = [
        document[start : start + PASSAGE]
        for document in documents(sources, folder, spec.field, split, HUB_CHARACTERS * wanted)
        for start in range(0, len(document), PASSAGE)
    ]
    if not any(passages):
        raise CorpusError("the corpus has no text", found=", ".join(sources), remedy="name files that are not empty")
    found, count = [], 0
    for index in np.random.default_rng(spec.seed).permutation(len(passages)):
        ids = tokenizer.encode(passages[index], add_special_tokens=False).ids
        found.append(np.array(ids, np.int32))
        count += len(ids)
        if count >= wanted:
            break
    return np.concatenate(found)[:wanted]


def documents(
    sources: Sequence[str], folder: Path, field: str, split: str = python_docs.TRAIN, hub_characters: int | None = None
) -> Iterator[str]:
    """The texts of the sources, one by one: always the same in the same order.

    `split` is the part of Python's documentation that is wanted; `hub_characters` limits each hub data set. Raises
    CorpusError for a source that cannot be read, and for a hub name without a revision.
    """
    for source in dict.fromkeys(sources):
        if source == PYTHON:
            yield from python_docs.split_documents(split)
        elif source.startswith(HUB):
            name, _, revision = source.removeprefix(HUB).partition("@")
            if not revision:
                expected = f"{HUB}OWNER/NAME@REVISION, which means one text"
                raise CorpusError(
                    f"{source}: no revision", expected=expected, remedy="add @ and the commit of its files"
                )
            rows = _load(source, path=name, revision=revision, split="train")
            texts = _column(rows, field, source)
            yield from texts if hub_characters is None else _head(texts, hub_characters)
    for file in source_files(sources, folder):
        if file.stat().st_size == 0:
            continue  # `datasets` fails on an empty JSON file with an internal error
        reader = READERS[file.suffix]
        options = {"sample_by": "document", "encoding": "utf-8-sig"} if reader == "text" else {}
        # `data_files` are patterns: brackets in a name are escaped.
        rows = _load(str(file), path=reader, data_files=glob.escape(str(file)), split="train", **options)
        yield from _column(rows, "text" if options else field, str(file))


def _head(documents: Iterator[str], characters: int) -> Iterator[str]:
    """The first documents, up to the one with which they have a number of characters."""
    for document in documents:
        yield document
        characters -= len(document)
        if characters <= 0:
            return


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
