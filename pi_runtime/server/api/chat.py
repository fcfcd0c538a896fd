"""`/v1/chat/completions`: an assistant's turn, with thoughts and calls of tools apart from its text."""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.generation import Stats
from pi_runtime.server.api.body import MANY, Body, Unsupported, invalid
from pi_runtime.server.api.conversation import (
    Conversation,
    Message,
    Text,
    Tool,
    ToolChoice,
    allowed_tools,
    template_message,
    text_of,
)
from pi_runtime.server.api.logprobs import ChatLogprobs, chat_logprobs
from pi_runtime.server.api.other_servers import OtherServersChatFields
from pi_runtime.server.api.response_format import ResponseFormat, schema_of
from pi_runtime.server.api.sampling import Count, IgnoredFields, LengthFields, StreamingFields, only_one
from pi_runtime.server.api.served import Served, new_id
from pi_runtime.server.api.turn import News, Turn
from pi_runtime.server.api.usage import Timings, Usage, timings, usage
from pi_runtime.server.errors import ApiError
from pi_runtime.server.jobs import SSE, Ask, End, Event, Part
from pi_runtime.server.tools.deltas import CallArguments, CallBegan, CallBroken, Delta, ReasoningDelta, TextDelta


class Prediction(Body):
    """What the answer most likely repeats: it comes sooner then, and is the same."""

    type: Literal["content"]
    content: Text


class ConversationFields(OtherServersChatFields):
    """A chat, and what may follow."""

    messages: Annotated[list[Message], Field(min_length=1), MANY]
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], MANY] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="Where the model's template knows it; `none` turns `enable_thinking` off."
    )
    chat_template_kwargs: Annotated[dict[str, Any], MANY] | None = Field(
        default=None, description="Further names for the model's template, such as `enable_thinking`."
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="`false`: the assistant's turn does not begin."
    )
    continue_final_message: bool | None = Field(
        default=None, description="The answer goes on where the last message, an assistant's, ends."
    )


class ChatRequest(LengthFields, StreamingFields, ConversationFields, IgnoredFields):
    """Messages, to which the assistant's next one is wanted."""

    model: str = Field(description="The name that `/v1/models` gives; another is a 404.")
    max_tokens: Count | None = Field(default=None, description="The same as `max_completion_tokens`.")
    max_completion_tokens: Count | None = Field(
        default=None, description="Most tokens of an answer, thoughts included; without it the context is the limit."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(default=None, description="Only with `logprobs`.")
    prediction: Prediction | None = None
    modalities: Annotated[
        Annotated[list[Literal["text"]], MANY] | None, Unsupported("this server reads and writes text")
    ] = None
    audio: Annotated[None, Unsupported("this server reads and writes text")] = None
    verbosity: Annotated[Literal["medium"] | None, Unsupported("say it in a message")] = None
    web_search_options: Annotated[None, Unsupported("this server searches nothing")] = None
    functions: Annotated[None, Unsupported("use tools")] = None
    function_call: Annotated[None, Unsupported("use tool_choice")] = None

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of an answer. Raises ApiError where two fields differ."""
        names = ("max_tokens", "max_completion_tokens", "n_predict")
        found = only_one(**{name: getattr(self, name) for name in names})
        return None if found == -1 else found


class FunctionOfCall(TypedDict):
    """The function that is called; in a stream first its name, then pieces of its arguments."""

    name: NotRequired[str]
    arguments: str


class CallOfTool(TypedDict):
    """A call of a tool. Those of a stream have an index, and name and id only when they begin."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionOfCall


class ChatMessage(TypedDict):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallOfTool]]


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(TypedDict):
    """All answers of a request."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(TypedDict):
    """More of an answer."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallOfTool]]


class ChunkChoice(TypedDict):
    """More of one answer, and why it ended, in its last chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatChunk(TypedDict):
    """A piece of a stream; the last one has the usage and no choice, where that is asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]


class ChatJob:
    """A request for an assistant's turn."""

    media = SSE

    def __init__(self, body: ChatRequest, served: Served) -> None:
        served.check_name(body.model)
        self._body, self._served = body, served
        self._id, self._created = new_id("chatcmpl-"), int(time.time())
        count = body.n or 1
        if count > served.settings.limits.answers:
            raise invalid("n", f"at most {served.settings.limits.answers}; found {count}")
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs", "allowed only with logprobs: true")
        prompt = conversation_of(body, served).prompt(served)
        settings = body.answer_settings(
            served,
            max_tokens=body.most_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=prompt.grammar,
        )
        settings["shown_tokens"] = prompt.shown_tokens
        guess = text_of(body.prediction.content) if body.prediction else ""
        self.asks = [Ask(prompt.ids, count, settings, guess, cache_salt=body.cache_salt)]
        self._turns = [prompt.turn(served) for _ in range(count)]
        self._prompt_tokens = len(prompt.ids)

    @classmethod
    def of(cls, value: object, served: Served) -> Self:
        """The job that a JSON value asks for. Raises ApiError."""
        return cls(ChatRequest.of(value), served)

    @property
    def streams(self) -> bool:
        """Whether events are written as they come."""
        return bool(self._body.stream)

    def part(self, index: int, part: Part) -> Sequence[Event]:
        """Take a part of an answer."""
        begins = not self._turns[index].began
        return self._events(index, self._turns[index].take(part), begins, part.stats)

    def end(self, index: int, end: End) -> Sequence[Event]:
        """Take the end of an answer."""
        turn = self._turns[index]
        begins = not turn.began
        events = self._events(index, turn.finish(end), begins, None)
        last = self._chunk(index, {}, finish_reason=turn.finish_reason, stats=end.stats)
        return [*events, last] if self.streams else ()

    def _events(self, index: int, news: News, begins: bool, stats: Stats | None) -> list[Event]:
        """The chunks of what is new, if they are wanted."""
        if not self.streams:
            return []
        logprobs = chat_logprobs(self._served.model.tokenizer, news.logprobs) if news.logprobs else None
        stats = stats if self._body.timings_per_token else None
        deltas = [_chunk_delta(delta) for delta in news.deltas]
        if not deltas and (logprobs or stats):
            deltas = [{}]
        events = [self._chunk(index, {"role": "assistant", "content": ""})] if begins else []
        for n, delta in enumerate(deltas):
            events.append(self._chunk(index, delta, logprobs=None if n else logprobs, stats=stats))
        return events

    def scores(self, ask: int, logprobs: Sequence[Any]) -> Sequence[Event]:
        """No log-probabilities of a chat's prompt are asked for."""
        raise NotImplementedError(ask, logprobs)

    def last(self) -> Sequence[Event]:
        """The events after all ends."""
        done = Event(None, "[DONE]")
        if not self._body.include_usage:
            return [done]
        return [Event(None, self._envelope("chat.completion.chunk", []) | {"usage": self._usage()}), done]

    def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        choices: list[ChatChoice] = [
            {
                "index": index,
                "message": _message(turn),
                "logprobs": chat_logprobs(self._served.model.tokenizer, turn.logprobs) if self._body.logprobs else None,
                "finish_reason": turn.finish_reason,
            }
            for index, turn in enumerate(self._turns)
        ]
        return self._envelope("chat.completion", choices) | {"usage": self._usage()}

    def failed(self, error: ApiError) -> Sequence[Event]:
        """The event of an error after the stream began."""
        return [Event(None, error.body())]

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        logprobs: ChatLogprobs | None = None,
        finish_reason: str | None = None,
        stats: Stats | None = None,
    ) -> Event:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = self._envelope("chat.completion.chunk", [choice])
        if self._body.include_usage:
            chunk["usage"] = None
        if stats is not None:
            chunk["timings"] = timings([stats], [stats])
        return Event(None, chunk)

    def _envelope(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._served.name,
            "system_fingerprint": self._served.fingerprint,
            "choices": choices,
        }

    def _usage(self) -> Usage:
        answers = [turn.stats for turn in self._turns if turn.stats is not None]
        return usage(self._prompt_tokens, answers, answers[:1], sum(turn.reasoning_tokens for turn in self._turns))


def conversation_of(body: ConversationFields, served: Served) -> Conversation:
    """What the template is to write."""
    if body.add_generation_prompt and body.continue_final_message:
        raise invalid("continue_final_message", "not with add_generation_prompt: the turn has begun already")
    tools, choice = allowed_tools(body.tools or [], body.tool_choice)
    if body.tool_choice not in (None, "none", "auto") and not body.tools:
        raise invalid("tool_choice", "allowed only with tools")
    return Conversation(
        messages=[template_message(message, f"messages[{n}]", served) for n, message in enumerate(body.messages)],
        tools=tools,
        tool_choice=choice,
        parallel=body.parallel_tool_calls is not False,
        schema=schema_of(body.response_format),
        variables={
            **reasoning_variables("reasoning_effort", body.reasoning_effort, served),
            **(body.chat_template_kwargs or {}),
        },
        add_generation_prompt=body.add_generation_prompt is not False,
        continues=bool(body.continue_final_message),
    )


def reasoning_variables(field: str, effort: str | None, served: Served) -> dict[str, Any]:
    """The names by which a template knows how much the model is to think."""
    template = served.template
    if effort is None:
        return {}
    if "enable_thinking" in template:
        return {"enable_thinking": effort != "none"}
    if "reasoning_effort" in template and effort != "none":
        return {"reasoning_effort": effort}
    raise invalid(field, "not supported: the model's chat template does not know it")


def _chunk_delta(delta: Delta) -> dict[str, Any]:
    """A delta as a chunk has it."""
    match delta:
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case CallBegan(index, call_id, name):
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [{"index": index, **call}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallBroken():
            return {}  # its arguments stay as they are; the finish reason says that it is not to be run


def _message(turn: Turn) -> ChatMessage:
    found: ChatMessage = {"role": "assistant", "content": turn.text, "refusal": None, "annotations": []}
    if turn.reasoning:
        found["reasoning_content"] = turn.reasoning
    if turn.calls:
        found["content"] = turn.text or None
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.calls
        ]
    return found
