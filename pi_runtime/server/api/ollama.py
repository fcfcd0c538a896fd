"""Ollama's forms, for clients that speak only these: `/api/chat` and `/api/generate`, and what the model is.

Streams are lines of JSON. Options have Ollama's names; those that set up a machine are the server's affair and change
nothing here.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.engine.events import CallBroken, End, Event, GatheredCall, ReasoningDelta, TextDelta
from pi_runtime.sequence.sampling import Sampling
from pi_runtime.server.api.answer import FINISH_REASONS, NDJSON, GatheredAnswer, bounded, to_json
from pi_runtime.server.api.body import MANY, OTHER_SERVERS, Body, Known, accepted, invalid, unsupported
from pi_runtime.server.api.completions import fill_in
from pi_runtime.server.api.conversation import AnyTool, allowed_tools
from pi_runtime.server.api.prompt import Prompt, chat_prompt, reasoning_variables, rendered
from pi_runtime.server.api.sampling import Penalty, Probability, RepetitionPenalty, SamplingFields
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError

NAMES = "A name of the model, with or without `:latest`; without one the model is meant."
NO_IMAGES = unsupported("this server reads text", "images", allowed=([],))


class Options(Body):
    """Ollama's names for settings."""

    known: ClassVar[Known] = {
        **{name: OTHER_SERVERS[name] for name in ("typical_p", "tfs_z", "mirostat", "mirostat_tau", "mirostat_eta")},
        **unsupported("penalties look at all tokens", "penalize_newline", allowed=(True,)),
        **accepted("numa", "num_batch", "num_gpu", "main_gpu", "use_mmap", "use_mlock", "num_thread", "low_vram"),
        **accepted("f16_kv", "vocab_only", "embedding_only", "logits_all"),  # the machine is the server's affair
    }
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], MANY] | None = None
    num_predict: Annotated[int, Field(ge=-2)] | None = Field(default=None, description="Below 1: until the end.")
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    num_ctx: int | None = Field(default=None, description="Accepted; the context is fixed.")
    num_keep: Annotated[int, Field(ge=-1)] | None = Field(default=None, description="Accepted; nothing is cut off.")
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = Field(
        default=None, description="With a penalty only −1: penalties look at the whole text."
    )

    def sampling_fields(self) -> SamplingFields:
        """These settings as requests in OpenAI's form have them."""
        shared = self.model_dump(include=set(SamplingFields.model_fields), exclude={"seed"})
        seed = self.seed if self.seed in (None, -1) else self.seed % 2**63
        return SamplingFields(**shared, seed=seed)


class OllamaFunction(Body):
    """A function that was called, with its arguments."""

    name: str
    arguments: Annotated[dict[str, Any], MANY] | str | None = None
    index: int | None = None


class OllamaCall(Body):
    """A call of a tool."""

    function: OllamaFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Body):
    """A message of a chat."""

    known: ClassVar[Known] = NO_IMAGES
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], MANY] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaFields(Body):
    """The fields that Ollama's requests for a chat and for the answer to a prompt share."""

    known: ClassVar[Known] = {
        **unsupported("use /v1/chat/completions", "logprobs", allowed=(False,)),
        **unsupported("use /v1/chat/completions", "top_logprobs", allowed=(0,)),
    }
    model: str | None = Field(default=None, description=NAMES)
    stream: bool | None = Field(default=None, description="Lines of JSON, unless it is `false`.")
    options: Options | None = None
    format: Literal["json", ""] | Annotated[dict[str, Any], MANY] | None = Field(
        default=None, description="`json`, or a schema that the answer must follow."
    )
    think: bool | Literal["low", "medium", "high"] | None = Field(
        default=None, description="Whether the model is to think first, where its template knows that."
    )
    keep_alive: str | float | None = Field(default=None, description="Accepted; the model stays.")


class OllamaChatRequest(OllamaFields):
    """A chat."""

    messages: Annotated[list[OllamaMessage], MANY]
    tools: Annotated[list[AnyTool], MANY] | None = None


class OllamaGenerateRequest(OllamaFields):
    """A prompt."""

    known: ClassVar[Known] = {
        **NO_IMAGES,
        **unsupported("the model's own template is used", "template", allowed=("",)),
        **unsupported("use /api/chat, or raw prompts", "context", allowed=([],)),
    }
    prompt: str = ""
    suffix: str | None = Field(default=None, description="What follows the text that is wanted.")
    system: str | None = None
    raw: bool | None = Field(default=None, description="The prompt is continued as it is, without the template.")


class OllamaSaid(TypedDict):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


class OllamaFigures(TypedDict):
    """The fields of every line of Ollama's answers; the last line has the figures too, with times in nanoseconds."""

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


def ollama_chat_request(body: OllamaChatRequest, served: Served) -> Prompt:
    """Make the engine's prompt of an Ollama chat, an empty one without messages. Raises ApiError for what is wrong."""
    _check_name(body.model, served)
    if not body.messages:
        return _request(body, served)
    tools, choice = allowed_tools(body.tools or [], None)
    messages = [_template_message(message) for message in body.messages]
    return _request(body, served, _prompt(body, served, messages, tools=tools, choice=choice))


def ollama_generate_request(body: OllamaGenerateRequest, served: Served) -> Prompt:
    """Make the engine's prompt of an Ollama prompt, an empty one without text. Raises ApiError for what is wrong."""
    _check_name(body.model, served)
    if not body.prompt:
        return _request(body, served)
    if body.suffix:
        return _request(body, served, Prompt(texts=[fill_in(served, body.prompt, body.suffix, "suffix")]))
    if body.raw or not served.template:
        return _request(body, served, _raw_prompt(body, served))
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": body.prompt}]
    return _request(body, served, _prompt(body, served, messages, field="prompt"))


def _check_name(name: str | None, served: Served) -> None:
    served.check_name(None if name is None else name.removesuffix(LATEST))


def _request(body: OllamaFields, served: Served, prompt: Prompt | None = None) -> Prompt:
    """A request without a prompt asks for the model to be loaded, which it is."""
    streams = body.stream is not False
    if prompt is None:
        return Prompt(texts=[], streams=streams)
    options = body.options or Options()
    most = options.num_predict
    settings = options.sampling_fields().answer_settings(
        served,
        max_tokens=served.most_tokens(most or None),
        prompt=prompt,
    )
    return replace(prompt, settings=settings, streams=streams)


def _prompt(
    body: OllamaFields,
    served: Served,
    messages: Sequence[Mapping[str, Any]],
    *,
    field: str = "messages",
    tools: Sequence[Mapping[str, Any]] = (),
    choice: str = "auto",
) -> Prompt:
    """The prompt that the template makes of messages."""
    if isinstance(body.think, str) or body.think is False:
        variables = reasoning_variables(body.think or "none", served)
    else:
        variables = {"enable_thinking": True} if body.think else {}
    schema = {"type": "object"} if body.format == "json" else body.format or None
    text = rendered(served, messages, field=field, tools=tools, variables=variables)
    return chat_prompt(served, text, field=field, tools=tools, choice=choice, schema=schema, schema_field="format")


def _raw_prompt(body: OllamaGenerateRequest, served: Served) -> Prompt:
    """A prompt as it is: the model reads nothing else."""
    if body.format or body.system:
        raise invalid("format" if body.format else "system", "not with a raw prompt, nor for a model without template")
    return Prompt(texts=[served.tokens(body.prompt, "prompt")], rendered=body.prompt)


class OllamaChatWriter:
    """Writes the answers of `/api/chat`, and their streams as lines."""

    media, alive = NDJSON, b""
    answer_type: type[OllamaFigures] = OllamaChatAnswer
    chunk_type: type[OllamaFigures] = OllamaChatAnswer

    def __init__(self, body: OllamaFields, _: Prompt, served: Served) -> None:
        self._model, self._began = body.model or served.name, time.perf_counter()

    def write(self, answer: GatheredAnswer, event: Event) -> bytes:
        """The line of an event. Calls are whole only at the end."""
        match event:
            case TextDelta(text) | CallBroken(_, text):
                return self._line(text)
            case ReasoningDelta(text):
                return self._line("", text)
            case End() if answer.calls:
                return self._line("", "", answer.calls)
        return b""

    def final_events(self, answers: Sequence[GatheredAnswer]) -> bytes:
        """The last line of a stream, which has the figures."""
        return to_json(self._object("", "", ()) | self._figures(answers)) + b"\n"

    def response(self, answers: Sequence[GatheredAnswer]) -> dict[str, Any]:
        """The answer as one object."""
        said = [(answer.text, answer.reasoning, answer.calls) for answer in answers]
        return self._object(*(said[0] if said else ("", "", ()))) | self._figures(answers)

    def failed(self, error: ApiError) -> bytes:
        """The line of an error after the stream began."""
        return to_json({"error": error.message}) + b"\n"

    def _line(self, text: str, thinking: str = "", calls: Sequence[GatheredCall] = ()) -> bytes:
        return to_json(self._object(text, thinking, calls)) + b"\n"

    def _object(self, text: str, thinking: str, calls: Sequence[GatheredCall]) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now, **self.said(text, thinking, calls), "done": False}

    def _figures(self, answers: Sequence[GatheredAnswer]) -> dict[str, Any]:
        """How the answer ended, with times in nanoseconds."""
        total = _nanoseconds(time.perf_counter() - self._began)
        end = answers[0].end if answers else None
        if end is None or end.stats is None:
            return {"done": True, "done_reason": "load", "total_duration": total, "load_duration": 0}
        return {
            "done": True,
            "done_reason": FINISH_REASONS[end.finish_reason],
            "total_duration": total,
            "load_duration": 0,
            "prompt_eval_count": end.stats.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(end.stats.prefill_s),
            "eval_count": end.stats.generated_tokens,
            "eval_duration": _nanoseconds(end.stats.decode_s),
        }

    @staticmethod
    def said(text: str, thinking: str, calls: Sequence[GatheredCall]) -> dict[str, Any]:
        """Text, thoughts and calls in the field that a chat's answer has for them."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "function": {"index": n, "name": call.name, "arguments": bounded(call.arguments)}}
                for n, call in enumerate(calls)
            ]
        return {"message": message}


class OllamaGenerateWriter(OllamaChatWriter):
    """Writes the answers of `/api/generate`, and their streams as lines."""

    answer_type = chunk_type = OllamaGenerateAnswer

    @staticmethod
    def said(text: str, thinking: str, calls: Sequence[GatheredCall]) -> dict[str, Any]:
        """Text and thoughts in the fields that the answer to a prompt has for them."""
        assert not calls
        return {"response": text, **({"thinking": thinking} if thinking else {})}


def _template_message(message: OllamaMessage) -> dict[str, Any]:
    """A message as `ChatModel.chat_prompt` takes it."""
    found = {"content": "", **message.model_dump(exclude_none=True, exclude={"tool_name"})}
    if message.tool_name is not None:
        found["name"] = message.tool_name
    for call in found.get("tool_calls", ()):
        call["function"].pop("index", None)
    return found


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


LATEST = ":latest"
VERSION = "0.9.0"
"""The version of Ollama whose forms these routes have; clients ask for a least one."""


class OllamaShowRequest(Body):
    """A question about the model."""

    model: str | None = Field(default=None, description=NAMES)
    name: str | None = Field(default=None, description="The same as `model`, as older clients spell it.")
    verbose: bool | None = Field(default=None, description="Accepted; the answer is the same.")


class OllamaModelDetails(TypedDict):
    """What kind of model it is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class _OllamaNamed(TypedDict):
    """What Ollama's list of models and its list of loaded models both say of one."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaModelDetails


class OllamaModel(_OllamaNamed):
    """A model that is there."""

    modified_at: str


class OllamaTags(TypedDict):
    """All models: one."""

    models: list[OllamaModel]


class OllamaRunningModel(_OllamaNamed):
    """A model that is loaded."""

    size_vram: int
    context_length: int


class OllamaRunning(TypedDict):
    """All models that are loaded: the one."""

    models: list[OllamaRunningModel]


class OllamaVersion(TypedDict):
    """The version of Ollama whose forms are spoken; not this server's own."""

    version: str


class OllamaModelDescription(TypedDict):
    """What the model is, and what it can do."""

    parameters: str
    template: str
    details: OllamaModelDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


def tags(served: Served) -> OllamaTags:
    """The answer to `/api/tags`: the list of models."""
    return {"models": [{**_named(served), "modified_at": served.created_at}]}


def running(served: Served) -> OllamaRunning:
    """The answer to `/api/ps`. The model is loaded as long as the server runs, so nothing says when it expires."""
    model = served.model
    on_gpu = 0 if model.allocation is None or model.device == "stand-in" else model.allocation.total
    return {"models": [{**_named(served), "size_vram": on_gpu, "context_length": model.context}]}


def ollama_version() -> OllamaVersion:
    """The answer to `/api/version`."""
    return {"version": VERSION}


def show(body: OllamaShowRequest, served: Served) -> OllamaModelDescription:
    """The answer to `/api/show`: what the model is. Raises ApiError 404 for another model."""
    _check_name(body.model or body.name, served)
    return {
        "parameters": "\n".join(f"{name} {value}" for name, value in _parameters(served)),
        "template": served.template,
        "details": _details(served),
        "model_info": _model_info(served),
        "capabilities": list(_capabilities(served)),
        "modified_at": served.created_at,
    }


def _named(served: Served) -> _OllamaNamed:
    name = served.name + LATEST
    model = served.model
    return {"name": name, "model": name, "size": model.nbytes, "digest": model.digest, "details": _details(served)}


def _details(served: Served) -> OllamaModelDetails:
    manifest = served.model.manifest
    family, count = manifest.decoder.family, served.model.parameters
    return {
        "parent_model": "",
        "format": "pi",
        "family": family,
        "families": [family],
        "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M",
        "quantization_level": manifest.formats["ffn"].upper(),
    }


def _parameters(served: Served) -> Iterator[tuple[str, float]]:
    """What holds where a request says nothing, by Ollama's names."""
    sampling = Sampling.from_generation_config(served.model.manifest.generation)
    yield "num_ctx", served.model.context
    yield "temperature", sampling.temperature
    yield "top_k", sampling.top_k
    yield "top_p", sampling.top_p
    yield "min_p", sampling.min_p
    yield "repeat_penalty", sampling.repetition_penalty


def _model_info(served: Served) -> dict[str, str | int]:
    """The shape of the model by GGUF's names, which Ollama's clients look for."""
    decoder = served.model.manifest.decoder
    experts = {"expert_count": decoder.n_experts, "expert_used_count": decoder.experts_per_token}
    shape = {
        "context_length": served.model.context,
        "block_count": decoder.n_layers,
        "embedding_length": decoder.d_model,
        "feed_forward_length": decoder.d_ff,
        "attention.head_count": decoder.n_heads,
        "attention.head_count_kv": decoder.n_kv_heads,
        "vocab_size": decoder.vocab_size,
        **(experts if decoder.n_experts > 1 else {}),
    }
    general: dict[str, str | int] = {
        "general.architecture": decoder.family,
        "general.parameter_count": served.model.parameters,
    }
    return {**general, **{f"{decoder.family}.{name}": n for name, n in shape.items()}}


def _capabilities(served: Served) -> Iterator[str]:
    yield "completion"
    if served.model.output.tools is not None:
        yield "tools"
    if served.model.output.reasoning is not None:
        yield "thinking"
