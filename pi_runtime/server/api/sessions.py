"""Sessions: texts that are continued in turns. What is typed is read ahead, and a turn may pause for a tool.

POST   /v1/sessions                a session, with a prompt, a chat or tokens to begin with
GET    /v1/sessions, …/{id}        the client's own, and how far each has come
POST   /v1/sessions/{id}/type      more of the draft, or an edit of it
POST   /v1/sessions/{id}/answer    the model's turn, after the draft and what is appended
DELETE /v1/sessions/{id}           the end of a session
"""

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.engine.events import End, Event, TextDelta
from pi_runtime.engine.sessions.session import Session
from pi_runtime.sequence.settings import AnswerSettings
from pi_runtime.server.api.answer import DONE, GatheredAnswer, SseWriter, sse
from pi_runtime.server.api.body import MANY, TOKENS, Body, invalid
from pi_runtime.server.api.chat_prompt import chat_text
from pi_runtime.server.api.conversation import ConversationFields
from pi_runtime.server.api.prompt import Prompt
from pi_runtime.server.api.sampling import CacheFields, Most, SamplingFields
from pi_runtime.server.api.served import Served, new_id
from pi_runtime.server.api.usage import FINISH_REASONS, Timings, Usage, timings, usage

TokenId = Annotated[int, Field(ge=0)]
State = Literal["idle", "answering", "paused"]


class AnswerFields(SamplingFields):
    """How a session's answers are made."""

    max_tokens: Most | None = Field(default=None, description="Without it the context is the limit.")
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
    """What a session begins with."""

    def __init__(self, body: SessionRequest, served: Served) -> None:
        """Raises ApiError for what is wrong. It may take long, as templates do."""
        if body.model is not None:
            served.check_name(body.model)
        if body.prompt is not None and body.chat is not None:
            raise invalid("chat", "not with prompt: a session begins with one of them")
        _settings(body, served)
        prompt = chat_text(body.chat, served) if body.chat is not None else body.prompt or ""
        field = "prompt" if body.chat is None else "chat"
        _check(prompt, field, served)
        self.draft = prompt if isinstance(prompt, str) else ""
        self.tokens = [] if isinstance(prompt, str) else prompt
        self.cache_salt = body.cache_salt
        self.defaults = body.model_dump(include=set(AnswerFields.model_fields), exclude_unset=True)
        """Settings of answers that do not say otherwise."""


def type_draft(body: TypeRequest, session: Session, served: Served) -> None:
    """Add text to the draft of a session, or replace its end."""
    at = len(session.draft) if body.at is None else body.at
    if at > len(session.draft):
        raise invalid("at", f"the draft has {len(session.draft)} characters; found {at}")
    most = served.settings.limits.body_bytes
    if at + len(body.text) > most:
        raise invalid("text", f"a draft has at most {most} characters")
    served.check_text(session.draft[:at] + body.text, "text", beside=len(session.tokens) + 1)
    session.edit(body.text, at)


def answer_request(body: AnswerRequest, session: Session, served: Served) -> Prompt:
    """What the engine is asked for. Raises ApiError for what is wrong."""
    append = "" if body.append is None else body.append
    if not isinstance(append, str) and session.draft:
        raise invalid("append", "tokens cannot follow a draft; append text, or empty the draft")
    text = session.draft + append if isinstance(append, str) else append
    _check(text, "append", served, beside=len(session.tokens) + 1)
    settings, stop_tokens = _settings(body, served)
    return Prompt(
        texts=[text],
        settings=settings,
        streams=bool(body.stream),
        session=session,
        stop_tokens=stop_tokens,
    )


def stop_token(prompt: Prompt, answer: GatheredAnswer) -> int | None:
    """The stop token that ended a turn, so that somebody else goes on; None where none did."""
    if answer.end is None or answer.end.finish_reason != "stop":
        return None
    return next((token for token in answer.tokens[-1:] if token in prompt.stop_tokens), None)


class SessionWriter(SseWriter):
    """Writes the turns of sessions and their chunks."""

    def __init__(self, body: AnswerRequest, prompt: Prompt, served: Served, session_id: str) -> None:
        self._with_timings, self._prompt, self._model = body.timings_per_token, prompt, served.name
        self._id, self._created, self._session_id = new_id("answer_"), int(time.time()), session_id

    def write(self, answer: GatheredAnswer, event: Event) -> bytes:
        """The chunk of an event of the turn."""
        ended = isinstance(event, End)
        text = event.text if isinstance(event, TextDelta) else ""
        chunk = self._head("session.answer.chunk") | {"text": text, "tokens": [*event.tokens], "finish_reason": None}
        if event.stats is not None and (ended or self._with_timings):
            chunk["timings"] = timings([event.stats], [event.stats])
        return sse(chunk | (self._ending(answer) if ended else {}))

    def final_events(self, answers: Sequence[GatheredAnswer]) -> bytes:  # noqa: ARG002  all has been said
        """The mark of a stream's end."""
        return DONE

    def response(self, answers: Sequence[GatheredAnswer]) -> dict[str, Any]:
        """The turn as one object."""
        (answer,) = answers
        said = {"text": answer.text, "tokens": answer.tokens}
        return self._head("session.answer") | said | self._ending(answer)

    def _head(self, kind: str) -> dict[str, Any]:
        names = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return {**names, "session": self._session_id}

    def _ending(self, answer: GatheredAnswer) -> dict[str, Any]:
        """How the turn ended."""
        assert answer.end is not None
        assert answer.stats is not None
        return {
            "finish_reason": FINISH_REASONS[answer.end.finish_reason],
            "stop_token": stop_token(self._prompt, answer),
            "usage": usage(answer.stats.prompt_tokens, [answer.stats], [answer.stats]),
        }


def _settings(body: AnswerFields, served: Served) -> tuple[AnswerSettings, list[int]]:
    """The settings of an answer for the engine, and the tokens that pause the session."""
    settings = body.answer_settings(served, max_tokens=served.most_tokens(body.max_tokens))
    settings["shown_tokens"] = _ids(body.shown_tokens, "shown_tokens", served)
    return settings, _ids(body.stop_tokens, "stop_tokens", served)


def _ids(tokens: Sequence[int | str] | None, field: str, served: Served) -> list[int]:
    """Tokens that a request names by ids or texts. Raises ApiError for a text that is none."""
    found = []
    for n, token in enumerate(tokens or ()):
        named = served.model.tokenizer.added_token(token) if isinstance(token, str) else token
        if named is None:
            tokenizer, text = served.model.tokenizer, str(token)
            spelled = tokenizer.encode(text, prefix=False) if len(text) <= tokenizer.longest else ()
            if len(spelled) != 1:
                raise invalid(f"{field}[{n}]", f"{str(token)[:80]!r} is not one token of this model")
            named = spelled[0]
        found.append(named)
    served.check_tokens(found, field)
    return found


def _check(prompt: str | list[int], field: str, served: Served, *, beside: int = 1) -> None:
    """Raise ApiError for a prompt that does not fit the context beside other tokens, or is none of the model's."""
    if isinstance(prompt, str):
        served.check_text(prompt, field, beside=beside)
    else:
        served.check_length(len(prompt), field, beside=beside)
        served.check_tokens(prompt, field)
