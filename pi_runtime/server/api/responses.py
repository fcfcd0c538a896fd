"""`/v1/responses`, without state: a request holds the whole conversation, and nothing is stored."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.engine.events import End, Event, NothingShown, PromptLogprobs
from pi_runtime.server.api.answer import SSE, GatheredAnswer, sse
from pi_runtime.server.api.body import MANY, ONE_ANSWER, Body, Known, Metadata, unsupported
from pi_runtime.server.api.chat_prompt import chat_prompt, reasoning_variables, rendered
from pi_runtime.server.api.conversation import (
    AllowedTools,
    AllowedToolsChoice,
    JsonObjectFormat,
    JsonSchema,
    TextFormat,
    Tool,
    ToolChoice,
    allowed_tools,
    schema_of,
)
from pi_runtime.server.api.logprobs import TokenLogprob, chat_logprobs
from pi_runtime.server.api.prompt import Prompt
from pi_runtime.server.api.response_items import (
    AllowedChoice,
    AnyFunctionTool,
    FunctionChoice,
    FunctionTool,
    InputItem,
    template_messages,
)
from pi_runtime.server.api.response_output import OutputItem, ResponseOutput, ResponseUsage, response_usage
from pi_runtime.server.api.sampling import CacheFields, IgnoredFields, Most, SamplingFields
from pi_runtime.server.api.served import Served, new_id
from pi_runtime.server.api.usage import FINISH_REASONS
from pi_runtime.server.errors import ApiError

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
    model: str = Field(description="The name that `/v1/models` gives; another is a 404.")
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
    chat_template_kwargs: Annotated[dict[str, Any], MANY] | None = Field(
        default=None, description="Further names for the model's template, such as `enable_thinking`."
    )
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


def response_request(body: ResponseRequest, served: Served) -> Prompt:
    """What the engine is asked for. Raises ApiError for what is wrong."""
    served.check_name(body.model)
    functions = [Tool(type="function", function=tool) for tool in body.tools or [] if isinstance(tool, FunctionTool)]
    tools, choice = allowed_tools(functions, _choice(body))
    messages = template_messages(body.instructions, body.input)
    schema = schema_of(None if body.text is None else body.text.format)
    effort = reasoning_variables(None if body.reasoning is None else body.reasoning.effort, served)
    variables = {**effort, **(body.chat_template_kwargs or {})}
    text = rendered(served, messages, field="input", tools=tools, variables=variables)
    prompt = chat_prompt(
        served,
        text,
        field="input",
        tools=tools,
        choice=choice,
        parallel=body.parallel_tool_calls is not False,
        schema=schema,
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

    media, answer_type, chunk_type = SSE, Response, ResponseEvent

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
        return _written([*found, *self._events(answer, event)])

    def final_events(self, answers: Sequence[GatheredAnswer]) -> bytes:  # noqa: ARG002  all events have been written
        """The last event of the stream, which has the response."""
        return _written([self._output.event(f"response.{self._response['status']}", response=self._response)])

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
        return _written([first, self._output.event("response.failed", response=self._response)])

    def _events(self, answer: GatheredAnswer, event: Event) -> list[dict[str, Any]]:
        """Add an event of the answer to the output; returns the events of the stream."""
        if isinstance(event, End):
            return self._end(answer, event)
        self._pending += chat_logprobs(self._tokenizer, event.logprobs)["content"]
        if isinstance(event, NothingShown | PromptLogprobs):
            return []
        pending, self._pending = self._pending, []
        return self._output.take(event, pending)

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


def _written(events: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(sse(event, event["type"]) for event in events)


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
