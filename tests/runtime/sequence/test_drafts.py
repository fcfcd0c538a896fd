"""Guesses: where they are found, how many run, and that no text shows them."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.long_form import marked_long
from support.requests import alone, found_by, oracle, random_requests

from pi_runtime import Model, Sampling, load
from pi_runtime.errors import UsageError
from pi_runtime.sequence.drafts import (
    GAIN,
    GRAMS,
    LONGEST_MATCH,
    Acceptance,
    Draft,
    PromptLookup,
    Speculation,
    StepTimes,
)


def naive(tokens: list[int], most: int) -> tuple[list[int], int]:
    """The draft by definition, and the match: the latest place where the longest of the n-grams stood before."""
    for size in GRAMS:
        for at in range(len(tokens) - 1, size - 1, -1):
            if tokens[at - size : at] == tokens[-size:]:
                found = list(tokens)
                for n in range(most):
                    found.append(found[at + n])
                match = next(
                    n
                    for n in range(LONGEST_MATCH + 1)
                    if n in (LONGEST_MATCH, at) or tokens[at - 1 - n] != tokens[-1 - n]
                )
                return found[len(tokens) :], match
    return [], 0


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 12))
def test_drafts_are_what_followed_before(whole: list[int], most: int) -> None:
    tokens: list[int] = []
    lookup = PromptLookup(tokens)
    for n in range(len(whole)):
        tokens += whole[n : n + 1]
        if n % 3 != 1:
            found = lookup.draft(most)
            assert (found.tokens, found.match) == naive(tokens, most)


def test_no_draft_ends_the_text_or_passes_the_limit() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 1, 2], frozenset([4]))
    assert lookup.draft(9).tokens == [3]
    assert lookup.draft(0).tokens == lookup.draft(-1).tokens == []


def test_acceptance_follows_what_was_right() -> None:
    draft = Draft([1, 2, 3], 2)
    before = draft.expected
    assert before == sorted(before, reverse=True)
    for _ in range(200):
        draft.count([1, 9])
    first, second, third = draft.expected
    assert first > 0.95
    assert 0.05 > second >= third


Cost = Callable[[int], float]


def simulated(cost: Cost, right: float, steps: int, setting: str | int = "auto") -> tuple[float, list[int]]:
    """Tokens per second with drafts ÷ without, and the drafts of each step. Each one is right with this chance."""
    rng, times = random.Random(0), StepTimes()
    rule, acceptance = Speculation(setting, times, can_gain=True, max_tokens=64), Acceptance()
    tokens, seconds, lengths = 0, 0.0, []
    for _ in range(steps):
        draft = Draft([1] * 32, 8, acceptance=acceptance)
        (length,) = rule.lengths([draft.expected])
        drawn = []
        while len(drawn) <= length and (not drawn or drawn[-1] == 1):
            drawn.append(int(rng.random() < right))
        spent = cost(1 + length) * rng.uniform(0.95, 1.1)
        times.count(1, 1 + length, spent)
        draft.count(drawn)
        tokens, seconds, lengths = tokens + len(drawn), seconds + spent, [*lengths, length]
    return tokens / seconds * cost(1) * 1.025, lengths


def test_where_a_block_costs_as_much_as_its_tokens_drafts_stop() -> None:
    for right in (0.0, 0.3, 0.8):
        ratio, lengths = simulated(float, right, 2000)
        assert ratio > 0.97
        assert sum(n > 0 for n in lengths[200:]) < 0.08 * 1800


def test_they_are_tried_again() -> None:
    slow = [True]
    times = StepTimes()
    rule = Speculation("auto", times, can_gain=True, max_tokens=64)
    ran = []
    for n in range(2000):
        slow[0] = n < 1000
        (length,) = rule.lengths([[0.9, 0.8, 0.7]])
        times.count(1, 1 + length, 1.0 + (1.0 if slow[0] else 0.05) * length)
        ran.append(length)
    assert sum(n > 0 for n in ran[100:1000]) < 50
    assert sum(n == 3 for n in ran[1300:]) > 600


@pytest.mark.parametrize("right", [0.5, 0.9, 0.99])
def test_the_number_of_drafted_tokens_is_near_the_best(right: float) -> None:
    def cost(tokens: int) -> float:
        return 1 + 0.1 * (tokens - 1)

    best = max(simulated(cost, right, 1500, setting=n)[0] for n in (1, 2, 4, 8, 16, 32))
    ratio, _ = simulated(cost, right, 1500)
    assert ratio > 0.9 * best
    assert ratio > 1.2


def test_several_sequences_share_what_pays() -> None:
    times = StepTimes()
    rule = Speculation("auto", times, can_gain=True, max_tokens=64)
    for tokens in range(3, 30):
        times.count(3, tokens, 1 + 0.1 * (tokens - 3))
    sure, unsure = [0.99**n for n in range(1, 9)], [0.01] * 8
    assert rule.lengths([sure, unsure, []]) == [8, 0, 0]
    assert rule.lengths([unsure, [], unsure]) == [0, 0, 0]
    assert rule.lengths([[]]) == [0]
    assert Speculation(9, times, can_gain=True, max_tokens=12).lengths([sure, unsure, []]) == [8, 1, 0]
    assert GAIN > 1


@pytest.mark.parametrize("right", [0.1, 0.3, 0.5])
def test_several_sequences_do_not_lose_by_steps_that_are_held_up(right: float) -> None:
    """Eight at once, where a drafted token costs a twelfth of a step. Times vary by a tenth, and some by much more."""
    rng, times, count = random.Random(5), StepTimes(), 8
    rule, acceptances = Speculation("auto", times, can_gain=True, max_tokens=64), [Acceptance() for _ in range(count)]
    plain = spent = 0.0
    for _ in range(1500):
        drafts = [Draft([1] * 32, rng.choice([2, 2, 3, 4, 8]), acceptance=a) for a in acceptances]
        lengths = rule.lengths([draft.expected for draft in drafts])
        cost = 1 + sum(lengths) / 12
        times.count(
            count,
            count + sum(lengths),
            cost * rng.lognormvariate(0, 0.1) * (rng.uniform(1.3, 2.5) if rng.random() < 0.05 else 1),
        )
        spent += cost
        for draft, length in zip(drafts, lengths, strict=True):
            drawn = [int(rng.random() < right)]
            while drawn[-1] and len(drawn) <= length:
                drawn.append(int(rng.random() < right))
            draft.count(drawn)
            plain += len(drawn) / count
    assert plain / spent > 0.99


@pytest.mark.parametrize("setting", ["on", "", 0, 33, -1, 2.0, True, None])
def test_impossible_settings(model: Model, setting: object) -> None:
    with pytest.raises(UsageError, match=r"^speculate"):
        model.generate([1], speculate=setting)  # type: ignore[arg-type]


def test_an_executor_without_blocks_takes_no_number(model: Model) -> None:
    assert not Speculation("auto", StepTimes(), can_gain=False, max_tokens=1).is_on
    with pytest.raises(UsageError, match="does not go with a placement"):
        Speculation(4, StepTimes(), can_gain=False, max_tokens=1)


def test_a_loop_is_drafted(loop: Model, endless: Path) -> None:
    with load(endless, context=200) as model:
        answer = model.generate("a", speculate=8)
        assert "".join(answer) == "ba" * 100
        assert answer.finish_reason == "context"
        s = answer.stats
        assert s.accepted_tokens > 150
        assert s.acceptance == s.accepted_tokens / s.guessed_tokens
    assert "".join(loop.generate("a", speculate=8)) == "".join(loop.generate("a", speculate="off"))


DRAFTED: list[tuple[bool, str | int]] = [(True, 1), (False, 5), (True, 32), (False, "auto")]
OTHERWISE = [(not sampled, speculate) for sampled, speculate in DRAFTED]


@pytest.mark.parametrize("case", marked_long(DRAFTED + OTHERWISE, OTHERWISE))
def test_the_same_text_with_drafts(
    random_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[bool, str | int]
) -> None:
    """With stop strings, limits and the context's edge inside of blocks, and one cache for all."""
    sampled, speculate = case
    requests = random_requests(random.Random(4), 25, sampled=sampled, context=96, cancels=False)
    with load(random_path, mode="predicted", device="cpu") as model:
        wanted = [alone(model, request) for request in requests]
        oracle(monkeypatch, requests, wanted, wrong=0.1)
        accepted = 0
        for request, answer in zip(requests, wanted, strict=True):
            generation = model.generate(request.prompt, **request.settings, speculate=speculate)
            assert found_by(generation) == answer
            accepted += generation.stats.accepted_tokens
        if speculate != "auto":
            assert accepted > 100


def test_a_draft_that_was_not_read_leaves_no_trace(random_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stops reading amid a block finds the cache as without drafts."""
    with load(random_path, mode="predicted", device="cpu") as model:
        held: list[Sequence[int]] = []
        for speculate in ("off", 32):
            with monkeypatch.context() as patch:
                patch.setattr(PromptLookup, "draft", lambda _, most: Draft([9] * min(most, 20), 3))
                cache = model.new_cache()
                generation = model.generate([1, 2], cache=cache, sampling=Sampling(), speculate=speculate)
                next(generation)
                del generation
                held.append(cache.tokens)
        assert held[0] == held[1][: len(held[0])]
        assert len(held[1]) <= len(held[0]) + 1


def test_what_is_expected_follows_the_prompt_at_first() -> None:
    tokens = [1, 2, 3, 4]
    lookup = PromptLookup(tokens, expected=[5, 6, 7, 8, 9, 10, 11])
    assert lookup.draft(3).tokens == [5, 6, 7]
    tokens += [5, 6]
    assert lookup.draft(9).tokens == [7, 8, 9, 10, 11]
    tokens += [20, 9, 10]
    assert lookup.draft(9) == Draft([11], 2)
    tokens += [11, 30, 31]
    assert lookup.draft(9).tokens == []


def test_an_answer_is_looked_up_in_itself_beside_what_was_expected() -> None:
    tokens = [1, 2]
    lookup = PromptLookup(tokens, expected=[7, 8])
    tokens += [3, 4, 5, 6, 3, 4]
    assert lookup.draft(4).tokens == [5, 6, 3, 4]


def test_answers_to_one_prompt_share_what_is_expected_and_nothing_else() -> None:
    prompt = [1, 2, 3, 4]
    expected = [5, 6, 7, 8, 3, 4, 9]
    mine, yours = [*prompt], [*prompt]
    first = PromptLookup(mine, frozenset([0]), expected)
    second = first.beside(yours)
    assert second._shared is first._shared
    for lookup, tokens in ((first, mine), (second, yours)):
        alone = [*prompt]
        other = PromptLookup(alone, frozenset([0]), expected)
        assert lookup.draft(9) == other.draft(9)
        for token in [5, 6, 20 + len(tokens), 21, 5, 6, 7, 20 + len(tokens), 21]:
            tokens.append(token)
            alone.append(token)
            assert lookup.draft(9) == other.draft(9)


def test_what_is_expected_is_put_into_an_index_when_it_is_needed() -> None:
    lookup = PromptLookup([1, 2], expected=[3, 4, 5])
    assert not lookup._known
    lookup.prepare()
    assert lookup._known == [1, 2, 3, 4, 5, -1]
    assert lookup.draft(2).tokens == [3, 4]


@pytest.mark.parametrize(("most", "kept"), [(None, 8), (4, 4), (100, 8)])
def test_what_is_expected_beyond_the_longest_answer_is_not_kept(model: Model, most: int | None, kept: int) -> None:
    prompt = [1] * (model.context - 7)
    answer = model.new_answer(prompt, expected=[1] * 1000, max_tokens=most)
    answer.lookup.prepare()
    assert answer.lookup._inserted == kept + 1
