"""What is read of a corpus: which files, how much of them, and what the user is told."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("datasets")

import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers

from pi_compile.corpus import python_docs, streams
from pi_compile.corpus.sources import PASSAGE, documents, sampled, source_files, units
from pi_compile.corpus.streams import CorpusSpec, read_streams
from pi_compile.errors import CorpusError
from tests.support.paths import ROOT

TUNE = {"field": "text", "tune_tokens": 200, "report_tokens": 200}


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(ROOT / "recipes/demo/tokenizer.json"))


def numbers(start: int, stop: int) -> str:
    return " ".join(f"number {n} is {n * n}." for n in range(start, stop))


def told_of(folder: Path, tokenizer: tokenizers.Tokenizer, *text: str, fit: int = 2000) -> list[str]:
    told: list[str] = []
    read_streams(CorpusSpec(text=text, report=(), fit_tokens=fit, **TUNE), folder, tokenizer, 64, told.append)
    return told


@pytest.mark.parametrize("hidden", [".git/note.txt", ".venv/lib/a.md", "sub/.cache/b.txt", ".draft.md"])
@pytest.mark.parametrize("source", [".", "**/*", "*"])
def test_nothing_hidden_is_read(tmp_path: Path, hidden: str, source: str) -> None:
    for name in ("a.txt", "sub/b.txt", hidden):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    found = [file.relative_to(tmp_path).as_posix() for file in source_files([source], tmp_path)]
    assert found == ["a.txt", "sub/b.txt"]
    # Who names it wants it.
    assert [file.name for file in source_files([hidden], tmp_path)] == [Path(hidden).name]
    assert source_files([str(Path(hidden).parent)], tmp_path)


def test_a_folder_below_a_hidden_one_is_read(tmp_path: Path) -> None:
    work = tmp_path / ".work" / "corpus"
    work.mkdir(parents=True)
    (work / "a.txt").write_text("text")
    assert source_files(["."], work)
    assert source_files([str(work)], tmp_path)


def test_suffixes_passed_over_are_named(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    (tmp_path / "A.TXT").write_text(numbers(0, 2000))
    for name in ("b.rst", "c.rst", "d.pdf", "Makefile"):
        (tmp_path / name).write_text("x")
    told = told_of(tmp_path, tokenizer, ".")
    assert "files passed over, which are not read as text: 2 .rst, 1 .pdf, 1 Makefile" in told
    with pytest.raises(CorpusError, match=r"no text found\n  expected: .*\n  found: 2 .rst"):
        source_files(["*.rst"], tmp_path)
    assert not any("passed over" in line for line in told_of(tmp_path, tokenizer, "*.TXT"))


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "parquet"])
def test_line_ends_are_said(tmp_path: Path, tokenizer: tokenizers.Tokenizer, kind: str) -> None:
    for name, end in (("unix", "\n"), ("windows", "\r\n"), ("old", "\r")):
        text, file = numbers(0, 2000).replace(". ", "." + end), tmp_path / f"{name}.{kind}"
        if kind == "parquet":
            pq.write_table(pa.table({"text": [text]}), file)
        else:
            file.write_bytes((text if kind == "txt" else json.dumps({"text": text})).encode())
        (read,) = documents([file.name], tmp_path, "text")
        assert read == numbers(0, 2000).replace(". ", ".\n")
        said = [line for line in told_of(tmp_path, tokenizer, file.name) if "line" in line]
        assert said == (
            [] if end == "\n" else ["text has lines that end in CR LF: they are read as if they ended in LF"]
        )


EMPTY = {
    "none.parquet": lambda path: pq.write_table(pa.table({"text": pa.array([], pa.string())}), path),
    "list.json": lambda path: path.write_text("[]"),
    "lines.jsonl": lambda path: path.write_text("\n\n"),
    "object.json": lambda path: path.write_text("{}"),
    "blank.txt": lambda path: path.write_text(""),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_file_without_rows_is_an_empty_text(tmp_path: Path, tokenizer: tokenizers.Tokenizer, name: str) -> None:
    EMPTY[name](tmp_path / name)
    assert list(documents([name], tmp_path, "text")) == []
    with pytest.raises(CorpusError, match="the corpus has no text"):
        told_of(tmp_path, tokenizer, name)
    (tmp_path / "a.txt").write_text(numbers(0, 2000))
    assert told_of(tmp_path, tokenizer, ".")


def test_reading_is_announced(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    (tmp_path / "a.txt").write_text(numbers(0, 200))
    assert told_of(tmp_path, tokenizer, "a.txt")[0].startswith("reading [corpus] a.txt: 3.9 KiB")
    (tmp_path / "a.txt").write_text(numbers(0, 20_000))
    first = told_of(tmp_path, tokenizer, "a.txt")[0]
    assert first.startswith("reading [corpus] a.txt: a sample of about 37.5 KiB of 5")


def one_file(folder: Path, text: str) -> None:
    (folder / "a.txt").write_text(text)


def many_files(folder: Path, text: str) -> None:
    for n in range(0, len(text), 20_000):
        (folder / f"{n:08}.txt").write_text(text[n : n + 20_000])


def rows(folder: Path, text: str) -> None:
    for n in range(0, len(text), 200_000):
        part = [json.dumps({"text": text[m : m + 1000]}) for m in range(n, min(n + 200_000, len(text)), 1000)]
        (folder / f"{n:08}.jsonl").write_text("\n".join(part))


@pytest.mark.parametrize("written", [one_file, many_files, rows])
def test_of_much_text_a_sample_is_read(
    tmp_path: Path, tokenizer: tokenizers.Tokenizer, written: Callable[[Path, str], None]
) -> None:
    text = numbers(0, 200_000)
    written(tmp_path, text)
    found = list(sampled(units(["."], tmp_path, "text", "train", print), 100_000, 0))
    assert 100_000 <= sum(map(len, found)) < 250_000
    # From all over the text.
    places = np.array([text.index(document[:200]) for document in found]) / len(text)
    assert all(np.any((places >= n / 4) & (places < (n + 1) / 4)) for n in range(4))
    # The same again, and another one with another seed.
    assert found == list(sampled(units(["."], tmp_path, "text", "train", print), 100_000, 0))
    assert found != list(sampled(units(["."], tmp_path, "text", "train", print), 100_000, 1)) or written is rows
    streams_ = read_streams(CorpusSpec(text=(".",), report=(), fit_tokens=5000, **TUNE), tmp_path, tokenizer, 64)
    assert [len(streams_.fit), len(streams_.tune)] == [5000, 200]


def test_characters_of_several_bytes_are_not_cut(tmp_path: Path) -> None:
    text = "".join(chr(0x4E00 + n % 20_000) + "é🙂x"[n % 3] for n in range(60_000))
    (tmp_path / "a.txt").write_text("\ufeff" + text, encoding="utf-8")
    found = list(sampled(units(["a.txt"], tmp_path, "text", "train", print), 100_000, 0))
    assert all(passage in text for passage in found)
    assert sum(len(passage.encode()) for passage in found) > 0.99 * PASSAGE * len(found)


def test_a_sample_with_too_little_text_is_followed_by_all(
    tmp_path: Path, tokenizer: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CHARACTERS", 1)
    (tmp_path / "a.txt").write_text(numbers(0, 2000))
    spec = CorpusSpec(text=("a.txt",), report=(), fit_tokens=70, field="text", tune_tokens=4000, report_tokens=4000)
    told: list[str] = []
    found = read_streams(spec, tmp_path, tokenizer, 64, told.append)
    assert [len(found.fit), len(found.tune), len(found.report)] == [70, 4000, 4000]
    assert "the sample has too little text: all of it is read" in told


def test_of_pythons_documentation_few_modules_are_read(
    tmp_path: Path, tokenizer: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    module = python_docs._module

    def counted(name: str, path: Path) -> object:
        read.append(name)
        return module(name, path)

    monkeypatch.setattr(python_docs, "_module", counted)
    told = told_of(tmp_path, tokenizer, "python", fit=5000)
    assert re.fullmatch(r"reading \[corpus\] python: a sample of about 84.4 KiB of [\d.]+ MiB", told[0])
    assert 0 < len(read) < 60
    assert len(python_docs.pieces(python_docs.TRAIN)) > 500
