"""Generation: greedy, seeds, ends, whole characters, prompts that cannot be run."""

from pathlib import Path

import numpy as np
import pytest
from support.scripted import saying, scripted_artifact
from support.synthetic import END_ID, random_artifact, small_decoder

from pi_runtime import Model, Sampling, load
from pi_runtime.artifact.schema import Text
from pi_runtime.errors import PromptError, UsageError
from pi_runtime.sequence.sampling import token_logprobs
from pi_runtime.text.tokenizer import TextStream

NEVER = Text(prefix_ids=(), end_ids=())


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
        tokenizer = model.tokenizer
        whole = tokenizer.decode([*prompt, *answer.token_ids])
        assert text == whole.removeprefix(TextStream.begun(tokenizer, prompt))
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


def test_a_fresh_seed_is_reported(model: Model) -> None:
    first = model.generate([1, 2], max_tokens=30, sampling=Sampling(temperature=1.5))
    text = "".join(first)
    second = model.generate([1, 2], max_tokens=30, sampling=Sampling(temperature=1.5))
    assert first.seed != second.seed
    assert "".join(second) != text
    again = model.generate([1, 2], max_tokens=30, sampling=Sampling(temperature=1.5, seed=first.seed))
    assert "".join(again) == text
    assert model.generate([1, 2]).seed is None


def test_generation_defaults_are_the_checkpoints(tmp_path: Path) -> None:
    defaults = {"do_sample": True, "temperature": 9.0, "top_k": 1}
    with load(random_artifact(tmp_path / "a.pi", small_decoder(), text=NEVER, generation=defaults)) as model:
        answer = model.generate([1], max_tokens=8)
        "".join(answer)
        assert answer.token_ids == naive(model, [1], 8)
        other = model.generate([1], max_tokens=8, sampling=Sampling(temperature=9.0, seed=1))
        "".join(other)
        assert other.token_ids != answer.token_ids


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


@pytest.mark.parametrize(
    "prompt", ["", [], [1.5], [[1, 2]], [257], [3, -1], [2**40], [2**70], "\ud800", "a" * 8], ids=repr
)
def test_a_prompt_that_cannot_be_run(loop: Model, prompt: str | list[int]) -> None:
    with pytest.raises(PromptError):
        loop.generate(prompt)


@pytest.mark.parametrize("count", [0, -1])
def test_max_tokens_below_one(loop: Model, count: int) -> None:
    with pytest.raises(UsageError):
        loop.generate("a", max_tokens=count)


def test_min_tokens_hold_back_the_end(tmp_path: Path) -> None:
    with load(scripted_artifact(tmp_path / "a.pi", saying("abcd"), context=32)) as model:
        answer = model.generate("a", min_tokens=5)
        text = "".join(answer)
        assert text.startswith("bcd")
        assert (len(answer.token_ids) >= 5, answer.finish_reason) == (True, "end")
        for least in (1, 2, 3):
            assert "".join(model.generate("a", min_tokens=least)) == "bcd"


def test_min_tokens_hold_back_stop_strings(loop: Model) -> None:
    for least, wanted in ((0, ""), (1, "b"), (2, "ba"), (3, "bab")):
        answer = loop.generate("a", min_tokens=least, stop=["ba", "ab"])
        assert ("".join(answer), answer.finish_reason) == (wanted, "stop")


@pytest.mark.parametrize("settings", [{"min_tokens": -1}, {"min_tokens": 4, "max_tokens": 3}], ids=str)
def test_impossible_min_tokens(loop: Model, settings: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"^min_tokens="):
        loop.generate("a", **settings)


def test_logprobs_are_those_of_the_raw_logits(random_path: Path) -> None:
    sampling = Sampling(temperature=0.5, top_k=5, presence_penalty=2, logit_bias={3: 9}, seed=1)
    with load(random_path, mode="dense") as model:
        answer = model.generate([1, 2, 3], max_tokens=12, sampling=sampling, logprobs=2)
        assert answer.logprobs == []
        "".join(answer)
        logits = model.logits([1, 2, 3, *answer.token_ids])[2:-1]
        wanted = [token_logprobs(row, token, 2) for row, token in zip(logits, answer.token_ids, strict=True)]
        assert answer.logprobs == wanted
        assert model.generate([1], max_tokens=1).logprobs == []
        with pytest.raises(UsageError, match=r"^logprobs=-1"):
            model.generate([1], logprobs=-1)


def test_the_end_has_no_logprob(tmp_path: Path) -> None:
    with load(scripted_artifact(tmp_path / "a.pi", saying("abc"))) as model:
        answer = model.generate("a", logprobs=0)
        assert "".join(answer) == "bc"
        assert [found.token for found in answer.logprobs] == answer.token_ids == [98, 99]


@pytest.mark.parametrize("first", [1, 2, 40, 89, 90, 200])
def test_a_score_is_that_of_the_logits(random_path: Path, first: int) -> None:
    prompt = np.random.default_rng(0).integers(0, 256, 90).tolist()
    with load(random_path, mode="predicted") as model:
        logits = model.logits(prompt)
        wanted = [token_logprobs(logits[n - 1], prompt[n], 3) for n in range(first, 90)]
        assert model.score(prompt, first=first, top=3) == wanted
        cache = model.new_cache()
        model.score(prompt[:50], cache=cache)
        assert model.score(prompt, first=first, top=3, cache=cache) == wanted


def test_scores_that_cannot_be(loop: Model) -> None:
    assert loop.score("a") == loop.score("") == []
    for settings in ({"first": 0}, {"top": -1}, {"top": True}):
        with pytest.raises(UsageError):
            loop.score("abc", **settings)
    with pytest.raises(PromptError, match="9 tokens"):
        loop.score("a" * 9)
