"""Each filter is transformers' filter; the draw has the stated distribution."""

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pi_runtime.errors import ArtifactError, PiError, UsageError
from pi_runtime.sequence import sampling as ours
from pi_runtime.sequence.sampling import Sampler, Sampling, TokenLogprobs, candidates, token_logprobs

V = 307


def random_logits(seed: int, size: int = V) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)


@pytest.fixture(scope="module")
def theirs() -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import torch
    from transformers.generation import logits_process

    def apply(name: str, argument: float, x: np.ndarray, ids: list[int] | None = None) -> np.ndarray:
        processor = getattr(logits_process, name)(argument)
        return processor(torch.tensor([ids or [0]]), torch.tensor(x)[None])[0].numpy()

    return apply


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("mine", "name", "arguments"),
    [
        (ours.top_k, "TopKLogitsWarper", [1, 2, 40, V, 10 * V]),
        (ours.top_p, "TopPLogitsWarper", [0.0, 1e-6, 0.1, 0.5, 0.9, 0.999]),
        (ours.min_p, "MinPLogitsWarper", [0.0, 0.01, 0.3, 1.0]),
    ],
)
def test_filter_keeps_what_transformers_keeps(
    theirs: Any, seed: int, mine: Callable[..., np.ndarray], name: str, arguments: list[float]
) -> None:
    x = random_logits(seed)
    for argument in arguments:
        kept = np.isfinite(theirs(name, argument, x))
        np.testing.assert_array_equal(mine(x.astype(np.float64), argument), kept, err_msg=f"{name}({argument})")
        assert kept.any()


@pytest.mark.parametrize("mine", [ours.top_k, ours.min_p])
def test_ties_stay_together(mine: Callable[..., np.ndarray]) -> None:
    assert mine(np.array([1.0, 2.0, 2.0, 0.0]), 1).tolist() == [False, True, True, False]


def test_top_p_ties_as_transformers(theirs: Any) -> None:
    x = np.array([1, 2, 2, 0, 2, 2], np.float32)
    for p in (0.0, 0.3, 0.6, 0.9):
        kept = np.isfinite(theirs("TopPLogitsWarper", p, x))
        assert ours.top_p(x.astype(np.float64), p).tolist() == kept.tolist(), p


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.1, 2.0])
def test_penalty_is_transformers(theirs: Any, penalty: float) -> None:
    x, seen = random_logits(1), [3, 5, 5, V - 1, V + 20]
    np.testing.assert_array_equal(
        ours.penalise(x, seen, penalty), theirs("RepetitionPenaltyLogitsProcessor", penalty, x, seen)
    )
    np.testing.assert_array_equal(x, random_logits(1))


@pytest.mark.parametrize("seed", range(5))
def test_the_whole_chain_is_transformers(theirs: Any, seed: int) -> None:
    x, seen = random_logits(seed), [1, 2, 3]
    expected = theirs("RepetitionPenaltyLogitsProcessor", 1.2, x, seen)
    for name, argument in (
        ("TemperatureLogitsWarper", 0.7),
        ("TopKLogitsWarper", 60),
        ("TopPLogitsWarper", 0.95),
        ("MinPLogitsWarper", 0.02),
    ):
        expected = theirs(name, argument, expected)
    chain = Sampling(temperature=0.7, top_k=60, top_p=0.95, min_p=0.02, repetition_penalty=1.2)
    ids, p = candidates(ours.penalise(x, seen, 1.2), chain)
    np.testing.assert_array_equal(ids, np.flatnonzero(np.isfinite(expected)))
    weights = np.exp(expected[ids].astype(np.float64))
    np.testing.assert_allclose(p, weights / weights.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    "chosen",
    [{"top_k": k} for k in (1, 50, 1024, 1025)]
    + [{"top_k": 40, "top_p": 0.8, "min_p": 0.1}, {"min_p": 0.2}, {"min_p": 1.0}, {"min_p": 1e-3, "temperature": 1.0}]
    + [{"top_p": 0.0}, {"top_p": 0.5}, {"top_p": 0.9, "min_p": 0.05}, {"top_p": 0.95, "temperature": 9.0}],
    ids=str,
)
def test_a_large_vocabulary_is_filtered_as_a_small_one(
    chosen: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where most ids are left out beforehand, the same are drawn with the same probabilities; ties stay."""
    sampling = Sampling(**{"temperature": 0.7, **chosen})
    for seed in range(3):
        x = np.round(random_logits(seed, 5000), seed)
        found = candidates(x, sampling)
        with monkeypatch.context() as patch:
            patch.setattr(ours, "_shortlist", lambda scores, _top, sampling: (np.arange(scores.size), sampling.top_p))
            wanted = candidates(x, sampling)
        np.testing.assert_array_equal(found[0], wanted[0])
        np.testing.assert_allclose(found[1], wanted[1], rtol=1e-12)
        fewer = len(ours._shortlist(x, float(x.max()), sampling)[0]) < x.size
        assert fewer == (sampling.top_k <= ours.GROUPS and sampling.temperature < 9)


@pytest.mark.parametrize("left", [1, 7, 300])
@pytest.mark.parametrize("chosen", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_tokens_that_may_not_follow_are_no_candidates(chosen: dict[str, float], left: int) -> None:
    """A grammar leaves few of a large vocabulary: they are chosen among as if there were no others."""
    sampling = Sampling(**{"temperature": 0.7, **chosen})
    few = np.sort(np.random.default_rng(left).permutation(5000)[:left])
    x = np.full(5000, -np.inf, np.float32)
    x[few] = random_logits(0, left)
    ids, p = candidates(x, sampling)
    wanted, wanted_p = candidates(x[few], sampling)
    np.testing.assert_array_equal(ids, few[wanted])
    np.testing.assert_allclose(p, wanted_p, rtol=1e-12)


def test_draws_have_the_stated_probabilities() -> None:
    """Inverse CDF: an evenly spaced u gives each id its probability's share of the draws, to one draw."""

    total = 20_000

    class Even(Sampler):
        def draw(self, position: int) -> float:
            return (position + 0.5) / total

    x = random_logits(0, 12)
    chosen = Sampling(temperature=1.5, top_k=9)
    sampler = Even(chosen, x.size)
    counts = np.bincount([sampler(x, range(n)) for n in range(total)], minlength=x.size)
    ids, p = candidates(x, chosen)
    assert counts.sum() == counts[ids].sum() == total
    np.testing.assert_allclose(counts[ids], p * total, atol=1.01)


def test_largest_u_still_draws_a_possible_id() -> None:
    class Last(Sampler):
        def draw(self, position: int) -> float:  # noqa: ARG002
            return 1 - 2**-53

    x = np.array([0, 0, 0, -np.inf], np.float32)
    assert Last(Sampling(temperature=1), x.size)(x, []) == 2


def test_a_seed_repeats_and_another_does_not() -> None:
    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), V)
        return [sampler(random_logits(n), range(n)) for n in range(40)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)


def test_a_draw_depends_on_seed_number_and_position_alone() -> None:
    def draws(positions: range, **key: int) -> list[float]:
        sampler = Sampler(Sampling(temperature=1, **key), V)
        return [sampler.draw(n) for n in positions]

    forth, back = range(200), range(199, -1, -1)
    assert draws(forth, seed=7) == draws(back, seed=7)[::-1]
    found = [x for seed in (0, 1, 2**31, 2**70) for number in (0, 1) for x in draws(forth, seed=seed, number=number)]
    assert len(set(found)) == len(found)
    assert min(found) >= 0
    assert max(found) < 1
    # Of 1,600 even numbers in each tenth 160 ± 12.
    assert np.histogram(found, 10, (0, 1))[0].tolist() == pytest.approx([160] * 10, abs=48)


def test_the_draws_are_these() -> None:
    """Another generator, or another key, would change every sampled text."""
    sampler = Sampler(Sampling(temperature=1, seed=7, number=2), V)
    assert [sampler.draw(n) for n in (0, 5)] == [0.8169432743302534, 0.5498742301976813]


def test_greedy_takes_the_lowest_of_the_largest() -> None:
    x = np.array([1, 4, 4, 0], np.float32)
    assert Sampler(Sampling(), 4)(x, []) == 1
    assert Sampler(Sampling(repetition_penalty=2), 4)(x, [1]) == 2


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1e-300),
        Sampling(temperature=5e-324),
        Sampling(temperature=1, top_k=1),
        Sampling(temperature=1, top_p=0),
        Sampling(temperature=1, top_p=1e-9),
        Sampling(temperature=1, min_p=1),
        Sampling(temperature=1e-3, top_k=10 * V, top_p=1, min_p=0),
    ],
)
def test_extremes_are_greedy(sampling: Sampling) -> None:
    for seed in range(10):
        x = random_logits(seed)
        assert Sampler(sampling, V)(x, []) == x.argmax()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=2, top_k=5, top_p=0.9, min_p=0.1)])
def test_one_possible_token_is_taken(sampling: Sampling) -> None:
    x = np.full(V, -np.inf, np.float32)
    x[17] = -3
    assert Sampler(sampling, V)(x, [17]) == 17


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_say_nothing(temperature: float, bad: float) -> None:
    x = random_logits(0)
    x[5] = bad
    sampler = Sampler(Sampling(temperature=temperature), V)
    with pytest.raises(PiError, match="logits"):
        sampler(x, [])
    with pytest.raises(PiError, match="logits"):
        sampler(np.full(V, -np.inf, np.float32), [])


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, "hot", True]),
        ("top_k", [-1, 1.5, True]),
        ("top_p", [-0.1, 1.1, math.nan]),
        ("min_p", [-0.1, 1.1, None]),
        ("repetition_penalty", [0, -1, math.inf]),
        ("presence_penalty", [-2.1, math.nan, "much"]),
        ("frequency_penalty", [2.1, None]),
        ("logit_bias", [3, [(1, 2)], {"1": 2}, {-1: 2}, {1: 101}, {1: "x"}]),
        ("seed", [-1, 0.5]),
        ("number", [-1, None]),
    ],
)
def test_impossible_values(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(UsageError):
            Sampling(**{field: value})


def test_generation_config() -> None:
    read = Sampling.from_generation_config
    llama = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None, "eos_token_id": 2}
    assert read({}).temperature == 0
    assert read({**llama, "do_sample": False}).temperature == 0
    assert read(llama) == Sampling(temperature=0.6, top_p=0.9, top_k=50)
    assert read(llama, temperature=0.0).temperature == 0
    assert read(llama, top_p=None, top_k=0, seed=3) == Sampling(temperature=0.6, top_p=0.9, seed=3)
    assert read({"repetition_penalty": 1.3}).repetition_penalty == 1.3
    # A filter or a temperature asks for sampling, a value that switches a filter off does not.
    assert read({}, temperature=0.8).temperature == 0.8
    assert read({}, top_p=0.5) == Sampling(temperature=1.0, top_p=0.5, top_k=50)
    assert read({}, top_p=1.0, seed=1).temperature == 0


def test_generation_config_errors_name_their_source() -> None:
    with pytest.raises(ArtifactError, match="generation defaults"):
        Sampling.from_generation_config({"do_sample": True, "top_p": 7})
    with pytest.raises(UsageError, match=r"^top_p=7"):
        Sampling.from_generation_config({}, top_p=7)


def test_presence_and_frequency_count_the_answer_alone() -> None:
    """OpenAI's definition: the logit less presence, if the answer has the token, and less frequency for each time."""
    x = random_logits(3)
    prompt, answer = [1, 1, 2], [2, 5, 5, 5]
    wanted = x.astype(np.float64)
    for token in set(answer):
        wanted[token] -= 0.5 + 0.25 * answer.count(token)
    np.testing.assert_allclose(ours.penalise_repeats(x, answer, 0.5, 0.25), wanted, rtol=1e-6)
    np.testing.assert_array_equal(x, random_logits(3))
    likely = np.zeros(V, np.float32)
    likely[[1, 2, 5]] = 1.0, 0.9, 1.5
    sampler = Sampler(Sampling(presence_penalty=0.5, frequency_penalty=0.25), V, prompt_tokens=3)
    assert sampler(likely, [*prompt, *answer]) == 1
    assert Sampler(Sampling(), V, prompt_tokens=3)(likely, [*prompt, *answer]) == 5


def test_a_bias_is_added() -> None:
    x = random_logits(1)
    wanted = x.copy()
    wanted[[3, V - 1]] += np.array([5, -100], np.float32)
    sampling = Sampling(temperature=1, logit_bias={3: 5, V - 1: -100}, seed=1)
    plain = Sampler(Sampling(temperature=1, seed=1), V)
    for n in range(50):
        assert Sampler(sampling, V)(x, range(n)) == plain(wanted, range(n))
    assert Sampler(Sampling(logit_bias={9: 100}), V)(x, []) == 9
    with pytest.raises(UsageError, match=f"^logit_bias: token id {V}"):
        Sampler(Sampling(logit_bias={V: 1}), V)


def test_end_ids_come_after_min_tokens() -> None:
    x = np.zeros(V, np.float32)
    x[7], x[8], x[9] = 3, 2, 1
    sampler = Sampler(Sampling(), V, prompt_tokens=2, end_ids=(7, 8), min_tokens=3)
    assert [sampler(x, range(100, 102 + n)) for n in range(5)] == [9, 9, 9, 7, 7]


def test_a_grammar_rules_tokens_out() -> None:
    x = random_logits(4)
    few = np.zeros(V, np.bool_)
    few[[11, 12, 300]] = True
    best = int(np.where(few, x, -np.inf).argmax())
    told: list[list[int]] = []

    def allowed(ids: Any) -> np.ndarray:
        told.append(list(ids))
        return few

    assert Sampler(Sampling(), V, prompt_tokens=2, allowed=allowed)(x, [7, 8, 9]) == best
    assert told == [[7, 8, 9]]
    # Of two demands the grammar's counts: nothing but the end may follow.
    assert Sampler(Sampling(), V, end_ids=[11, 12, 300], min_tokens=9, allowed=allowed)(x, []) == best
    sampler = Sampler(Sampling(temperature=1), V, allowed=lambda _: np.zeros(V, np.bool_))
    with pytest.raises(PiError, match="no token may follow"):
        sampler(x, [])


@pytest.mark.parametrize("top", [0, 1, 5, V, V + 9])
def test_logprobs_are_the_log_softmax(top: int) -> None:
    x = random_logits(2)
    wanted = np.log(ours.softmax(x.astype(np.float64)))
    found = token_logprobs(x, 17, top)
    assert (found.token, found.logprob) == (17, pytest.approx(wanted[17], rel=1e-12))
    order = sorted(range(V), key=lambda i: (-wanted[i], i))[:top]
    assert [token for token, _ in found.top] == order
    np.testing.assert_allclose([logprob for _, logprob in found.top], wanted[order], rtol=1e-12)


def test_logprobs_with_ties_and_impossible_tokens() -> None:
    x = np.array([1, 2, 2, -np.inf, 2], np.float32)
    found = token_logprobs(x, 3, 2)
    assert found.logprob == -math.inf
    assert [token for token, _ in found.top] == [1, 2]


def test_log_probabilities_that_are_kept_take_little_memory() -> None:
    """Those of sixteen answers with twenty likely tokens each would take gigabytes as Python's numbers."""
    top = tuple((n * 7919, -0.1 * n) for n in range(20))
    tracemalloc.start()
    try:
        kept = [TokenLogprobs(n, -1.5, top) for n in range(1000)]
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 600 * len(kept)
    assert kept[3].top == top
    assert kept[3] == TokenLogprobs(3, -1.5, top) != TokenLogprobs(3, -1.5, top[:19])
    assert repr(TokenLogprobs(3, -1.5, top[:1])) == "TokenLogprobs(token=3, logprob=-1.5, top=((0, -0.0),))"
