"""`/v1/completions`: texts continued, and with `echo` and `logprobs` the log-probabilities of the texts themselves."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.generation import Stats
from pi_runtime.sampling import TokenLogprobs
from pi_runtime.server.api.body import TOKENS, Unsupported, invalid
from pi_runtime.server.api.logprobs import CompletionLogprobs, CompletionLogprobsWriter, ShownLogprobs, joined
from pi_runtime.server.api.sampling import LengthFields, StreamingFields, only_one
from pi_runtime.server.api.served import Served, new_id
from pi_runtime.server.api.usage import FINISH_REASONS, Timings, Usage, timings, usage
from pi_runtime.server.errors import ApiError
from pi_runtime.server.jobs import SSE, Ask, End, Event, Part

DEFAULT_TOKENS = 16
"""Most tokens of an answer where the request does not say: OpenAI's default."""
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1), TOKENS]
# The kinds have one bound, so that a list beyond it is too long whatever its items are.
Texts = Annotated[list[str], Field(min_length=1), TOKENS]
Lists = Annotated[list[Ids], Field(min_length=1), TOKENS]


class CompletionRequest(LengthFields, StreamingFields):
    """A text, a list of token ids, or a list of either, to be continued."""

    model: str = Field(description="The name that `/v1/models` gives; another is a 404.")
    prompt: str | Ids | Texts | Lists | None = Field(
        description="Token ids are taken as they are; a text is framed as the model was trained."
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description=f"0 with `echo` answers with the prompt alone; {DEFAULT_TOKENS} if left out."
    )
    echo: bool | None = Field(default=None, description="The answer begins with the prompt.")
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = Field(
        default=None, description="Log-probabilities of all tokens shown, and of so many likeliest ones."
    )
    best_of: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Answers are not compared, so only the value of `n` is allowed."
    )
    suffix: Annotated[Literal[""] | None, Unsupported("a text is continued at its end alone")] = None
    add_special_tokens: Annotated[Literal[True] | None, Unsupported("give token ids, which are taken as they are")] = (
        None
    )

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of an answer, which may be 0; None goes on until the end. Raises ApiError where two differ."""
        found = only_one(max_tokens=self.max_tokens, n_predict=self.n_predict)
        return DEFAULT_TOKENS if found is None else None if found == -1 else found


class CompletionChoice(TypedDict):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class _CompletionHead(TypedDict):
    """What a whole answer and a piece of a stream have in common."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]


class Completion(_CompletionHead):
    """All answers of a request."""

    usage: Usage


class CompletionChunk(_CompletionHead):
    """A piece of a stream; the last one has the usage and no choice, where that is asked for."""

    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]


@dataclass(eq=False)
class _Choice:
    index: int
    ask: int
    shown: ShownLogprobs
    writer: CompletionLogprobsWriter | None
    began: bool = False
    """Whether the prompt has been written, where it is wanted."""
    texts: list[str] = field(default_factory=list)
    logprobs: list[CompletionLogprobs] = field(default_factory=list)
    held: list[Part | End] = field(default_factory=list)
    """What came before the scores of its prompt."""
    end: End | None = None


class CompletionJob:
    """A request for completions. Choice k of n to prompt p has the index p · n + k."""

    media = SSE

    def __init__(self, body: CompletionRequest, served: Served) -> None:
        served.check_name(body.model)
        self._body, self._served = body, served
        self._id, self._created = new_id("cmpl-"), int(time.time())
        self._n, self._generates = body.n or 1, body.most_tokens != 0
        prompts = _prompts(body.prompt)
        self._check_counts(len(prompts))
        self._ids = [self._tokens(place, prompt) for place, prompt in prompts.items()]
        self._echo = [*map(self._text, prompts.values(), self._ids)] if body.echo else None
        self._scores: dict[int, CompletionLogprobs] = {}
        self._wants_scores = bool(body.echo) and body.logprobs is not None
        self.asks = self._asks()
        self._choices = [self._new_choice(k) for k in range(len(prompts) * self._n)]

    @classmethod
    def of(cls, value: object, served: Served) -> Self:
        """The job that a JSON value asks for. Raises ApiError."""
        return cls(CompletionRequest.of(value), served)

    @property
    def streams(self) -> bool:
        """Whether events are written as they come."""
        return bool(self._body.stream)

    def part(self, index: int, part: Part) -> Sequence[Event]:
        """Take a part of an answer."""
        return self._take(self._choices[index], part)

    def end(self, index: int, end: End) -> Sequence[Event]:
        """Take the end of an answer."""
        return self._take(self._choices[index], end)

    def scores(self, ask: int, logprobs: Sequence[TokenLogprobs]) -> Sequence[Event]:
        """Take the log-probabilities of a prompt; what was held until they came goes out after them."""
        writer = CompletionLogprobsWriter(self._served.model.tokenizer)
        self._scores[ask] = joined([writer.first(self._ids[ask][0]), writer.write(logprobs)])
        events: list[Event] = []
        for choice in self._choices[ask * self._n : (ask + 1) * self._n]:
            held, choice.held = choice.held, []
            for item in held:
                events += self._take(choice, item)
        return events

    def last(self) -> Sequence[Event]:
        """The events after all ends."""
        events = self._unanswered()
        if self._body.include_usage:
            events.append(Event(None, self._envelope([]) | {"usage": self._usage()}))
        return [*events, Event(None, "[DONE]")]

    def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        self._unanswered()
        choices: list[CompletionChoice] = [
            {
                "index": choice.index,
                "text": "".join(choice.texts),
                "logprobs": None if choice.writer is None else joined(choice.logprobs),
                "finish_reason": "length" if choice.end is None else FINISH_REASONS[choice.end.finish_reason],
            }
            for choice in self._choices
        ]
        return self._envelope(choices) | {"usage": self._usage()}

    def failed(self, error: ApiError) -> Sequence[Event]:
        """The event of an error after the stream began."""
        return [Event(None, error.body())]

    def _unanswered(self) -> list[Event]:
        """Write the choices of a request that wants no tokens."""
        choices = [] if self._generates else self._choices
        return [event for choice in choices for event in self._write(choice, "", (), "length")]

    def _tokens(self, place: str, prompt: str | list[int]) -> list[int]:
        """A prompt's tokens. Raises ApiError for what is none, or too long."""
        beside = int(self._generates)
        ids = self._served.encode(prompt, place, beside=beside) if isinstance(prompt, str) else prompt
        if not ids:
            raise invalid(place, "the prompt is empty, and the model has no begin-of-text token to start from")
        self._served.check_length(len(ids), place, beside=beside)
        self._served.check_tokens(ids, place)
        return ids

    def _text(self, prompt: str | list[int], ids: list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._served.model.tokenizer.decode(ids)

    def _check_counts(self, prompts: int) -> None:
        body, most = self._body, self._served.settings.limits.answers
        if self._n > most:
            raise invalid("n", f"at most {most}; found {self._n}")
        if prompts * self._n > most:
            raise invalid("prompt", f"at most {most} answers a request; found {prompts} prompts × {self._n}")
        if body.best_of not in {None, self._n}:
            raise invalid("best_of", f"not supported: answers are not compared; only {self._n}, the value of n")

    def _asks(self) -> list[Ask]:
        body, served = self._body, self._served
        most = body.most_tokens if self._generates else 1
        settings = body.answer_settings(served, max_tokens=most, logprobs=body.logprobs)
        score = (1, body.logprobs) if self._wants_scores and body.logprobs is not None else None
        known: dict[str, Any] = {"score": score, "cache_salt": body.cache_salt}
        return [Ask(ids, self._n * self._generates, settings, **known) for ids in self._ids]

    def _new_choice(self, index: int) -> _Choice:
        ask = index // self._n
        offset = len(self._echo[ask]) if self._echo else 0
        tokenizer = self._served.model.tokenizer
        writer = None if self._body.logprobs is None else CompletionLogprobsWriter(tokenizer, offset)
        return _Choice(index, ask, ShownLogprobs(tokenizer), writer)

    def _take(self, choice: _Choice, item: Part | End) -> Sequence[Event]:
        if self._wants_scores and choice.ask not in self._scores:
            choice.held.append(item)
            return ()
        if isinstance(item, Part):
            due = choice.shown.take(item.text, item.logprobs)
            return list(self._write(choice, item.text, due, stats=item.stats))
        choice.end = item
        ending = [*choice.shown.finish(item), *([] if item.ending is None else [item.ending])]
        return list(self._write(choice, "", ending, FINISH_REASONS[item.finish_reason], item.stats))

    def _write(
        self,
        choice: _Choice,
        text: str,
        logprobs: Sequence[TokenLogprobs],
        finish_reason: Literal["stop", "length"] | None = None,
        stats: Stats | None = None,
    ) -> Sequence[Event]:
        """Keep what has come, or make an event of it."""
        found = [] if choice.writer is None else [choice.writer.write(logprobs)]
        if self._echo and not choice.began:
            choice.began = True
            text = self._echo[choice.ask] + text
            found = [self._scores[choice.ask], *found] if self._wants_scores else found
        if not self.streams:
            choice.texts.append(text)
            choice.logprobs += found
            return ()
        written: CompletionChoice = {
            "index": choice.index,
            "text": text,
            "logprobs": joined(found) if found else None,
            "finish_reason": finish_reason,
        }
        event = self._envelope([written])
        if self._body.include_usage:
            event["usage"] = None
        if stats is not None and (finish_reason or self._body.timings_per_token):
            event["timings"] = timings([stats], [stats])
        return [Event(None, event)]

    def _envelope(self, choices: list[CompletionChoice]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._served.name,
            "system_fingerprint": self._served.fingerprint,
            "choices": choices,
        }

    def _usage(self) -> Usage:
        answers = [choice.end.stats for choice in self._choices if choice.end is not None]
        firsts = [choice.end.stats for choice in self._choices[:: self._n] if choice.end is not None]
        return usage(sum(map(len, self._ids)), answers, firsts)


def _prompts(prompt: str | list[int] | list[str] | list[list[int]] | None) -> dict[str, str | list[int]]:
    """The prompts of a request, by their fields; none at all is the beginning of a text."""
    if prompt is None or isinstance(prompt, str):
        return {"prompt": prompt or ""}
    ids = [item for item in prompt if isinstance(item, int)]
    several = [item for item in prompt if not isinstance(item, int)]
    return {"prompt": ids} if ids else {f"prompt[{n}]": item for n, item in enumerate(several)}
