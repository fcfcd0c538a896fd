"""`/v1/chat/completions`: an assistant's turn, with thoughts and calls of tools apart from its text."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.engine.events import (
    CallArguments,
    CallBegan,
    End,
    Event,
    NothingShown,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
)
from pi_runtime.sequence.sampling import TokenLogprobs
from pi_runtime.sequence.stats import Stats
from pi_runtime.server.api.answer import GatheredAnswer, Lazily
from pi_runtime.server.api.body import Body, Known, ModelName, invalid, unsupported
from pi_runtime.server.api.conversation import ConversationFields, GrammarFields, Text, schema_of
from pi_runtime.server.api.openai_forms import ChatLogprobs, ChoicesWriter, Chunk, Whole, chat_logprob, chat_logprobs
from pi_runtime.server.api.prompt import Prompt, asked_grammar, chat_prompt, chat_text, text_of
from pi_runtime.server.api.sampling import IgnoredFields, LengthFields, MostOrNone, StreamingFields, only_one
from pi_runtime.server.api.served import Served


class Prediction(Body):
    """What the answer most likely repeats: it comes sooner then, and is the same."""

    type: Literal["content"]
    content: Text


class ChatRequest(GrammarFields, LengthFields, StreamingFields, ConversationFields, IgnoredFields):
    """Messages, to which the assistant's next one is wanted."""

    known: ClassVar[Known] = {
        **unsupported("this server reads and writes text", "modalities", allowed=(["text"], [])),
        **unsupported("this server reads and writes text", "audio"),
        **unsupported("say it in a message", "verbosity", allowed=("medium",)),
        **unsupported("this server searches nothing", "web_search_options"),
        **unsupported("use tools", "functions", allowed=([],)),
        **unsupported("use tool_choice", "function_call", allowed=("none", "auto")),
    }
    model: ModelName = None
    max_tokens: MostOrNone | None = Field(default=None, description="The same as `max_completion_tokens`.")
    max_completion_tokens: MostOrNone | None = Field(
        default=None,
        description="Most tokens of an answer, thoughts included; without it the context is the limit. 0 reads the "
        "prompt ahead: nothing is answered, and a later prompt that begins alike is read sooner.",
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="Only with `logprobs`, but for 0."
    )
    prediction: Prediction | None = None

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of an answer, as it was asked for. Raises ApiError where two fields differ."""
        names = ("max_tokens", "max_completion_tokens", "n_predict")
        return only_one(**{name: getattr(self, name) for name in names})


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
    tokens: NotRequired[list[int]]


class ChatCompletion(Whole):
    """All answers of a request."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


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
    tokens: NotRequired[list[int]]


class ChatChunk(Chunk):
    """A piece of a stream; the last one has the usage and no choice, where that is asked for."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]


def chat_request(body: ChatRequest, served: Served) -> Prompt:
    """Make the engine's prompt of a request for a chat completion. Raises ApiError for what is wrong."""
    served.check_name(body.model)
    count = body.count(served)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "allowed only with logprobs: true")
    text = chat_text(body, served)
    tools, choice = body.allowed_tools
    grammar = asked_grammar(body, served, but="json_schema")
    if (grammar or body.json_schema) is not None and body.response_format is not None:
        raise invalid("response_format", "something else says what the answer must be; give one of them")
    if grammar is not None and tools:
        raise invalid("tools", "a grammar of the whole answer leaves no room for calls")
    prompt = chat_prompt(
        served,
        text,
        tools=tools,
        choice=choice,
        parallel=body.parallel_tool_calls is not False,
        schema=schema_of(body.response_format) if body.json_schema is None else body.json_schema,
        schema_field="response_format" if body.json_schema is None else "json_schema",
    )
    most = served.most_tokens(body.most_tokens)
    settings = body.answer_settings(
        served,
        max_tokens=most or None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt=prompt,
    )
    if grammar is not None:
        settings["grammar"] = grammar
    return replace(
        prompt,
        count=count,
        settings=settings,
        streams=bool(body.stream),
        shows_progress=bool(body.stream and body.return_progress),
        goal="reading" if most == 0 else "answers",
        prediction=text_of(body.prediction.content) if body.prediction else "",
        cache_salt=body.cache_salt,
    )


class ChatWriter(ChoicesWriter):
    """Writes chat completions and their chunks."""

    answer_type, chunk_type = ChatCompletion, ChatChunk
    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def write(self, answer: GatheredAnswer, event: Event) -> bytes:
        """The chunks of an event."""
        index, found = answer.index, b""
        if answer.is_new:
            found += self._chunk(index, {"role": "assistant", "content": ""})
        logprobs = self._logprobs(event.logprobs) if event.logprobs else None
        if isinstance(event, End):
            found += self._chunk(index, {}, logprobs=logprobs) if logprobs else b""
            return found + self._chunk(index, {}, finish_reason=answer.finish_reason, stats=event.stats)
        stats = event.stats if self.with_timings or isinstance(event, PromptProgress) else None
        if not isinstance(event, NothingShown) or logprobs or stats:
            found += self._chunk(index, _delta(event), logprobs=logprobs, stats=stats, event=event)
        return found

    def response(self, answers: Sequence[GatheredAnswer]) -> dict[str, Any]:
        """The chat completion as one object."""
        choices: list[ChatChoice] = [
            {
                "index": answer.index,
                "message": _message(answer),
                "logprobs": self._all_logprobs(answer) if self.wants_logprobs else None,
                "finish_reason": answer.finish_reason,
            }
            for answer in answers
        ]
        for choice, answer in zip(choices, answers, strict=True):
            if self.with_tokens:
                choice["tokens"] = answer.tokens
        return self.with_usage(choices, answers)

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        logprobs: ChatLogprobs | None = None,
        finish_reason: str | None = None,
        stats: Stats | None = None,
        event: Event | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if self.with_tokens and event is not None:
            choice["tokens"] = event.tokens
        return self.chunk(choice, stats, event)

    def _logprobs(self, found: Sequence[TokenLogprobs]) -> ChatLogprobs:
        return chat_logprobs(self.served.model.tokenizer, found)

    def _all_logprobs(self, answer: GatheredAnswer) -> Any:
        return {"content": Lazily(partial(chat_logprob, self.served.model.tokenizer), answer.logprobs), "refusal": None}


def _delta(event: Event) -> dict[str, Any]:
    """An event as a chunk has it."""
    match event:
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case CallBegan(index, call_id, name):
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [{"index": index, **call}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return {}  # arguments that broke off stay as they are; the finish reason says that the call is not to be run


def _message(answer: GatheredAnswer) -> ChatMessage:
    text, calls = answer.text, answer.calls
    found: ChatMessage = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    if reasoning := answer.reasoning:
        found["reasoning_content"] = reasoning
    if calls:
        found["content"] = text or None
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return found
