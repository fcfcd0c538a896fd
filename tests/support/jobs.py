"""Runs a request's job on an engine without a server, one answer after the other."""

import json
from collections.abc import Iterator
from typing import Any

from pi_runtime import Engine
from pi_runtime.engine.stream import Stream
from pi_runtime.generation import Stats
from pi_runtime.server.jobs import Ask, End, Event, Job, Part

STATS = Stats(
    prompt_tokens=9,
    cached_tokens=4,
    generated_tokens=8,
    prefill_s=0.1,
    decode_s=0.2,
    first_token_s=0.1,
    rows_read_share=0.5,
    active_share=0.25,
    guessed_tokens=0,
    accepted_tokens=0,
)
"""Figures of an answer that nobody wrote."""


def events(job: Job, engine: Engine) -> list[Event]:
    """All events of a job that streams; each is JSON."""
    found = [*_run(job, engine), *job.last()]
    json.dumps(found, allow_nan=False)
    return found


def whole(job: Job, engine: Engine) -> dict[str, Any]:
    """The answer of a job that does not stream."""
    assert not job.streams
    assert not list(_run(job, engine))
    found = job.whole()
    json.dumps(found, allow_nan=False)
    return found


def _run(job: Job, engine: Engine) -> Iterator[Event]:
    index = 0
    for number, ask in enumerate(job.asks):
        streams = engine.generate_many(ask.prompt, ask.count, **ask.settings) if ask.count else []
        for n, stream in enumerate(streams):
            yield from _answer(job, index + n, stream)
        index += ask.count
        if ask.score is not None:
            yield from job.scores(number, _scores(engine, ask))


def _scores(engine: Engine, ask: Ask) -> Any:
    assert ask.score is not None
    first, top = ask.score
    return engine.score(ask.prompt, first=first, top=top).result()


def _answer(job: Job, index: int, stream: Stream) -> Iterator[Event]:
    done = 0
    for text in stream:
        # A piece may be read late, when more tokens are there already.
        yield from job.part(index, _part(stream, text, done, done + 1))
        done += 1
    if done < len(stream.token_ids):
        yield from job.part(index, _part(stream, "", done, None))
    assert stream.finish_reason is not None
    yield from job.end(index, End(stream.finish_reason, stream.stats, stream.seed, stream.ending))


def _part(stream: Stream, text: str, start: int, stop: int | None) -> Part:
    return Part(text, stream.token_ids[start:stop], stream.logprobs[start:stop], stream.stats)
