"""The application: which request goes where, and how answers are written.

    GET  /health /metrics /slots /props /v1/models …     from what is known, at once
    POST /v1/chat/completions …                          a job: admitted, prepared, run, written as it comes

A request is admitted before its body is read, so that one too many is refused at once. While it is answered a task
waits for the client to leave: then everything that was begun for it ends, wherever it is.
"""

import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
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
from pi_runtime.server.api.ollama import OllamaChatJob, OllamaGenerateJob
from pi_runtime.server.api.ollama_models import show
from pi_runtime.server.api.plain import apply_template, detokenize, embeddings, tokenize
from pi_runtime.server.api.responses import ResponseJob
from pi_runtime.server.api.served import Served
from pi_runtime.server.clients import Client
from pi_runtime.server.errors import ApiError, failed
from pi_runtime.server.figures import Figures
from pi_runtime.server.guard import Guard
from pi_runtime.server.jobs import Job
from pi_runtime.server.models import model_routes
from pi_runtime.server.page import page
from pi_runtime.server.reply import JSON, Reply, to_json
from pi_runtime.server.request_log import RequestLog, Write
from pi_runtime.server.requests import ClientGone, read_body, reading, while_connected
from pi_runtime.server.runs import Run
from pi_runtime.server.service import Service
from pi_runtime.server.sessions import session_routes
from pi_runtime.server.settings import ServerSettings


class JobType(Protocol):
    """Makes a job of the JSON of a request. Raises ApiError for a wrong one."""

    def of(self, body: object, served: Served) -> Job:
        """The job. It may take long."""


SHOWN_HEADERS = ("x-request-id", "x-unknown-fields")
"""Headers of answers that pages of other origins may read."""
Plain = Callable[[Any, Served], Mapping[str, Any]]
"""Makes the JSON of an answer that takes no engine. It may take long."""
Answer = Callable[[bytes, Ticket], Coroutine[Any, Any, None]]


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
            with self.service.admitted(scope["owner"]) as ticket:
                body = await read_body(receive, self.settings.limits.body_bytes, Headers(scope=scope))
                await while_connected(receive, answer(body, ticket))
        except ClientGone:
            self.service.metrics.cancelled += 1

    async def write(self, job: Job, run: Run, scope: Scope, send: Send) -> None:
        """Write what becomes of a job that has begun."""
        reply = Reply(send, job, self.settings.keep_alive_s)
        with self.service.running(run):
            try:
                await reply.write(run)
            except Exception as error:
                scope["error"] = found = failed(error)
                await reply.fail(found)


class JobEndpoint:
    """Answers requests that are jobs."""

    def __init__(self, app: App, make: JobType) -> None:
        self._app, self._make = app, make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.monotonic()
        await self._app.admitted(scope, receive, lambda body, ticket: self._answer(body, ticket, arrived, scope, send))

    async def _answer(self, body: bytes, ticket: Ticket, arrived: float, scope: Scope, send: Send) -> None:
        service, settings, served, client = self._app.service, self._app.settings, self._app.served, Client.of(scope)
        read = reading(scope, body, settings, lambda value: self._make.of(value, served))
        job = await service.prepare(client, read)
        await self._app.write(job, await service.begin(job, ticket, arrived, client), scope, send)


class PlainEndpoint:
    """Answers requests that take no engine, though they may take long."""

    def __init__(self, app: App, answer: Plain) -> None:
        self._app, self._plain = app, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app.admitted(scope, receive, lambda body, _: self._answer(body, scope, receive, send))

    async def _answer(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        settings, served = self._app.settings, self._app.served
        read = reading(scope, body, settings, lambda value: to_json(self._plain(value, served)))
        found = await self._app.service.prepare(Client.of(scope), read)
        await Response(found, media_type=JSON)(scope, receive, send)


def build_app(settings: ServerSettings, open_engine: Callable[[], Engine], log: Write) -> Starlette:
    """The application. It opens the engine when it starts, and closes engine and model when it ends.

    `log` is called with lines of what it does, and for each request if the settings ask for it. `app.state.service` is
    the service.
    """
    service = Service(open_engine, settings)
    requests = RequestLog(log, every_request=settings.log_requests)
    service.on_event = requests.event
    app = App(service)
    routes = routes_of(app)
    paths: dict[Any, str] = {route.endpoint: route.path for route in routes}

    def count(scope: Scope, status: int, seconds: float) -> None:
        path = paths.get(scope.get("endpoint"), "other")
        service.metrics.requests[path, status] += 1
        requests.count(scope, path, status, seconds)

    guards = [Middleware(Guard, settings=settings, count=count)]
    if settings.cors:
        allowed = settings.allowed_origins
        guards.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=allowed,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=SHOWN_HEADERS,
            ),
        )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        await service.close()
        requests.event("the server has stopped")

    handlers = {ApiError: _refuse, HTTPException: _refuse_http, Exception: _refuse_fault}
    found = Starlette(routes=routes, middleware=guards, exception_handlers=handlers, lifespan=lifespan)
    found.state.service = service
    return found


def routes_of(app: App) -> list[Route]:
    """All routes."""
    figures = Figures(app)
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
        "/api/show": show,
    }
    return [
        Route("/", _page),
        Route("/health", figures.health),
        Route("/metrics", figures.metrics),
        Route("/slots", figures.slots),
        Route("/props", figures.props),
        Route("/openapi.json", figures.described),
        *model_routes(app),
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
    request.scope["error"] = error
    return JSONResponse(error.body_at(request.scope["path"]), error.status, error.headers)


async def _refuse_http(request: Request, error: Exception) -> Response:
    """What starlette refuses: paths and methods that there are not."""
    assert isinstance(error, HTTPException)
    said = {404: "there is no such path", 405: f"{request.method} is not what this path takes"}
    found = ApiError(error.status_code, said.get(error.status_code, error.detail), headers=error.headers)
    return await _refuse(request, found)


async def _refuse_fault(request: Request, error: Exception) -> Response:
    return await _refuse(request, failed(error))
