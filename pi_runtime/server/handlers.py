"""What routes do: the kinds of handlers, and the routes that say how the server is."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pi_runtime.server.api.answer import AnswerWriter, to_json
from pi_runtime.server.api.ollama_models import ollama_version
from pi_runtime.server.api.plain import retrieve_model
from pi_runtime.server.api.request import GenerateRequest
from pi_runtime.server.api.served import Served
from pi_runtime.server.host import BodyEndpoint, Exchange, Host
from pi_runtime.server.metrics import MEDIA
from pi_runtime.server.openapi import Route
from pi_runtime.server.page import page
from pi_runtime.server.response import JSON

Handler = Callable[[Host, Route], Any]


def at_once(answer: Callable[[Host, Request], Awaitable[Response]]) -> Handler:
    """Answers from what is known, without admission."""

    def endpoint(host: Host, _: Route) -> Any:
        return partial(answer, host)

    return endpoint


def known(describe: Callable[[Served], Any]) -> Handler:
    """Answers with JSON of the model that is served, without admission."""

    async def answer(host: Host, _: Request) -> Response:
        return JSONResponse(describe(host.served))

    return at_once(answer)


def with_body(handle: Callable[[Host, Exchange], Awaitable[Response | None]]) -> Handler:
    """Answers requests that have a body."""

    def endpoint(host: Host, _: Route) -> Any:
        return BodyEndpoint(host, partial(handle, host))

    return endpoint


@dataclass(frozen=True)
class Computed:
    """Answers with JSON that takes no engine, though it may take long."""

    compute: Callable[[Any, Served], Any]

    def __call__(self, host: Host, route: Route) -> BodyEndpoint:
        """The endpoint of a route."""

        async def handle(exchange: Exchange) -> Response:
            served = host.served
            found = await host.prepared(exchange, lambda value: to_json(self.compute(route.read(value), served)))
            return Response(found, media_type=JSON)

        return BodyEndpoint(host, handle)


@dataclass(frozen=True)
class Generated:
    """Answers with what the engine generates: what it is asked for, and what writes its answers."""

    to_request: Callable[[Any, Served], GenerateRequest]
    writer_of: Callable[[Any, GenerateRequest, Served], AnswerWriter]

    def read(self, body: Any, served: Served) -> tuple[GenerateRequest, AnswerWriter]:
        """What becomes of a body. Raises ApiError for what is wrong."""
        request = self.to_request(body, served)
        return request, self.writer_of(body, request, served)

    def __call__(self, host: Host, route: Route) -> BodyEndpoint:
        """The endpoint of a route."""

        async def handle(exchange: Exchange) -> None:
            served = host.served
            request, writer = await host.prepared(exchange, lambda value: self.read(route.read(value), served))
            in_flight = await host.service.begin(request, exchange.ticket, exchange.arrived, exchange.client)
            await host.respond(exchange, in_flight, writer, streams=request.streams)

        return BodyEndpoint(host, handle)


async def chat_page(_host: Host, _: Request) -> Response:
    """The page to chat on."""
    body, headers = page()
    return Response(body, headers=headers)


async def health(host: Host, _: Request) -> Response:
    """Whether requests are taken; 503 with the reason where they are not."""
    is_well, word = host.service.health
    return JSONResponse({"status": "ok" if is_well else word}, 200 if is_well else 503)


async def metrics(host: Host, _: Request) -> Response:
    """All figures, for Prometheus."""
    service, engine = host.service, host.service.opened
    stats = None if engine is None else engine.stats
    text = service.metrics.text(stats, slots=service.settings.slots, open_requests=service.open_requests)
    return Response(text, media_type=MEDIA)


async def slots(host: Host, _: Request) -> Response:
    """What runs in each slot: how far it is, and nothing of what it says."""
    context = host.service.engine.model.context
    running = [stream for request in host.service.in_flight for stream in request.streams if stream.is_running]
    found = []
    for number in range(host.settings.slots):
        slot: dict[str, Any] = {"id": number, "n_ctx": context, "is_processing": number < len(running)}
        if number < len(running):
            stats = running[number].stats
            slot |= {"prompt_tokens": stats.prompt_tokens, "cached_tokens": stats.cached_tokens}
            slot |= {"generated_tokens": stats.generated_tokens}
        found.append(slot)
    return JSONResponse(found)


async def props(host: Host, _: Request) -> Response:
    """What the server is."""
    served, settings = host.served, host.settings
    model = served.model
    return JSONResponse(
        {
            "model": served.name,
            "context": model.context,
            "mode": model.mode,
            "device": model.device,
            "chat_template": served.template,
            "total_slots": settings.slots,
            "queue": settings.queue,
            "system_fingerprint": served.fingerprint,
            "generation_defaults": dict(model.manifest.generation),
        }
    )


async def openapi(host: Host, _: Request) -> Response:
    """The OpenAPI document."""
    return Response(host.document, media_type=JSON)


async def model(host: Host, request: Request) -> Response:
    """The model that the path names."""
    return JSONResponse(retrieve_model(request.path_params["name"], host.served))


async def ollama(_host: Host, _: Request) -> Response:
    """The version of Ollama's forms."""
    return JSONResponse(ollama_version())
