"""Asks an engine in a form of API without a server, by the table of routes, and reads what is written."""

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from pi_runtime import Engine
from pi_runtime.engine.events import Event
from pi_runtime.sequence.stats import Stats
from pi_runtime.server.admission import Client
from pi_runtime.server.api.answer import AnswerWriter, EventReader, GatheredAnswer
from pi_runtime.server.api.prompt import Prompt
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError
from pi_runtime.server.exchange import in_parts
from pi_runtime.server.in_flight import InFlight
from pi_runtime.server.metrics import Metrics
from pi_runtime.server.routes import ROUTES, Computed, Generated

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
POSTS = {route.path: route for route in ROUTES if route.method == "POST"}
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
    checked_drafts=0,
    drafts_won_s=0.0,
)
"""Figures of an answer that nobody wrote."""


def read(path: str, value: object, served: Served) -> tuple[Prompt, AnswerWriter]:
    """What becomes of the JSON of a request of this path."""
    handler = POSTS[path].handler
    assert isinstance(handler, Generated)
    return handler.read(POSTS[path].body.of(value), served)


def asked(path: str, value: object, served: Served) -> Prompt:
    """What the engine is asked for by a request of this path."""
    return read(path, value, served)[0]


def computed(path: str, value: object, served: Served) -> Any:
    """The answer to a request of this path, which takes no engine."""
    handler = POSTS[path].handler
    assert isinstance(handler, Computed)
    return handler.compute(POSTS[path].body.of(value), served)


def refused(path: str, value: object, served: Served, param: str | None, says: str = "", status: int = 400) -> str:
    """The message by which a request of this path is refused; it names the field that is wrong, and says what is."""
    with pytest.raises(ApiError) as raised:
        (computed if isinstance(POSTS[path].handler, Computed) else asked)(path, value, served)
    error = raised.value
    assert (error.status, error.param) == (status, param), error.message
    assert says in error.message
    return error.message


def whole(path: str, value: object, chat: tuple[Served, Engine]) -> Any:
    """The answer to a request that does not stream."""
    request, writer = read(path, value, chat[0])
    assert not request.streams
    return _whole(writer, [answer for answer, _ in _events(request, *chat)])


def streamed(path: str, value: object, chat: tuple[Served, Engine]) -> list[tuple[str | None, Any]]:
    """The names and the JSON of all events of a stream."""
    request, writer = read(path, value, chat[0])
    assert request.streams
    found, answers = b"", []
    for answer, events in _events(request, *chat):
        answers.append(answer)
        for event in events:
            found += write(writer, answer, event)
    return parsed(found + writer.final_events(answers))


def said(
    path: str, value: object, served: Served, pieces: Sequence[str], reason: str = "end", stats: Stats = STATS
) -> Any:
    """What is written of one answer whose tokens are these pieces: its whole, or the events of its stream."""
    prompt, writer = read(path, value, served)
    answer = GatheredAnswer(0, 0)
    reader, found = EventReader(prompt, served.model.tokenizer), b""
    for piece in pieces:
        for event in reader.read(piece, [1], (), stats):
            found += write(writer, answer, event)
    for event in reader.end(reason, stats):
        found += write(writer, answer, event)
    return (
        parsed(found + writer.final_events([answer]))
        if prompt.streams
        else _whole(read(path, value, served)[1], [answer])
    )


def write(writer: AnswerWriter, answer: GatheredAnswer, event: Event) -> bytes:
    """The bytes of an event, which becomes the answer's latest."""
    answer.events.append(event)
    return writer.write(answer, event)


def parsed(data: bytes) -> list[tuple[str | None, Any]]:
    """The names and the JSON of server-sent events, or of lines; `[DONE]` stands as it is."""
    found: list[tuple[str | None, Any]] = []
    name = None
    for line in filter(None, data.decode().split("\n")):
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
            continue
        text = line.removeprefix("data: ")
        found.append((name, text if text == "[DONE]" else json.loads(text)))
        name = None
    return found


def _events(request: Prompt, served: Served, engine: Engine) -> list[tuple[GatheredAnswer, list[Event]]]:
    """The events of each answer, which are gathered too where it does not stream."""
    in_flight = InFlight(request, engine, Metrics(), served.settings, time.monotonic(), Client("", ""))
    found: list[tuple[GatheredAnswer, list[Event]]] = [(answer, []) for answer in in_flight.answers]
    while not in_flight.ended:
        for answer, event in in_flight.read():
            found[answer.index][1].append(event)
            if not request.streams:
                answer.events.append(event)
        time.sleep(0.001)
    return found


def _whole(writer: AnswerWriter, answers: Sequence[GatheredAnswer]) -> Any:
    return json.loads(b"".join(in_parts(writer.response(answers))), parse_constant=_refused)


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
