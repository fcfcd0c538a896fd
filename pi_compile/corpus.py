"""Corpora: text through `datasets`, as three disjoint token streams.

A source is a path or glob (text, JSON, JSON lines or Parquet), `python` for the documentation that comes with Python,
or `hub:OWNER/NAME@REVISION`. Documents are cut into pieces and the pieces shuffled, so that any stretch of the stream
is a sample of the whole.
"""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from pi_compile import python_docs
from pi_compile.errors import CorpusError

PIECE = 4096
"""Characters of a piece."""
READERS = {".txt": "text", ".md": "text", ".raw": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
PYTHON, HUB = "python", "hub:"

Stream = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class CorpusSpec:
    """Which text, and how much of it."""

    text: tuple[str, ...]
    """Sources to fit on; `tune` is cut off their stream."""
    report: tuple[str, ...]
    """Sources to report on; none cuts `report` off the same stream."""
    field: str
    """Column of JSON, Parquet and hub data that holds the text."""
    fit_tokens: int
    tune_tokens: int
    report_tokens: int
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Streams:
    """Disjoint token streams."""

    fit: Stream
    tune: Stream
    report: Stream


def source_files(sources: Sequence[str], folder: Path) -> list[Path]:
    """The local files behind the sources, in a fixed order. Raises CorpusError for a source that has none."""
    found = []
    for source in sources:
        if source == PYTHON or source.startswith(HUB):
            continue
        pattern = str(folder / source)
        matches = sorted(Path(p) for p in glob.glob(pattern, recursive=True))  # noqa: PTH207  patterns may be absolute
        files = [f for m in matches for f in (sorted(m.rglob("*")) if m.is_dir() else [m]) if f.suffix in READERS]
        if not files:
            raise CorpusError(f"{pattern}: no text found", expected=f"files ending in {', '.join(READERS)}")
        found += files
    return found


def read_streams(spec: CorpusSpec, folder: Path, tokenizer: tokenizers.Tokenizer, window: int) -> Streams:
    """Tokenise the corpus. `folder`: what relative paths start from. `window`: tokens each stream must at least have.

    Raises CorpusError: nothing found, an unreadable file, a text that is in both corpora, or one that is too short.
    """
    shared = {f.resolve() for f in source_files(spec.text, folder)} & {
        f.resolve() for f in source_files(spec.report, folder)
    }
    if shared:
        raise CorpusError(f"{sorted(shared)[0]}: is in [corpus] text and in report, which must be disjoint")
    own_report = 0 if spec.report else spec.report_tokens
    wanted = spec.fit_tokens + spec.tune_tokens + own_report
    stream = _tokens(spec, spec.text, folder, tokenizer, wanted, python_docs.TRAIN)
    least = spec.tune_tokens + own_report + window
    if len(stream) < least:
        raise CorpusError(
            f"[corpus] text has {len(stream):,} tokens",
            expected=f"at least {least:,}: tune_tokens, report_tokens and one window",
            remedy="add text, or lower tune_tokens and report_tokens",
        )
    tune, rest = stream[: spec.tune_tokens], stream[spec.tune_tokens :]
    if not spec.report:
        return Streams(rest[own_report:], tune, rest[:own_report])
    report = _tokens(spec, spec.report, folder, tokenizer, spec.report_tokens, python_docs.HELD_OUT)
    if len(report) < window:
        raise CorpusError(f"[corpus] report has {len(report):,} tokens", expected=f"at least one window of {window}")
    return Streams(rest, tune, report)


def _tokens(
    spec: CorpusSpec, sources: Sequence[str], folder: Path, tokenizer: tokenizers.Tokenizer, wanted: int, split: str
) -> Stream:
    """The first `wanted` tokens of the shuffled pieces."""
    pieces = [
        document[start : start + PIECE]
        for document in _documents(sources, folder, spec.field, split)
        for start in range(0, len(document), PIECE)
    ]
    if not any(pieces):
        raise CorpusError("the corpus has no text", found=", ".join(sources))
    parts, count = [], 0
    for index in np.random.default_rng(spec.seed).permutation(len(pieces)):
        ids = tokenizer.encode(pieces[index], add_special_tokens=False).ids
        parts.append(np.array(ids, np.int32))
        count += len(ids)
        if count >= wanted:
            break
    return np.concatenate(parts)[:wanted]


def _documents(sources: Sequence[str], folder: Path, field: str, split: str) -> Iterator[str]:
    for source in sources:
        if source == PYTHON:
            yield from python_docs.split_documents(split)
        elif source.startswith(HUB):
            name, _, revision = source.removeprefix(HUB).partition("@")
            yield from _column(_load(source, path=name, revision=revision or None, split="train"), field, source)
        else:
            for file in source_files([source], folder):
                options: dict[str, Any] = {"sample_by": "document"} if READERS[file.suffix] == "text" else {}
                rows = _load(str(file), path=READERS[file.suffix], data_files=str(file), split="train", **options)
                yield from _column(rows, "text" if options else field, str(file))


def _load(source: str, **arguments: Any) -> Any:
    import datasets  # noqa: PLC0415  seconds to import

    try:
        return datasets.load_dataset(streaming=True, **arguments)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise CorpusError(f"{source}: cannot be read as a dataset", found=error) from None


def _column(rows: Any, field: str, source: str) -> Iterator[str]:
    import datasets  # noqa: PLC0415
    import pyarrow  # noqa: PLC0415

    try:
        for row in rows:
            if not isinstance(row.get(field), str):
                raise CorpusError(
                    f"{source}: no text column {field!r}", found=", ".join(row), remedy="set [corpus] field"
                )
            yield row[field]
    except (OSError, ValueError, datasets.exceptions.DatasetsError, pyarrow.ArrowException) as error:
        raise CorpusError(f"{source}: cannot be read", found=error) from None
