"""The routes: the one list of what the server answers. The application and its OpenAPI document are made of it."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, get_type_hints

from starlette.requests import Request
from starlette.responses import Response

from pi_runtime.server import handlers
from pi_runtime.server.api import chat, completions, ollama, ollama_models, plain, responses
from pi_runtime.server.api.answer import to_json
from pi_runtime.server.handlers import Computed, Generated, known
from pi_runtime.server.openapi import HTML, JSON, TEXT, Health, Route, document
from pi_runtime.server.service import Service


@cache
def _document(model_name: str, *, refuses_unknown: bool) -> bytes:
    """The OpenAPI document, made once, for it takes some tenths of a second."""
    return to_json(document(model_name, ROUTES, refuses_unknown=refuses_unknown))


async def openapi(service: Service, _: Request) -> Response:
    """The OpenAPI document."""
    settings = service.settings
    found = _document(settings.model_name, refuses_unknown=settings.unknown_fields == "refuse")
    return Response(found, media_type=JSON)


def _generated(path: str, summary: str, to_prompt: Callable[..., Any], writer: Any) -> Route:
    """The route of a form of API: a function that makes a prompt of its body, and the class that writes answers."""
    types = {"body": get_type_hints(to_prompt)["body"], "answer": writer.answer_type, "chunk": writer.chunk_type}
    handler = Generated(to_prompt, writer)
    return Route("POST", path, summary, handler, stream_media=writer.media, errors=(404,), **types)


def _computed(path: str, summary: str, compute: Callable[..., Any], *errors: int) -> Route:
    """The route of a function that computes JSON of body and model. The types are those of its annotations."""
    types = get_type_hints(compute)
    return Route("POST", path, summary, Computed(compute), body=types["body"], answer=types["return"], errors=errors)


def _described(path: str, summary: str, describe: Callable[..., Any]) -> Route:
    """The route of a function that says something of the model. The type is that of its annotation."""
    return Route("GET", path, summary, known(describe), answer=get_type_hints(describe)["return"], errors=(503,))


MOST_PARTS = 8
"""Parts of a path that are looked at: ours have fewer."""
OWN_ROUTES = (
    Route(
        "GET",
        "/",
        "A page to chat on, for who asks for HTML.",
        handlers.root,
        media=HTML,
        plain_media=TEXT,
        needs_key=False,
    ),
    Route(
        "GET",
        "/health",
        "Whether requests are taken.",
        handlers.health,
        answer=Health,
        errors=(503,),
        needs_key=False,
    ),
    Route("GET", "/metrics", "Figures in Prometheus' form.", handlers.metrics, media=TEXT),
    Route("GET", "/slots", "What runs.", handlers.slots, errors=(503,)),
    Route("GET", "/props", "What the server is.", handlers.props, errors=(503,)),
    Route("GET", "/openapi.json", "This document.", openapi),
    _described("/v1/models", "The one model.", plain.list_models),
    Route(
        "GET",
        "/v1/models/{name:path}",
        "The model by its name.",
        handlers.model,
        answer=plain.ModelObject,
        errors=(404, 503),
    ),
    _generated("/v1/chat/completions", "The assistant's next message.", chat.chat_request, chat.ChatWriter),
    _generated(
        "/v1/completions",
        "Texts continued, and log-probabilities of texts.",
        completions.completion_request,
        completions.CompletionWriter,
    ),
    _generated(
        "/v1/responses",
        "The next turn of a conversation. Nothing is stored.",
        responses.response_request,
        responses.ResponseWriter,
    ),
    Route(
        "POST",
        "/v1/embeddings",
        "Refused: the model writes text.",
        Computed(plain.embeddings),
        body=dict[str, Any],
        is_refused=True,
    ),
    _computed("/tokenize", "The tokens of a text.", plain.tokenize),
    _computed("/detokenize", "The text of tokens.", plain.detokenize),
    _computed("/apply-template", "The prompt of a chat.", plain.apply_template, 404),
    _generated("/api/chat", "Ollama's chat.", ollama.ollama_chat_request, ollama.OllamaChatWriter),
    _generated(
        "/api/generate",
        "Ollama's answer to a prompt.",
        ollama.ollama_generate_request,
        ollama.OllamaGenerateWriter,
    ),
    _described("/api/tags", "Ollama's list of models.", ollama_models.tags),
    _described("/api/ps", "Ollama's list of loaded models.", ollama_models.running),
    Route("GET", "/api/version", "The version of Ollama's forms.", handlers.ollama, answer=ollama_models.OllamaVersion),
    _computed("/api/show", "What the model is, as Ollama describes it.", ollama_models.show, 404),
)

ALIASES = {
    "/v1/health": "/health",
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
}
"""Further paths, as llama-server has them, of clients whose base URL has `/v1` where it should not, or lacks it."""
ROUTES = (
    *OWN_ROUTES,
    *(replace(route, path=path) for path, own in ALIASES.items() for route in OWN_ROUTES if route.path == own),
)


def beside(path: str) -> str | None:
    """The path that is meant by one that there is not: with `/v1` or `/api` before it, or without a beginning."""
    parts = path.strip("/").split("/")[:MOST_PARTS]
    ends = ["/" + "/".join(parts[n:]) for n in range(len(parts))]
    meant = [start + end for end in ends for start in ("", "/v1", "/api")]
    return next((route.path for one in meant for route in ROUTES if route.path == one != "/"), None)
