"""A guess head: what it computes is its definition, and it changes no text."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.guess_heads import drafted, help_head
from support.requests import CAN_CONSTRAIN, Request, alone, assert_same, found_by, random_requests, together
from support.synthetic import FACTS, frequencies, random_artifact, small_decoder, small_guess_head, stored_plan

from pi_runtime import Engine, Grammar, Model, Sampling, load
from pi_runtime.artifact.guess_head import PREFIX, GuessHead
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Text
from pi_runtime.artifact.verification import verify
from pi_runtime.engine.loading import NO_HEAD
from pi_runtime.errors import PiError, UsageError
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.execution.guess_head import GuessHeadRun
from pi_runtime.execution.plan_layout import placed_arrays
from pi_runtime.sequence.drafts import (
    LEAST_DRAFTINGS,
    NO_DRAFT,
    STALE_STEPS,
    Acceptance,
    Draft,
    PromptLookup,
    Speculation,
    StepTimes,
)
from pi_runtime.sequence.head_draft import HEAD_RIGHT, MAX_WAITING, Floats, HeadDraft

CONTEXT = 128


def artifact(path: Path, fmt: str = "f32", **fields: Any) -> Path:
    decoder = small_decoder(context_length=CONTEXT, n_layers=3, **fields)
    plans = (stored_plan((16, 8, 40), 1 << 20, 20000, context=CONTEXT),)
    head = small_guess_head(decoder, format=fmt)
    text = Text(prefix_ids=(), end_ids=(3, 77))
    return random_artifact(path, decoder, format=fmt, guess=head, plans=plans, scale=2.0, text=text)


def states_of(model: Model, tokens: Sequence[int], select: bool) -> tuple[Floats, Floats]:
    step = SequenceStep(
        cache=model.new_cache(),
        tokens=np.array(tokens),
        select=select,
        logits="all",
        states=model.manifest.guess_states,
    )
    (result,) = model.executor.step([step])
    assert result.states_TC is not None
    return result.states_TC, result.logits_TV


@pytest.mark.parametrize("fmt", ["f32", "f16", "q8", "q4"])
@pytest.mark.parametrize("fields", [{}, {"d_embedding": 24}], ids=["", "narrow"])
def test_the_head_is_its_definition(fmt: str, fields: dict[str, Any], tmp_path: Path) -> None:
    assert_is_its_definition(artifact(tmp_path / "a.pi", fmt, **fields), fmt)


@pytest.mark.parametrize("kind", FACTS)
def test_the_head_is_its_definition_beside_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    """What its model has (latents, windows, layers without rotation) is not the head's, and nor is its cache's page."""
    decoder = small_decoder(**{"context_length": CONTEXT, "n_layers": 3} | FACTS[kind])
    fields = {"n_heads": 6, "n_kv_heads": 3, "head_dim": 40, "rotary_frequencies": frequencies(40)}
    path = random_artifact(
        tmp_path / "a.pi", decoder, format="f32", guess=small_guess_head(decoder, **fields), scale=2.0
    )
    verify(path)
    with load(path, device="cpu") as model:
        assert model.executor.guess_head is not None
        (one,) = model.executor.guess_head.new_cache().pool.classes
        assert (one.page.shape, one.window) == ((1, 2, 3, 32, 40), 0)
    assert_is_its_definition(path, "f32")


def test_a_head_that_does_not_fit_its_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = small_decoder(**FACTS["latents of keys and of queries, experts of groups by their largest"])
    head = small_guess_head(decoder)
    assert not [*head.problems(decoder)]
    monkeypatch.setattr(GuessHead, "layer_of", lambda _, d: d)
    assert any("a page of its cache" in problem for problem in head.problems(decoder))


def assert_is_its_definition(path: Path, fmt: str) -> None:
    tokens = [5, 200, 7, 9, 31, 8, 90, 13]
    with load(path, device="cpu") as model, Artifact.open(path) as file:
        head, runner = file.manifest.guess, model.executor.guess_head
        assert head is not None
        assert runner is not None
        w = {name.removeprefix(PREFIX): file.values(name) for name in file.manifest.arrays if name.startswith(PREFIX)}
        states_TC, _ = states_of(model, tokens[:-1], select=True)
        wanted, logits = drafted(head, w, file.values("embedding"), tokens, states_TC, 4)
        cache, y_TD, found = runner.new_cache(), states_TC[:0], []
        y_TD, logits_S = runner.draft(cache, tokens[1:], states_TC, y_TD)
        rounding = {"f32": 1e-4, "f16": 2e-3}.get(fmt, 0.1)  # inputs of block formats are rounded to a byte
        for n in range(4):
            assert np.abs(logits_S - logits[n]).max() < rounding * np.abs(logits[n]).max()
            found.append(wanted[n])
            y_TD, logits_S = runner.draft(cache, [found[-1]], None, y_TD)
        assert cache.length == len(tokens) - 1 + 4


@pytest.mark.parametrize("fields", [{}, {"window": 9, "windowed_layers": (0, 2)}], ids=["", "windows"])
def test_a_head_may_take_its_text_in_parts(fields: dict[str, Any], tmp_path: Path) -> None:
    with load(artifact(tmp_path / "a.pi", **fields), device="cpu") as model:
        runner, tokens = model.executor.guess_head, [n % 250 for n in range(1, 101)]
        assert runner is not None
        states_TC, _ = states_of(model, tokens[:64], select=False)
        whole = runner.draft(runner.new_cache(), tokens[1:65], states_TC, states_TC[:0])
        cache = runner.new_cache()
        assert [table.of.window for table in cache.tables] == [0], "the model's windows are not the head's"
        for part in (slice(0, 5), slice(5, 6), slice(6, 64)):
            parts = runner.draft(cache, tokens[1:65][part], states_TC[part], states_TC[:0])
        assert all(np.array_equal(one, other) for one, other in zip(whole, parts, strict=True))


@pytest.mark.parametrize("select", [True, False])
def test_states_are_what_enters_the_layers(tmp_path: Path, select: bool) -> None:
    path, tokens = artifact(tmp_path / "a.pi"), [5, 200, 7, 9]
    decoder = small_decoder(context_length=CONTEXT, n_layers=3)
    head = small_guess_head(decoder, states=(0, 1, 3))
    path = random_artifact(tmp_path / "b.pi", decoder, guess=head)
    with load(path, device="cpu") as model, Artifact.open(path) as file:
        states_TC, logits_TV = states_of(model, tokens, select)
        first, _, last = np.split(states_TC, 3, axis=1)
        assert np.array_equal(first, file.values("embedding")[tokens])
        scale = 1 / np.sqrt((last * last).mean(1, keepdims=True) + 1e-5)
        normed = last * scale * file.values("final_norm/weight")
        np.testing.assert_allclose(normed @ file.values("head").T, logits_TV, rtol=1e-4, atol=1e-4)


def test_the_stand_in_has_the_same_states(tmp_path: Path) -> None:
    path, tokens = artifact(tmp_path / "a.pi"), [5, 200, 7, 9]
    with load(path, device="cpu") as one, load(path, device="stand-in") as other:
        assert other.executor.guess_head is not None
        for select in (True, False):
            np.testing.assert_allclose(
                states_of(one, tokens, select)[0], states_of(other, tokens, select)[0], rtol=1e-4, atol=1e-5
            )


def test_no_plan_puts_the_head_on_a_gpu(tmp_path: Path) -> None:
    with Artifact.open(artifact(tmp_path / "a.pi")) as file:
        plan = replace(file.manifest.plans[0], head="gpu", embedding="gpu", attention=("gpu",) * 3)
        names = [array.name for array in placed_arrays(file.manifest, plan)]
    assert "head" in names
    assert not [name for name in names if name.startswith(PREFIX)]


def test_the_disk_tier_drafts_without_the_head(tmp_path: Path) -> None:
    path = artifact(tmp_path / "a.pi")
    with load(path, device="cpu") as model:
        wanted = found_by(model.generate([5, 6], max_tokens=9, sampling=Sampling()))
    with load(path, ram_budget=1 << 30) as model:
        assert model.executor.guess_head is None
        assert model.notice == NO_HEAD
        assert found_by(model.generate([5, 6], max_tokens=9, sampling=Sampling(), speculate=4)) == wanted


def test_keys_and_values_of_the_head_are_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as a sequence takes with its head runs; the pages of both never take more."""
    heads, most = list[Any](), list[int]()
    make, new_cache = HeadDraft._make, GuessHeadRun.new_cache

    def noted_cache(self: GuessHeadRun) -> Any:
        heads.append(new_cache(self))
        return heads[-1]

    with load(artifact(tmp_path / "a.pi"), device="cpu") as model:
        pool = model.executor.new_pool()
        budget = pool.budget_for(4 * pool.page_nbytes)
        assert budget > 4 * pool.page_nbytes
        with Engine(model, slots=2, kv_budget=budget, speculate=4) as engine:

            def noted(self: HeadDraft, count: int) -> list[int]:
                found = make(self, count)
                most.append(engine.stats.bytes_used + sum(cache.pool.in_use_nbytes for cache in heads))
                return found

            monkeypatch.setattr(GuessHeadRun, "new_cache", noted_cache)
            monkeypatch.setattr(HeadDraft, "_make", noted)
            streams = [engine.generate([n, 6], max_tokens=CONTEXT - 30, sampling=Sampling()) for n in range(4)]
            assert all(list(stream) for stream in streams)
    assert 0 < max(most) <= budget


def test_a_head_without_meaning_changes_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(artifact(tmp_path / "a.pi"), device="cpu") as model:
        wanted = found_by(model.generate([5, 6], max_tokens=30, speculate="off"))
        draft = GuessHeadRun.draft
        monkeypatch.setattr(GuessHeadRun, "draft", lambda *given: tuple(x * np.nan for x in draft(*given)))
        monkeypatch.setattr(PromptLookup, "draft", lambda *_: NO_DRAFT)
        with Engine(model, speculate=4) as engine:
            assert found_by(engine.generate([5, 6], max_tokens=30)) == wanted
            assert engine.ended is None


@pytest.mark.skipif(not CAN_CONSTRAIN, reason="needs llguidance")
def test_a_grammar_too_complex_for_a_draft_ends_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end its own answer, at a token that the answer has."""
    monkeypatch.setattr(PromptLookup, "draft", lambda *_: NO_DRAFT)
    patterns = [{"pattern": f"^[a-z]{{6}}(.*[a-z]{{{3 + k}}}.*7x{k}|y*)*$"} for k in range(4)]
    grammar = Grammar.json_schema({"type": "string", "allOf": patterns})
    settings: dict[str, Any] = {"grammar": grammar, "sampling": Sampling(temperature=2.0, seed=1), "max_tokens": 30}
    with load(artifact(tmp_path / "a.pi"), device="cpu") as model:
        plain = found_by(model.generate([5, 6], max_tokens=90))
        with Engine(model, speculate=8) as engine:
            other = engine.generate([5, 6], max_tokens=90)
            with pytest.raises(PiError, match="cannot be followed"):
                "".join(engine.generate([5, 6], **settings))
            assert found_by(other) == plain


def test_a_closed_model_drafts_nothing(tmp_path: Path) -> None:
    with load(artifact(tmp_path / "a.pi"), device="cpu") as model:
        answer = model.generate([5, 6], max_tokens=20, sampling=Sampling(), speculate=4)
        next(answer)
    with pytest.raises(UsageError, match="closed"):
        list(answer)


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"device": "stand-in"}], ids=["cpu", "stand-in"])
@pytest.mark.parametrize("right", [0.0, 0.7])
def test_the_same_text_with_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: bool, options: dict[str, Any], right: float
) -> None:
    """`right`: the share of tokens that a guess head drafts right beside those that its random weights hit."""
    path, guessed, accepted = artifact(tmp_path / "a.pi"), 0, 0
    for n in range(100 if long else 3):
        rng = random.Random(f"{options} {n}")
        requests = random_requests(rng, 50 if long else 10, sampled=n % 2 == 1, context=CONTEXT, cancels=True)
        with load(path, threads=1, **options) as model:
            wanted = [alone(model, request) for request in requests]
            speculate: str | int = rng.choice(["auto", 1, 4, 8])
            known = [[*r.prompt, *token_ids] for r, (_, token_ids, *_) in zip(requests, wanted, strict=True)]
            with monkeypatch.context() as patch:
                if right:
                    help_head(patch, known, right, rng)
                if rng.random() < 0.7:
                    patch.setattr(PromptLookup, "draft", lambda *_: NO_DRAFT)
                for request, answer in zip(requests, wanted, strict=True):
                    generated = model.generate(request.prompt, **request.settings, speculate=speculate)
                    assert_same(request, answer, found_by(generated))
                    guessed += generated.stats.head_guessed_tokens
                    accepted += generated.stats.head_accepted_tokens
                pool = model.executor.new_pool()
                budget = pool.budget_for(pool.page_nbytes * rng.choice([4, 6, 50]))
                with Engine(model, slots=rng.choice([1, 3, 8]), kv_budget=budget, speculate=speculate) as engine:
                    found = together(engine, requests, rng)
                    guessed += engine.stats.head_guessed_tokens
                    accepted += engine.stats.head_accepted_tokens
            for request, one, other in zip(requests, wanted, found, strict=True):
                assert_same(request, one, other)
    assert guessed > 100
    assert accepted > 0.3 * right * guessed


@pytest.mark.skipif(not CAN_CONSTRAIN, reason="needs llguidance")
def test_drafted_tokens_follow_the_grammar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptLookup, "draft", lambda *_: NO_DRAFT)
    settings: dict[str, Any] = {"grammar": Grammar.regex("[ -z]{40}"), "sampling": Sampling(temperature=2.0, seed=3)}
    with load(artifact(tmp_path / "a.pi"), device="cpu") as model:
        request, tokens = Request((5, 6), settings), list[int]()
        make = HeadDraft._make

        def noted(self: HeadDraft, count: int) -> list[int]:
            found = make(self, count)
            tokens.extend(found)
            return found

        monkeypatch.setattr(HeadDraft, "_make", noted)
        generated = model.generate([5, 6], speculate=5, **settings)
        assert_same(request, alone(model, request), found_by(generated))
    assert tokens
    assert all(chr(token) in map(chr, range(32, 123)) for token in tokens)


class Runner:
    """A guess head that foretells the token behind the number in the last state, and notes what it is given."""

    ids_S, vocabulary, states = np.arange(0, 100, 2), 100, (0,)

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[int], list[float] | None]] = []

    def new_cache(self) -> Any:
        return Positions()

    def draft(self, cache: Any, tokens: list[int], states_TC: Floats | None, y_TD: Floats) -> tuple[Floats, Floats]:
        given = None if states_TC is None else states_TC[:, 0].tolist()
        assert given is None or len(given) == len(tokens)
        self.calls.append((cache.length, tokens, given))
        cache.length += len(tokens)
        last = float(y_TD[-1, 0] if states_TC is None else states_TC[-1, 0])
        logits_S = np.zeros(50, np.float32)
        logits_S[int(last + 2) // 2 % 50] = 9
        return np.array([[last + 2]], np.float32), logits_S


class Positions:
    length = 0

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)


def new_draft(tokens: list[int], end_ids: frozenset[int] = frozenset()) -> tuple[HeadDraft, Runner]:
    runner = Runner()
    return begun(runner, Acceptance(right=HEAD_RIGHT), tokens, end_ids), runner


def begun(runner: Runner, acceptance: Acceptance, tokens: list[int], end_ids: frozenset[int]) -> HeadDraft:
    return HeadDraft(runner, acceptance, tokens, lambda logits_V, _seen: int(logits_V.argmax()), end_ids)


def states(*numbers: float) -> Floats:
    return np.array(numbers, np.float32)[:, None]


def test_a_head_reads_what_it_has_not_read_yet() -> None:
    tokens = [1, 2, 3, 4]
    draft, runner = new_draft(tokens)
    draft.take(0, states(10, 20, 30))
    assert draft.draft(5).run(3, None).tokens == [32, 34, 36]
    assert runner.calls == [(0, [2, 3, 4], [10, 20, 30]), (3, [32], None), (4, [34], None)]
    tokens += [32, 7]
    draft.take(3, states(40, 50))
    runner.calls.clear()
    assert draft.draft(5).run(1, None).tokens == [52]
    assert runner.calls == [(3, [32, 7], [40, 50])]


def test_a_head_begins_anew_behind_a_gap_and_where_tokens_run_again() -> None:
    tokens = [1, 2, 3, 4]
    draft, runner = new_draft(tokens)
    draft.take(2, states(30))  # the others' keys and values were stored
    assert draft.draft(1).run(1, None).tokens == [32]
    draft.take(0, states(10, 20, 30))
    assert draft.draft(1).run(1, None).tokens == [32]
    assert runner.calls == [(0, [4], [30]), (0, [2, 3, 4], [10, 20, 30])]


def test_a_head_drafts_only_behind_known_states_and_no_end() -> None:
    draft, _ = new_draft([1, 2, 3, 4], frozenset([34]))
    assert draft.draft(5) is NO_DRAFT
    draft.take(0, states(10, 20))
    assert draft.draft(5) is NO_DRAFT
    draft.take(2, states(30))
    assert draft.draft(5).planned == 5
    assert draft.draft(0).expected == draft.draft(-1).expected == []
    assert draft.draft(5).run(5, None).tokens == [32]


def test_a_head_that_is_not_asked_keeps_few_states() -> None:
    tokens = list(range(2 * MAX_WAITING + 2))
    draft, runner = new_draft(tokens)
    for first in range(0, len(tokens) - 2, 10):
        draft.take(first, states(*range(first, min(first + 10, len(tokens) - 1))))
    assert sum(map(len, draft._waiting)) == draft._num_waiting == MAX_WAITING
    assert draft._waiting[-1].base is None or len(draft._waiting[-1].base) < 20  # what comes is not copied into one
    assert draft.draft(1).run(1, None).num_run == 1
    ((length, given, _),) = runner.calls
    assert length == 0
    assert given == tokens[-len(given) :]


def test_the_next_answer_knows_how_often_the_head_was_right() -> None:
    runner, acceptance, text = Runner(), Acceptance(right=HEAD_RIGHT), [1, 2, 3, 4]
    expected = list[float]()
    for right in (1, 0, 0, 0, 0):
        draft = begun(runner, acceptance, text, frozenset())
        draft.take(0, states(10, 20, 30))
        expected.append(draft.draft(1).expected[0])
        for _ in range(8):
            Draft([32], 0, acceptance=acceptance).count([32 if right else 7])
    assert expected[0] < expected[1] > expected[2] > expected[3] > expected[4]
    for _ in range(200):
        begun(runner, acceptance, text, frozenset())
    assert draft.draft(1).expected[0] == pytest.approx(HEAD_RIGHT, abs=0.01), "it is tried again in time"


def made(planned: int, right: float) -> Draft:
    return Draft([], 0, acceptance=Acceptance(right=right), planned=planned, make=lambda count: [0] * count)


def test_a_head_that_is_slow_is_off() -> None:
    times = StepTimes()
    speculation = Speculation("auto", times, can_gain=True, max_tokens=16)
    for _ in range(3):
        times.count(1, 1, 1.0)
    for tokens in range(2, 10):
        times.count(1, tokens, 1.0 + 0.1 * tokens)
        times.count(1, tokens, 1.0 + 0.1 * tokens)
    head, lookup = made(8, 0.8), Draft([5, 6, 7], 2)
    (draft, length), = speculation.planned([[NO_DRAFT, head]])  # fmt: skip
    assert draft is head
    free = length
    assert free > 2
    for _ in range(LEAST_DRAFTINGS):
        assert times.drafting_s == 0
        times.count_drafting(4, 0.8)
    assert times.drafting_s == pytest.approx(0.2)
    (draft, length), = speculation.planned([[lookup, head]])  # fmt: skip
    assert draft is head
    assert 0 < length < free
    for _ in range(17):
        times.count_drafting(1, 2.0)
    (draft, length), = speculation.planned([[lookup, head]])  # fmt: skip
    assert draft is lookup
    assert speculation.planned([[NO_DRAFT, head]])[0][1] == 0
    for _ in range(STALE_STEPS):
        times.count(1, 1, 1.0)
    assert times.drafting_s == 0


def test_a_number_of_tokens_takes_the_look_up_first() -> None:
    speculation = Speculation(4, StepTimes(), can_gain=True, max_tokens=16)
    head, lookup = made(8, 0.9), Draft([5, 6], 2)
    assert speculation.planned([[lookup, head], [NO_DRAFT, head]]) == [(lookup, 2), (head, 4)]
    run = speculation.run(head, 4, None)
    assert (run.tokens, run.num_run) == ([0] * 4, 4)
    assert run.made_s > 0
