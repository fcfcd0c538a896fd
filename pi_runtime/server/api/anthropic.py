"""`/v1/messages`, Anthropic's form, which coding agents speak: a turn in blocks of text, thoughts and calls.

Nothing is stored, and what the API's own tools did is passed over.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.engine.events import CallArguments, CallBegan, CallBroken, End, Event, ReasoningDelta, TextDelta
from pi_runtime.sequence.stats import Stats
from pi_runtime.server.api.answer import SSE, GatheredAnswer, bounded, sse, sse_by_type
from pi_runtime.server.api.body import MANY, Body, Known, ModelName, accepted, unsupported
from pi_runtime.server.api.conversation import (
    Function,
    FunctionName,
    Name,
    NamedTool,
    OtherTool,
    SchemaFields,
    TemplateVariables,
    Tool,
    ToolChoice,
    allowed_tools,
)
from pi_runtime.server.api.prompt import Prompt, chat_prompt, reasoning_variables, rendered
from pi_runtime.server.api.sampling import CacheFields, SamplingFields
from pi_runtime.server.api.served import Served, new_id
from pi_runtime.server.errors import ApiError, anthropic_body

BILLING = re.compile(r"\Ax-anthropic-billing-header:(?:\s*\w+=[^;\s]*;?)*\s*")
"""The beginning of some clients' instructions. Each request has another, with which no stored beginning would fit."""
OTHERS = (
    "redacted_thinking",
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "tool_reference",
    "mcp_tool_use",
    "mcp_tool_result",
)
"""Blocks of what the API's own tools did, and of what it alone can read."""
TEXTS, OWN = ("text", "document", "search_result"), ("thinking", "tool_use", "tool_result")


class Source(Body):
    """The text of a document. Files and addresses are not supported."""

    known: ClassVar[Known] = accepted("media_type")
    type: Literal["text", "content"]
    data: str | None = None
    content: "Content" = None


class Block(Body):
    """A part of a turn: text, thoughts, a call of a tool, or what one gave."""

    known: ClassVar[Known] = accepted("cache_control", "citations", "signature", "caller", "toolset_name")
    type: Literal["text", "document", "search_result", "thinking", "tool_use", "tool_result"]
    text: str | None = None
    title: str | None = None
    context: str | None = None
    source: str | Source | None = None
    content: "Content" = None
    thinking: str | None = Field(default=None, description="Its thoughts; the template uses or drops them.")
    id: str | None = None
    name: str | None = None
    input: Annotated[dict[str, Any], MANY] | None = None
    tool_use_id: str | None = None
    is_error: bool | None = Field(default=None, description="A result without content is said to be an error.")

    @property
    def shown(self) -> str:
        """The text that the model reads."""
        source = [self.source.data, _text(self.source.content)] if isinstance(self.source, Source) else [self.source]
        return "\n".join(filter(None, (self.text, self.title, self.context, *source, _text(self.content))))


def _kind_of(block: Any) -> str:
    """The tag of a block."""
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return "other" if kind in OTHERS else "own" if kind in (*TEXTS, *OWN) else str(kind)


OtherBlock = Annotated[
    dict[str, Any], MANY, Field(description=f"Passed over: what the API's own tools did ({', '.join(OTHERS)}).")
]
AnyBlock = Annotated[
    Annotated[Block, Tag("own")] | Annotated[OtherBlock, Tag("other")],
    Discriminator(
        _kind_of,
        custom_error_type="union_tag_unknown",
        custom_error_message=f"this server reads text: input should be {', '.join((*TEXTS, *OWN))}",
    ),
]
Content = str | Annotated[list[AnyBlock], MANY] | None


class AnthropicMessage(Body):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class AnthropicTool(Body):
    """A tool that the model may call."""

    known: ClassVar[Known] = accepted(
        "cache_control", "defer_loading", "eager_input_streaming", "input_examples", "allowed_callers"
    )
    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: SchemaFields | None = None
    strict: bool | None = None

    def as_chats_have_it(self) -> Tool:
        """The same tool as chats have it."""
        given = Function(name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict)
        return Tool(type="function", function=given)


AnyTool = Annotated[
    Annotated[AnthropicTool, Tag("custom")] | Annotated[OtherTool, Tag("other")],
    Discriminator(lambda tool: "other" if isinstance(tool, dict) and tool.get("type") not in MINE else "custom"),
]
MINE = (None, "custom")
"""Types of tools that a client runs."""


class AnthropicChoice(Body):
    """Which tools may, or must, be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, description="The tool that must be called, with the type `tool`.")
    disable_parallel_tool_use: bool | None = None

    def as_chats_have_it(self) -> ToolChoice:
        """The same choice as chats have it."""
        if self.type == "tool":
            return NamedTool(type="function", function=FunctionName(name=self.name or "-"))
        return "required" if self.type == "any" else self.type


class Thinking(Body):
    """Whether the model is to think first, where its template knows that."""

    known: ClassVar[Known] = accepted("budget_tokens")
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="Thoughts come whole, or with `omitted` as an empty block."
    )


class OutputFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: SchemaFields = Field(alias="schema")


class OutputConfig(Body):
    """How much the model is to think, and what the answer must be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class AnthropicConversation(Body):
    """A conversation, and what may follow."""

    known: ClassVar[Known] = {
        **accepted("metadata", "cache_control", "context_management", "diagnostics", "inference_geo"),
        **unsupported("there is one tier", "service_tier", allowed=("auto", "standard_only")),
        **unsupported("there is one speed", "speed", allowed=("standard",)),
        **unsupported("there are none", "container", "mcp_servers", allowed=([],)),
        **unsupported("use the server's keys", "user_profile_id", "workspace_id"),
    }
    model: ModelName = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1), MANY]
    system: Content = None
    tools: Annotated[list[AnyTool], MANY] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateVariables = None

    def read(self, served: Served) -> tuple[str, list[dict[str, Any]], Any]:
        """The text that the template makes of it, the tools, and the choice among them. Raises ApiError."""
        served.check_name(self.model)
        asked = [tool.as_chats_have_it() for tool in self.tools or [] if isinstance(tool, AnthropicTool)]
        tools, choice = allowed_tools(asked, None if self.tool_choice is None else self.tool_choice.as_chats_have_it())
        turns = [turn for message in self.messages for turn in _turns(message)]
        if system := BILLING.sub("", _text(self.system)):
            turns.insert(0, {"role": "system", "content": system})
        last = turns[-1]
        goes_on = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
        variables = {**self._thinks(served), **(self.chat_template_kwargs or {})}
        text = rendered(served, turns, tools=tools, variables=variables, continue_final_message=goes_on)
        return text, tools, choice

    def _thinks(self, served: Served) -> dict[str, Any]:
        """The names by which the template knows how much to think."""
        effort = None if self.output_config is None else self.output_config.effort
        if self.thinking is None:
            return reasoning_variables(effort, served)
        if self.thinking.type == "disabled":
            return reasoning_variables("none", served)
        return reasoning_variables(effort or "high", served)


class MessagesRequest(SamplingFields, CacheFields, AnthropicConversation):
    """A conversation, whose next turn is wanted."""

    max_tokens: Annotated[int, Field(ge=0)] = Field(
        description="Most tokens of the answer, thoughts included. 0 reads the prompt ahead."
    )
    stop: Annotated[list[str], MANY] | None = Field(
        default=None, alias="stop_sequences", description="Texts that end the answer and are not part of it."
    )
    stream: bool | None = None


class AnthropicUsage(TypedDict):
    """Tokens of a turn: those of the prompt that ran, those that were stored, and those of the answer."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
STOP_REASONS: dict[str, StopReason] = {
    "end": "end_turn",
    "stop": "stop_sequence",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "cancelled": "end_turn",
}
"""Anthropic's word for each of the engine's."""


class AnthropicAnswer(TypedDict):
    """The assistant's turn."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicEvent(TypedDict):
    """An event of a stream. Its further fields depend on its type."""

    type: str


def messages_request(body: MessagesRequest, served: Served) -> Prompt:
    """Make the engine's prompt of a request for a message. Raises ApiError for what is wrong."""
    text, tools, choice = body.read(served)
    form = None if body.output_config is None else body.output_config.format
    prompt = chat_prompt(
        served,
        text,
        tools=tools,
        choice=choice,
        parallel=body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use,
        schema=None if form is None else form.schema_,
        schema_field="output_config.format",
    )
    settings = body.answer_settings(served, max_tokens=body.max_tokens or None, prompt=prompt)
    goal: Literal["answers", "reading"] = "answers" if body.max_tokens else "reading"
    return replace(prompt, settings=settings, streams=bool(body.stream), goal=goal, cache_salt=body.cache_salt)


class MessagesWriter:
    """Writes messages and the events of their streams."""

    media, alive, answer_type, chunk_type = SSE, sse({"type": "ping"}, "ping"), AnthropicAnswer, AnthropicEvent

    def __init__(self, body: MessagesRequest, prompt: Prompt, served: Served) -> None:
        self._prompt, self._id, self._model = prompt, new_id("msg_"), served.name
        self._omits = body.thinking is not None and body.thinking.display == "omitted"
        self._open = ""
        """The type of the block that is open."""
        self._count = 0
        """Blocks up to now."""

    def write(self, answer: GatheredAnswer, event: Event) -> bytes:
        """The events of the stream that an event of the answer becomes."""
        found = []
        if answer.is_new:
            found = [{"type": "message_start", "message": self._message(event.stats)}]
        return sse_by_type([*found, *self._events(event)])

    def final_events(self, answers: Sequence[GatheredAnswer]) -> bytes:
        """Why the turn ended, its usage, and the end of the stream."""
        (answer,) = answers
        assert answer.end is not None
        usage = self._usage(answer.end.stats, answer.end)
        delta = {"type": "message_delta", "delta": _stopped(answer), "usage": usage}
        return sse_by_type([*self._ended(), delta, {"type": "message_stop"}])

    def response(self, answers: Sequence[GatheredAnswer]) -> AnthropicAnswer:
        """The turn as one object."""
        (answer,) = answers
        assert answer.end is not None
        message = self._message(answer.end.stats, answer.end)
        return message | {"content": [*self._content(answer)], **_stopped(answer)}  # type: ignore[return-value]

    def failed(self, error: ApiError) -> bytes:
        """The event of an error after the stream began."""
        return sse(anthropic_body(error), "error")

    def _content(self, answer: GatheredAnswer) -> Iterator[dict[str, Any]]:
        calls = answer.calls
        if thoughts := answer.reasoning:
            yield {"type": "thinking", "thinking": "" if self._omits else thoughts, "signature": ""}
        if (text := answer.text) or not (thoughts or calls or self._prompt.goal == "reading"):
            yield {"type": "text", "text": text}
        for call in calls:
            yield {"type": "tool_use", "id": call.id, "name": call.name, "input": bounded(call.arguments)}

    def _events(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case TextDelta(text):
                return [*self._begun("text", text=""), self._delta("text_delta", text=text)]
            case ReasoningDelta(text):
                began = self._begun("thinking", thinking="", signature="")
                return began if self._omits else [*began, self._delta("thinking_delta", thinking=text)]
            case CallBegan(_, call_id, name):
                return [*self._closed(), *self._begun("tool_use", id=call_id, name=name, input={})]
            case CallArguments(_, text):
                return [self._delta("input_json_delta", partial_json=text)]
            case CallBroken():
                return self._closed()
        return []

    def _begun(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """Open a block of a kind unless one is open."""
        if self._open == kind:
            return []
        closed, self._open, self._count = self._closed(), kind, self._count + 1
        return [*closed, self._at("content_block_start", content_block={"type": kind, **fields})]

    def _closed(self) -> list[dict[str, Any]]:
        """End the open block, if there is one. Thoughts end with a signature, which is empty here."""
        kind, self._open = self._open, ""
        signed = [self._delta("signature_delta", signature="")] if kind == "thinking" else []
        return [*signed, self._at("content_block_stop")] if kind else []

    def _ended(self) -> list[dict[str, Any]]:
        """End the last block; a turn without blocks has an empty one, for clients read its first."""
        empty = [] if self._count or self._prompt.goal == "reading" else self._begun("text", text="")
        return [*empty, *self._closed()]

    def _at(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": self._count - 1, **fields}

    def _delta(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._at("content_block_delta", delta={"type": kind, **fields})

    def _message(self, stats: Stats | None, end: End | None = None) -> AnthropicAnswer:
        """The turn before anything has come of it."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(stats, end),
        }

    def _usage(self, stats: Stats | None, end: End | None) -> AnthropicUsage:
        stored = 0 if stats is None else stats.cached_tokens
        return {
            "input_tokens": len(self._prompt.texts[0]) - stored,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": stored,
            "output_tokens": 0 if stats is None or end is None else stats.generated_tokens,
            "output_tokens_details": {"thinking_tokens": 0 if end is None else end.reasoning_tokens},
        }


def _stopped(answer: GatheredAnswer) -> dict[str, Any]:
    """Why a turn ended. `tool_use` asks for all calls to be run."""
    end = answer.end
    assert end is not None
    reason = "tool_use" if answer.finish_reason == "tool_calls" else STOP_REASONS[end.finish_reason]
    return {"stop_reason": reason, "stop_sequence": end.stop_string}


def _blocks(content: Content, *kinds: str) -> list[Block]:
    """The blocks of some kinds."""
    return [] if isinstance(content, str) else [b for b in content or () if isinstance(b, Block) and b.type in kinds]


def _text(content: Content) -> str:
    """The text of a content; blocks stand on lines of their own."""
    return content if isinstance(content, str) else "\n".join(block.shown for block in _blocks(content, *TEXTS))


def _turns(message: AnthropicMessage) -> Iterator[dict[str, Any]]:
    """The messages of a turn as `ChatModel.chat_prompt` takes them: results are messages of their own, and come first,
    right behind the calls that they belong to."""
    results = _blocks(message.content, "tool_result")
    for result in results:
        text = _text(result.content) or ("error" if result.is_error else "")
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": text}
    turn: dict[str, Any] = {"role": message.role, "content": _text(message.content)}
    if thoughts := _blocks(message.content, "thinking"):
        turn["reasoning_content"] = "\n".join(block.thinking or "" for block in thoughts)
    if calls := _blocks(message.content, "tool_use"):
        named = [(call.id, {"name": call.name or "", "arguments": call.input or {}}) for call in calls]
        turn["tool_calls"] = [{"id": call_id, "type": "function", "function": function} for call_id, function in named]
    if turn["content"] or len(turn) > 2 or not results:
        yield turn
