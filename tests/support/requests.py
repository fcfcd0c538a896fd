"""Random requests, their answers alone, and a run of them all through an engine."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest

from pi_runtime import Engine, Grammar, Model, Sampling
from pi_runtime.engine.generation import Generation
from pi_runtime.engine.stream import Reading, Stream
from pi_runtime.sequence.drafts import MAX_DRAFT_TOKENS, Draft, PromptLookup
from support.definition import Found, answer_of

CAN_CONSTRAIN = find_spec("llguidance") is not None
GRAMMARS = (
    Grammar.regex("[a-f]{3,9}(.|\n)*"),
    Grammar.regex("(yes|no)( [a-z]+)*"),
    Grammar.json_schema({"type": "array", "items": {"type": ["integer", "boolean"]}}),
)


@dataclass(frozen=True)
class Request:
    """A prompt with its settings; and after how many pieces of text it is cancelled, if at all."""

    prompt: tuple[int, ...]
    settings: dict[str, Any]
    cancelled_after: int | None = None


def random_requests(rng: random.Random, count: int, *, sampled: bool, context: int, cancels: bool) -> list[Request]:
    """Prompts of any length that fits, half of which begin as an earlier one does; limits, stop strings, grammars."""
    found: list[Request] = []
    for _ in range(count):
        prompt = [rng.randrange(250) for _ in range(rng.randint(1, context // 2))]
        if found and rng.random() < 0.5:
            earlier = rng.choice(found).prompt
            prompt = [*earlier[: rng.randint(1, len(earlier))], *prompt[: rng.randint(0, 8)]]
        settings: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 5, 12, 30, None])}
        if rng.random() < 0.3:
            settings["stop"] = [chr(rng.randrange(32, 127)) for _ in range(rng.randint(1, 3))]
        if CAN_CONSTRAIN and rng.random() < 0.2:
            settings["grammar"] = rng.choice(GRAMMARS)
        if rng.random() < 0.3:
            settings["logprobs"] = rng.randint(0, 3)
        if rng.random() < 0.3:
            settings["min_tokens"] = rng.randint(0, settings["max_tokens"] or 20)
        penalties = {
            "presence_penalty": rng.choice([0.0, 0.7]),
            "frequency_penalty": rng.choice([0.0, 0.3]),
            "logit_bias": rng.choice([{}, {rng.randrange(250): rng.uniform(-9, 9)}]),
        }
        settings["sampling"] = Sampling(**penalties)
        if sampled:
            settings["sampling"] = Sampling(
                temperature=rng.choice([0.5, 1.0, 3.0]),
                top_k=rng.choice([0, 5, 40]),
                top_p=rng.choice([0.9, 1.0]),
                repetition_penalty=rng.choice([1.0, 1.3]),
                seed=rng.randrange(1000),
                number=rng.randrange(3),
                **penalties,
            )
        cancelled = rng.randint(0, 3) if cancels and rng.random() < 0.15 else None
        found.append(Request(tuple(prompt[: context - 1]), settings, cancelled))
    return found


def follow_ups(
    rng: random.Random, requests: Sequence[Request], answers: Sequence[Found], context: int
) -> list[Request]:
    """Second turns of some talks: each prompt is an earlier one with its answer and a few tokens more."""
    found = []
    for request, (_, token_ids, *_) in zip(requests, answers, strict=True):
        prompt = (*request.prompt, *token_ids, *(rng.randrange(250) for _ in range(rng.randint(1, 9))))
        if len(prompt) < context and rng.random() < 0.5:
            found.append(Request(prompt, request.settings))
    return found


def found_by(answer: Generation | Stream) -> Found:
    """All that an answer comes to."""
    return "".join(answer), answer.token_ids, answer.finish_reason, answer.logprobs


def alone(model: Model, request: Request) -> Found:
    """The answer to a request, from the definition."""
    return answer_of(model, request.prompt, **request.settings)


def oracle(
    monkeypatch: pytest.MonkeyPatch, requests: Sequence[Request], answers: Sequence[Found], wrong: float
) -> None:
    """Let drafts be the answers that are known, with some wrong tokens: more of them are right than any text gives."""
    rng = random.Random(0)
    known = [[*request.prompt, *token_ids] for request, (_, token_ids, *_) in zip(requests, answers, strict=True)]

    def draft(lookup: PromptLookup, max_tokens: int) -> Draft:
        so_far = list(lookup._tokens)
        found = next((k[len(so_far) :] for k in known if k[: len(so_far)] == so_far), [])
        found = [rng.randrange(250) if rng.random() < wrong else token for token in [*found, *range(9)]]
        return Draft(found[: max(0, min(max_tokens, MAX_DRAFT_TOKENS))], rng.randint(2, 16))

    monkeypatch.setattr(PromptLookup, "draft", draft)


def together(engine: Engine, requests: Sequence[Request], rng: random.Random) -> list[Found]:
    """Answers from one engine. Requests come at random times; streams are read late, early or in part.

    Before, beside and behind them prompts are read ahead: theirs, in part or with something else behind them.
    """
    streams, readings = [], []
    for request in requests:
        if rng.random() < 0.4:
            readings += read_ahead(engine, request.prompt, rng)
        streams.append(engine.generate(request.prompt, **request.settings))
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.01)
    heads: list[str] = []
    for request, stream in zip(requests, streams, strict=True):
        head = []
        if request.cancelled_after is not None:
            head = [piece for _, piece in zip(range(request.cancelled_after), stream, strict=False)]
            stream.cancel()
        heads.append("".join(head))
    found = [(head + (f := found_by(stream))[0], *f[1:]) for head, stream in zip(heads, streams, strict=True)]
    for reading in readings:
        stats = reading.result()
        assert 0 <= stats.cached_tokens <= stats.prompt_tokens
    settle(engine)
    return found


def settle(engine: Engine, seconds: float = 150.0) -> None:
    """Wait until an engine has nothing left to do: answers are read again behind their end."""
    ends = time.monotonic() + seconds
    while (stats := engine.stats).running or stats.waiting or stats.reading_ahead:
        assert time.monotonic() < ends
        time.sleep(0.001)


def read_ahead(engine: Engine, prompt: Sequence[int], rng: random.Random) -> list[Reading]:
    """Let an engine read a prompt ahead as it grows, for one of two clients; some readings are cancelled."""
    client, readings = rng.choice("ab"), []
    for _ in range(rng.randint(1, 3)):
        begun = [*prompt[: rng.randint(1, len(prompt))], *(rng.randrange(250) for _ in range(rng.choice([0, 0, 3])))]
        readings.append(engine.read(begun[: len(prompt)], client=client))
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.02)
        if rng.random() < 0.1:
            readings[-1].cancel()
    return readings


def assert_same(request: Request, wanted: Found, found: Found) -> None:
    """The same text, tokens and end; of a request that was cancelled in time, the beginning of them."""
    if request.cancelled_after is not None and found[2] == "cancelled":
        assert wanted[0].startswith(found[0]), request
        assert wanted[1][: len(found[1])] == found[1], request
        assert wanted[3][: len(found[3])] == found[3], request
    else:
        assert found == wanted, request
