"""What routes do: the kinds of handlers, and the routes that say how the server is."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pi_runtime.server.api.answer import AnswerWriter, to_json
from pi_runtime.server.api.ollama_models import ollama_version
from pi_runtime.server.api.plain import retrieve_model
from pi_runtime.server.api.prompt import Prompt
from pi_runtime.server.api.served import Served
from pi_runtime.server.chat_page import chat_page
from pi_runtime.server.exchange import Exchange
from pi_runtime.server.metrics import MEDIA
from pi_runtime.server.openapi import TEXT
from pi_runtime.server.response import JSON
from pi_runtime.server.service import Service

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
    return JSONResponse(
        {
            "model": served.name,
            "context": model.context,
            "mode": model.mode,
            "rungs": model.manifest.rungs_in(model.mode),
            "device": model.device,
            "chat_template": served.template,
            "total_slots": settings.slots,
            "queue": settings.queue,
            "system_fingerprint": served.fingerprint,
            "generation_defaults": {**served.generation, **settings.sampling},
        }
    )


async def model(service: Service, request: Request) -> Response:
    """The model that the path names."""
    return JSONResponse(retrieve_model(request.path_params["name"], service.served))


async def ollama(_service: Service, _: Request) -> Response:
    """The version of Ollama's forms."""
    return JSONResponse(ollama_version())
