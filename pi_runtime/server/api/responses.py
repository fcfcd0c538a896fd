"""`/v1/responses`, without state: a request holds the whole conversation, and nothing is stored."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.engine.events import (
    CallArguments,
    CallBegan,
    CallBroken,
    Delta,
    Embedded,
    End,
    Event,
    NothingShown,
    PromptLogprobs,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
)
from pi_runtime.sequence.stats import Stats
from pi_runtime.server.api.answer import FINISH_REASONS, KEEP_ALIVE, SSE, GatheredAnswer, sse_by_type
from pi_runtime.server.api.body import MANY, ONE_ANSWER, TOKENS, Body, Known, Metadata, ModelName, invalid, unsupported
from pi_runtime.server.api.conversation import (
    AllowedTools,
    AllowedToolsChoice,
    CacheBreakpoint,
    Function,
    FunctionName,
    JsonObjectFormat,
    JsonSchema,
    NamedTool,
    OtherTool,
    RefusalPart,
    TemplateVariables,
    TextFormat,
    Tool,
    ToolChoice,
    allowed_tools,
    of_other_type,
    schema_of,
)
from pi_runtime.server.api.openai_forms import Timings, TokenLogprob, chat_logprobs, timings
from pi_runtime.server.api.prompt import Prompt, chat_prompt, custom_call, reasoning_variables, rendered, text_of
from pi_runtime.server.api.sampling import CacheFields, IgnoredFields, Most, SamplingFields
from pi_runtime.server.api.served import Served, new_id
from pi_runtime.server.errors import ApiError

Status = Literal["in_progress", "completed", "incomplete"]
UNUSED = "Accepted, as answers have it; not used."


class ItemFields(Body):
    """What items of an answer have besides."""

    id: str | None = None
    status: Status | None = None


class InputText(Body):
    """Text. Images and files are not supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None
    annotations: Annotated[list[Any], TOKENS] | None = Field(default=None, description=UNUSED)
    logprobs: Annotated[list[Any], TOKENS] | None = Field(default=None, description=UNUSED)


InputPart = Annotated[InputText | RefusalPart, Field(discriminator="type")]


class InputMessage(ItemFields):
    """A message: of the user, of whoever instructs, or an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputPart], MANY] | None = None
    phase: Literal["commentary", "final_answer"] | None = Field(default=None, description="Accepted; not used.")


class InputCall(ItemFields):
    """An earlier call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[dict[str, Any], MANY] | str | None = Field(
        default=None, description="A JSON object as text; what is none, as a call that was cut off, stands within one."
    )


class InputCustomCall(ItemFields):
    """An earlier call of a tool that takes text: shown as a call with the argument `input`."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str | None = None


class InputShellCall(ItemFields):
    """An earlier call of the tool `local_shell`, whose arguments are its action."""

    type: Literal["local_shell_call"]
    call_id: str | None = None
    action: Annotated[dict[str, Any], MANY] | None = None


class InputCallOutput(ItemFields):
    """What a function, or another tool, gave."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    call_id: str | None = None
    output: str | Annotated[list[InputText], MANY] | None = None
    name: str | None = None


class ReasoningText(Body):
    """Some thoughts."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(ItemFields):
    """Earlier thoughts; the template uses or drops them."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], MANY] | None = None
    content: Annotated[list[ReasoningText], MANY] | None = None
    encrypted_content: str | None = Field(default=None, description="Accepted; only text is used.")


OTHERS = (
    "web_search_call",
    "file_search_call",
    "image_generation_call",
    "code_interpreter_call",
    "computer_call",
    "mcp_list_tools",
    "mcp_call",
)
"""Items of what the API's own tools did, which is no text."""
InputOther = Annotated[
    dict[str, Any], MANY, Field(description=f"Passed over: what the API's own tools did ({', '.join(OTHERS)}).")
]


def _kind_of(item: Any) -> str:
    """The tag of an item."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return next((tag for tag, kinds in KINDS.items() if kind in kinds), str(kind))


KINDS = {
    "output": ("function_call_output", "custom_tool_call_output", "local_shell_call_output"),
    "other": OTHERS,
}
InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCustomCall, Tag("custom_tool_call")]
    | Annotated[InputShellCall, Tag("local_shell_call")]
    | Annotated[InputCallOutput, Tag("output")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputOther, Tag("other")],
    Discriminator(
        _kind_of,
        custom_error_type="union_tag_unknown",
        custom_error_message="input should be a message, function_call, function_call_output or reasoning",
    ),
]


class OfFunctions(Body):
    """An object whose `type` is `function`, the only kind of tool that is called."""

    type: Literal["function"]


class FunctionTool(Function, OfFunctions):
    """A function that the model may call."""


AnyFunctionTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")], Discriminator(of_other_type)
]


class FunctionChoice(FunctionName, OfFunctions):
    """A function by its name."""

    def as_chats_have_it(self) -> NamedTool:
        """The same choice as chats have it."""
        return NamedTool(type="function", function=self)


class AllowedChoice(Body):
    """Those of the tools that may, or must, be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1), MANY]


def template_messages(instructions: str | None, items: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """The messages of a conversation as `ChatModel.chat_prompt` takes them.

    The thoughts, text and calls of one turn are items of their own here, and one message there.
    """
    found: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(items, str):
        return [*found, {"role": "user", "content": items}]
    thoughts: list[str] = []
    for item in items:
        if isinstance(item, dict):
            continue
        if isinstance(item, InputReasoning):
            thoughts += [part.text for part in item.content or item.summary or []]
            continue
        _add(found, item, begins=bool(thoughts))
        if thoughts and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"] = "\n".join(thoughts)
        thoughts = []
    if not found:
        raise invalid("input", "at least one message is required")
    return found


def _add(
    found: list[dict[str, Any]],
    item: InputMessage | InputCall | InputCustomCall | InputShellCall | InputCallOutput,
    *,
    begins: bool,
) -> None:
    """Add an item to the messages: a call to that of the assistant before it, unless thoughts begin another."""
    match item:
        case InputCallOutput():
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        case InputMessage():
            found.append({"role": item.role, "content": text_of(item.content)})
        case _:
            if not found or found[-1]["role"] != "assistant" or begins:
                found.append({"role": "assistant", "content": ""})
            found[-1].setdefault("tool_calls", []).append(_call(item))


def _call(item: InputCall | InputCustomCall | InputShellCall) -> dict[str, Any]:
    """A call as chats have it."""
    match item:
        case InputCustomCall():
            return custom_call(item.call_id, item.name, item.input)
        case InputShellCall():
            function: dict[str, Any] = {"name": "local_shell", "arguments": item.action}
            return {"id": item.call_id or item.id, "type": "function", "function": function}
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


class OutputPart(TypedDict):
    """A piece of an item: text, with or without log-probabilities, or thoughts."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[TokenLogprob]]


class OutputItem(TypedDict):
    """A message, thoughts, or a call of a function."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Status
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[OutputPart]]
    summary: NotRequired[list[Any]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]


class InputTokensDetails(TypedDict):
    """Tokens of the input: those that did not run again, and those that ran and are kept while there is room."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """Tokens of the output that are thoughts."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    timings: NotRequired[Timings]


class ResponseOutput:
    """Makes items and events of what comes of an answer. One item is open at a time, the last."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._texts: list[str] = []
        """The text of the open item, in the parts that have come."""
        self._logprobs: list[TokenLogprob] = []
        self._count = 0

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The next event of the stream."""
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}

    def push(self, delta: Delta, logprobs: Sequence[TokenLogprob] = ()) -> list[dict[str, Any]]:
        """Take more of the answer, with the log-probabilities of its tokens where these are wanted."""
        match delta:
            case TextDelta(text):
                events = self._opened("message", role="assistant", content=[])
                self._logprobs += logprobs
                return [*events, self._delta("response.output_text.delta", text, logprobs=[*logprobs])]
            case ReasoningDelta(text):
                events = self._opened("reasoning", summary=[], content=[])
                return [*events, self._delta("response.reasoning_text.delta", text)]
            case CallBegan(_, call_id, name):
                return [*self.close(), *self._open("function_call", call_id=call_id, name=name, arguments="")]
            case CallArguments(_, text):
                return [self._delta("response.function_call_arguments.delta", text)]
            case CallBroken():
                return self.close("incomplete")

    def close(self, status: Status = "completed") -> list[dict[str, Any]]:
        """End the open item, if there is one."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return []
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            done = [self._at("response.function_call_arguments.done", arguments=text)]
        else:
            part = self._part(text)
            item["content"] = [part]
            logprobs = {"logprobs": self._logprobs} if item["type"] == "message" else {}
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            done = [
                self._at(f"response.{kind}.done", content_index=0, text=text, **logprobs),
                self._at("response.content_part.done", content_index=0, part=part),
            ]
        self._texts, self._logprobs = [], []
        return [*done, self._item_event("response.output_item.done")]

    def finish(self, status: Status) -> list[dict[str, Any]]:
        """End the output; one without items becomes an empty message."""
        opened = [] if self.items else self._opened("message", role="assistant", content=[])
        return [*opened, *self.close(status)]

    def _opened(self, kind: Literal["message", "reasoning"], **fields: Any) -> list[dict[str, Any]]:
        """Open an item of a kind, with its one part, unless one is open."""
        if self.items and self.items[-1]["type"] == kind and self.items[-1]["status"] == "in_progress":
            return []
        events = [*self.close(), *self._open(kind, **fields)]
        return [*events, self._at("response.content_part.added", content_index=0, part=self._part(""))]

    def _open(self, kind: Literal["message", "reasoning", "function_call"], **fields: Any) -> list[dict[str, Any]]:
        prefix = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}[kind]
        item: Any = {"id": new_id(prefix), "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        return [self._item_event("response.output_item.added")]

    def _part(self, text: str) -> OutputPart:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*self._logprobs]}

    def _delta(self, kind: str, text: str, **fields: Any) -> dict[str, Any]:
        self._texts.append(text)
        place = {} if self.items[-1]["type"] == "function_call" else {"content_index": 0}
        return self._at(kind, delta=text, **place, **fields)

    def _at(self, kind: str, **fields: Any) -> dict[str, Any]:
        """A stream's event about the open item: the item's id and place, and what the event has besides."""
        return self.event(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **fields)

    def _item_event(self, kind: str) -> dict[str, Any]:
        item: Mapping[str, Any] = dict(self.items[-1])
        return self.event(kind, output_index=len(self.items) - 1, item=item)


def response_usage(stats: Stats, reasoning_tokens: int) -> ResponseUsage:
    """The tokens and times of an answer as a response has them."""
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": stats.cached_tokens,
            "cache_write_tokens": stats.prompt_tokens - stats.cached_tokens,
        },
        "output_tokens": stats.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "timings": timings([stats], [stats]),
    }


Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
LOGPROBS = "message.output_text.logprobs"


class JsonSchemaText(JsonSchema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]


class TextSettings(Body):
    """What the text of the answer must be."""

    known: ClassVar[Known] = unsupported("say it in a message", "verbosity", allowed=("medium",))
    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaText, Field(discriminator="type")] | None = None


class ReasoningSettings(Body):
    """How much the model is to think; passed over where its template does not know that."""

    known: ClassVar[Known] = {
        **unsupported("thoughts come as they are, without a summary", "summary", "generate_summary", allowed=("auto",)),
        **unsupported("the template decides which thoughts it shows", "context", allowed=("auto",)),
        **unsupported("there is one mode", "mode", allowed=("standard",)),
    }
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponseStreamOptions(Body):
    """What a stream carries."""

    known: ClassVar[Known] = unsupported("this server pads no events", "include_obfuscation", allowed=(False,))


class ResponseRequest(SamplingFields, CacheFields, IgnoredFields):
    """A conversation, whose next turn is wanted."""

    known: ClassVar[Known] = {
        **ONE_ANSWER,
        **unsupported("a conversation that is too long is a 400", "truncation", allowed=("disabled",)),
        **unsupported("an answer is written while its client waits", "background", allowed=(False,)),
        **unsupported("an answer is written while its client waits", "background_options"),
        **unsupported(
            "requests do not know of each other; send the whole conversation as input",
            *("previous_response_id", "conversation", "context_management"),
        ),
        **unsupported("there are no stored prompts", "prompt"),
        **unsupported("there are no built-in tools", "max_tool_calls"),
        **unsupported("there are none", "access_programs"),
        **unsupported("this server reads and writes text", "image"),
    }
    model: ModelName = None
    input: Annotated[str, Field(min_length=1)] | Annotated[list[InputItem], Field(min_length=1), MANY]
    instructions: str | None = Field(default=None, description="A system message before the input.")
    max_output_tokens: Most | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: Annotated[list[Included], MANY] | None = Field(
        default=None, description="Log-probabilities. Thoughts always come as text, never encrypted."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    chat_template_kwargs: TemplateVariables = None
    tools: Annotated[list[AnyFunctionTool], MANY] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[FunctionChoice | AllowedChoice, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None


class IncompleteDetails(TypedDict):
    """Why a response ended before its end."""

    reason: Literal["max_output_tokens"]


class Failure(TypedDict):
    """What broke a response."""

    code: Literal["server_error"]
    message: str


class Response(TypedDict):
    """A response: what was asked for, and the output."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: Failure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: Metadata
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    presence_penalty: float
    frequency_penalty: float
    prompt_cache_key: str | None
    safety_identifier: str | None
    reasoning: dict[str, Any]
    store: Literal[False]
    service_tier: Literal["default"]
    background: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: NotRequired[str]


class ResponseEvent(TypedDict):
    """An event of a stream. Its further fields depend on its type; the last event has the response."""

    type: str
    sequence_number: int
    response: NotRequired[Response]


def read_input(body: ResponseRequest, served: Served) -> tuple[str, list[dict[str, Any]], Any]:
    """The text that the template makes of a request, the tools, and the choice among them. Raises ApiError."""
    served.check_name(body.model)
    functions = [Tool(type="function", function=tool) for tool in body.tools or [] if isinstance(tool, FunctionTool)]
    tools, choice = allowed_tools(functions, _choice(body))
    messages = template_messages(body.instructions, body.input)
    effort = reasoning_variables(None if body.reasoning is None else body.reasoning.effort, served)
    variables = {**effort, **(body.chat_template_kwargs or {})}
    return rendered(served, messages, field="input", tools=tools, variables=variables), tools, choice


def response_request(body: ResponseRequest, served: Served) -> Prompt:
    """What the engine is asked for. Raises ApiError for what is wrong."""
    text, tools, choice = read_input(body, served)
    prompt = chat_prompt(
        served,
        text,
        field="input",
        tools=tools,
        choice=choice,
        parallel=body.parallel_tool_calls is not False,
        schema=schema_of(None if body.text is None else body.text.format),
        schema_field="text.format",
    )
    wants_logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    settings = body.answer_settings(
        served,
        max_tokens=served.most_tokens(body.max_output_tokens),
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        prompt=prompt,
    )
    return replace(prompt, settings=settings, streams=bool(body.stream), cache_salt=body.cache_salt)


class ResponseWriter:
    """Writes responses and the events of their streams."""

    media, alive, answer_type, chunk_type = SSE, KEEP_ALIVE, Response, ResponseEvent

    def __init__(self, body: ResponseRequest, _: Prompt, served: Served) -> None:
        self._tokenizer, self._output = served.model.tokenizer, ResponseOutput()
        self._pending: list[TokenLogprob] = []
        """Log-probabilities of tokens without text: they belong to the text that comes next."""
        self._response = _response(body, served)

    def write(self, answer: GatheredAnswer, event: Event) -> bytes:
        """The events of the response's stream that an event of the answer becomes."""
        found = []
        if answer.is_new:
            kinds = ("response.created", "response.in_progress")
            found = [self._output.event(kind, response=dict(self._response)) for kind in kinds]
        return sse_by_type([*found, *self._events(answer, event)])

    def final_events(self, answers: Sequence[GatheredAnswer]) -> bytes:  # noqa: ARG002  all events have been written
        """The last event of the stream, which has the response."""
        return sse_by_type([self._output.event(f"response.{self._response['status']}", response=self._response)])

    def response(self, answers: Sequence[GatheredAnswer]) -> dict[str, Any]:
        """The response as one object."""
        for answer in answers:
            for event in answer.events:
                self._events(answer, event)
        return dict(self._response)

    def failed(self, error: ApiError) -> bytes:
        """The events of an error after the stream began."""
        failure: Failure = {"code": "server_error", "message": error.message}
        self._response |= {"status": "failed", "error": failure, "output": self._output.items}
        first = self._output.event("error", code=error.code, message=error.message, param=error.param)
        return sse_by_type([first, self._output.event("response.failed", response=self._response)])

    def _events(self, answer: GatheredAnswer, event: Event) -> list[dict[str, Any]]:
        """Add an event of the answer to the output; returns the events of the stream."""
        if isinstance(event, End):
            return self._end(answer, event)
        self._pending += chat_logprobs(self._tokenizer, event.logprobs)["content"]
        if isinstance(event, NothingShown | PromptProgress | PromptLogprobs | Embedded):
            return []
        pending, self._pending = self._pending, []
        return self._output.push(event, pending)

    def _end(self, answer: GatheredAnswer, end: End) -> list[dict[str, Any]]:
        assert end.stats is not None
        is_whole = FINISH_REASONS[end.finish_reason] == "stop"
        events = self._output.finish("completed" if is_whole and not answer.is_cut else "incomplete")
        self._response |= {
            "status": "completed" if is_whole else "incomplete",
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "completed_at": int(time.time()),
            "output": self._output.items,
            "usage": response_usage(end.stats, end.reasoning_tokens),
        }
        return events


def _choice(body: ResponseRequest) -> ToolChoice | None:
    """The choice of tools as chats have it."""
    choice = body.tool_choice
    match choice:
        case FunctionChoice():
            return choice.as_chats_have_it()
        case AllowedChoice(mode=mode, tools=tools):
            allowed = AllowedTools(mode=mode, tools=[tool.as_chats_have_it() for tool in tools])
            return AllowedToolsChoice(type="allowed_tools", allowed_tools=allowed)
    return choice


def _response(body: ResponseRequest, served: Served) -> Response:
    """The response before anything has come of it."""
    sampling = body.sampling(served)
    form = None if body.text is None else body.text.format
    choice = body.tool_choice
    found: Response = {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": served.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "store": False,
        "service_tier": "default",
        "background": False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice or "auto" if choice is None or isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() if isinstance(tool, FunctionTool) else tool for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }
    if body.user is not None:
        found["user"] = body.user
    return found
