"""Ollama's `/api/tags`, `/api/show`, `/api/ps` and `/api/version`: what the model is, from its manifest."""

from collections.abc import Iterator
from datetime import UTC, datetime

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.sequence.sampling import Sampling
from pi_runtime.server.api.body import Body, invalid
from pi_runtime.server.api.served import Served

LATEST = ":latest"
VERSION = "0.9.0"
"""The version of Ollama whose forms these routes have; clients ask for a least one."""


class OllamaShowRequest(Body):
    """A question about the model."""

    model: str | None = Field(default=None, description="The name that `/api/tags` gives, with or without `:latest`.")
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
    return {"models": [{**_named(served), "modified_at": _loaded_at(served)}]}


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
    name = body.model or body.name
    if name is None:
        raise invalid("model", "the field is required", code="missing_required_parameter")
    served.check_name(name.removesuffix(LATEST))
    return {
        "parameters": "\n".join(f"{name} {value}" for name, value in _parameters(served)),
        "template": served.template,
        "details": _details(served),
        "model_info": _model_info(served),
        "capabilities": list(_capabilities(served)),
        "modified_at": _loaded_at(served),
    }


def _named(served: Served) -> _OllamaNamed:
    name = served.name + LATEST
    model = served.model
    return {"name": name, "model": name, "size": model.nbytes, "digest": model.digest, "details": _details(served)}


def _loaded_at(served: Served) -> str:
    return datetime.fromtimestamp(served.created, UTC).isoformat().replace("+00:00", "Z")


def _details(served: Served) -> OllamaModelDetails:
    manifest = served.model.manifest
    family = manifest.decoder.family
    return {
        "parent_model": "",
        "format": "pi",
        "family": family,
        "families": [family],
        "parameter_size": "",
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
    return {"general.architecture": decoder.family, **{f"{decoder.family}.{name}": n for name, n in shape.items()}}


def _capabilities(served: Served) -> Iterator[str]:
    yield "completion"
    if served.model.output.tools is not None:
        yield "tools"
    if served.model.output.reasoning is not None:
        yield "thinking"
