"""Loading, modes and logits; what cannot be is refused by name."""

from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from support.paths import GOLDEN
from support.synthetic import random_artifact, small_decoder

from pi_runtime import Model, load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer
from pi_runtime.engine.loading import DEFAULT_CONTEXT
from pi_runtime.errors import ArtifactError, DeviceError, MissingExtraError, PromptError, TemplateError, UsageError
from pi_runtime.kernels import reference

PLAIN = {"chat_template.jinja": b"{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}bot:"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return random_artifact(tmp_path / "a.pi", small_decoder(d_ff=90), ranks=[4, None])


def assert_is_mode(model: Model, mode: str, ids: list[int]) -> None:
    wanted = reference.forward(model._artifact, ids, mode)
    np.testing.assert_allclose(model.logits(ids), wanted, rtol=1e-4, atol=1e-5 * float(np.abs(wanted).max()))


@pytest.mark.parametrize(("mode", "means"), [("auto", "predicted"), ("predicted", "predicted"), ("gate", "gate")])
def test_modes(path: Path, mode: str, means: str) -> None:
    ids = list(range(40, 61))
    with load(path, mode=mode) as model, load(path, mode="dense") as dense:
        assert model.mode == mode
        assert model.manifest.rungs_in(mode) == ({"gate": 2} if mode == "gate" else {"predicted": 1, "gate": 1})
        assert_is_mode(model, means, ids)
        equal = np.allclose(model.logits(ids), dense.logits(ids), atol=1e-4)
        assert equal == (means == "gate")


def test_auto_is_gate_without_predictors(tmp_path: Path) -> None:
    path = random_artifact(tmp_path / "a.pi", small_decoder())
    with load(path) as auto, load(path, mode="gate") as gate:
        np.testing.assert_array_equal(auto.logits([1, 2, 3]), gate.logits([1, 2, 3]))


def test_predicted_needs_predictors(tmp_path: Path) -> None:
    path = random_artifact(tmp_path / "a.pi", small_decoder())
    with pytest.raises(UsageError):
        load(path, mode="predicted")
    path.unlink()  # nothing holds it open


def test_modes_of_a_rung_without_a_predictor(tmp_path: Path) -> None:
    layers = Layer(rung="threshold", threshold=0.2), Layer(rung="gate")
    path = random_artifact(tmp_path / "a.pi", small_decoder(activation="silu"), layers=layers)
    ids = list(range(40, 61))
    for mode, means in (("auto", "predicted"), ("predicted", "predicted"), ("gate", "dense"), ("dense", "dense")):
        with load(path, mode=mode) as model:
            assert_is_mode(model, means, ids)


def test_logits_are_float32_and_the_callers_own(path: Path) -> None:
    with load(path) as model:
        one = model.logits([1, 2, 3])
        kept = one.copy()
        model.logits([9, 9, 9])
        assert (one.dtype, one.shape) == (np.float32, (3, 257))
        np.testing.assert_array_equal(one, kept)


@pytest.mark.parametrize("ids", [(1, 2, 3), np.array([1, 2, 3], np.uint8), np.array([1, 9, 2, 9, 3, 9], np.int32)[::2]])
def test_token_ids_of_any_integer_kind(path: Path, ids: Any) -> None:
    with load(path) as model:
        np.testing.assert_array_equal(model.logits(ids), model.logits([1, 2, 3]))


@pytest.mark.parametrize("ids", [[], [[1]], [1.0], ["a"], [None], [True], [2**70]])
def test_what_are_no_token_ids(path: Path, ids: Any) -> None:
    with load(path) as model, pytest.raises(PromptError, match="non-empty list of integers"):
        model.logits(ids)


@pytest.mark.parametrize("mode", ["dense", "gate", "predicted"])
def test_logits_with_a_cache_are_those_without(tmp_path: Path, mode: str) -> None:
    """Texts that share a beginning, none, all, or more than the positions asked for; over block borders too."""
    path = random_artifact(tmp_path / "a.pi", small_decoder(d_ff=90, context_length=150), ranks=[4, None])
    rng = np.random.default_rng(0)
    base = rng.integers(0, 257, 150)
    with load(path, mode=mode) as model:
        cache = model.new_cache()
        for common, length, last in [
            (0, 100, 3),
            (90, 140, 60),
            (90, 91, 1),
            (139, 140, 50),
            (91, 91, 1),
            (5, 150, 150),
        ]:
            ids = np.concatenate([base[:common], rng.integers(0, 257, length - common)])
            found = model.logits(ids, last, cache=cache)
            assert cache.tokens == tuple(ids.tolist())
            np.testing.assert_allclose(found, model.logits(ids)[-last:], rtol=1e-4, atol=1e-5)
        for wrong in (0, 4):
            with pytest.raises(UsageError, match=f"the last {wrong} positions"):
                model.logits([1, 2, 3], wrong)


def test_what_a_cache_holds_is_not_computed_again(path: Path) -> None:
    ran: list[int] = []
    with load(path) as model:
        step, cache = model.executor.step, model.new_cache()
        model.executor.step = lambda sequences: ran.extend(len(s.tokens) for s in sequences) or step(sequences)
        for ids in (range(50), [*range(45), 7, 8, 9], [*range(45), 7, 8, 9], [1]):
            model.logits(list(ids), 2 if len(ids) > 1 else 1, cache=cache)
    assert ran == [50, 3, 2, 1]


def test_logits_of_a_whole_context_and_no_more(path: Path) -> None:
    with load(path) as model:
        assert model.logits(np.arange(64)).shape == (64, 257)
        with pytest.raises(PromptError, match="65 tokens"):
            model.logits(np.arange(65))
        with pytest.raises(PromptError, match="token id 257"):
            model.logits([257])


def test_the_context_is_the_models_or_a_bounded_one(tmp_path: Path) -> None:
    short = random_artifact(tmp_path / "a.pi", small_decoder())
    long = random_artifact(tmp_path / "b.pi", small_decoder(context_length=100_000))
    with load(short) as model:
        assert model.context == 64
    with load(long) as model:
        assert model.context == DEFAULT_CONTEXT
    with load(long, context=100_000) as model:
        assert model.context == 100_000


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"mode": "sparse"}, UsageError),
        ({"context": 65}, UsageError),
        ({"context": 1}, UsageError),
        ({"threads": 0}, UsageError),
        ({"threads": numba.config.NUMBA_NUM_THREADS + 1}, UsageError),
        ({"device": "gpu"}, UsageError),
        ({"device": "cuda:99"}, (DeviceError, MissingExtraError)),
    ],
)
def test_arguments_that_cannot_be(path: Path, arguments: Any, error: Any) -> None:
    with pytest.raises(error):
        load(path, **arguments)


def test_what_is_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "a.pi").write_text("text")
    for path in (tmp_path / "a.pi", tmp_path / "none.pi", tmp_path):
        with pytest.raises(ArtifactError):
            load(path)


def test_threads_do_not_change_a_bit(path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 256, 50)
    for mode in ("dense", "gate", "predicted"):
        found = []
        for threads in range(1, numba.config.NUMBA_NUM_THREADS + 1):
            with load(path, mode=mode, threads=threads) as model:
                found.append(model.logits(ids).tobytes())
        assert len(set(found)) == 1


def test_chat_prompt(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with load(random_artifact(tmp_path / "a.pi", small_decoder(), files=PLAIN)) as model:
        assert model.chat_prompt(messages) == "user: hi\nbot:"
    with load(GOLDEN) as model:
        assert model.chat_prompt(messages) == "hi →"


def test_no_chat_template(path: Path) -> None:
    with load(path) as model, pytest.raises(TemplateError):
        model.chat_prompt([{"role": "user", "content": "hi"}])


def test_a_chat_template_that_is_no_text(tmp_path: Path) -> None:
    path = random_artifact(tmp_path / "a.pi", small_decoder(), files={"chat_template.jinja": b"\xff"})
    with load(path) as model, pytest.raises(ArtifactError, match="not UTF-8"):
        model.chat_prompt([{"role": "user", "content": "hi"}])


def test_a_tokenizer_that_is_none_closes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(Artifact, "close", lambda self: closed.append(self.path))
    path = random_artifact(tmp_path / "a.pi", small_decoder(), files={"tokenizer.json": b"{}"})
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        load(path)
    assert closed == [path]
