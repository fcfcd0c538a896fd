"""The routes: the one list of what the server answers, and what each does.

The application and its OpenAPI document are made of it.
"""

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, get_type_hints

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pi_runtime.server.api import anthropic, chat, completions, embeddings, native, ollama, plain, responses
from pi_runtime.server.api.answer import AnswerWriter, to_json
from pi_runtime.server.api.prompt import Prompt
from pi_runtime.server.api.served import Served
from pi_runtime.server.exchange import Exchange
from pi_runtime.server.metrics import MEDIA
from pi_runtime.server.openapi import HTML, JSON, TEXT, Health, Route, document
from pi_runtime.server.service import Service

FIXED_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
}


class ChatPage(NamedTuple):
    """The bytes of the chat page, and the headers to send them with."""

    body: bytes
    headers: Mapping[str, str]


@cache
def chat_page() -> ChatPage:
    """Read the chat page, and compute its Content-Security-Policy.

    The policy names the page's own style and script by their hashes: nothing that a model writes can become script, and
    `trusted-types 'none'` makes browsers refuse every assignment of HTML.
    """
    body = files("pi_runtime.server").joinpath("page.html").read_bytes()
    policy = {
        "default-src": "'none'",
        "script-src": _hashes(body, "script"),
        "style-src": _hashes(body, "style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    text = "; ".join(f"{name} {value}" for name, value in policy.items())
    return ChatPage(body, FIXED_HEADERS | {"content-security-policy": text})


def _hashes(body: bytes, tag: str) -> str:
    """Hashes of what stands in the page's elements of this name, as a policy spells them."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), body, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)


RUNNING = "Ollama is running"


def known(describe: Callable[[Served], Any]) -> Callable[[Service, Request], Awaitable[Response]]:
    """A handler that answers with what a function says of the served model."""

    async def answer(service: Service, _: Request) -> Response:
        return JSONResponse(describe(service.served))

    return answer


@dataclass(frozen=True)
class Computed:
    """A handler that answers with JSON which a function computes of the body, without the engine."""

    compute: Callable[[Any, Served], Any]

    async def __call__(self, exchange: Exchange) -> Response:
        """Answer an exchange."""
        return Response(await exchange.beside(self._found, exchange, exchange.service.served), media_type=JSON)

    def _found(self, exchange: Exchange, served: Served) -> bytes:
        return to_json(self.compute(exchange.typed(), served))


@dataclass(frozen=True)
class Generated:
    """A handler that answers with text which the engine generates, written in one form of API."""

    to_prompt: Callable[[Any, Served], Prompt]
    writer_of: Callable[[Any, Prompt, Served], AnswerWriter]

    def read(self, body: Any, served: Served) -> tuple[Prompt, AnswerWriter]:
        """The prompt that a typed body asks for, and the writer of its answers. Raises ApiError for what is wrong."""
        prompt = self.to_prompt(body, served)
        return prompt, self.writer_of(body, prompt, served)

    async def __call__(self, exchange: Exchange) -> None:
        """Answer an exchange."""
        prompt, writer = await exchange.beside(self._found, exchange, exchange.service.served)
        await exchange.respond(await exchange.begin(prompt), writer, streams=prompt.streams)

    def _found(self, exchange: Exchange, served: Served) -> tuple[Prompt, AnswerWriter]:
        return self.read(exchange.typed(), served)


async def root(_service: Service, request: Request) -> Response:
    """The page to chat on for browsers, which ask for HTML; for others the words by which clients know Ollama."""
    accepted = " ".join(request.headers.getlist("accept")).lower()
    if "text/html" not in accepted and "application/xhtml+xml" not in accepted:
        return Response(RUNNING, media_type=TEXT, headers={"vary": "accept"})
    body, headers = chat_page()
    return Response(body, headers={**headers, "vary": "accept"})


async def health(service: Service, _: Request) -> Response:
    """Whether requests are taken; 503 with the reason where they are not."""
    is_well, word = service.health
    return JSONResponse({"status": "ok" if is_well else word}, 200 if is_well else 503)


async def metrics(service: Service, _: Request) -> Response:
    """All figures of server and engine, for Prometheus."""
    stats = None if service.opened is None else service.opened.stats
    text = service.metrics.text(stats, slots=service.settings.slots, open_requests=service.open_requests)
    return Response(text, media_type=MEDIA)


async def slots(service: Service, _: Request) -> Response:
    """What runs in each slot: how far it is, and nothing of what it says."""
    context = service.engine.model.context
    running = [stream for request in service.in_flight for stream in request.streams if stream.is_running]
    found = []
    for number in range(service.settings.slots):
        slot: dict[str, Any] = {"id": number, "n_ctx": context, "is_processing": number < len(running)}
        if number < len(running):
            stats = running[number].stats
            slot |= {"prompt_tokens": stats.prompt_tokens, "cached_tokens": stats.cached_tokens}
            slot |= {"generated_tokens": stats.generated_tokens}
        found.append(slot)
    return JSONResponse(found)


async def props(service: Service, _: Request) -> Response:
    """Model, settings and defaults of the server."""
    served, settings = service.served, service.settings
    model = served.model
    defaults = {**served.generation, **settings.sampling}
    return JSONResponse(
        {
            "model": served.name,
            "model_alias": served.name,
            "model_path": model.name,
            "context": model.context,
            "mode": model.mode,
            "rungs": model.manifest.rungs_in(model.mode),
            "device": model.device,
            "chat_template": served.template,
            "total_slots": settings.slots,
            "queue": settings.queue,
            "system_fingerprint": served.fingerprint,
            "generation_defaults": defaults,
            "default_generation_settings": {"n_ctx": model.context, "params": defaults},
        }
    )


async def model(service: Service, request: Request) -> Response:
    """The model that the path names."""
    return JSONResponse(plain.retrieve_model(request.path_params["name"], service.served))


async def ollama_version(_service: Service, _: Request) -> Response:
    """The version of Ollama's forms."""
    return JSONResponse(ollama.ollama_version())


@cache
def _document(names: Sequence[str], *, refuses_unknown: bool) -> bytes:
    """The OpenAPI document, made once, for it takes some tenths of a second."""
    return to_json(document(names, ROUTES, refuses_unknown=refuses_unknown))


async def openapi(service: Service, _: Request) -> Response:
    """The OpenAPI document."""
    settings = service.settings
    found = _document(settings.names, refuses_unknown=settings.unknown_fields == "refuse")
    return Response(found, media_type=JSON)


def _generated(path: str, summary: str, to_prompt: Callable[..., Any], writer: Any, *errors: int) -> Route:
    """The route of a form of API: a function that makes a prompt of its body, and the class that writes answers."""
    types = {"body": get_type_hints(to_prompt)["body"], "answer": writer.answer_type, "chunk": writer.chunk_type}
    handler = Generated(to_prompt, writer)
    return Route("POST", path, summary, handler, stream_media=writer.media, errors=(404, *errors), **types)


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
    Route("GET", "/", "A page to chat on, for who asks for HTML.", root, media=HTML, plain_media=TEXT, needs_key=False),
    Route("GET", "/health", "Whether requests are taken.", health, answer=Health, errors=(503,), needs_key=False),
    Route("GET", "/metrics", "Figures in Prometheus' form.", metrics, media=TEXT),
    Route("GET", "/slots", "What runs.", slots, errors=(503,)),
    Route("GET", "/props", "What the server is.", props, errors=(503,)),
    Route("GET", "/openapi.json", "This document.", openapi),
    _described("/v1/models", "The one model.", plain.list_models),
    Route(
        "GET", "/v1/models/{name:path}", "The model by its name.", model, answer=plain.ModelObject, errors=(404, 503)
    ),
    _generated("/v1/chat/completions", "The assistant's next message.", chat.chat_request, chat.ChatWriter),
    _generated(
        "/v1/completions",
        "Texts continued, and log-probabilities of texts.",
        completions.completion_request,
        completions.CompletionWriter,
        501,
    ),
    _generated(
        "/v1/responses",
        "The next turn of a conversation. Nothing is stored.",
        responses.response_request,
        responses.ResponseWriter,
    ),
    _generated(
        "/v1/messages",
        "Anthropic's form: the assistant's next turn.",
        anthropic.messages_request,
        anthropic.MessagesWriter,
    ),
    _generated("/completion", "llama-server's completion.", native.native_request, native.NativeWriter, 501),
    _generated("/infill", "Code filled in.", native.infill_request, native.NativeWriter, 501),
    _computed("/v1/messages/count_tokens", "The tokens of a conversation.", plain.count_message_tokens, 404),
    _computed("/v1/responses/input_tokens", "The tokens of a turn's input.", plain.count_response_tokens, 404),
    _computed("/v1/chat/completions/input_tokens", "The tokens of a chat.", plain.count_chat_tokens, 404),
    _generated("/v1/embeddings", "Texts as vectors.", embeddings.embeddings_request, embeddings.EmbeddingsWriter, 501),
    Route(
        *("POST", "/v1/rerank", "Refused: the model writes text.", Computed(plain.refuse)),
        body=plain.RerankRequest,
        is_refused=True,
        errors=(501,),
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
        501,
    ),
    _generated("/api/embed", "Texts as vectors.", embeddings.embed_request, embeddings.OllamaEmbeddingsWriter, 501),
    _described("/api/tags", "Ollama's list of models.", ollama.tags),
    _described("/api/ps", "Ollama's list of loaded models.", ollama.running),
    Route("GET", "/api/version", "The version of Ollama's forms.", ollama_version, answer=ollama.OllamaVersion),
    _computed("/api/show", "What the model is, as Ollama describes it.", ollama.show, 404),
)

ALIASES = {
    "/v1/health": "/health",
    "/models": "/v1/models",
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
    "/responses": "/v1/responses",
    "/embeddings": "/v1/embeddings",
    "/rerank": "/v1/rerank",
    "/chat/completions/input_tokens": "/v1/chat/completions/input_tokens",
    "/responses/input_tokens": "/v1/responses/input_tokens",
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
