"""Embeddings: the head reads what they are made of, so a model's own logits say what they must be."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.synthetic import random_artifact, small_decoder, small_guess_head

from pi_runtime import Engine, Model, load
from pi_runtime.errors import ContextError, PromptError, UsageError
from pi_runtime.sequence.embedding import Pooling

IDS = [3 * n % 250 for n in range(1, 101)]
"""More than one block of tokens."""


@pytest.fixture(scope="module", params=["rms", "layer", "none"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    fields = {"final_norm": False} if request.param == "none" else {"norm": request.param}
    decoder = small_decoder(context_length=128, **fields)
    path = random_artifact(tmp_path_factory.mktemp("embedding") / "a.pi", decoder, format="f32", scale=2.0)
    with load(path, device="cpu") as opened:
        yield opened


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("tokens", [1, 64, 65, 100])
def test_a_vector_is_what_the_head_would_read(model: Model, pooling: Pooling, tokens: int) -> None:
    logits_TV = model.logits(IDS[:tokens]).astype(np.float64)
    wanted_V = logits_TV.mean(0) if pooling == "mean" else logits_TV[-1]
    vector = np.array(model.embed(IDS[:tokens], pooling))
    name = "embedding" if model.manifest.decoder.tied_head else "head"
    found_V = model._artifact.values(name).astype(np.float64) @ vector
    scale = found_V @ wanted_V / (found_V @ found_V)
    assert np.square(vector).sum() == pytest.approx(1)
    assert scale > 0
    np.testing.assert_allclose(found_V * scale, wanted_V, atol=1e-5 * np.abs(wanted_V).max())


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_the_same_in_company_and_after_others(model: Model, pooling: Pooling) -> None:
    texts = [IDS[:n] for n in (100, 3, 64, 100, 65)] + [IDS[40:]]
    alone = [model.embed(text, pooling) for text in texts]
    with Engine(model, slots=3) as engine:
        for _ in range(2):
            answer = engine.generate(IDS[:20], max_tokens=8)
            found = [engine.embed(text, pooling) for text in texts]
            assert [vector.result() for vector in found] == alone
            assert "".join(answer) == "".join(model.generate(IDS[:20], max_tokens=8))


def test_a_guess_head_and_vectors_share_a_step(tmp_path: Path) -> None:
    decoder = small_decoder(context_length=128)
    path = random_artifact(tmp_path / "a.pi", decoder, format="f32", guess=small_guess_head(decoder), scale=2.0)
    with load(path, device="cpu") as model, Engine(model, slots=4, speculate=3) as engine:
        answers = [engine.generate(IDS[:n], max_tokens=20) for n in (5, 9)]
        vectors = [engine.embed(IDS[:n]) for n in (70, 12)]
        assert [vector.result() for vector in vectors] == [model.embed(IDS[:n]) for n in (70, 12)]
        texts = ["".join(model.generate(IDS[:n], max_tokens=20, speculate="off")) for n in (5, 9)]
        assert ["".join(answer) for answer in answers] == texts


def test_what_cannot_be_embedded_is_refused(model: Model) -> None:
    with pytest.raises(PromptError, match="token"):
        model.embed("")
    with pytest.raises(ContextError, match="129"):
        model.embed([1] * 129)
    with pytest.raises(UsageError, match="max"):
        model.embed([1], "max")  # type: ignore[arg-type]
