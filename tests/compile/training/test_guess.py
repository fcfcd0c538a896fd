"""The guess stage: the head in torch is its definition, it learns, and its artifact runs."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from support import guess_heads
from support.documents import assert_as_documented
from support.small_project import no_progress, small_project, small_recipe
from support.synthetic import random_values, small_decoder, small_guess_head

from pi_compile.checkpoint import open_checkpoint
from pi_compile.pipeline.pipeline import Pipeline
from pi_compile.pipeline.summary import guess_report
from pi_compile.recipe import Recipe
from pi_compile.results import GuessWeights
from pi_compile.training.guess import stage
from pi_compile.training.guess.network import Unrolled, shifted
from pi_compile.training.guess.spec import GuessSpec, new_head
from pi_runtime import Sampling, load
from pi_runtime.artifact.guess_head import PREFIX
from pi_runtime.artifact.reader import Artifact

GUESS = {"tokens": 2 * 16 * 64, "steps": 2, "shortlist": 40}


def test_the_head_in_torch_is_its_definition() -> None:
    """Each token of each unroll is what drafting from there gives, with the model's states up to there."""
    decoder, rng = small_decoder(), np.random.default_rng(0)
    head = small_guess_head(decoder, n_heads=4, n_kv_heads=2, head_dim=8, rotary_frequencies=(1.0, 0.1))
    w = {name.removeprefix(PREFIX): random_values(name, s, rng) for name, s in head.arrays(decoder)}
    embedding_TW, g_TD = (rng.standard_normal((9, 32), np.float32) for _ in range(2))
    run = Unrolled(head, {name: torch.from_numpy(a) for name, a in w.items()}, torch.from_numpy(embedding_TW)[None])
    g = torch.from_numpy(g_TD)[None]
    for unroll in range(3):
        y = run.step(g)
        for p in range(unroll, 9):
            known = g_TD[: p + 1 - unroll]
            for _ in range(unroll):
                after, _ = guess_heads.layer(head, w, embedding_TW[: len(known)], known)
                known = np.concatenate([known, after[-1:]])
            wanted, logits = guess_heads.layer(head, w, embedding_TW[: p + 1], known)
            np.testing.assert_allclose(y[0, p], wanted[-1], rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(run.logits(y)[0, p], logits[-1], rtol=1e-3, atol=1e-4)
        g = shifted(y, 1)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small_project(tmp_path_factory.mktemp("guess"))
    (folder / "small.toml").write_text(small_recipe(guess=GUESS).to_toml())
    return folder


def pipeline(folder: Path, name: str = "small.toml") -> Pipeline:
    return Pipeline(folder / name, "cpu", lambda _line: None, no_progress)


def built(folder: Path, name: str = "small.toml") -> Path:
    made = pipeline(folder, name)
    path = folder / name.replace(".toml", ".pi")
    with made.worker:
        made.pack(path)
    return path


@pytest.mark.slow
def test_a_recipe_with_a_head_gives_an_artifact_with_it(project: Path) -> None:
    path = built(project)
    with Artifact.open(path) as artifact:
        guess = artifact.manifest.guess
        assert guess is not None
        assert (guess.states, guess.shortlist, guess.format) == ((0, 1, 2), 40, "q8")
        assert (np.diff(artifact.values("guess/ids").astype(int)) > 0).all()
    settings: dict[str, Any] = {"max_tokens": 20, "sampling": Sampling(temperature=1.0, seed=1)}
    with load(path, device="cpu") as model:
        wanted = "".join(model.generate([1, 2, 3], speculate="off", **settings))
        drafted = model.generate([1, 2, 3], speculate=3, **settings)
        assert "".join(drafted) == wanted
        assert drafted.stats.head_guessed_tokens > 0
    again = pipeline(project)
    with again.worker:
        again.pack(path)
        assert again.guess is not None
        assert_as_documented("guess", {**guess_report(again.guess), "ran": again.ran})
    assert again.ran == []


@pytest.mark.slow
def test_what_is_there_is_used_again_and_the_bytes_are_the_same(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, first = built(project), []
    draw = stage.draw_answers

    def killed(*arguments: Any) -> None:
        draw(*arguments)
        first.append(arguments)
        raise KeyboardInterrupt

    for stored in project.rglob("guess-*.npz"):
        stored.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(stage, "draw_answers", killed)
        with pytest.raises(KeyboardInterrupt):
            built(project)
    before = path.read_bytes()
    path.unlink()
    drawn: list[Any] = []
    monkeypatch.setattr(stage, "draw_answers", lambda *a: drawn.append(draw(*a)))
    assert built(project).read_bytes() == before
    assert len(first) == len(drawn) == 1


@pytest.mark.slow
def test_a_head_learns(project: Path) -> None:
    checkpoint, rng = open_checkpoint(str(project / "model")), np.random.default_rng(0)
    spec = GuessSpec(tokens=1, steps=30, shortlist=64, seed=0, threads=1, length=16, prompt=4)
    d, head = checkpoint.decoder, new_head(checkpoint.decoder, spec)
    tokens = rng.integers(0, d.vocab_size, (8, 16))
    states = rng.standard_normal((8, 16, len(head.states) * d.d_model)).astype(np.float16)
    lesson = stage._Lesson.of(checkpoint, head, spec, tokens)
    before = lesson._loss(tokens, states).item()
    lesson.train(tokens, states)
    assert lesson._loss(tokens, states).item() < before
    assert all(0 <= share <= 1 for share in lesson.right(tokens, states))


def test_a_recipe_without_a_head_is_what_it_was() -> None:
    plain = small_recipe()
    assert "guess" not in plain.model_dump()
    assert "guess" not in plain.to_toml()
    wanted = Recipe.model_validate({**plain.model_dump(), "guess": {"tokens": 1000}})
    assert wanted.guess.steps == 2000
    assert "[guess]" in wanted.to_toml()


def test_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    head = small_guess_head(small_decoder())
    found = GuessWeights(head, {"fc": np.ones((2, 3), np.float32)}, (0.5, 0.25), "abc")
    found.save(tmp_path / "head.npz")
    again = GuessWeights.load(tmp_path / "head.npz")
    assert asdict(again.head) == asdict(head)
    assert (again.right, again.inputs) == ((0.5, 0.25), "abc")
    assert np.array_equal(again.arrays["fc"], found.arrays["fc"])


def test_each_part_is_announced() -> None:
    spec = GuessSpec(tokens=100_000, steps=100, shortlist=64, seed=0, threads=1)
    answers, training = stage.announce(small_decoder(), spec, 2)
    assert answers.startswith("drawing answers on 100,000 tokens: about ")
    assert training.startswith("training the guess head on 102,400 tokens: about ")
