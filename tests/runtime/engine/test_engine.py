"""The engine as its callers meet it: joining, leaving, ends of every kind, faults, memory."""

import gc
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.requests import alone, found_by, random_requests, settle, together
from support.scripted import saying, scripted_artifact

from pi_runtime import Engine, Model, Sampling, load
from pi_runtime.artifact.buffers import Buffer
from pi_runtime.engine.stream import Stream
from pi_runtime.errors import ArtifactError, DoesNotFitError, PiError, PromptError, UsageError
from pi_runtime.execution.executor import SequenceResult, SequenceStep
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import PAGE_POSITIONS
from pi_runtime.sequence.answer import AnswerSequence
from pi_runtime.sequence.drafts import Draft
from pi_runtime.sequence.sequence import Origin, TokenSequence

Steps = list[list[SequenceStep]]


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    with Engine(model, slots=4) as engine:
        yield engine


@pytest.fixture
def talker(endless: Path) -> Iterator[Model]:
    """Goes on for 4,096 tokens; guesses would shorten that to a moment."""
    with load(endless) as model:
        yield model


def spied(model: Model, monkeypatch: pytest.MonkeyPatch, before: Callable[[], object] = lambda: None) -> Steps:
    """The steps that the model runs from now on; `before` is called before each."""
    steps: Steps = []
    step = model.executor.step

    def spy(sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        before()
        steps.append(list(sequences))
        return step(sequences)

    monkeypatch.setattr(model.executor, "step", spy)
    return steps


def wait_until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_many_at_once(model: Model, engine: Engine) -> None:
    prompts = [[n, 2, 3] for n in range(20)]
    streams = [engine.generate(prompt, max_tokens=9) for prompt in prompts]
    assert ["".join(s) for s in streams] == ["".join(model.generate(p, max_tokens=9)) for p in prompts]
    assert {s.finish_reason for s in streams} == {"length"}
    s = streams[0].stats
    assert (s.prompt_tokens, s.cached_tokens, s.generated_tokens) == (3, 0, 9)
    assert s.first_token_s >= s.prefill_s > 0 < s.decode_s
    assert s.rows_read_share == s.active_share == 1
    found = engine.stats
    assert (found.running, found.waiting, found.finished) == (0, 0, 20)
    assert (found.generated_tokens, found.prompt_tokens) == (180, 60)
    assert found.tokens_per_s == 180 / found.busy_s


def test_requests_are_checked_at_once(engine: Engine) -> None:
    for prompt in ([], [999], "a" * 96):
        with pytest.raises(PromptError):
            engine.generate(prompt)
    for settings in ({"max_tokens": 0}, {"stop": [""]}, {"stop": [3]}, {"stop": "ab"}):
        with pytest.raises(UsageError):
            engine.generate([1], **settings)
    assert engine.stats.finished == 0


@pytest.mark.parametrize("settings", [{"slots": 0}, {"piece": 0}, {"kv_budget": 1}], ids=str)
def test_impossible_settings(model: Model, settings: dict[str, int]) -> None:
    with pytest.raises((UsageError, DoesNotFitError), match=f"^{next(iter(settings))}="):
        Engine(model, **settings)


def test_what_cannot_fit_alone_is_refused_with_its_bytes(model: Model) -> None:
    page = model.executor.new_pool(None).page_nbytes
    with Engine(model, kv_budget=2 * page) as engine:
        most = 2 * PAGE_POSITIONS
        assert len(engine.generate([1] * (most - 9), max_tokens=10).token_ids) <= 10
        for prompt, count in ((most - 9, 11), (most + 1, 1), (1, None)):
            with pytest.raises(UsageError, match=f"take {3 * page} bytes"):
                engine.generate([1] * prompt, max_tokens=count)


def test_a_prompt_is_not_computed_again(model: Model, engine: Engine) -> None:
    prompt = list(range(50))
    first, second = (engine.generate(prompt, max_tokens=4) for _ in range(2))
    texts = ["".join(first), "".join(second)]
    third = engine.generate([*prompt[:40], 7, 7, 7], max_tokens=4)
    assert "".join(third) == "".join(model.generate([*prompt[:40], 7, 7, 7], max_tokens=4))
    assert third.stats.cached_tokens == 40
    again = engine.generate(prompt, max_tokens=4)
    assert [*texts, "".join(again)] == ["".join(model.generate(prompt, max_tokens=4))] * 3
    assert again.stats.cached_tokens == 49
    assert engine.stats.cached_tokens >= 89


def test_a_prompt_is_shared_while_its_answer_is_still_written(talker: Model) -> None:
    with Engine(talker, slots=2, speculate="off") as engine:
        first = engine.generate("ab" * 50)
        next(first)
        second = engine.generate("ab" * 40 + "b", max_tokens=3)
        assert "".join(second) == "aba"
        assert second.stats.cached_tokens == 80
        first.cancel()


PROMPT = [n % 200 for n in range(70)]


WAYS: dict[str, Callable[[Engine, str], object]] = {
    "answers": lambda engine, salt: [
        "".join(s) for s in engine.generate_many(PROMPT, 2, max_tokens=1, cache_salt=salt)
    ],
    "scores": lambda engine, salt: engine.score(PROMPT, first=60, cache_salt=salt).result(),
    "readings": lambda engine, salt: engine.read(PROMPT, cache_salt=salt).result(),
}


@pytest.mark.parametrize("way", WAYS)
def test_only_requests_with_the_same_salt_share_what_is_kept(
    model: Model, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    with Engine(model, slots=2, kv_budget=1 << 24, speculate="off") as engine:
        steps = spied(model, monkeypatch)

        def ran(way: str, salt: str) -> int:
            """Tokens that one request had to run."""
            steps.clear()
            WAYS[way](engine, salt)
            settle(engine)
            return sum(len(sequence.tokens) for step in steps for sequence in step)

        alone = ran(way, "one")
        assert alone > 60
        assert ran(way, "two") == alone, "it began with what another's request left"
        assert ran(way, "two") < 20
        assert ran("answers", "three") >= 70
        assert ran("answers", "") >= 70
        assert ran("answers", "one") < 20


def test_equal_prompts_at_once_are_computed_once(random_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All go on from the two full pages, which are read once."""
    prompt, runs, all_are_there = [n % 200 for n in range(93)], threading.Event(), threading.Event()
    with load(random_path, mode="predicted") as model, Engine(model, slots=4, decode_share=0) as engine:
        spied(model, monkeypatch, before=lambda: (runs.set(), all_are_there.wait(30)))
        first = engine.generate([1], max_tokens=1)
        assert runs.wait(30)  # or some of the four would join beside it
        streams = [engine.generate(prompt, max_tokens=3) for _ in range(4)]
        all_are_there.set()
        "".join(first)
        assert {"".join(stream) for stream in streams} == {"".join(model.generate(prompt, max_tokens=3))}
        assert engine.stats.cached_tokens == 3 * 64


@pytest.mark.parametrize(
    ("mode", "reads", "held"), [("dense", False, 22), ("predicted", False, 20), ("predicted", True, 22)]
)
def test_an_answer_serves_as_prompt_only_where_that_is_the_same(
    random_path: Path, mode: str, reads: bool, held: int
) -> None:
    """With selection its keys and values are others than those of a prompt, as which it is read again."""
    with load(random_path, mode=mode, device="cpu") as model, Engine(model) as engine:
        engine._store._reads_again = reads
        first = engine.generate(range(1, 21), max_tokens=3)
        "".join(first)
        settle(engine)
        talk = [*range(1, 21), *first.token_ids, 5]
        second = engine.generate(talk, max_tokens=9)
        assert found_by(second) == found_by(model.generate(talk, max_tokens=9))
        assert second.stats.cached_tokens == held


def test_a_slow_reader_holds_up_nobody(model: Model) -> None:
    with Engine(model, slots=1) as engine:
        unread = engine.generate([1, 2], max_tokens=20)
        assert len("".join(engine.generate([3], max_tokens=20))) > 0
        assert unread.finish_reason == "length"
        assert "".join(unread) == "".join(model.generate([1, 2], max_tokens=20))
        assert list(unread) == []


def test_a_cancelled_request_leaves_before_the_next_step(talker: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = spied(talker, monkeypatch)
    with Engine(talker, slots=2, speculate="off") as engine:
        other, stream = engine.generate("a"), engine.generate("ab")
        head = next(stream)
        cache = next(s.cache for step in steps for s in step if 98 in s.tokens[:2] and len(s.tokens) == 2)
        stream.cancel()
        begun = len(steps)
        wait_until(lambda: len(steps) >= begun + 3)
        assert all(s.cache is not cache for step in steps[begun + 1 :] for s in step)
        assert cache.length == 0
        assert cache.pages == ()
        assert stream.finish_reason == "cancelled"
        assert (head + "".join(stream)).startswith("ab"[: len(head)])
        other.cancel()
        assert "".join(other).startswith("baba")
        stream.cancel()


def test_what_waits_can_be_cancelled(talker: Model) -> None:
    with Engine(talker, slots=1, speculate="off") as engine:
        running, waiting = engine.generate("a"), engine.generate("b")
        waiting.cancel()
        assert list(waiting) == []
        assert waiting.finish_reason == "cancelled"
        wait_until(lambda: engine.stats.running == 1)
        running.cancel()


def test_a_stream_that_nobody_refers_to_is_cancelled(talker: Model) -> None:
    with Engine(talker, speculate="off") as engine:
        engine.generate("a")
        gc.collect()
        wait_until(lambda: engine.stats.finished == 1)
        assert engine.stats.generated_tokens < 4000


def test_logits_without_meaning_end_one_request(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    step = model.executor.step

    def broken(sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        found = step(sequences)
        for s, result in zip(sequences, found, strict=True):
            if s.cache.tokens[0] == 66 and s.cache.length > 5:
                result.logits_TV[:] = np.nan
        return found

    wanted = [alone(model, r) for r in random_requests(random.Random(1), 6, sampled=True, context=96, cancels=False)]
    monkeypatch.setattr(model.executor, "step", broken)
    with Engine(model, slots=8) as engine:
        bad = engine.generate([66, 1], max_tokens=50)
        requests = random_requests(random.Random(1), 6, sampled=True, context=96, cancels=False)
        assert together(engine, requests, random.Random(1)) == wanted
        for _ in range(2):
            with pytest.raises(ArtifactError, match="the model's logits have the maximum nan"):
                "".join(bad)
        assert bad.finish_reason is None
        assert len(bad.token_ids) == 4


def fails(self: object, *_: object) -> Any:
    raise RuntimeError("of this sequence alone, and a secret")


FAULTS: dict[str, Callable[[AnswerSequence], object]] = {
    "what may be drafted": lambda s: setattr(s, "drafts", partial(fails, s)),
    "drafting": lambda s: setattr(s, "drafts", lambda: [Draft([], 0, planned=4, make=fails)]),
    "taking states": lambda s: setattr(s, "take_states", partial(fails, s)),
    "advancing": lambda s: setattr(s, "advance", partial(fails, s)),
}
"""Places where what belongs to one sequence may fail."""


@pytest.mark.parametrize("place", FAULTS)
def test_a_fault_of_one_sequence_ends_no_other(talker: Model, place: str) -> None:
    wanted = "".join(talker.generate("a", max_tokens=90))
    with Engine(talker, slots=4, speculate=4) as engine:
        others = [engine.generate("a", max_tokens=90) for _ in range(2)]
        broken = talker.new_answer("b", max_tokens=90)
        FAULTS[place](broken)
        engine.submit(broken, Origin())
        broken.done.wait(60)
        assert ["".join(stream) for stream in others] == [wanted] * 2
        assert engine.ended is None
        while not (output := broken.outputs.get()).ended:
            pass
        assert output.error is not None
        assert engine.stats.running == engine.stats.waiting == 0


def test_logits_without_meaning_end_a_scoring_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    step = model.executor.step

    def without_meaning(sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        bad = [s.cache.tokens[:1] == [66] or s.tokens[0] == 66 for s in sequences]
        return [
            replace(result, logits_TV=result.logits_TV * np.nan) if is_bad else result
            for result, is_bad in zip(step(sequences), bad, strict=True)
        ]

    wanted = "".join(model.generate([1, 2], max_tokens=9))
    monkeypatch.setattr(model.executor, "step", without_meaning)
    with Engine(model) as engine:
        with pytest.raises(PiError, match="logits"):
            engine.score([66, 2]).result()
        assert "".join(engine.generate([1, 2], max_tokens=9)) == wanted


def test_who_asks_later_is_told_nothing_that_a_fault_quotes(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.executor, "step", partial(fails, model))
    with Engine(model) as engine:
        with pytest.raises(RuntimeError):
            "".join(engine.generate([1]))
        with pytest.raises(UsageError, match=r"the engine has failed\n  found: RuntimeError$") as found:
            engine.generate([1])
        assert "secret" not in str(found.value)


def test_a_fault_of_the_model_reaches_every_stream(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = threading.Event()

    def fail(_: Sequence[SequenceStep]) -> list[SequenceResult]:
        entered.wait(10)
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(model.executor, "step", fail)
    with Engine(model, slots=2) as engine:
        streams = [engine.generate([n]) for n in range(5)]
        entered.set()
        for stream in streams:
            with pytest.raises(ZeroDivisionError):
                next(stream)
        with pytest.raises(UsageError, match="the engine has failed"):
            engine.generate([1])
        assert engine.stats.pages_used == 0


def test_closing_ends_what_runs_and_what_waits(talker: Model) -> None:
    with Engine(talker, slots=2, speculate="off") as engine:
        streams = [engine.generate("a") for _ in range(4)]
        next(streams[0])
    for stream in streams:
        with pytest.raises(UsageError, match="the engine was closed before this answer ended"):
            "".join(stream)
    with pytest.raises(UsageError, match="the engine is closed"):
        engine.generate("a")
    assert engine.stats.pages_used == 0
    assert engine.stats.running == engine.stats.waiting == 0
    engine.close()


def test_the_memory_of_a_closed_engine_does_not_wait_for_the_collector(model: Model) -> None:
    gc.collect()
    gc.disable()
    try:
        with Engine(model) as engine:
            "".join(engine.generate("x", max_tokens=3))
        kept = weakref.ref(engine._store)
        del engine
        assert kept() is None
    finally:
        gc.enable()


def test_the_model_is_closed_first(endless: Path) -> None:
    model = load(endless)
    with Engine(model) as engine:
        stream = engine.generate("a")
        next(stream)
        model.close()
        with pytest.raises(UsageError, match="the model is closed"):
            "".join(stream)


def test_threads_generate_at_once(model: Model, engine: Engine) -> None:
    def run(n: int) -> bool:
        settings = {"max_tokens": 12, "sampling": Sampling(temperature=1.0, seed=n)}
        return found_by(engine.generate([n % 5, 8], **settings)) == found_by(model.generate([n % 5, 8], **settings))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(run, range(24)))


def test_no_step_holds_more_than_a_piece(talker: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = spied(talker, monkeypatch)
    with Engine(talker, slots=4, piece=10) as engine:
        streams = [engine.generate("ab" * n, max_tokens=30) for n in (1, 50, 200, 3)]
        for stream in streams:
            "".join(stream)
    for step in steps:
        assert sum(len(s.tokens) for s in step if not s.select) <= 10
    alone = [n for n, step in enumerate(steps) if len(step[0].tokens) > 1]
    assert len(alone) < len(steps)


@pytest.mark.parametrize("cache_format", ["auto", "q4"])
def test_little_memory_changes_no_text(random_path: Path, cache_format: str) -> None:
    rng = random.Random(3)
    with load(random_path, mode="predicted", cache_format=cache_format) as model:
        requests = random_requests(rng, 30, sampled=True, context=96, cancels=False)
        wanted = [alone(model, r) for r in requests]
        with Engine(model, slots=6, kv_budget=4 * model.executor.new_pool(None).page_nbytes) as engine:
            assert together(engine, requests, rng) == wanted
            assert engine.stats.preemptions > 0
            assert engine.stats.pages_used <= 4
        assert engine.stats.pages_used == 0


def test_ctrl_c_reaches_a_waiting_reader(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    spied(model, monkeypatch, before=lambda: go_on.wait(10) and None)
    with Engine(model) as engine:
        stream: Stream = engine.generate([1], max_tokens=3)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        go_on.set()
        assert "".join(stream) == "".join(model.generate([1], max_tokens=3))


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_several_answers_are_those_of_their_numbers(random_path: Path, monkeypatch: Any, slots: int) -> None:
    """They read the prompt once, whether there are slots for all of them or not."""
    prompt, sampling = [n % 200 for n in range(50)], Sampling(temperature=1.5, seed=4, number=2)
    with load(random_path, mode="predicted") as model:
        numbers = [replace(sampling, number=2 + k) for k in range(6)]
        wanted = [found_by(model.generate(prompt, max_tokens=9, sampling=one)) for one in numbers]
        steps = spied(model, monkeypatch)
        with Engine(model, slots=slots) as engine:
            streams = engine.generate_many(prompt, 6, max_tokens=9, sampling=sampling)
            assert [found_by(stream) for stream in streams] == wanted
            assert [stream.stats.cached_tokens for stream in streams] == [0, *[50] * 5]
        assert sum(len(s.tokens) for step in steps for s in step if not s.select) == 50
        assert len({text for text, *_ in wanted}) == 6


def test_several_answers_of_a_fresh_seed_share_it(model: Model, engine: Engine) -> None:
    streams = engine.generate_many([1, 2, 3], 3, max_tokens=5, sampling=Sampling(temperature=2.0))
    texts = ["".join(stream) for stream in streams]
    (seed,) = {stream.seed for stream in streams}
    again = [Sampling(temperature=2.0, seed=seed, number=k) for k in range(3)]
    assert ["".join(model.generate([1, 2, 3], max_tokens=5, sampling=one)) for one in again] == texts
    assert len(engine.generate_many([1, 2, 3], 1, max_tokens=1)) == 1
    for count in (0, 10**9):
        with pytest.raises(UsageError, match=f"{count} answers"):
            engine.generate_many([1, 2, 3], count)


def test_an_answer_that_leaves_early_leaves_the_others(talker: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, go_on = threading.Event(), threading.Event()
    spied(talker, monkeypatch, before=lambda: (runs.set(), go_on.wait(30)))
    with Engine(talker, slots=1, speculate="off") as engine:
        busy = engine.generate("ab", max_tokens=200)
        assert runs.wait(30)  # the only slot is taken
        streams = engine.generate_many("ab" * 30, 3, max_tokens=4)
        streams[0].cancel()
        streams[1].cancel()
        go_on.set()
        assert ["".join(stream) for stream in streams] == ["", "", "abab"]
        assert [stream.finish_reason for stream in streams] == ["cancelled", "cancelled", "length"]
        assert len("".join(busy)) == 200


def test_closing_ends_answers_that_wait_for_their_prompt(talker: Model) -> None:
    with Engine(talker, slots=1, speculate="off") as engine:
        busy = engine.generate("ab")
        next(busy)
        streams = engine.generate_many("ab" * 30, 3)
        assert engine.stats.waiting == 3
    for stream in streams:
        with pytest.raises(UsageError, match="closed"):
            "".join(stream)


def test_answers_may_end_with_their_first_token(tmp_path: Path) -> None:
    with load(scripted_artifact(tmp_path / "a.pi", saying("ab"))) as model, Engine(model, slots=2) as engine:
        assert [found_by(s) for s in engine.generate_many("b", 3)] == [("", [], "end", [])] * 3
        assert engine.stats.finished == 3


def test_several_answers_to_a_prompt_without_meaning(model: Model, monkeypatch: Any) -> None:
    step = model.executor.step

    def without_meaning(sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        return [replace(result, logits_TV=result.logits_TV * np.nan) for result in step(sequences)]

    monkeypatch.setattr(model.executor, "step", without_meaning)
    with Engine(model) as engine:
        for stream in engine.generate_many([1, 2], 3):
            with pytest.raises(PiError, match="logits"):
                "".join(stream)
        with pytest.raises(PiError, match="logits"):
            engine.score([1, 2]).result()


@pytest.mark.parametrize("mode", ["dense", "predicted"])
def test_scores_beside_answers(random_path: Path, monkeypatch: Any, mode: str) -> None:
    """They are the model's, before, after and beside answers to the same prompt, with as little memory as can be."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 250, n).tolist() for n in (2, 33, 90, 90)]
    prompts[3][:70] = prompts[2][:70]
    with load(random_path, mode=mode) as model:
        wanted = [model.score(prompt, top=2) for prompt in prompts]
        texts = ["".join(model.generate(prompt, max_tokens=5)) for prompt in prompts]
        page = model.executor.new_pool(None).page_nbytes
        with Engine(model, slots=3, piece=7, kv_budget=4 * page) as engine:
            for _ in range(2):
                streams = [engine.generate(prompt, max_tokens=5) for prompt in prompts]
                scores = [engine.score(prompt, top=2) for prompt in prompts]
                assert [s.result() for s in scores] == wanted
                assert ["".join(s) for s in streams] == texts
        with Engine(model) as engine:
            assert engine.score(prompts[2], top=2).result() == wanted[2]
            steps = spied(model, monkeypatch)
            assert engine.score(prompts[3], first=71, top=2).result() == wanted[3][70:]
            # Stored up to token 70, which differs and so runs.
            assert sum(len(s.tokens) for step in steps for s in step) == 89 - 70
            for first in (90, 200):
                assert engine.score(prompts[3], first=first).result() == []
            assert engine.score([5]).result() == []


def test_scores_that_are_cancelled_or_wrong(talker: Model) -> None:
    with Engine(talker, slots=1, speculate="off") as engine:
        busy = engine.generate("ab")
        scores = engine.score("ab" * 20)
        scores.cancel()
        assert scores.result() == scores.result() == []
        busy.cancel()
        with pytest.raises(UsageError):
            engine.score("ab", first=0)
    with pytest.raises(UsageError, match="closed"):
        engine.score("ab")


def test_news_are_all_of_an_answer_with_the_tokens_of_each_part(engine: Engine, model: Model) -> None:
    told = threading.Event()
    stream = engine.generate("Once", max_tokens=30, logprobs=1)
    stream.listen(told.set)
    text, seen = "", 0
    while True:
        assert told.wait(30)
        told.clear()
        output = stream.read()
        text += output.text
        assert output.num_tokens >= seen or not output.text
        seen = max(seen, output.num_tokens)
        if output.ended:
            break
    assert text == "".join(model.generate("Once", max_tokens=30))
    assert seen == len(stream.token_ids) == len(stream.logprobs) == 30
    assert stream.chars == len(text)
    assert stream.read().ended
    assert stream.read().text == ""
    assert list(stream) == []


def test_outputs_of_an_answer_that_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = ValueError("of this request")

    def fail(*_: Any) -> Any:
        raise fault

    monkeypatch.setattr("pi_runtime.sequence.answer.AnswerSequence.draw", fail)
    stream = engine.generate("Once", max_tokens=3)
    wait_until(lambda: stream.read().ended)
    assert stream.read().error is fault


def test_scores_tell_when_they_are_there(engine: Engine) -> None:
    told = threading.Event()
    scores = engine.score("Once upon a time")
    scores.listen(lambda: scores.done and told.set())
    assert told.wait(30)
    assert len(scores.result()) == len("Once upon a time") - 1


def test_an_engine_says_how_long_its_step_stands_still_and_why_it_ended(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    spied(model, monkeypatch, before=lambda: gate.wait(30))
    with Engine(model) as engine:
        assert engine.stalled_s == 0
        stream = engine.generate("Once", max_tokens=2)
        wait_until(lambda: engine.stalled_s > 0.01)
        gate.set()
        list(stream)
        wait_until(lambda: engine.stalled_s == 0)
        assert engine.ended is None
    assert engine.ended is not None


def test_what_is_expected_is_guessed_and_changes_no_text(model: Model) -> None:
    alone = model.generate("Once", max_tokens=40, speculate="off")
    text = "".join(alone)
    for expected, most in ((alone.token_ids, 40), ([1, 2, 3], 0)):
        with Engine(model, speculate=8) as engine:
            stream = engine.generate("Once", max_tokens=40, expected=expected)
            assert "".join(stream) == text
            assert (stream.stats.accepted_tokens >= 30) == (most > 0)
    with Engine(model) as engine, pytest.raises(PromptError, match="token id"):
        engine.generate("Once", expected=[10**9])


def test_a_listener_that_fails_ends_its_request_alone(talker: Model) -> None:
    with Engine(talker, speculate="off") as engine:
        stream = engine.generate("a", max_tokens=4000)
        heard: list[None] = []

        def notify() -> None:
            if heard:
                raise RuntimeError("Event loop is closed")
            heard.append(None)

        stream.listen(notify)
        assert "".join(engine.generate("ba", max_tokens=3)) == "bab"
        wait_until(lambda: engine.stats.finished == 2)
        assert (stream.finish_reason, engine.ended) == ("cancelled", None)


@pytest.mark.parametrize("when", ["joins", "grows"])
def test_memory_that_runs_out_ends_the_request_that_asked_for_it(
    model: Model, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    with Engine(model, speculate="off") as engine:
        first = engine.generate([1, 2, 3], max_tokens=PAGE_POSITIONS + 9)
        next(first)
        if when == "grows":
            monkeypatch.setattr(Buffer, "in_ram", no_memory)
            with pytest.raises(MemoryError):
                "".join(first)
        else:
            "".join(first)
            monkeypatch.setattr(Buffer, "in_ram", no_memory)
            with pytest.raises(MemoryError):
                "".join(engine.generate([4] * (3 * PAGE_POSITIONS - 9), max_tokens=2))
        monkeypatch.undo()
        assert engine.ended is None
        assert "".join(engine.generate([4, 5], max_tokens=3)) == "".join(model.generate([4, 5], max_tokens=3))
        settled = engine.stats
        assert (settled.running, settled.waiting, settled.pages_used) == (0, 0, settled.pages_kept)


def test_an_error_that_is_kept_keeps_no_pages(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [4] * PAGE_POSITIONS
    with Engine(model, speculate="off") as engine:
        "".join(engine.generate(prompt, max_tokens=1))
        monkeypatch.setattr(Buffer, "in_ram", no_memory)
        with pytest.raises(MemoryError) as kept:
            "".join(engine.generate([*prompt, *prompt[:9]], max_tokens=1))
        assert engine._store.tree.evict(sys.maxsize) == 1, kept


def test_answers_that_have_just_begun_hear_that_the_engine_failed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCache, "fork", no_memory)
    with Engine(model, slots=2) as engine:
        for stream in engine.generate_many([1, 2, 3], 3, max_tokens=4):
            assert isinstance(stream._sequence.outputs.get(timeout=30).error, MemoryError)


def test_answers_that_nobody_wants_any_more_read_no_prompt(talker: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, go_on = threading.Event(), threading.Event()
    steps = spied(talker, monkeypatch, before=lambda: (runs.set(), go_on.wait(30)))
    with Engine(talker, slots=2, piece=1, speculate="off") as engine:
        streams = engine.generate_many("ab" * 30, 20, max_tokens=4)
        assert runs.wait(30)  # the first token of the prompt runs
        for stream in streams:
            stream.cancel()
        go_on.set()
        assert ["".join(stream) for stream in streams] == [""] * 20
    assert len(steps) == 1


def test_a_client_with_many_answers_keeps_no_other_waiting(talker: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, go_on = threading.Event(), threading.Event()
    spied(talker, monkeypatch, before=lambda: (runs.set(), go_on.wait(30)))
    with Engine(talker, slots=1, speculate="off") as engine:
        ended: list[str] = []
        streams = {"first": engine.generate("ab", max_tokens=2, client="a")}
        assert runs.wait(30)
        for n, prompt in enumerate(("ab", "ba")):
            for k, stream in enumerate(engine.generate_many(prompt, 20, max_tokens=2, client="a")):
                streams[f"a{n} {k}"] = stream
        streams["b"] = engine.generate("ab", max_tokens=2, client="b")
        streams["c"] = engine.generate("ba", max_tokens=2, client="c")
        for name, stream in streams.items():
            sequence = stream._sequence

            def notify(name: str = name, sequence: TokenSequence = sequence) -> None:
                if sequence.done.is_set() and name not in ended:
                    ended.append(name)

            stream.listen(notify)
        go_on.set()
        texts = {name: "".join(stream) for name, stream in streams.items()}
    assert ended[:4] == ["first", "a0 0", "b", "c"]
    assert ended[4:] == [name for name in streams if name.startswith("a")][1:]
    wanted = {prompt: "".join(talker.generate(prompt, max_tokens=2)) for prompt in ("ab", "ba")}
    assert texts == {name: wanted["ba" if name == "c" or name[:2] == "a1" else "ab"] for name in streams}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_an_engine_is_not_there_after_a_fork(engine: Engine) -> None:
    if (child := os.fork()) == 0:
        try:
            engine.generate([1], max_tokens=1)
        except UsageError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def no_memory(*_: object) -> None:
    raise MemoryError
