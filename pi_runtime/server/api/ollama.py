"""Ollama's `/api/chat` and `/api/generate`, for clients that speak only these.

Streams are lines of JSON. Options have Ollama's names; those that set up a machine are the server's affair and change
nothing here.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.generation import AnswerSettings
from pi_runtime.sampling import TokenLogprobs
from pi_runtime.server.api.body import MANY, AtMost, Body, Unsupported, invalid
from pi_runtime.server.api.conversation import Conversation, Prompt, Tool, allowed_tools
from pi_runtime.server.api.ollama_models import LATEST
from pi_runtime.server.api.sampling import Penalty, Probability, RepetitionPenalty, SamplingFields, StopString
from pi_runtime.server.api.served import Served
from pi_runtime.server.api.turn import Call
from pi_runtime.server.api.usage import FINISH_REASONS
from pi_runtime.server.errors import ApiError
from pi_runtime.server.jobs import NDJSON, Ask, End, Event, Part
from pi_runtime.server.tools.deltas import CallBroken, Delta, ReasoningDelta, TextDelta
from pi_runtime.server.tools.output import OutputFormat

Machine = Annotated[Any, Field(description="Accepted; the machine is the server's affair.")]


class Options(Body):
    """Ollama's names for settings."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], MANY] | None = None
    num_predict: Annotated[int, Field(ge=-2)] | None = Field(default=None, description="Below 1: until the end.")
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    num_ctx: Annotated[int, Field(ge=1)] | None = Field(default=None, description="Accepted; the context is fixed.")
    num_keep: Annotated[int, Field(ge=-1)] | None = Field(default=None, description="Accepted; nothing is cut off.")
    repeat_last_n: Annotated[
        Literal[-1] | None, Unsupported("penalties look at the whole text, so only -1 is allowed")
    ] = None
    typical_p: Annotated[Literal[1] | None, Unsupported("only 1, which changes nothing")] = None
    tfs_z: Annotated[Literal[1] | None, Unsupported("only 1, which changes nothing")] = None
    mirostat: Annotated[Literal[0] | None, Unsupported("only 0, which is off")] = None
    mirostat_tau: float | None = Field(default=None, description="Accepted; mirostat is off.")
    mirostat_eta: float | None = Field(default=None, description="Accepted; mirostat is off.")
    penalize_newline: Annotated[Literal[True] | None, Unsupported("penalties look at all tokens")] = None
    numa: Machine = None
    num_batch: Machine = None
    num_gpu: Machine = None
    main_gpu: Machine = None
    use_mmap: Machine = None
    use_mlock: Machine = None
    num_thread: Machine = None
    low_vram: Machine = None
    f16_kv: Machine = None
    vocab_only: Machine = None
    embedding_only: Machine = None
    logits_all: Machine = None

    def sampling_fields(self) -> SamplingFields:
        """The same settings under OpenAI's names."""
        return SamplingFields(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed % 2**63,
            stop=self.stop,
            repetition_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )


class OllamaFunction(Body):
    """A function that was called, with its arguments."""

    name: str
    arguments: Annotated[dict[str, Any], MANY]
    index: int | None = None


class OllamaCall(Body):
    """A call of a tool."""

    function: OllamaFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Body):
    """A message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], MANY] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Annotated[Annotated[list[str], AtMost(0)] | None, Unsupported("this server reads text")] = None


class OllamaFields(Body):
    """What both requests have."""

    model: str = Field(description="The name that `/api/tags` gives, with or without `:latest`.")
    stream: bool | None = Field(default=None, description="Lines of JSON, unless it is `false`.")
    options: Options | None = None
    format: Literal["json", ""] | Annotated[dict[str, Any], MANY] | None = Field(
        default=None, description="`json`, or a schema that the answer must follow."
    )
    think: bool | Literal["low", "medium", "high"] | None = Field(
        default=None, description="Whether the model is to think first, where its template knows that."
    )
    keep_alive: str | float | None = Field(default=None, description="Accepted; the model stays.")
    logprobs: Annotated[Literal[False] | None, Unsupported("use /v1/chat/completions")] = None
    top_logprobs: Annotated[Literal[0] | None, Unsupported("use /v1/chat/completions")] = None


class OllamaChatRequest(OllamaFields):
    """A chat."""

    messages: Annotated[list[OllamaMessage], MANY]
    tools: Annotated[list[Tool], MANY] | None = None


class OllamaGenerateRequest(OllamaFields):
    """A prompt."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = Field(default=None, description="The prompt is continued as it is, without the template.")
    suffix: Annotated[Literal[""] | None, Unsupported("a text is continued at its end alone")] = None
    template: Annotated[Literal[""] | None, Unsupported("the model's own template is used")] = None
    context: Annotated[Annotated[list[int], AtMost(0)] | None, Unsupported("use /api/chat, or raw prompts")] = None
    images: Annotated[Annotated[list[str], AtMost(0)] | None, Unsupported("this server reads text")] = None


class OllamaError(ApiError):
    """An error in Ollama's form."""

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"error": self.message}


class OllamaSaid(TypedDict):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


class OllamaFigures(TypedDict):
    """What every line has; the last one has the figures, with times in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class OllamaChatAnswer(OllamaFigures):
    """A line of a chat, or the whole of it."""

    message: OllamaSaid


class OllamaGenerateAnswer(OllamaFigures):
    """A line of an answer to a prompt, or the whole of it."""

    response: str
    thinking: NotRequired[str]


class _OllamaJob:
    """A request in Ollama's form. One without a prompt asks for the model to be loaded, which it is."""

    media = NDJSON

    def __init__(self, body: OllamaFields, prompt: Prompt | None, served: Served) -> None:
        self._body, self._began = body, time.perf_counter()
        self._turn = None if prompt is None else prompt.turn(served)
        self.asks = [] if prompt is None else [Ask(prompt.ids, 1, _settings(body, prompt, served))]

    @property
    def streams(self) -> bool:
        """Whether lines are written as they come."""
        return self._body.stream is not False

    def part(self, index: int, part: Part) -> Sequence[Event]:
        """Take a part of the answer."""
        assert self._turn is not None, index
        return self._lines(self._turn.take(part).deltas)

    def end(self, index: int, end: End) -> Sequence[Event]:
        """Take the end of the answer. Calls are whole only now."""
        assert self._turn is not None, index
        lines = self._lines(self._turn.finish(end).deltas)
        calls = [Event(None, self._object("", "", self._turn.calls))] if self._turn.calls and self.streams else []
        return [*lines, *calls]

    def scores(self, ask: int, logprobs: Sequence[TokenLogprobs]) -> Sequence[Event]:
        """No log-probabilities of a prompt are asked for."""
        raise NotImplementedError(ask, logprobs)

    def last(self) -> Sequence[Event]:
        """The line with the figures."""
        return [Event(None, self._object("", "", ()) | self._figures())]

    def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        turn = self._turn
        found = self._object("", "", ()) if turn is None else self._object(turn.text, turn.reasoning, turn.calls)
        return found | self._figures()

    def failed(self, error: ApiError) -> Sequence[Event]:
        """The line of an error after the stream began."""
        return [Event(None, {"error": error.message})]

    def _lines(self, deltas: Sequence[Delta]) -> Sequence[Event]:
        found = []
        for delta in deltas if self.streams else ():
            match delta:
                case TextDelta(text) | CallBroken(_, text):
                    found.append(Event(None, self._object(text, "", ())))
                case ReasoningDelta(text):
                    found.append(Event(None, self._object("", text, ())))
        return found

    def _object(self, text: str, thinking: str, calls: Sequence[Call]) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._body.model, "created_at": now, **self._said(text, thinking, calls), "done": False}

    def _said(self, text: str, thinking: str, calls: Sequence[Call]) -> dict[str, Any]:
        """What was said, where this request has it."""
        raise NotImplementedError

    def _figures(self) -> dict[str, Any]:
        """How it ended, with times in nanoseconds."""
        total = _nanoseconds(time.perf_counter() - self._began)
        if self._turn is None or self._turn.end is None:
            return {"done": True, "done_reason": "load", "total_duration": total, "load_duration": 0}
        stats = self._turn.end.stats
        return {
            "done": True,
            "done_reason": FINISH_REASONS[self._turn.end.finish_reason],
            "total_duration": total,
            "load_duration": 0,
            "prompt_eval_count": stats.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(stats.prefill_s),
            "eval_count": stats.generated_tokens,
            "eval_duration": _nanoseconds(stats.decode_s),
        }


class OllamaChatJob(_OllamaJob):
    """A request of `/api/chat`."""

    @classmethod
    def of(cls, value: object, served: Served) -> Self:
        """The job that a JSON value asks for. Raises OllamaError."""
        with _in_ollamas_form():
            body = OllamaChatRequest.of(value)
            served.check_name(body.model.removesuffix(LATEST))
            if not body.messages:
                return cls(body, None, served)
            tools, choice = allowed_tools(body.tools or [], None)
            messages = [_template_message(message) for message in body.messages]
            return cls(body, _conversation(body, messages, tools=tools, tool_choice=choice).prompt(served), served)

    def _said(self, text: str, thinking: str, calls: Sequence[Call]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "function": {"index": n, "name": call.name, "arguments": json.loads(call.arguments)}}
                for n, call in enumerate(calls)
            ]
        return {"message": message}


class OllamaGenerateJob(_OllamaJob):
    """A request of `/api/generate`."""

    @classmethod
    def of(cls, value: object, served: Served) -> Self:
        """The job that a JSON value asks for. Raises OllamaError."""
        with _in_ollamas_form():
            body = OllamaGenerateRequest.of(value)
            served.check_name(body.model.removesuffix(LATEST))
            if not body.prompt:
                return cls(body, None, served)
            if body.raw or not served.template:
                return cls(body, _raw_prompt(body, served), served)
            system = [{"role": "system", "content": body.system}] if body.system else []
            messages = [*system, {"role": "user", "content": body.prompt}]
            return cls(body, _conversation(body, messages, messages_field="prompt").prompt(served), served)

    def _said(self, text: str, thinking: str, calls: Sequence[Call]) -> dict[str, Any]:
        assert not calls
        return {"response": text, **({"thinking": thinking} if thinking else {})}


@contextmanager
def _in_ollamas_form() -> Iterator[None]:
    """Let errors have Ollama's form."""
    try:
        yield
    except ApiError as error:
        raise OllamaError(error.status, error.message, headers=error.headers) from None


def _conversation(body: OllamaFields, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Conversation:
    variables: dict[str, Any] = {} if body.think is None else {"enable_thinking": bool(body.think)}
    if isinstance(body.think, str):
        variables["reasoning_effort"] = body.think
    schema = {"type": "object"} if body.format == "json" else body.format or None
    return Conversation(messages=messages, schema=schema, schema_field="format", variables=variables, **fields)


def _raw_prompt(body: OllamaGenerateRequest, served: Served) -> Prompt:
    """A prompt as it is: the model reads nothing else."""
    if body.format or body.system:
        raise invalid("format" if body.format else "system", "not with a raw prompt, nor for a model without template")
    ids = served.encode(body.prompt, "prompt")
    served.check_length(len(ids), "prompt")
    return Prompt(body.prompt, ids, None, (), OutputFormat(None, None, {}))


def _template_message(message: OllamaMessage) -> dict[str, Any]:
    """A message as chat templates know it."""
    found = message.model_dump(exclude_none=True, exclude={"images", "thinking", "tool_name"})
    if message.thinking is not None:
        found["reasoning_content"] = message.thinking
    if message.tool_name is not None:
        found["name"] = message.tool_name
    for call in found.get("tool_calls", ()):
        call["function"].pop("index", None)
    return found


def _settings(body: OllamaFields, prompt: Prompt, served: Served) -> AnswerSettings:
    options = body.options or Options()
    most = options.num_predict
    settings = options.sampling_fields().answer_settings(
        served, max_tokens=None if most is None or most < 1 else most, logprobs=None, grammar=prompt.grammar
    )
    settings["shown_tokens"] = prompt.shown_tokens
    return settings


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
