"""The OpenAPI document: every route with its request, its answers and its errors, from the types that the code uses."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.server.api.answer import SSE
from pi_runtime.server.api.ollama import LATEST
from pi_runtime.server.errors import ANTHROPIC, OLLAMA

JSON, TEXT, HTML = "application/json", "text/plain", "text/html"
REFERENCE = "#/components/schemas/{model}"
ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The key is missing or wrong.",
    403: "The Host or Origin header is not allowed.",
    404: "There is no such model.",
    408: "The client sent or read too slowly.",
    413: "The body is too large.",
    429: "The queue is full; `Retry-After` says when to ask again.",
    500: "A fault of the server.",
    501: "The model cannot do that.",
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


class AnthropicError(TypedDict):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: dict[str, str]


class Health(TypedDict):
    """Whether requests are taken."""

    status: str


@dataclass(frozen=True)
class Route:
    """What one method of one path does, and who does it."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    """A path as starlette writes it: `{name:path}` takes slashes too."""
    summary: str
    handler: Callable[..., Awaitable[Any]]
    """Answers: with a body an exchange, without one a request to a service."""
    body: Any = None
    """The type of its request; None where it has no body."""
    answer: Any = None
    """The type of its answer; None where it is none of JSON, or has no fixed form."""
    chunk: Any = None
    """The type of an event of its stream."""
    media: str = JSON
    stream_media: str = SSE
    plain_media: str | None = None
    """What the answer is for who does not accept `media`; None where it is that for everybody."""
    errors: Sequence[int] = ()
    """Statuses of errors beside those that all routes have."""
    needs_key: bool = True
    is_refused: bool = False
    """Whether every request is answered by an error."""

    @property
    def shown_path(self) -> str:
        """The path as the document has it."""
        return self.path.replace(":path}", "}")

    @property
    def statuses(self) -> list[int]:
        """The statuses of its errors."""
        common = [403, 500] + [401] * self.needs_key + [400, 408, 413, 429, 503] * (self.body is not None)
        return sorted({*common, *self.errors})


def document(names: Sequence[str], routes: Sequence[Route], *, refuses_unknown: bool = True) -> dict[str, Any]:
    """The document of a server for a model of these names, which refuses fields that it does not know, or does not."""
    schemas, components = _schemas(routes)
    for component in components.values():
        if component.get("additionalProperties") is True:  # a request's
            component["additionalProperties"] = not refuses_unknown
            _name_model(component, names)
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.shown_path, {})[route.method.lower()] = _described(route, schemas)
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


def _schemas(routes: Sequence[Route]) -> tuple[dict[str, Any], dict[str, Any]]:
    """For each type of the operations its schema, by name, and all schemas that these refer to."""
    types = {_key(kind): kind for route in routes for kind in _types(route)}
    inputs = [(key, "validation", TypeAdapter(kind)) for key, kind in types.items()]
    found, definitions = TypeAdapter.json_schemas(inputs, ref_template=REFERENCE)  # type: ignore[arg-type]
    return {key: schema for (key, _), schema in found.items()}, definitions.get("$defs", {})


def _types(route: Route) -> Iterator[Any]:
    yield from (kind for kind in (route.body, route.answer, route.chunk) if kind is not None)
    yield _error(route)


def _error(route: Route) -> Any:
    """The type of a route's errors."""
    forms = {ANTHROPIC: AnthropicError, OLLAMA: OllamaErrorBody}
    return next((form for start, form in forms.items() if route.path.startswith(start)), Error)


def _key(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))


def _name_model(schema: dict[str, Any], names: Sequence[str]) -> None:
    """Let the schema of a request allow the names of the one model only."""
    for model in schema.get("properties", {}).get("model", {}).get("anyOf", ()):
        if model["type"] == "string":
            more = [name + LATEST for name in names] if schema["title"].startswith("Ollama") else []
            model["enum"] = [*names, *more]


def _described(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    """The operation object of a route."""
    found: dict[str, Any] = {"summary": route.summary, "operationId": _identifier(route)}
    names = [part[1:-1] for part in route.shown_path.split("/") if part.startswith("{")]
    if names:
        schema = {"type": "string"}
        found["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    if route.body is not None:
        body = schemas[_key(route.body)]
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    answer = schemas[_key(route.answer)] if route.answer is not None else {}
    content: dict[str, Any] = {route.media: {"schema": answer} if route.media == JSON else {}}
    if route.plain_media is not None:
        content[route.plain_media] = {}
    if route.chunk is not None:
        content[route.stream_media] = {"x-itemSchema": schemas[_key(route.chunk)]}
    error = schemas[_key(_error(route))]
    found["responses"] = {
        str(status): {"description": ERRORS[status], "content": {JSON: {"schema": error}}} for status in route.statuses
    }
    if not route.is_refused:
        found["responses"] |= {"200": {"description": "The answer.", "content": content}}
    if route.answer is Health:
        found["responses"]["503"]["content"] = content
    if route.needs_key:
        found["security"] = [{"key": []}, {}]
    return found


def _identifier(route: Route) -> str:
    words = [word.strip("{}") for part in route.shown_path.split("/") for word in part.replace(".", "-").split("-")]
    return "_".join([route.method.lower(), *filter(None, words)])
