"""What is read ahead, and read again: nobody waits for it, it waits for everybody, and no text depends on it."""

import random
from pathlib import Path
from typing import Any

import pytest
from support.requests import alone, assert_same, found_by, random_requests, settle
from support.synthetic import random_artifact, small_decoder

from pi_runtime import Engine, Model, Sampling, load
from pi_runtime.artifact.schema import Layer, Text
from pi_runtime.engine.core import Core
from pi_runtime.engine.scheduler import MOST_AGAIN, PromptPace, Scheduler
from pi_runtime.engine.store import PrefixStore
from pi_runtime.errors import PromptError, UsageError
from pi_runtime.execution.pages import PAGE_POSITIONS
from pi_runtime.sequence.answer import AnswerSequence
from pi_runtime.sequence.drafts import StepTimes
from pi_runtime.sequence.sequence import Origin, Rank, ReadSequence, TokenSequence

CONTEXT = 128
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"mode": "dense"}),
    "predicted": ({}, {"mode": "predicted"}),
    "predicted, cache in q8": ({}, {"mode": "predicted", "cache_format": "q8"}),
    "windows, cache in q4": ({"window": 9, "windowed_layers": (0,)}, {"mode": "predicted", "cache_format": "q4"}),
    "windows": ({"window": 9, "windowed_layers": (0,)}, {"mode": "predicted"}),
    "latents": ({"n_kv_heads": 1, "latent_rank": 37, "rotary_frequencies": (1.0,)}, {"mode": "predicted"}),
}


def opened(folder: Path, case: str) -> Model:
    fields, options = CASES[case]
    decoder = small_decoder(n_layers=2, context_length=CONTEXT, **fields)
    layers = (Layer(rung="predicted", rank=4), Layer(rung="gate"))
    text = Text(prefix_ids=(), end_ids=(3, 77))
    path = folder / "a.pi"
    random_artifact(path, decoder, format="f32", ranks=[4, None], layers=layers, text=text, scale=2.0)
    return load(path, device="cpu", threads=1, **options)


class Stepped:
    """A core without a thread: who runs how many tokens in which step, and what has to hold of every step."""

    def __init__(self, model: Model, *, slots: int = 2, pages: int = 300, speculate: str | int = "off") -> None:
        self.model, pool = model, model.executor.new_pool()
        budget = pages * pool.page_nbytes
        self.store = PrefixStore(
            model.executor, model.executor.new_pool(budget), selection_matters=model.mode != "dense"
        )
        scheduler: Scheduler[TokenSequence] = Scheduler(slots, 8)
        pace = PromptPace(0.5, 8, model.executor.block_tokens)
        self.core = Core(model.executor, self.store, scheduler, pace, model.speculation(speculate, StepTimes()))
        self.submitted: list[TokenSequence] = []

    def ask(self, prompt: list[int], client: str = "", **settings: Any) -> AnswerSequence:
        answer = self.model.new_answer(prompt, **settings)
        return self._submitted(answer, client)

    def read(self, prompt: list[int], client: str = "") -> ReadSequence:
        return self._submitted(self.model.new_reading(prompt), client)

    def _submitted(self, sequence: Any, client: str) -> Any:
        sequence.origin = Origin("", client)
        self.core.submit(sequence)
        self.submitted.append(sequence)
        return sequence

    def step(self) -> dict[TokenSequence, int]:
        """Run a step; returns what ran."""
        scheduler, before = self.core.scheduler, {s: s.num_computed for s in self.core.scheduler.live}
        asked = [s for s in scheduler.requests if s.rank is Rank.ASKED and not s.cancelled]
        self.core.step()
        ran = {s: s.num_scheduled for s in before if s.is_running and s.num_computed > before[s]}
        ran |= {s: s.num_computed - s.cached_tokens for s in scheduler.live if s not in before}
        assert len({s.rank for s in scheduler.live}) <= 1
        assert not asked or all(s.rank is Rank.ASKED for s in ran), "it runs beside a request"
        ahead = [s.client for s in scheduler.requests if s.rank is Rank.AHEAD]
        assert len(ahead) == len(set(ahead)), "a client has two"
        return ran

    def run(self) -> None:
        while not self.core.scheduler.idle:
            self.step()
        assert not self.core.held
        assert self.store.pool.in_use == len(set(self.store.tree.pages))
        assert all(sequence.done.is_set() for sequence in self.submitted)


@pytest.fixture(autouse=True)
def no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails in a core ends the test, and not only a sequence."""
    leave = Core.leave

    def checked(core: Core, sequence: TokenSequence, error: BaseException | None = None) -> None:
        leave(core, sequence, error)
        assert error is None

    monkeypatch.setattr(Core, "leave", checked)


def prompt(seed: int, tokens: int) -> list[int]:
    return [random.Random(seed).randrange(100, 250) for _ in range(tokens)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_the_same_texts_whatever_is_read_before_and_beside_them(tmp_path: Path, case: str, seed: int) -> None:
    """Readings are replaced, cancelled, put off for requests, and short of memory; drafts run, and samples."""
    rng = random.Random(f"{case} {seed}")
    with opened(tmp_path, case) as model:
        requests = random_requests(rng, 14, sampled=seed == 1, context=CONTEXT, cancels=False)
        wanted = [alone(model, request) for request in requests]
        pages = CONTEXT // PAGE_POSITIONS + rng.choice([1, 3, 30])
        stepped = Stepped(model, slots=rng.choice([1, 2, 4]), pages=pages, speculate=rng.choice(["off", 4]))
        answers, readings = [], []
        for request in requests:
            for _ in range(rng.randint(0, 3)):
                begun = [
                    *request.prompt[: rng.randint(1, len(request.prompt))],
                    *prompt(rng.randrange(9), rng.choice([0, 2])),
                ]
                readings.append(stepped.read(begun[: CONTEXT - 1], client=rng.choice("ab")))
                for _ in range(rng.choice([0, 1, 2, 9])):
                    stepped.step()
                readings[-1].cancelled = rng.random() < 0.1
            answers.append(stepped.ask([*request.prompt], client=rng.choice("ab"), **request.settings))
            for _ in range(rng.choice([0, 0, 1, 5, 40])):
                stepped.step()
        stepped.run()
        for request, answer, found in zip(requests, answers, wanted, strict=True):
            texts = [answer.outputs.get() for _ in range(answer.outputs.qsize())]
            text = "".join(output.text for output in texts)
            assert_same(request, found, (text, answer.token_ids, answer.finish_reason, answer.logprobs))
        assert all(reading.done.is_set() for reading in readings)


def test_what_is_read_is_there_for_whoever_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path, "plain") as model:
        stepped, text = Stepped(model), prompt(0, 70)
        reading = stepped.read(text[:60])
        stepped.run()
        assert (reading.stats.prompt_tokens, reading.stats.cached_tokens) == (60, 0)
        assert reading.stats.prefill_s > 0
        answer = stepped.ask(text, max_tokens=1)
        stepped.run()
        assert answer.cached_tokens == 60
        again = stepped.read(text)
        stepped.run()
        assert again.stats.cached_tokens == 70
        assert stepped.core.ahead_tokens == 60, "what is there is not read again"
        assert (stepped.core.prompt_tokens, stepped.core.cached_tokens, stepped.core.finished) == (70, 60, 1)


@pytest.mark.parametrize("slots", [1, 4])
def test_a_request_takes_the_slot_and_what_was_read_stays(tmp_path: Path, slots: int) -> None:
    with opened(tmp_path, "plain") as model:
        stepped, text = Stepped(model, slots=slots), prompt(0, 60)
        reading = stepped.read(text)
        for _ in range(3):
            stepped.step()
        assert reading.num_computed == 24
        other = stepped.ask(prompt(1, 9), max_tokens=5)
        while not other.complete:
            assert list(stepped.step()) != [reading]
        same = stepped.ask(text, max_tokens=1)
        stepped.run()
        assert same.cached_tokens == 24
        assert reading.complete
        assert reading.cached_tokens == 0, "what it has read itself was not there"


def test_a_newer_one_takes_the_place_of_its_clients_and_of_no_others(tmp_path: Path) -> None:
    with opened(tmp_path, "plain") as model:
        stepped, text = Stepped(model), prompt(0, 70)
        first, other = stepped.read(text[:40], "a"), stepped.read(prompt(1, 40), "b")
        stepped.step()
        newer = stepped.read(text, "a")
        assert first.done.is_set()
        assert not other.done.is_set()
        ran = first.num_computed
        assert 0 < ran < 40
        stepped.run()
        assert newer.cached_tokens == ran
        assert other.complete


def test_readings_end_where_memory_is_short_and_take_none_from_requests(tmp_path: Path) -> None:
    with opened(tmp_path, "plain") as model:
        stepped = Stepped(model, slots=4, pages=4)
        readings = [stepped.read(prompt(n, 100), str(n)) for n in range(3)]
        stepped.step()
        answer = stepped.ask(prompt(9, 100), max_tokens=20)
        stepped.run()
        assert answer.finish_reason == "length"
        assert stepped.core.preemptions == 0
        assert all(reading.done.is_set() for reading in readings)


def test_an_answer_is_read_again_as_a_prompt_has_it(tmp_path: Path) -> None:
    with opened(tmp_path, "predicted") as model:
        stepped, text = Stepped(model), prompt(0, 50)
        answer = stepped.ask(text, max_tokens=20, min_tokens=20)
        while not answer.done.is_set():
            stepped.step()
        (again,) = stepped.core.scheduler.requests
        assert (again.rank, again.tokens) == (Rank.AGAIN, answer.tokens[:69])
        typed = stepped.read([*answer.tokens, 5], "other")
        while not typed.done.is_set():
            stepped.step()
            assert again.num_computed == 0, "what somebody types comes first"
        stepped.run()
        turn = stepped.ask([*answer.tokens, *prompt(1, 5)], max_tokens=1)
        stepped.run()
        assert turn.cached_tokens == 70


@pytest.mark.parametrize(
    ("case", "ask"),
    [("plain", {"max_tokens": 9}), ("predicted", {"max_tokens": 1})],
    ids=["dense", "one token, which never ran"],
)
def test_an_answer_that_gains_nothing_by_it_is_not_read_again(tmp_path: Path, case: str, ask: dict[str, Any]) -> None:
    with opened(tmp_path, case) as model:
        stepped = Stepped(model)
        stepped.ask(prompt(0, 20), **ask)
        stepped.run()
        assert stepped.core.ahead_tokens == 0


def test_of_many_answers_the_newest_are_read_again(tmp_path: Path) -> None:
    with opened(tmp_path, "predicted") as model:
        stepped = Stepped(model, slots=100)
        answers = [stepped.ask([n, n, n + 1], max_tokens=3, min_tokens=3) for n in range(100, 103 + MOST_AGAIN)]
        while not all(answer.done.is_set() for answer in answers):
            stepped.step()
        again = [s.tokens[0] for s in stepped.core.scheduler.requests]
        assert again == [*range(103, 103 + MOST_AGAIN)]
        stepped.run()


def test_several_answers_to_a_prompt_that_was_read_ahead(tmp_path: Path) -> None:
    """None of them is read again: at most one goes on."""
    with opened(tmp_path, "predicted") as model, Engine(model, slots=2) as engine:
        text, sampling = prompt(0, 60), Sampling(temperature=1.0, seed=3)
        wanted = [
            found_by(model.generate(text, max_tokens=9, sampling=Sampling(temperature=1.0, seed=3, number=n)))
            for n in range(3)
        ]
        assert engine.read(text[:40]).result().cached_tokens == 0
        streams = engine.generate_many(text, 3, max_tokens=9, sampling=sampling)
        assert [found_by(stream) for stream in streams] == wanted
        settle(engine)
        assert engine.stats.ahead_tokens == 40
        assert [stream.stats.cached_tokens for stream in streams] == [40, 60, 60]


def test_a_cache_of_the_callers(tmp_path: Path) -> None:
    with opened(tmp_path, "plain") as model:
        text, cache = prompt(0, 60), model.new_cache()
        assert model.read(text[:40], cache).cached_tokens == 0
        assert model.read(text, cache).cached_tokens == 40
        answer = model.generate(text, cache=cache, max_tokens=5)
        assert found_by(answer) == found_by(model.generate(text, max_tokens=5))
        assert answer.stats.cached_tokens == 59


def test_what_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path, "plain") as model, Engine(model, kv_budget=1 << 15) as engine:
        for read in (engine.read, lambda text: model.read(text, model.new_cache())):
            with pytest.raises(PromptError, match="fewer than the context"):
                read(prompt(0, CONTEXT))
            with pytest.raises(PromptError):
                read([])
    with pytest.raises(UsageError, match="closed"):
        engine.read([1])


@pytest.mark.parametrize("length", [15, 16, 31, 32, 33, 48, 64])
@pytest.mark.parametrize("readers", [2, 3])
def test_a_prompt_that_another_has_read_whole_is_read(model: Model, length: int, readers: int) -> None:
    """Who only reads is done where it comes to what another has read: nothing of it is left to run."""
    stepped, prompt = Stepped(model, slots=readers), [n % 200 for n in range(length)]
    read = [stepped.read(prompt, client) for client in "abc"[:readers]]
    stepped.run()
    assert all(one.complete and not one.cancelled for one in read)
