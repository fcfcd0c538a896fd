"""Generation: the loop over logits, its ends, its cache, its figures."""

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scripted import saying, scripted_artifact
from synthetic import END_ID, random_artifact, small_decoder

from pi_runtime import Model, Sampling, load
from pi_runtime import engine as engine_module
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Text
from pi_runtime.errors import PromptError, UsageError
from pi_runtime.kernels import reference

LOOP = {ord("a"): ord("b"), ord("b"): ord("a")}
NEVER = Text(prefix_ids=(), end_ids=())


@pytest.fixture(scope="module")
def random_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with predictors that pass about half, and no end of text."""
    decoder = small_decoder(d_ff=150, n_layers=3, context_length=96)
    return random_artifact(
        tmp_path_factory.mktemp("engine") / "a.pi", decoder, ranks=[4, None, 6], seed=5, scale=3.0, text=NEVER
    )


@pytest.fixture(scope="module")
def model(random_path: Path) -> Iterator[Model]:
    with load(random_path, mode="dense") as model:
        yield model


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Model]:
    """Says abab… without end."""
    with load(scripted_artifact(tmp_path / "loop.pi", LOOP), context=8) as model:
        yield model


def naive(model: Model, prompt: list[int], count: int) -> list[int]:
    """The definition of greedy: the likeliest token, `count` times, each from the logits of everything so far."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.logits(ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("mode", ["dense", "gate"])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 66])
def test_greedy_is_the_argmax_of_the_logits(random_path: Path, mode: str, length: int) -> None:
    prompt = np.random.default_rng(length).integers(0, 256, length).tolist()
    with load(random_path, mode=mode) as model:
        answer = model.generate(prompt, max_tokens=20)
        text = "".join(answer)
        assert answer.token_ids == naive(model, prompt, 20)
        assert text == model.tokenizer.decode(answer.token_ids)
        assert answer.finish_reason == "length"


def test_prefill_is_dense_and_logits_are_the_modes(random_path: Path) -> None:
    """The first token is the dense model's even where the sparse one would say another."""
    prompts = np.random.default_rng(0).integers(0, 256, (20, 9)).tolist()
    with load(random_path, mode="dense") as dense, load(random_path, mode="predicted") as sparse:
        first = [dense.logits(p)[-1].argmax() for p in prompts]
        assert [sparse.logits(p)[-1].argmax() for p in prompts] != first
        for prompt, token in zip(prompts, first, strict=True):
            answer = sparse.generate(prompt, max_tokens=1)
            "".join(answer)
            assert answer.token_ids == [token]


def test_a_seed_repeats_its_text(model: Model) -> None:
    def text(seed: int) -> str:
        return "".join(model.generate([1, 2], max_tokens=30, sampling=Sampling(temperature=1.5, seed=seed)))

    assert text(7) == text(7)
    assert len({text(seed) for seed in range(5)}) == 5


def test_generation_defaults_are_the_checkpoints(tmp_path: Path) -> None:
    defaults = {"do_sample": True, "temperature": 9.0, "top_k": 1}
    with load(random_artifact(tmp_path / "a.pi", small_decoder(), text=NEVER, generation=defaults)) as model:
        answer = model.generate([1], max_tokens=8)
        "".join(answer)
        assert answer.token_ids == naive(model, [1], 8)
        other = model.generate([1], max_tokens=8, sampling=Sampling(temperature=9.0, seed=1))
        "".join(other)
        assert other.token_ids != answer.token_ids


# Ends


def test_the_model_ends_its_text(tmp_path: Path) -> None:
    with load(scripted_artifact(tmp_path / "a.pi", saying("abcdef"))) as model:
        answer = model.generate("ab")
        assert answer.finish_reason is None
        assert "".join(answer) == "cdef"
        assert answer.finish_reason == "end"
        assert bytes(answer.token_ids) == b"cdef"


def test_any_of_several_end_ids_ends(tmp_path: Path) -> None:
    ends = (END_ID, ord("e"), ord("z"))
    with load(scripted_artifact(tmp_path / "a.pi", saying("abcdef"), end_ids=ends)) as model:
        answer = model.generate("a")
        assert "".join(answer) == "bcd"
        assert answer.finish_reason == "end"
        assert "".join(model.generate("d")) == ""


def test_a_stop_string_is_not_shown(tmp_path: Path) -> None:
    with load(scripted_artifact(tmp_path / "a.pi", saying("abcdefgh"))) as model:
        answer = model.generate("a", stop=["fx", "ef"])
        assert "".join(answer) == "bcd"
        assert answer.finish_reason == "stop"
        assert bytes(answer.token_ids) == b"bcdef"
        unmet = model.generate("a", stop=["ghi"])
        assert "".join(unmet) == "bcdefgh"
        assert unmet.finish_reason == "end"


def test_a_stop_string_beats_the_limit(tmp_path: Path) -> None:
    with load(scripted_artifact(tmp_path / "a.pi", saying("abcdefgh"))) as model:
        answer = model.generate("a", stop=["cd"], max_tokens=3)
        assert ("".join(answer), answer.finish_reason) == ("b", "stop")
        cut = model.generate("a", stop=["cd"], max_tokens=2)
        assert ("".join(cut), cut.finish_reason) == ("bc", "length")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_max_tokens(loop: Model, count: int) -> None:
    answer = loop.generate("a", max_tokens=count)
    assert "".join(answer) == "babab"[:count]
    assert answer.finish_reason == "length"
    assert answer.stats.generated_tokens == count


@pytest.mark.parametrize("length", [1, 3, 7])
def test_a_full_context_ends_the_text(loop: Model, length: int) -> None:
    """The last token needs no position: it is shown, and never read."""
    answer = loop.generate("a" * length)
    assert "".join(answer) == "babababab"[: 8 - length + 1]
    assert answer.finish_reason == "context"
    assert list(answer) == []


def test_learned_positions_last_to_the_end_of_the_context(tmp_path: Path) -> None:
    with load(random_artifact(tmp_path / "a.pi", small_decoder("opt", context_length=20), text=NEVER)) as model:
        answer = model.generate([5, 6])
        "".join(answer)
        assert len(answer.token_ids) == 19
        assert answer.token_ids[:-1] == naive(model, [5, 6], 18)


# Text


def test_no_piece_splits_a_character(tmp_path: Path) -> None:
    text = "aé→🙂"
    with load(scripted_artifact(tmp_path / "a.pi", saying(text))) as model:
        assert list(model.generate("a")) == ["é", "→", "🙂"]
        cut = model.generate("a", max_tokens=4)
        assert "".join(cut) == "é\ufffd"


def test_begin_of_text_comes_once(tmp_path: Path) -> None:
    """Here the end-of-text token begins a text too, as in OPT."""
    path = scripted_artifact(tmp_path / "a.pi", {END_ID: ord("x"), **saying("abc")}, prefix_ids=(END_ID,))
    with load(path) as model:
        for prompt, count in [("ab", 3), ("<|end|>ab", 3), ([ord("a"), ord("b")], 2)]:
            answer = model.generate(prompt)
            assert "".join(answer) == "c"
            assert answer.stats.prompt_tokens == count
        assert "".join(model.generate("", max_tokens=1)) == "x"


# Cache


def test_a_talk_with_a_cache_reads_like_one_without(random_path: Path) -> None:
    rng = np.random.default_rng(1)
    with load(random_path, mode="gate") as model:
        cache, talk = model.new_cache(), rng.integers(0, 256, 20).tolist()
        held = 0
        for _ in range(3):
            reused, fresh = model.generate(talk, max_tokens=9, cache=cache), model.generate(talk, max_tokens=9)
            assert "".join(reused) == "".join(fresh)
            assert reused.token_ids == fresh.token_ids
            assert (reused.stats.cached_tokens, fresh.stats.cached_tokens) == (held, 0)
            # The last token of an answer has not run yet.
            held = len(talk) + 8
            assert cache.tokens == talk + reused.token_ids[:-1]
            talk = talk + reused.token_ids + rng.integers(0, 256, 5).tolist()


def test_a_cache_of_another_talk_is_used_as_far_as_it_agrees(model: Model) -> None:
    cache = model.new_cache()
    "".join(model.generate([1, 2, 3, 4, 5, 6], max_tokens=5, cache=cache))
    for prompt, kept in [([1, 2, 3, 9, 9], 3), ([1, 2, 3, 9, 9], 4), ([1, 2], 1), ([7, 7], 0)]:
        answer = model.generate(prompt, max_tokens=6, cache=cache)
        assert "".join(answer) == "".join(model.generate(prompt, max_tokens=6))
        assert answer.stats.cached_tokens == kept


def test_a_cache_of_another_shape_is_refused(model: Model, loop: Model) -> None:
    with pytest.raises(UsageError, match="another model or context"):
        model.generate([1], cache=loop.new_cache())


def test_two_generations_may_take_turns(model: Model) -> None:
    def texts() -> list[str]:
        return ["".join(model.generate([n], max_tokens=12)) for n in (3, 4)]

    one, two = (model.generate([n], max_tokens=12) for n in (3, 4))
    turns = list(itertools.zip_longest(one, two, fillvalue=""))
    assert ["".join(column) for column in zip(*turns, strict=True)] == texts()


# Prompts


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "non-empty list of integers"),
        ([1.5], "non-empty list of integers"),
        ([[1, 2]], "non-empty list of integers"),
        ([257], "token id 257"),
        ([3, -1], "token id -1"),
        ([2**40], f"token id {2**40}"),
        ([2**70], "non-empty list of integers"),
        ("\ud800", "not Unicode"),
        ("a" * 8, "the prompt has 8 tokens"),
    ],
)
def test_a_prompt_that_cannot_be_run(loop: Model, prompt: str | list[int], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        loop.generate(prompt)


@pytest.mark.parametrize("count", [0, -1])
def test_max_tokens_below_one(loop: Model, count: int) -> None:
    with pytest.raises(UsageError, match="--max-tokens"):
        loop.generate("a", max_tokens=count)


# Figures


def test_figures_before_and_after(loop: Model) -> None:
    answer = loop.generate("aa")
    before = answer.stats
    assert (before.prompt_tokens, before.generated_tokens, before.prefill_tokens_per_s) == (2, 0, None)
    "".join(answer)
    s = answer.stats
    assert (s.prompt_tokens, s.cached_tokens, s.generated_tokens) == (2, 0, 7)
    assert s.first_token_s >= s.prefill_s > 0
    assert s.decode_s > 0
    assert s.prefill_tokens_per_s == 2 / s.prefill_s
    assert s.decode_tokens_per_s == 6 / s.decode_s


def test_one_token_has_no_decoding_speed(loop: Model) -> None:
    answer = loop.generate("a", max_tokens=1)
    "".join(answer)
    s = answer.stats
    assert (s.decode_s, s.decode_tokens_per_s, s.rows_read_share, s.active_share) == (0, None, None, None)


def test_time_before_the_first_piece_is_asked_for_is_not_prefill(loop: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    answer = loop.generate("a")
    for _ in range(100):
        next(clock)
    next(answer)
    assert (answer.stats.prefill_s, answer.stats.first_token_s) == (1, 102)


def counted(path: Path, ids: list[int], prefilled: int, mode: str) -> tuple[float, float]:
    """Shares of rows read and of neurons kept over ids[prefilled:], by the definition; the ids before run dense."""
    with Artifact.open(path) as artifact:
        d = artifact.manifest.decoder
        x_TD = artifact.values("embedding")[ids]
        read = kept = 0
        for n, layer in enumerate(artifact.manifest.layers):
            w = reference._Weights(artifact, f"layers/{n}/")
            x_TD = x_TD + reference.attention(d, w, reference.norm(d, w, "attention/norm", x_TD))
            normed_TD = reference.norm(d, w, "ffn/norm", x_TD)
            active_TF = np.ones((len(ids), d.d_ff), bool)
            if mode == "predicted" and layer.rung == "predicted":
                active_TF[prefilled:] = reference.scores(w, normed_TD)[prefilled:] > 0
            fires_TF = active_TF & ((normed_TD @ w["ffn/first"].T > 0) | (mode == "dense"))
            read, kept = read + active_TF[prefilled:].sum(), kept + fires_TF[prefilled:].sum()
            x_TD = x_TD + reference.ffn(d, w, normed_TD, active_TF)
    neurons = d.d_ff * d.n_layers * (len(ids) - prefilled)
    return read / neurons, kept / neurons


@pytest.mark.parametrize("mode", ["dense", "gate", "predicted", "auto"])
def test_shares_are_those_counted_by_the_definition(random_path: Path, mode: str) -> None:
    prompt = [5, 80, 17]
    with load(random_path, mode=mode) as model:
        answer = model.generate(prompt, max_tokens=25)
        "".join(answer)
    ran = prompt + answer.token_ids[:-1]
    wanted = counted(random_path, ran, len(prompt), "predicted" if mode == "auto" else mode)
    s = answer.stats
    assert s.rows_read_share is not None
    assert s.active_share is not None
    np.testing.assert_allclose((s.rows_read_share, s.active_share), wanted, rtol=1e-12)
    assert {"dense": s.active_share == 1, "gate": s.active_share < s.rows_read_share == 1}.get(
        mode, s.rows_read_share < 1
    )


# The model's end


def test_a_generation_outlives_its_models_name(random_path: Path) -> None:
    answer = load(random_path, mode="dense").generate([1, 2], max_tokens=5)
    gc.collect()
    with load(random_path, mode="dense") as model:
        assert "".join(answer) == "".join(model.generate([1, 2], max_tokens=5))


def test_a_closed_model_says_so(random_path: Path) -> None:
    with load(random_path) as model:
        begun, unbegun = model.generate([1, 2]), model.generate([1, 2])
        next(begun)
    for use in (lambda: list(begun), lambda: list(unbegun), lambda: model.logits([1])):
        with pytest.raises(UsageError, match="the model is closed"):
            use()
    model.close()
