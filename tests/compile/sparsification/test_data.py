"""The row of sequences: the same whatever reads it, from wherever it goes on, and apart from what is held out."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

from support.sparsifying import small_recipe
from tokenizers import Tokenizer, models, pre_tokenizers

from pi_compile.errors import CorpusError
from pi_compile.sparsification import data
from pi_compile.sparsification.data import Mixture, Packing, open_mixture, read_evaluation_text, source_digests
from pi_compile.sparsification.recipe import MixtureSection


@pytest.fixture
def packing() -> Packing:
    """A token for each word of the sources."""
    words = {f"{name}{n}": 60 * i + n for i, name in enumerate("ab") for n in range(60)}
    tokenizer = Tokenizer(models.WordLevel({**words, "end": 120, "?": 121}, unk_token="?"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return Packing(tokenizer, 120, 16)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sources whose sequences tell where they are from, in blocks of a few passages."""
    monkeypatch.setattr(data, "BLOCK", 8)
    for name in "ab":
        rows = [{"text": f"{name}{n} " * 40} for n in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def section(**changes: object) -> MixtureSection:
    return small_recipe(text=("a.jsonl", "b.jsonl"), corpus=changes).corpus


def mixture(folder: Path, packing: Packing, seed: int = 0, **changes: object) -> Mixture:
    return open_mixture(section(**changes), folder, packing, seed)


def test_the_row_does_not_depend_on_how_much_is_taken_at_once(folder: Path, packing: Packing) -> None:
    whole, parts = mixture(folder, packing).take(300), mixture(folder, packing)
    assert np.array_equal(np.concatenate([parts.take(n) for n in (1, 99, 200)]), whole)
    assert not np.array_equal(mixture(folder, packing, seed=1).take(300), whole)


@pytest.mark.parametrize("taken", [0, 1, 50, 700])
def test_a_position_goes_on_where_it_was(folder: Path, packing: Packing, taken: int) -> None:
    first = mixture(folder, packing)
    if taken:
        first.take(taken)
    second = mixture(folder, packing)
    second.restore(json.loads(json.dumps(first.position)))
    assert np.array_equal(first.take(90), second.take(90))
    assert first.position == second.position


def test_a_source_begins_again_in_another_order(folder: Path, packing: Packing) -> None:
    row = mixture(folder, packing)
    row.take(3000)
    assert row.position["sources"]["a.jsonl"]["epoch"] >= 1
    alone = small_recipe(text=("a.jsonl",)).corpus
    one = open_mixture(alone, folder, packing, 0)
    first = []
    while one.position["sources"]["a.jsonl"]["epoch"] == 0:
        first.append(one.take(1))
    again = [first.pop()] + [one.take(1) for _ in first]
    assert not np.array_equal(np.concatenate(first), np.concatenate(again[: len(first)]))


def test_weights_say_how_often_a_source_is_taken(folder: Path, packing: Packing) -> None:
    found = mixture(folder, packing, weights=[3.0, 1.0]).take(400)
    assert 0.7 < (found.min(1) < 60).mean() < 0.8


def test_held_out_passages_are_never_trained_on(folder: Path, packing: Packing) -> None:
    texts = read_evaluation_text(section(), folder, packing)
    trained, end = mixture(folder, packing).take(1000), {120}
    assert set(texts.tune.ravel()) - end
    assert set(texts.held_out.ravel()) - end
    assert not set(texts.tune.ravel()) & set(texts.held_out.ravel()) - end
    assert not (set(texts.tune.ravel()) | set(texts.held_out.ravel())) & set(trained.ravel()) - end


def test_sources_to_report_on_are_apart(folder: Path, packing: Packing) -> None:
    corpus = small_recipe(text=("a.jsonl",), corpus={"report": ["b.jsonl"]}).corpus
    texts = read_evaluation_text(corpus, folder, packing)
    assert texts.held_out.min() >= 60
    assert texts.tune[texts.tune < 120].max() < 60
    with pytest.raises(CorpusError, match="must be disjoint"):
        open_mixture(section(report=["a.jsonl"]), folder, packing, 0)


@pytest.mark.parametrize("own_report", [False, True])
def test_a_copy_of_the_held_out_text_is_never_trained_on(tmp_path: Path, packing: Packing, own_report: bool) -> None:
    """A copy whose passages begin elsewhere has other hashes; its words are taken out."""
    generator = np.random.default_rng(3)
    texts = [" ".join("ab"[n // 60] + str(n % 60) for n in generator.integers(0, 120, 1500)) for _ in range(24)]
    copies = "".join(json.dumps({"text": "a1 b2 " * 9 + text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "b.jsonl").write_text(copies)
    names, report = (("a.jsonl",), ["b.jsonl"]) if own_report else (("a.jsonl", "b.jsonl"), [])
    corpus = small_recipe(text=names, corpus={"report": report}).corpus
    found = read_evaluation_text(corpus, tmp_path, packing)
    trained = open_mixture(corpus, tmp_path, found.left_out(packing), 0).take(1500)

    def runs(sequences: np.ndarray) -> set[bytes]:
        return {
            run.tobytes() for run in np.lib.stride_tricks.sliding_window_view(sequences, 13, axis=1).reshape(-1, 13)
        }

    assert len(runs(trained)) > 1000
    assert not runs(found.tune) & runs(trained)
    assert not runs(found.held_out) & (runs(trained) | runs(found.tune))


def test_a_text_without_a_sequence_is_refused(tmp_path: Path, packing: Packing) -> None:
    (tmp_path / "a.txt").write_text("too short")
    corpus = small_recipe(text=("a.txt",)).corpus
    with pytest.raises(CorpusError, match="too little text"):
        open_mixture(corpus, tmp_path, packing, 0).take(1)
    with pytest.raises(CorpusError, match="too little text that is not trained on"):
        read_evaluation_text(corpus, tmp_path, packing)


def test_the_record_has_hashes_and_revisions(folder: Path) -> None:
    corpus = section(report=["python", "hub:owner/name@abc"])
    found = source_digests(corpus, folder)
    assert found["hub:owner/name"] == "abc"
    assert [len(found[(folder / f"{name}.jsonl").as_posix()]) for name in "ab"] == [64, 64]
