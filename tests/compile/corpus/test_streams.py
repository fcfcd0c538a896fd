"""Corpora: every kind of source, three disjoint streams, and what is wrong with a text that cannot be used."""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("datasets")

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers

from pi_compile.corpus import python_docs, sources, streams
from pi_compile.corpus.sources import documents, source_files
from pi_compile.corpus.streams import CorpusSpec, Streams, read_streams
from pi_compile.errors import CorpusError
from pi_runtime.files import CHARACTERS

WINDOW = 8
SPEC = CorpusSpec(text=("text.txt",), report=(), field="text", fit_tokens=400, tune_tokens=60, report_tokens=50)
WORDS = 3000


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    """One token a word of fixed width; word n has id n, so a token tells where it comes from."""
    vocab = {f"w{n:04}": n for n in range(2 * WORDS)} | {"?": 2 * WORDS}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))  # noqa: S106 (no password)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return tokenizer


def words(start: int = 0, stop: int = WORDS) -> str:
    return " ".join(f"w{n:04}" for n in range(start, stop))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sources, streams):
        monkeypatch.setattr(module, "PASSAGE", 50)


@pytest.fixture
def read(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> Callable[..., Streams]:
    return lambda **changes: read_streams(replace(SPEC, **changes), tmp_path, tokenizer, WINDOW)


@pytest.fixture
def refused(read: Callable[..., Streams]) -> Callable[..., str]:
    def message(**changes: Any) -> str:
        with pytest.raises(CorpusError) as caught:
            read(**changes)
        assert caught.value.exit_code == 3
        return str(caught.value)

    return message


def known(stream: np.ndarray) -> list[int]:
    """Ids of whole words: those that a passage's end cuts are unknown."""
    return [int(i) for i in stream if i < 2 * WORDS]


def write(path: Path, text: str, kind: str) -> None:
    rows = [{"n": n, "text": part} for n, part in enumerate(text.split("\n"))]
    if kind == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(text)


@pytest.mark.parametrize("kind", ["txt", "md", "raw", "json", "jsonl", "parquet"])
def test_every_kind_of_file_is_read_whole(read: Callable[..., Streams], tmp_path: Path, kind: str) -> None:
    write(tmp_path / f"text.{kind}", words(0, 200) + "\n" + words(200, 400) + "\n" + words(400, 600), kind)
    streams = read(text=(f"text.{kind}",), fit_tokens=10**6)
    found = known(np.concatenate([streams.fit, streams.tune, streams.report]))
    assert len(found) == len(set(found))  # nothing twice
    assert set(found) <= set(range(600))
    # One word in nine is cut by a piece's end here.
    assert len(found) > 500
    assert (len(streams.tune), len(streams.report)) == (60, 50)


def test_another_column(read: Callable[..., Streams], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": 3, "body": words()}))
    assert len(read(text=("a.jsonl",), field="body").fit) == 400


def test_streams_are_disjoint_parts_of_one_text(read: Callable[..., Streams], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(words())
    streams = read()
    assert [len(s) for s in (streams.fit, streams.tune, streams.report)] == [400, 60, 50]
    assert all(s.dtype == np.int32 for s in (streams.fit, streams.tune, streams.report))
    parts = [set(known(s)) for s in (streams.fit, streams.tune, streams.report)]
    assert sum(map(len, parts)) == len(set.union(*parts))
    # Each is a sample of the whole text.
    assert all(max(part) - min(part) > WORDS / 4 for part in parts)


def test_report_from_its_own_sources(read: Callable[..., Streams], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(words())
    (tmp_path / "held-out.txt").write_text(words(WORDS, 2 * WORDS))
    streams = read(report=("held-out.txt",))
    assert min(known(streams.report)) >= WORDS
    assert max(known(streams.fit) + known(streams.tune)) < WORDS
    assert [len(s) for s in (streams.fit, streams.tune, streams.report)] == [400, 60, 50]


def test_the_seed_decides(read: Callable[..., Streams], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(words())
    first, second, other = read(), read(), read(seed=1)
    for name in ("fit", "tune", "report"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert not np.array_equal(first.fit, other.fit)


def test_folders_globs_and_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.md", "sub/deep/d.jsonl", "sub/e.pdf", "x [1920].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def found(*sources: str) -> list[str]:
        return [f.relative_to(tmp_path).as_posix() for f in source_files(sources, tmp_path)]

    assert found("*.txt") == ["a.txt", "b.txt", "x [1920].txt"]
    assert found("sub") == ["sub/c.md", "sub/deep/d.jsonl"]
    assert found("**/*.md", "b.txt") == ["sub/c.md", "b.txt"]
    assert found(str(tmp_path / "[ab].txt")) == ["a.txt", "b.txt"]
    assert found(str(tmp_path / "a.txt")) == ["a.txt"]
    assert found("x [1920].txt") == ["x [1920].txt"]
    assert found("a.txt", "*.txt", ".", "python", "hub:some/name@main") == [
        "a.txt",
        "b.txt",
        "x [1920].txt",
        "sub/c.md",
        "sub/deep/d.jsonl",
    ]


def test_brackets_are_no_pattern(tokenizer: tokenizers.Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "[work] *"
    folder.mkdir()
    (folder / "a [b].txt").write_text(words())
    assert len(read_streams(replace(SPEC, text=("a [b].txt",)), folder, tokenizer, WINDOW).fit) == 400
    assert len(read_streams(replace(SPEC, text=("*.txt",)), folder, tokenizer, WINDOW).fit) == 400


def test_a_file_named_twice_is_read_once(read: Callable[..., Streams], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(words(0, 600))
    streams = read(text=("text.txt", "*.txt", "."))
    parts = [set(known(s)) for s in (streams.fit, streams.tune, streams.report)]
    assert sum(map(len, parts)) == len(set.union(*parts))


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\r\nb", encoding="utf-8-sig")
    assert list(documents(["a.txt"], tmp_path, "text")) == ["a\nb"]


def test_empty_files_among_others_do_not_matter(read: Callable[..., Streams], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(words())
    for kind in ("txt", "json", "jsonl", "parquet"):
        (tmp_path / f"empty.{kind}").touch()
    assert len(read(text=(".",)).fit) == 400


# What users get wrong.


@pytest.mark.parametrize("source", ["missing.txt", "*.txt", "folder"])
def test_a_source_that_has_no_files(refused: Callable[..., str], tmp_path: Path, source: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "book.pdf").touch()
    message = refused(text=(source,))
    assert f"{tmp_path / source}: no text found" in message
    assert "expected: files ending in .txt, .md" in message


@pytest.mark.parametrize("kind", ["txt", "json", "jsonl", "parquet"])
def test_an_empty_corpus(refused: Callable[..., str], tmp_path: Path, kind: str) -> None:
    (tmp_path / f"a.{kind}").touch()
    assert f"the corpus has no text\n  found: a.{kind}" in refused(text=(f"a.{kind}",))


def test_rows_without_text(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 3)
    assert "the corpus has no text" in refused(text=("a.jsonl",))


def test_a_short_corpus(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(words(0, 100))
    message = refused()
    assert "[corpus] text has 1" in message
    assert "expected: at least 118: tune_tokens, report_tokens and one window" in message
    assert "add text, or lower tune_tokens and report_tokens" in message
    (tmp_path / "held-out.txt").write_text(words(0, 5))
    (tmp_path / "text.txt").write_text(words())
    message = refused(report=("held-out.txt",))
    assert "[corpus] report has 5 tokens\n  expected: at least one window of 8" in message


@pytest.mark.parametrize("name", ["fit_tokens", "tune_tokens", "report_tokens"])
def test_fewer_tokens_than_a_window(refused: Callable[..., str], tmp_path: Path, name: str) -> None:
    (tmp_path / "text.txt").write_text(words())
    message = refused(**{name: WINDOW - 1})
    assert f"[corpus] {name}\n  expected: at least one window of 8 tokens\n  found: 7" in message


@pytest.mark.parametrize("kind", ["txt", "json", "jsonl", "parquet"])
def test_a_file_that_is_something_else(refused: Callable[..., str], tmp_path: Path, kind: str) -> None:
    (tmp_path / f"a.{kind}").write_bytes(bytes(range(256)) * 64)
    message = refused(text=(f"a.{kind}",))
    assert f"{tmp_path / f'a.{kind}'}: cannot be read" in message
    assert "found: " in message


def test_a_file_that_may_not_be_read(refused: Callable[..., str], tmp_path: Path, monkeypatch: Any) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "text.jsonl").write_text('{"text": "a"}')
    monkeypatch.setattr(datasets, "load_dataset", denied)
    message = refused(text=("text.jsonl",))
    assert f"{tmp_path / 'text.jsonl'}: cannot be read as a dataset\n  found: [Errno 13]" in message
    (tmp_path / "text.txt").write_text(words())
    monkeypatch.setattr(Path, "read_bytes", denied)
    monkeypatch.setattr(Path, "open", denied)
    assert f"{tmp_path / 'text.txt'}: cannot be read\n  found: [Errno 13]" in refused()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_no_such_column(refused: Callable[..., str], tmp_path: Path, kind: str) -> None:
    write(tmp_path / f"a.{kind}", words(), kind)
    message = refused(text=(f"a.{kind}",), field="body")
    assert "a." + kind + ": no text column 'body'\n  found: n, text\n  try: set [corpus] field" in message


@pytest.mark.parametrize("row", ['{"text": null}', '{"text": 3}', '{"text": ["a"]}'])
def test_a_column_that_holds_no_text(refused: Callable[..., str], tmp_path: Path, row: str) -> None:
    (tmp_path / "a.jsonl").write_text(row + "\n")
    assert "a.jsonl: column 'text'\n  expected: text in every row" in refused(text=("a.jsonl",))


def test_the_same_file_in_text_and_report(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(words())
    (tmp_path / "link.txt").symlink_to(tmp_path / "text.txt")
    for report in (("text.txt",), (".",), ("link.txt",)):
        message = refused(report=report)
        assert (
            f"{tmp_path / 'text.txt'}: is in [corpus] text and in report, which must be disjoint\n  try: take it"
            in message
        )


# The hub.


class Hub:
    """Stand-in for `datasets.load_dataset` that records calls and how many rows were taken."""

    def __init__(self, rows: Iterator[dict[str, Any]]) -> None:
        self.calls: list[dict[str, Any]] = []
        self.taken = 0
        self._rows = rows

    def __call__(self, **arguments: Any) -> Iterator[dict[str, Any]]:
        self.calls.append(arguments)
        for row in self._rows:
            self.taken += 1
            yield row


def test_a_hub_name_and_revision(read: Callable[..., Streams], monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(iter([{"body": words(n, n + 100)} for n in range(0, 2000, 100)]))
    monkeypatch.setattr(datasets, "load_dataset", hub)
    streams = read(text=("hub:owner/name@0123abc",), field="body")
    assert len(streams.fit) == 400
    assert hub.calls == [{"path": "owner/name", "revision": "0123abc", "split": "train", "streaming": True}]


def test_an_endless_data_set_is_read_as_far_as_needed(
    read: Callable[..., Streams], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub({"text": words(n % WORDS, n % WORDS + 100)} for n in itertools.count(0, 100))
    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert len(read(text=("hub:owner/name@1",)).fit) == 400
    assert hub.taken * 100 * len("w123 ") < 1.5 * CHARACTERS * 510


def test_a_hub_name_that_is_not_there(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**_: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'owner/name' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", missing)
    message = refused(text=("hub:owner/name@1",))
    assert "hub:owner/name@1: cannot be read as a dataset\n  found: Dataset 'owner/name' doesn't exist" in message


def test_a_hub_name_without_a_revision(refused: Callable[..., str]) -> None:
    assert "hub:owner/name: no revision\n  expected: hub:OWNER/NAME@REVISION" in refused(text=("hub:owner/name",))


def test_the_same_data_set_in_text_and_report(refused: Callable[..., str]) -> None:
    message = refused(text=("hub:owner/name@1",), report=("hub:owner/name@2",))
    assert "hub:owner/name: is in [corpus] text and in report" in message


# Python's own documentation.


def test_python_is_a_corpus(read: Callable[..., Streams], monkeypatch: pytest.MonkeyPatch) -> None:
    def piece(n: int) -> python_docs.Piece:
        text = words(n * 100, n * 100 + 100)
        return python_docs.Piece(f"source/module{n}.py", len(text), lambda: iter([(f"doc/module{n}.py", text)]))

    monkeypatch.setattr(python_docs, "_all_pieces", lambda: map(piece, range(60)))
    monkeypatch.setattr(python_docs, "HELD_OUT_PER_MILLE", 200)
    streams = read(text=("python",), report=("python",))
    held_out = {n for n in range(60) if python_docs.is_held_out(f"doc/module{n}.py")}
    assert 3 < len(held_out) < 25
    assert {n // 100 for n in known(streams.report)} <= held_out
    assert not {n // 100 for n in known(streams.fit) + known(streams.tune)} & held_out


def test_python_documents_are_there_and_clean() -> None:
    found = list(itertools.islice(python_docs.documents(), 130))
    assert {"topic", "doc", "source"} <= {name.split("/")[0] for name, _ in found}
    assert sum(len(text) for _, text in found) > 1_000_000
    assert not any("<html" in text for name, text in found if name.endswith(".html"))
    assert len(dict(found)) == len(found)


def test_about_three_in_a_hundred_documents_are_held_out() -> None:
    held_out = [python_docs.is_held_out(f"source/module{n}.py") for n in range(4000)]
    assert 0.02 < np.mean(held_out) < 0.04
    # Docstrings and source of one module are on one side.
    assert held_out == [python_docs.is_held_out(f"doc/module{n}.py") for n in range(4000)]
