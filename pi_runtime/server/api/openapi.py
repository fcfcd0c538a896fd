"""The OpenAPI document: every route with its request, its answers and its errors, from the types that the code uses.

`OPERATIONS` is the list of what the server answers; a test compares it with the application's routes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.server.api.chat import ChatChunk, ChatCompletion, ChatRequest
from pi_runtime.server.api.completions import Completion, CompletionChunk, CompletionRequest
from pi_runtime.server.api.ollama import (
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
)
from pi_runtime.server.api.ollama_models import (
    LATEST,
    OllamaModelDescription,
    OllamaRunning,
    OllamaShowRequest,
    OllamaTags,
    OllamaVersion,
)
from pi_runtime.server.api.plain import (
    Content,
    DetokenizeRequest,
    ModelList,
    ModelObject,
    TemplatePrompt,
    TemplateRequest,
    TokenizeRequest,
    Tokens,
)
from pi_runtime.server.api.responses import Response, ResponseEvent, ResponseRequest
from pi_runtime.server.api.sessions import (
    AnswerRequest,
    SessionAnswer,
    SessionChunk,
    SessionDeleted,
    SessionList,
    SessionObject,
    SessionRequest,
    TypeRequest,
)
from pi_runtime.server.errors import OLLAMA
from pi_runtime.server.jobs import NDJSON, SSE

JSON, TEXT, HTML = "application/json", "text/plain", "text/html"
REFERENCE = "#/components/schemas/{model}"
ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The key is missing or wrong.",
    403: "The Host or Origin header is not allowed.",
    404: "There is no such model, or no such session.",
    408: "The client sent or read too slowly.",
    409: "The session is still answering.",
    413: "The body is too large.",
    429: "The queue is full; `Retry-After` says when to ask again.",
    500: "A fault of the server.",
    503: "The model is loading, or the server is ending.",
}


class ErrorFields(TypedDict):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """An error in OpenAI's form."""

    error: ErrorFields


class OllamaErrorBody(TypedDict):
    """An error in Ollama's form."""

    error: str


class Health(TypedDict):
    """Whether requests are taken."""

    status: str


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What one method of one path does."""

    path: str
    summary: str
    method: Literal["get", "post", "delete"] = "get"
    body: Any = None
    """The type of its request."""
    answer: Any = None
    """The type of its answer; None where it is none of JSON, or has no fixed form."""
    chunk: Any = None
    """The type of an event of its stream."""
    media: str = JSON
    stream_media: str = SSE
    errors: Sequence[int] = ()
    """Statuses beside those that all have."""
    needs_key: bool = True
    is_refused: bool = False
    """Whether every request is answered by an error."""

    @property
    def statuses(self) -> list[int]:
        """The statuses of its errors."""
        common = [403, 500] + [401] * self.needs_key + [400, 408, 413, 429, 503] * (self.body is not None)
        return sorted({*common, *self.errors})


OPERATIONS = [
    Operation(path="/", summary="A page to chat on.", media=HTML, needs_key=False),
    Operation(path="/health", summary="Whether requests are taken.", answer=Health, errors=(503,), needs_key=False),
    Operation(path="/metrics", summary="Figures in Prometheus' form.", media=TEXT),
    Operation(path="/slots", summary="What runs.", errors=(503,)),
    Operation(path="/props", summary="What the server is.", errors=(503,)),
    Operation(path="/openapi.json", summary="This document."),
    Operation(path="/v1/models", summary="The one model.", answer=ModelList, errors=(503,)),
    Operation(path="/v1/models/{name}", summary="The model by its name.", answer=ModelObject, errors=(404, 503)),
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="The assistant's next message.",
        body=ChatRequest,
        answer=ChatCompletion,
        chunk=ChatChunk,
        errors=(404,),
    ),
    Operation(
        method="post",
        path="/v1/completions",
        summary="Texts continued, and log-probabilities of texts.",
        body=CompletionRequest,
        answer=Completion,
        chunk=CompletionChunk,
        errors=(404,),
    ),
    Operation(
        method="post",
        path="/v1/responses",
        summary="The next turn of a conversation. Nothing is stored.",
        body=ResponseRequest,
        answer=Response,
        chunk=ResponseEvent,
        errors=(404,),
    ),
    Operation(
        method="post",
        path="/v1/embeddings",
        summary="Refused: the model writes text.",
        body=dict[str, Any],
        is_refused=True,
    ),
    Operation(method="post", path="/tokenize", summary="The tokens of a text.", body=TokenizeRequest, answer=Tokens),
    Operation(method="post", path="/detokenize", summary="The text of tokens.", body=DetokenizeRequest, answer=Content),
    Operation(
        method="post",
        path="/apply-template",
        summary="The prompt of a chat.",
        body=TemplateRequest,
        answer=TemplatePrompt,
        errors=(404,),
    ),
    Operation(
        method="post",
        path="/api/chat",
        summary="Ollama's chat.",
        body=OllamaChatRequest,
        answer=OllamaChatAnswer,
        chunk=OllamaChatAnswer,
        stream_media=NDJSON,
        errors=(404,),
    ),
    Operation(
        method="post",
        path="/api/generate",
        summary="Ollama's answer to a prompt.",
        body=OllamaGenerateRequest,
        answer=OllamaGenerateAnswer,
        chunk=OllamaGenerateAnswer,
        stream_media=NDJSON,
        errors=(404,),
    ),
    Operation(path="/v1/sessions", summary="The sessions of the key.", answer=SessionList, errors=(503,)),
    Operation(
        method="post",
        path="/v1/sessions",
        summary="A new session: a text that is continued in turns.",
        body=SessionRequest,
        answer=SessionObject,
        errors=(404,),
    ),
    Operation(path="/v1/sessions/{id}", summary="A session.", answer=SessionObject, errors=(404, 503)),
    Operation(
        method="delete",
        path="/v1/sessions/{id}",
        summary="The end of a session.",
        answer=SessionDeleted,
        errors=(404,),
    ),
    Operation(
        method="post",
        path="/v1/sessions/{id}/type",
        summary="Text typed into a session's draft, which is read ahead.",
        body=TypeRequest,
        answer=SessionObject,
        errors=(404, 409),
    ),
    Operation(
        method="post",
        path="/v1/sessions/{id}/answer",
        summary="The model's turn in a session.",
        body=AnswerRequest,
        answer=SessionAnswer,
        chunk=SessionChunk,
        errors=(404, 409),
    ),
    Operation(path="/api/tags", summary="Ollama's list of models.", answer=OllamaTags, errors=(503,)),
    Operation(path="/api/ps", summary="Ollama's list of loaded models.", answer=OllamaRunning, errors=(503,)),
    Operation(path="/api/version", summary="The version of Ollama's forms.", answer=OllamaVersion),
    Operation(
        method="post",
        path="/api/show",
        summary="What the model is, as Ollama describes it.",
        body=OllamaShowRequest,
        answer=OllamaModelDescription,
        errors=(404,),
    ),
]


def document(
    model_name: str, operations: Sequence[Operation] = OPERATIONS, *, refuses_unknown: bool = True
) -> dict[str, Any]:
    """The document of a server for a model of this name, which refuses fields that it does not know, or does not."""
    schemas, components = _schemas(operations)
    for component in components.values():
        if component.get("additionalProperties") is True:  # a request's
            component["additionalProperties"] = not refuses_unknown
            _name_model(component, model_name)
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "pi-serve", "version": version("pi-toolchain"), "license": {"name": "MIT"}},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas(operations: Sequence[Operation]) -> tuple[dict[str, Any], dict[str, Any]]:
    """For each type of the operations its schema, by name, and all schemas that these refer to."""
    types = {_key(kind): kind for operation in operations for kind in _types(operation)}
    inputs = [(key, "validation", TypeAdapter(kind)) for key, kind in types.items()]
    found, definitions = TypeAdapter.json_schemas(inputs, ref_template=REFERENCE)  # type: ignore[arg-type]
    return {key: schema for (key, _), schema in found.items()}, definitions.get("$defs", {})


def _types(operation: Operation) -> Iterator[Any]:
    yield from (kind for kind in (operation.body, operation.answer, operation.chunk) if kind is not None)
    yield OllamaErrorBody if operation.path.startswith(OLLAMA) else Error


def _key(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))


def _name_model(schema: dict[str, Any], name: str) -> None:
    """Let a request's model be the one there is."""
    model = schema.get("properties", {}).get("model")
    if model is not None and model.get("type") == "string":
        model["enum"] = [name, name + LATEST] if schema["title"].startswith("Ollama") else [name]


def _described(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    """The operation object."""
    found: dict[str, Any] = {"summary": operation.summary, "operationId": _identifier(operation)}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    if names:
        schema = {"type": "string"}
        found["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    if operation.body is not None:
        body = schemas[_key(operation.body)]
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    answer = schemas[_key(operation.answer)] if operation.answer is not None else {}
    content: dict[str, Any] = {operation.media: {"schema": answer} if operation.media == JSON else {}}
    if operation.chunk is not None:
        content[operation.stream_media] = {"x-itemSchema": schemas[_key(operation.chunk)]}
    error = schemas[_key(OllamaErrorBody if operation.path.startswith(OLLAMA) else Error)]
    found["responses"] = {
        str(status): {"description": ERRORS[status], "content": {JSON: {"schema": error}}}
        for status in operation.statuses
    }
    if not operation.is_refused:
        found["responses"] |= {"200": {"description": "The answer.", "content": content}}
    if operation.path == "/health":
        found["responses"]["503"]["content"] = content
    if operation.needs_key:
        found["security"] = [{"key": []}, {}]
    return found


def _identifier(operation: Operation) -> str:
    words = [word.strip("{}") for part in operation.path.split("/") for word in part.replace(".", "-").split("-")]
    return "_".join([operation.method, *filter(None, words)])
