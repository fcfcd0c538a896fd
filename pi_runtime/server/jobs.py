"""What lies between the forms of requests and the engine: a request is a job, which asks, and makes events of answers.

A job knows nothing of sockets and threads. Whoever runs it hands each prompt to the engine, brings what comes of the
answers in order, and writes the events that the job makes of it. So each form of a request is tested by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pi_runtime.engine.session import Session
from pi_runtime.generation import AnswerSettings, Stats
from pi_runtime.sampling import TokenLogprobs
from pi_runtime.server.errors import ApiError

SSE = "text/event-stream"
NDJSON = "application/x-ndjson"


class Event(NamedTuple):
    """One event of a stream: JSON, or a text that stands as it is. `event` is its name where it has one."""

    event: str | None
    data: dict[str, Any] | str


@dataclass(frozen=True)
class Part:
    """What the engine gave since the last part of one answer. Tokens without text of their own come with the next."""

    text: str
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    """Of these tokens, if they were asked for."""
    stats: Stats | None = None
    """The figures of its answer up to now."""


@dataclass(frozen=True)
class End:
    """How an answer ended: its reason is the engine's `end`, `stop`, `length`, `context` or `cancelled`."""

    finish_reason: str
    stats: Stats
    seed: int | None = None
    """The seed of its draws; None where it is greedy."""
    ending: TokenLogprobs | None = None
    """The log-probability of the token that ended the text and is no part of it, if these were asked for."""


@dataclass(frozen=True)
class Ask:
    """One prompt for the engine."""

    prompt: str | Sequence[int]
    """Text, or token ids taken as they are."""
    count: int
    """Answers; 0 where only scores are wanted."""
    settings: AnswerSettings
    guess: str = ""
    """Text that is likely to come."""
    score: tuple[int, int] | None = None
    """The first token and the number of likeliest tokens, where log-probabilities of the prompt are wanted."""
    session: Session | None = None
    """The session whose text the prompt continues; it has one answer."""
    stop_tokens: Sequence[int] = ()
    """Tokens that end a session's turn, and become part of its text."""
    cache_salt: str | None = None
    """Given by the request, where only those with the same are to share what is kept of its prompt."""


class Job(Protocol):
    """A request that has been read and checked. Its methods are called one after the other, none of them waits.

    `scores` and `whole`, which may take long, are called beside the event loop.

    For each ask that wants them come its scores. Of each answer come parts, and one end, which is its last; those of
    several answers are interleaved. Then `last` if it streams, else `whole`. After an error comes only `failed`, and
    only if something was streamed before.
    """

    @property
    def streams(self) -> bool:
        """Whether events are written as they come."""

    @property
    def media(self) -> str:
        """The type of its stream: `SSE` or `NDJSON`."""

    @property
    def asks(self) -> Sequence[Ask]:
        """The prompts."""

    def part(self, index: int, part: Part) -> Sequence[Event]:
        """Take a part of an answer; `index` counts the answers of all asks in order."""

    def end(self, index: int, end: End) -> Sequence[Event]:
        """Take the end of an answer."""

    def scores(self, ask: int, logprobs: Sequence[TokenLogprobs]) -> Sequence[Event]:
        """Take the log-probabilities of the prompt of an ask."""

    def last(self) -> Sequence[Event]:
        """The events after all ends."""

    def whole(self) -> dict[str, Any]:
        """The JSON of a request that does not stream, after all ends."""

    def failed(self, error: ApiError) -> Sequence[Event]:
        """The events that tell of an error after a stream began."""
