"""The application: which request goes where, and how answers are written.

    GET  /health /metrics /slots /props /v1/models …     from what is known, at once
    POST /v1/chat/completions …                          a job: admitted, prepared, run, written as it comes

A request is admitted before its body is read, so that one too many is refused at once. While it is answered a task
waits for the client to leave: then everything that was begun for it ends, wherever it is.
"""

import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pi_runtime.engine.engine import Engine
from pi_runtime.server.admission import Ticket
from pi_runtime.server.api.chat import ChatJob
from pi_runtime.server.api.completions import CompletionJob
from pi_runtime.server.api.ollama import OllamaChatJob, OllamaGenerateJob, tags
from pi_runtime.server.api.openapi import document
from pi_runtime.server.api.plain import apply_template, detokenize, embeddings, list_models, retrieve_model, tokenize
from pi_runtime.server.api.responses import ResponseJob
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError, failed
from pi_runtime.server.guard import Guard
from pi_runtime.server.jobs import NDJSON, SSE, Event, Job
from pi_runtime.server.metrics import MEDIA
from pi_runtime.server.page import page
from pi_runtime.server.requests import ClientGone, parsed, read_body, while_connected
from pi_runtime.server.service import Run, Service
from pi_runtime.server.sessions import session_routes
from pi_runtime.server.settings import ServerSettings

KEEP_ALIVE = b": keep-alive\n\n"
JSON = "application/json"
OLLAMA = "/api/"
"""Paths whose errors have Ollama's form."""
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class JobType(Protocol):
    """Makes a job of the JSON of a request. Raises ApiError for a wrong one."""

    def of(self, body: object, served: Served) -> Job:
        """The job. It may take long."""


Plain = Callable[[Any, Served], Mapping[str, Any]]
"""Makes the JSON of an answer that takes no engine. It may take long."""
Answer = Callable[[bytes, Ticket], Coroutine[Any, Any, None]]
Log = Callable[[str], None]


class App:
    """What the routes share."""

    def __init__(self, service: Service) -> None:
        self.service, self.settings = service, service.settings
        self._served: Served | None = None

    @property
    def served(self) -> Served:
        """The model as answers speak of it. Raises ApiError (503) before it is there."""
        if self._served is None:
            self._served = Served(self.service.engine.model, self.settings)
        return self._served

    async def admitted(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        """Admit a request, read its body, and let it be answered for as long as its client waits."""
        try:
            with self.service.admitted() as ticket:
                body = await read_body(receive, self.settings.limits.body_bytes, Headers(scope=scope))
                await while_connected(receive, answer(body, ticket))
        except ClientGone:
            self.service.metrics.cancelled += 1

    async def write(self, job: Job, run: Run, send: Send) -> None:
        """Write what becomes of a job that has begun."""
        reply = Reply(send, job, self.settings.keep_alive_s)
        with self.service.running(run):
            try:
                await reply.write(run)
            except Exception as error:
                await reply.fail(failed(error))


class JobEndpoint:
    """Answers requests that are jobs."""

    def __init__(self, app: App, make: JobType) -> None:
        self._app, self._make = app, make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.monotonic()
        owner = scope["owner"]
        await self._app.admitted(scope, receive, lambda body, ticket: self._answer(body, ticket, arrived, owner, send))

    async def _answer(self, body: bytes, ticket: Ticket, arrived: float, owner: str, send: Send) -> None:
        service, settings, served = self._app.service, self._app.settings, self._app.served
        job = await service.prepare(lambda: self._make.of(parsed(body, settings.limits), served))
        await self._app.write(job, await service.begin(job, ticket, arrived, owner), send)


class PlainEndpoint:
    """Answers requests that take no engine, though they may take long."""

    def __init__(self, app: App, answer: Plain) -> None:
        self._app, self._plain = app, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app.admitted(scope, receive, lambda body, _: self._answer(body, scope, receive, send))

    async def _answer(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        limits, served = self._app.settings.limits, self._app.served
        found = await self._app.service.prepare(lambda: to_json(self._plain(parsed(body, limits), served)))
        await Response(found, media_type=JSON)(scope, receive, send)


class Reply:
    """Writes what becomes of a job: its events as they come, or its whole answer."""

    def __init__(self, send: Send, job: Job, keep_alive_s: float) -> None:
        self._send, self._job, self._keep_alive_s = send, job, keep_alive_s
        self._has_begun = False

    async def write(self, run: Run) -> None:
        """Write until everything has been said. Raises ApiError for what ends it before."""
        job = self._job
        while not run.ended:
            if await run.wait(self._keep_alive_s):
                await self._events(run.read())
            elif job.streams and job.media == SSE:
                await self._say(KEEP_ALIVE)
        if job.streams:
            await self._events(job.last())
            await self._say(b"", more=False)
        else:
            await self._begin(JSON)
            await self._say(to_json(job.whole()), more=False)

    async def fail(self, error: ApiError) -> None:
        """Write an error as the last events, if anything was written; else raise it, for it has a status."""
        if not self._has_begun:
            raise error
        await self._events(self._job.failed(error))
        await self._say(b"", more=False)

    async def _events(self, events: Sequence[Event]) -> None:
        if events and self._job.streams:
            await self._say(b"".join(encoded(event, self._job.media) for event in events))

    async def _say(self, data: bytes, *, more: bool = True) -> None:
        # The status comes with the first of it: what fails before has a status of its own.
        if not self._has_begun:
            await self._begin(f"{self._job.media}; charset=utf-8")
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _begin(self, media: str) -> None:
        self._has_begun = True
        headers = [(b"content-type", media.encode()), *(STREAM_HEADERS if self._job.streams else ())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})


def to_json(value: Any) -> bytes:
    """JSON as it goes over the wire."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def encoded(event: Event, media: str) -> bytes:
    """An event as it goes over the wire."""
    data = event.data.encode() if isinstance(event.data, str) else to_json(event.data)
    if media == NDJSON:
        return data + b"\n"
    name = b"" if event.event is None else b"event: " + event.event.encode() + b"\n"
    return name + b"data: " + data + b"\n\n"


class Figures:
    """The routes that say how the server is. They are answered from what is known, at once."""

    def __init__(self, app: App) -> None:
        self._app, self._service = app, app.service

    async def health(self, _: Request) -> Response:
        """Whether requests are taken; 503 with the reason where they are not."""
        is_well, word = self._service.health
        return JSONResponse({"status": "ok" if is_well else word}, 200 if is_well else 503)

    async def metrics(self, _: Request) -> Response:
        """All figures, for Prometheus."""
        service, engine = self._service, self._service.opened
        text = service.metrics.text(
            None if engine is None else engine.stats,
            slots=service.settings.slots,
            open_requests=service.open_requests,
        )
        return Response(text, media_type=MEDIA)

    async def slots(self, _: Request) -> Response:
        """What runs in each slot: how far it is, and nothing of what it says."""
        context = self._service.engine.model.context
        running = [stream for run in self._service.runs for stream in run.streams if stream.is_running]
        found = []
        for number in range(self._service.settings.slots):
            slot: dict[str, Any] = {"id": number, "n_ctx": context, "is_processing": number < len(running)}
            if number < len(running):
                stats = running[number].stats
                slot |= {"prompt_tokens": stats.prompt_tokens, "cached_tokens": stats.cached_tokens}
                slot |= {"generated_tokens": stats.generated_tokens}
            found.append(slot)
        return JSONResponse(found)

    async def props(self, _: Request) -> Response:
        """What the server is."""
        served, settings = self._app.served, self._app.settings
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

    async def described(self, _: Request) -> Response:
        """The OpenAPI document."""
        return JSONResponse(document(self._app.settings.model_name))


class Models:
    """The routes that list models, of which there is one."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def listed(self, _: Request) -> Response:
        """OpenAI's list."""
        return JSONResponse(list_models(self._app.served))

    async def one(self, request: Request) -> Response:
        """The model that the path names."""
        return JSONResponse(retrieve_model(request.path_params["name"], self._app.served))

    async def tagged(self, _: Request) -> Response:
        """Ollama's list."""
        return JSONResponse(tags(self._app.served))


def build_app(settings: ServerSettings, open_engine: Callable[[], Engine], log: Log | None = None) -> Starlette:
    """The application. It opens the engine when it starts, and closes engine and model when it ends.

    `log` is called with a line for each request if the settings ask for it. `app.state.service` is the service.
    """
    service = Service(open_engine, settings)
    app = App(service)
    routes = routes_of(app)
    paths: dict[Any, str] = {route.endpoint: route.path for route in routes}

    def count(scope: Scope, status: int, seconds: float) -> None:
        path = paths.get(scope.get("endpoint"), "other")
        service.metrics.requests[path, status] += 1
        if settings.log_requests and log is not None:
            log(f"{scope['method']} {path} {status} {seconds:.3f} s")

    guards = [Middleware(Guard, settings=settings, count=count)]
    if settings.cors:
        allowed = settings.allowed_origins
        guards.insert(0, Middleware(CORSMiddleware, allow_origins=allowed, allow_methods=["*"], allow_headers=["*"]))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        await service.close()

    handlers = {ApiError: _refuse, HTTPException: _refuse_http, Exception: _refuse_fault}
    found = Starlette(routes=routes, middleware=guards, exception_handlers=handlers, lifespan=lifespan)
    found.state.service = service
    return found


def routes_of(app: App) -> list[Route]:
    """All routes."""
    figures, models = Figures(app), Models(app)
    jobs: dict[str, JobType] = {
        "/v1/chat/completions": ChatJob,
        "/v1/completions": CompletionJob,
        "/v1/responses": ResponseJob,
        "/api/chat": OllamaChatJob,
        "/api/generate": OllamaGenerateJob,
    }
    plain: dict[str, Plain] = {
        "/tokenize": tokenize,
        "/detokenize": detokenize,
        "/apply-template": apply_template,
        "/v1/embeddings": embeddings,
    }
    return [
        Route("/", _page),
        Route("/health", figures.health),
        Route("/metrics", figures.metrics),
        Route("/slots", figures.slots),
        Route("/props", figures.props),
        Route("/openapi.json", figures.described),
        Route("/v1/models", models.listed),
        Route("/v1/models/{name:path}", models.one),
        Route("/api/tags", models.tagged),
        *(Route(path, JobEndpoint(app, job), methods=["POST"]) for path, job in jobs.items()),
        *(Route(path, PlainEndpoint(app, answer), methods=["POST"]) for path, answer in plain.items()),
        *session_routes(app),
    ]


async def _page(_: Request) -> Response:
    """The page to chat on."""
    body, headers = page()
    return Response(body, headers=headers)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    body = {"error": error.message} if request.url.path.startswith(OLLAMA) else error.body()
    return JSONResponse(body, error.status, error.headers)


async def _refuse_http(request: Request, error: Exception) -> Response:
    """What starlette refuses: paths and methods that there are not."""
    assert isinstance(error, HTTPException)
    said = {404: "there is no such path", 405: f"{request.method} is not what this path takes"}
    found = ApiError(error.status_code, said.get(error.status_code, error.detail), headers=error.headers)
    return await _refuse(request, found)


async def _refuse_fault(request: Request, error: Exception) -> Response:
    return await _refuse(request, failed(error))
