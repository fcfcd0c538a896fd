"""An answer from the engine to the wire: events are made of what the engine gives, and a writer makes bytes of them."""

import json
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from pi_runtime.engine.events import End, Event, Gathered, NothingShown
from pi_runtime.sequence.sampling import TokenLogprobs
from pi_runtime.sequence.stats import Stats
from pi_runtime.server.api.prompt import Prompt
from pi_runtime.server.errors import ApiError
from pi_runtime.text.tokenizer import TextStream, Tokenizer

SSE, NDJSON = "text/event-stream", "application/x-ndjson"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which says that a stream is alive."""
DONE = b"data: [DONE]\n\n"
"""The mark of the end of a stream in OpenAI's forms."""
FINISH_REASONS: dict[str, Literal["stop", "length"]] = {
    "end": "stop",
    "stop": "stop",
    "length": "length",
    "context": "length",
    "cancelled": "stop",
}
"""OpenAI's word for each of the engine's."""
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=lambda value: value.listed())


class Lazily(Sequence[Any]):
    """A list whose items are made when they are asked for: all of them at once would take much memory."""

    def __init__(self, make: Callable[[Any], Any], given: Sequence[Any]) -> None:
        self._make, self._given = make, given

    def listed(self) -> list[Any]:
        """All of them."""
        return [*self]

    def __len__(self) -> int:
        return len(self._given)

    def __getitem__(self, place: Any) -> Any:
        return self._make(self._given[place])


def to_json(value: Any) -> bytes:
    """JSON as it goes over the wire."""
    return ENCODER.encode(value).encode("utf-8", "replace")


def bounded(text: str) -> Any:
    """Parse JSON that a model wrote, so that it can be sent: a number beyond the range of floats is the largest."""

    def number(digits: str) -> int | float:
        found = float(digits)
        if math.isinf(found):
            return math.copysign(sys.float_info.max, found)
        return int(digits) if digits.lstrip("-").isdecimal() else found

    return json.loads(text, parse_constant=lambda _: None, parse_float=number, parse_int=number)


def sse(data: Any, name: str | None = None) -> bytes:
    """A server-sent event; `name` is its event field, where it has one."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(data) + b"\n\n"


def sse_by_type(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Server-sent events, each with its type as its name."""
    return b"".join(sse(event, event["type"]) for event in events)


class ShownLogprobs:
    """Lets the log-probabilities of tokens through as their text is shown, and drops those of a stop string.

    What comes in one part depends on how fast it is read; what comes in all does not.
    """

    def __init__(self, tokenizer: Tokenizer, shown_tokens: Sequence[int] = (), *, after: Sequence[int] = ()) -> None:
        """`after`: the tokens of the prompt."""
        self._text = TextStream(tokenizer, shown_tokens, after=after)
        self._held: deque[tuple[int, TokenLogprobs]] = deque()
        """Tokens whose text has not been shown, each with where its text begins."""
        self._chars = self._shown = 0

    def push(self, text: str, found: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        """Take text that is shown, and tokens; returns those whose text has been shown now."""
        self._shown += len(text)
        for token in found:
            self._held.append((self._chars, token))
            self._chars += len(self._text.push(token.token))
        due = []
        while self._held and self._held[0][0] < self._shown:
            due.append(self._held.popleft()[1])
        return due

    def finish(self, finish_reason: str) -> list[TokenLogprobs]:
        """Return the log-probabilities that are still held, unless their tokens belong to a stop string."""
        return [] if finish_reason == "stop" else [token for _, token in self._held]


class EventReader:
    """Makes events of what the engine gives of one answer: text, thoughts and calls, whatever form they are in."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer, *, after: Sequence[int] = ()) -> None:
        """`after`: the tokens that the answer continues."""
        self._parser = prompt.output.parser(prompt.rendered, prompt.tools)
        self._shown = ShownLogprobs(tokenizer, prompt.settings.get("shown_tokens", ()), after=after)

    def read(
        self, text: str, tokens: Sequence[int] = (), logprobs: Sequence[TokenLogprobs] = (), stats: Stats | None = None
    ) -> list[Event]:
        """The events of more text and of the tokens that came with it. There is one at least."""
        found: list[Event] = [*self._parser.push(text, len(tokens))]
        first, *more = found or [NothingShown()]
        shown = self._shown.push(text, logprobs)
        return [
            replace(first, tokens=tokens, logprobs=shown, stats=stats),
            *(replace(delta, stats=stats) for delta in more),
        ]

    def end(
        self,
        finish_reason: str,
        stats: Stats,
        ending: TokenLogprobs | None = None,
        stop_string: str | None = None,
    ) -> list[Event]:
        """The events of what was held back until the end, and the end."""
        held = self._parser.finish()
        end = End(finish_reason, ending, self._parser.reasoning_tokens, stop_string, stats=stats)
        first, *more = [*held, end]
        return [replace(first, logprobs=self._shown.finish(finish_reason)), *more]


@dataclass
class GatheredAnswer(Gathered):
    """One answer to a request."""

    index: int
    """The place among all answers of the request."""
    prompt: int
    """The place of its prompt among the prompts of the request."""

    @property
    def is_new(self) -> bool:
        """Whether its first event is its latest."""
        return len(self.events) == 1

    @property
    def tokens(self) -> list[int]:
        """The tokens of the answer up to now."""
        return [token for event in self.events for token in event.tokens]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The log-probabilities of its tokens that are shown."""
        return [found for event in self.events for found in event.logprobs]

    @property
    def end(self) -> End | None:
        """The event that ended the answer; None until then."""
        last = self.events[-1] if self.events else None
        return last if isinstance(last, End) else None

    @property
    def stats(self) -> Stats | None:
        """The figures of the answer, once it has ended."""
        return None if self.end is None else self.end.stats

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """Why it ended, in OpenAI's words. `tool_calls` asks for all calls to be run."""
        assert self.end is not None
        found = FINISH_REASONS[self.end.finish_reason]
        return "tool_calls" if found == "stop" and self.calls and not self.is_cut else found


class AnswerWriter(Protocol):
    """Writes the answers to one request in one form of API. None of its methods waits.

    A request that streams has `write` called for each event, and `final_events` after all ends. Any other has
    `response` called, which may take long. After an error comes only `failed`, and only if something was written
    before.
    """

    @property
    def media(self) -> str:
        """The type of its stream: `SSE` or `NDJSON`."""

    @property
    def alive(self) -> bytes:
        """What says that a stream is alive while nothing comes."""

    def write(self, answer: GatheredAnswer, event: Event) -> bytes:
        """The bytes of an event, which is the latest of its answer."""

    def final_events(self, answers: Sequence[GatheredAnswer]) -> bytes:
        """The bytes after the last event."""

    def response(self, answers: Sequence[GatheredAnswer]) -> Mapping[str, Any]:
        """The JSON of all answers together."""

    def failed(self, error: ApiError) -> bytes:
        """The bytes of an error after a stream began."""


class SseWriter:
    """What writers of server-sent events share."""

    media, alive = SSE, KEEP_ALIVE

    def failed(self, error: ApiError) -> bytes:
        """The event of an error."""
        return sse(error.body())
