"""What is held out is so by content: no stream has the words of another one, wherever the text stands twice.

The slow twin counts runs of words in the decoded streams, which knows nothing of tokens, passages or hashes.
"""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("datasets")

import tokenizers

from pi_compile.corpus.held_out import RUN, HeldOut
from pi_compile.corpus.streams import CorpusSpec, Streams, read_streams
from pi_compile.errors import CorpusError
from tests.support.paths import ROOT

RUN_OF_TWIN = 16
PAGES = [(ROOT / f"docs/explanation/{name}.md").read_text() for name in ("pipeline", "placement", "engine")]
TEXT = "\n\n".join(PAGES)


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(ROOT / "recipes/demo/tokenizer.json"))


def leaked(held: list[str], other: list[str]) -> float:
    """The share of the held-out runs of words that stand in the other text too."""

    def runs(words: list[str]) -> list[tuple[str, ...]]:
        return [tuple(words[n : n + RUN_OF_TWIN]) for n in range(len(words) - RUN_OF_TWIN + 1)]

    there = set(runs(other))
    return sum(run in there for run in runs(held)) / max(1, len(runs(held)))


def leaks(streams: Streams, tokenizer: tokenizers.Tokenizer) -> dict[str, float]:
    words = {
        name: tokenizer.decode([int(i) for i in getattr(streams, name)]).split() for name in ("fit", "tune", "report")
    }
    pairs = [("tune", "fit"), ("report", "fit"), ("report", "tune")]
    return {f"{held} in {other}": leaked(words[held], words[other]) for held, other in pairs}


def again(text: str) -> str:
    """The same text, with passages that begin elsewhere."""
    return "A line before it.\n" * 37 + text


SAME: dict[str, Callable[[str], str]] = {
    "as it is": lambda text: text,
    "beginning elsewhere": again,
    "with other line ends": lambda text: text.replace("\n", "\r\n"),
    "indented": lambda text: textwrap.indent(again(text), "        "),
    "wrapped": lambda text: "\n".join(textwrap.fill(line, 61) for line in again(text).split("\n")),
    "a part of it": lambda text: "Something else. " * 9 + text[len(text) // 3 : len(text) // 2],
}


@pytest.mark.parametrize("own_report", [False, True], ids=["report of the text", "report of its own"])
@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_a_copy_does_not_leak(
    tmp_path: Path, tokenizer: tokenizers.Tokenizer, change: Callable[[str], str], own_report: bool
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text(TEXT)
    (tmp_path / ("copy.txt" if own_report else "text/copy.txt")).write_bytes(change(TEXT).encode())
    spec = CorpusSpec(
        text=("text",), report=("copy.txt",) if own_report else (), field="text",
        fit_tokens=10**6, tune_tokens=2000, report_tokens=2000,
    )  # fmt: skip
    told: list[str] = []
    streams = read_streams(spec, tmp_path, tokenizer, 64, told.append)
    assert max(leaks(streams, tokenizer).values()) < 0.005, leaks(streams, tokenizer)
    assert len(streams.fit) > 4000
    assert any(line.startswith("left out: ") and "in what is held out too" in line for line in told)


def test_a_copy_among_rows_does_not_leak(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    rows = [{"text": part} for part in TEXT.split("\n\n")]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = CorpusSpec(
        text=("a.txt", "b.jsonl"), report=(), field="text", fit_tokens=10**6, tune_tokens=2000, report_tokens=2000
    )
    assert max(leaks(read_streams(spec, tmp_path, tokenizer, 64), tokenizer).values()) < 0.005


def test_order_of_the_files_does_not_matter(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Names are all that differs: whichever copy comes first, nothing leaks."""
    for name in ("a", "z"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "m.txt").write_text(TEXT)
        (folder / f"{name}.txt").write_text(again(TEXT))
        spec = CorpusSpec(text=(name,), report=(), field="text", fit_tokens=10**6, tune_tokens=2000, report_tokens=2000)
        assert max(leaks(read_streams(spec, tmp_path, tokenizer, 64), tokenizer).values()) < 0.005


def test_text_that_is_all_held_out_is_refused(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    (tmp_path / "a.txt").write_text(PAGES[0])
    (tmp_path / "b.txt").write_text(TEXT)
    spec = CorpusSpec(
        text=("a.txt",), report=("b.txt",), field="text", fit_tokens=1000, tune_tokens=500, report_tokens=10**6
    )
    with pytest.raises(CorpusError, match=r"text has \d+ tokens; [\d,]+ more are left out, whose words are in what is"):
        read_streams(spec, tmp_path, tokenizer, 64)


def test_text_without_copies_stays_whole(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    (tmp_path / "a.txt").write_text(" ".join(f"{n} {n * n}" for n in range(4000)))
    spec = CorpusSpec(text=("a.txt",), report=(), field="text", fit_tokens=10**6, tune_tokens=500, report_tokens=500)
    told: list[str] = []
    streams = read_streams(spec, tmp_path, tokenizer, 64, told.append)
    assert not any("left out" in line for line in told)
    assert sum(map(len, (streams.fit, streams.tune, streams.report))) > 15_000


def test_rest_against_a_plain_search() -> None:
    """On random tokens: every run of `RUN` words of the held-out text goes, and nothing that is in no such run."""
    vocabulary = {
        **{f"w{n}": n for n in range(40)},
        **{f"\u0120w{n}": 40 + n for n in range(40)},
        "\u0120": 80,
        "\u010a": 81,
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))  # noqa: S106 (no password)
    generator = np.random.default_rng(5)

    def words(ids: np.ndarray) -> list[int]:
        return [int(i) % 40 for i in ids if i < 80]

    for _ in range(60):
        held = generator.integers(0, 82, 200).astype(np.int32)
        start = generator.integers(0, 200 - RUN - 12)
        copied = held[start : start + generator.integers(1, 40)]
        copied = np.where(copied < 80, (copied + 40) % 80, copied).astype(np.int32)  # the other spelling of each word
        ids = np.concatenate([generator.integers(0, 82, 60), copied, generator.integers(0, 82, 60)]).astype(np.int32)
        rest = HeldOut.nothing(tokenizer).plus(held).rest(ids)
        runs = {tuple(words(held)[n : n + RUN]) for n in range(len(words(held)) - RUN + 1)}
        places, own = np.flatnonzero(ids < 80), words(ids)
        gone = np.zeros(len(ids), bool)
        for n in range(len(own) - RUN + 1):
            if tuple(own[n : n + RUN]) in runs:
                gone[places[n] : places[n + RUN - 1] + 1] = True
        np.testing.assert_array_equal(rest, ids[~gone])


@pytest.mark.parametrize(("before", "behind"), [(RUN, RUN - 1), (RUN - 1, RUN), (RUN, RUN), (0, RUN - 1)])
def test_scraps_beside_what_is_held_out_go_too(before: int, behind: int) -> None:
    """What is left of a text in pieces shorter than `RUN` tokens."""
    vocabulary = {f"w{n}": n for n in range(100)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))  # noqa: S106 (no password)
    held, first, last = np.arange(RUN), np.arange(20, 20 + before), np.arange(40, 40 + behind)
    ids = np.concatenate([first, held, last]).astype(np.int32)
    rest = HeldOut.nothing(tokenizer).plus(held.astype(np.int32)).rest(ids)
    wanted = [piece for piece in (first, last) if len(piece) >= RUN]
    np.testing.assert_array_equal(rest, np.concatenate([*wanted, ids[:0]]))
