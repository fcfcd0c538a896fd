"""Sessions: texts that are continued in turns. What is typed is read ahead, and a turn may pause for a tool.

POST   /v1/sessions                a session, with a prompt, a chat or tokens to begin with
GET    /v1/sessions, …/{id}        the client's own, and how far each has come
POST   /v1/sessions/{id}/type      more of the draft, or an edit of it
POST   /v1/sessions/{id}/answer    the model's turn, after the draft and what is appended
DELETE /v1/sessions/{id}           the end of a session
"""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.engine.session import Session
from pi_runtime.generation import AnswerSettings, Stats
from pi_runtime.server.api.body import MANY, TOKENS, Body, invalid
from pi_runtime.server.api.chat import ConversationFields, conversation_of
from pi_runtime.server.api.other_servers import OneAnswerFields
from pi_runtime.server.api.sampling import CacheFields, Count, SamplingFields
from pi_runtime.server.api.served import Served, new_id
from pi_runtime.server.api.usage import FINISH_REASONS, Timings, Usage, timings, usage
from pi_runtime.server.errors import ApiError
from pi_runtime.server.jobs import SSE, Ask, End, Event, Part

TokenId = Annotated[int, Field(ge=0)]
State = Literal["idle", "answering", "paused"]


class AnswerFields(SamplingFields, OneAnswerFields):
    """How a session's answers are made."""

    max_tokens: Count | None = Field(default=None, description="Without it the context is the limit.")
    stop_tokens: Annotated[list[TokenId | str], MANY] | None = Field(
        default=None,
        description="Tokens, by id or text, that pause the session: they end the answer and are part of the text.",
    )
    shown_tokens: Annotated[list[TokenId | str], MANY] | None = Field(
        default=None, description="Special tokens, by id or text, whose text is not left out."
    )


class SessionRequest(AnswerFields, CacheFields):
    """A session that is wanted. Settings of answers hold for each that does not say otherwise."""

    model: str | None = Field(default=None, description="The name that `/v1/models` gives, if any.")
    prompt: str | Annotated[list[TokenId], TOKENS] | None = Field(
        default=None, description="What the session begins with: text, which becomes the draft, or tokens."
    )
    chat: ConversationFields | None = Field(
        default=None, description="A chat to begin with, in place of `prompt`: what the template makes of it."
    )


class TypeRequest(Body):
    """Text that is being typed."""

    text: str
    at: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="The text replaces all of the draft from this character on; without it, it follows."
    )


class AnswerRequest(AnswerFields):
    """The model's turn."""

    stream: bool | None = None
    timings_per_token: bool | None = Field(default=None, description="Every chunk of a stream has `timings`.")
    append: str | Annotated[list[TokenId], TOKENS] | None = Field(
        default=None, description="What comes after the draft, such as a tool's result: text, or tokens without draft."
    )


class SessionProgress(TypedDict):
    """How far a session has come."""

    id: str
    object: Literal["session"]
    created: int
    model: str
    state: State
    tokens: int
    idle_limit_s: float


class SessionObject(SessionProgress):
    """A session, and what has been typed since its last turn."""

    draft: str


class SessionList(TypedDict):
    """All sessions that were made with the same key."""

    object: Literal["list"]
    data: list[SessionProgress]


class SessionDeleted(TypedDict):
    """A session that is no more."""

    id: str
    object: Literal["session.deleted"]
    deleted: Literal[True]


class SessionAnswer(TypedDict):
    """A turn that the model has written."""

    id: str
    object: Literal["session.answer"]
    created: int
    model: str
    session: str
    text: str
    tokens: list[int]
    finish_reason: Literal["stop", "length"]
    stop_token: int | None
    usage: Usage


class SessionChunk(TypedDict):
    """A piece of a turn; the last has all that is not required."""

    id: str
    object: Literal["session.answer.chunk"]
    created: int
    model: str
    session: str
    text: str
    tokens: list[int]
    finish_reason: Literal["stop", "length"] | None
    stop_token: NotRequired[int | None]
    usage: NotRequired[Usage]
    timings: NotRequired[Timings]


class Beginning:
    """A request for a session, checked."""

    def __init__(self, value: object, served: Served) -> None:
        """Raises ApiError for what is wrong. It may take long, as templates do."""
        body = SessionRequest.of(value)
        if body.model is not None:
            served.check_name(body.model)
        if body.prompt is not None and body.chat is not None:
            raise invalid("chat", "not with prompt: a session begins with one of them")
        _settings(body, served)
        prompt = conversation_of(body.chat, served).text(served) if body.chat is not None else body.prompt or ""
        field = "prompt" if body.chat is None else "chat"
        if isinstance(prompt, str):
            served.check_text(prompt, field)
        self.draft = prompt if isinstance(prompt, str) else ""
        self.tokens = [] if isinstance(prompt, str) else _checked(prompt, field, served)
        self.cache_salt = body.cache_salt
        self.defaults = body.model_dump(include=set(AnswerFields.model_fields), exclude_unset=True)


def typed(value: object, session: Session, served: Served) -> None:
    """Type into the draft of a session."""
    body = TypeRequest.of(value)
    at = len(session.draft) if body.at is None else body.at
    if at > len(session.draft):
        raise invalid("at", f"the draft has {len(session.draft)} characters; found {at}")
    most = served.settings.limits.body_bytes
    if at + len(body.text) > most:
        raise invalid("text", f"a draft has at most {most} characters")
    served.check_text(session.draft[:at] + body.text, "text", beside=len(session.tokens) + 1)
    session.edit(body.text, at)


class AnswerJob:
    """A session's turn."""

    media = SSE

    def __init__(
        self, value: object, served: Served, *, session_id: str, session: Session, defaults: Mapping[str, Any]
    ) -> None:
        """Raises ApiError for what is wrong. `defaults`: settings that the session was made with."""
        body = AnswerRequest.of({**defaults, **value} if isinstance(value, dict) else value)
        append = "" if body.append is None else body.append
        if not isinstance(append, str) and session.draft:
            raise invalid("append", "tokens cannot follow a draft; append text, or empty the draft")
        prompt = session.draft + append if isinstance(append, str) else append
        beside = len(session.tokens) + 1
        if isinstance(prompt, str):
            served.check_text(prompt, "append", beside=beside)
        else:
            _checked(prompt, "append", served, beside=beside)
        self._body, self._served, self._session_id = body, served, session_id
        self._id, self._created = new_id("answer_"), int(time.time())
        settings, self._stop_tokens = _settings(body, served)
        self.asks = [Ask(prompt, 1, settings, session=session, stop_tokens=self._stop_tokens)]
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._end: End | None = None

    @property
    def streams(self) -> bool:
        """Whether events are written as they come."""
        return bool(self._body.stream)

    @property
    def pauses(self) -> bool:
        """Whether the turn ended with a stop token, so that somebody else goes on."""
        return self._stop_token is not None

    @property
    def _stop_token(self) -> int | None:
        ended = self._end is not None and self._end.finish_reason == "stop"
        return self._tokens[-1] if ended and self._tokens and self._tokens[-1] in self._stop_tokens else None

    def part(self, index: int, part: Part) -> Sequence[Event]:  # noqa: ARG002  there is one answer
        """Take a part of the answer."""
        self._texts.append(part.text)
        self._tokens += part.tokens
        return self._chunk(part.text, part.tokens, part.stats if self._body.timings_per_token else None)

    def end(self, index: int, end: End) -> Sequence[Event]:  # noqa: ARG002
        """Take the end of the answer."""
        self._end = end
        return self._chunk("", (), end.stats)

    def scores(self, ask: int, logprobs: Sequence[Any]) -> Sequence[Event]:
        """No log-probabilities are asked for."""
        raise NotImplementedError(ask, logprobs)

    def last(self) -> Sequence[Event]:
        """The mark of a stream's end."""
        return [Event(None, "[DONE]")]

    def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        answer: SessionAnswer = {
            "id": self._id,
            "object": "session.answer",
            "created": self._created,
            "model": self._served.name,
            "session": self._session_id,
            "text": "".join(self._texts),
            "tokens": self._tokens,
            "finish_reason": self._finish_reason,
            "stop_token": self._stop_token,
            "usage": self._usage(),
        }
        return dict(answer)

    def failed(self, error: ApiError) -> Sequence[Event]:
        """The event of an error after the stream began."""
        return [Event(None, error.body())]

    def _chunk(self, text: str, tokens: Sequence[int], stats: Stats | None) -> Sequence[Event]:
        if not self.streams:
            return ()
        chunk: SessionChunk = {
            "id": self._id,
            "object": "session.answer.chunk",
            "created": self._created,
            "model": self._served.name,
            "session": self._session_id,
            "text": text,
            "tokens": list(tokens),
            "finish_reason": None,
        }
        if stats is not None:
            chunk["timings"] = timings([stats], [stats])
        if self._end is not None:
            chunk |= {"finish_reason": self._finish_reason, "stop_token": self._stop_token, "usage": self._usage()}
        return [Event(None, dict(chunk))]

    @property
    def _finish_reason(self) -> Literal["stop", "length"]:
        assert self._end is not None
        return FINISH_REASONS[self._end.finish_reason]

    def _usage(self) -> Usage:
        assert self._end is not None
        return usage(self._end.stats.prompt_tokens, [self._end.stats], [self._end.stats])


def _settings(body: AnswerFields, served: Served) -> tuple[AnswerSettings, list[int]]:
    """The settings of an answer for the engine, and the tokens that pause the session."""
    settings = body.answer_settings(served, max_tokens=body.max_tokens, logprobs=None)
    settings["shown_tokens"] = _ids(body.shown_tokens, "shown_tokens", served)
    return settings, _ids(body.stop_tokens, "stop_tokens", served)


def _ids(tokens: Sequence[int | str] | None, field: str, served: Served) -> list[int]:
    """Tokens that a request names by ids or texts. Raises ApiError for a text that is none."""
    found = []
    for n, token in enumerate(tokens or ()):
        named = served.model.tokenizer.added_token(token) if isinstance(token, str) else token
        if named is None:
            tokenizer, text = served.model.tokenizer, str(token)
            spelled = tokenizer.encode(text, prefix=False) if tokenizer.least_tokens(text) <= 1 else ()
            if len(spelled) != 1:
                raise invalid(f"{field}[{n}]", f"{str(token)[:80]!r} is not one token of this model")
            named = spelled[0]
        found.append(named)
    served.check_tokens(found, field)
    return found


def _checked(ids: list[int], field: str, served: Served, *, beside: int = 1) -> list[int]:
    served.check_length(len(ids), field, beside=beside)
    served.check_tokens(ids, field)
    return ids
