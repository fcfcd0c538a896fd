"""The application: which request goes where, and how answers are written.

    GET  /health /metrics /slots /props /v1/models …     from what is known, at once
    POST /v1/chat/completions …                          a job: admitted, prepared, run, written as it comes

A request is admitted before its body is read, so that one too many is refused at once. While it is answered a task
waits for the client to leave: then everything that was begun for it ends, wherever it is.
"""

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pi_runtime.engine.engine import Engine
from pi_runtime.server.admission import Ticket
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError, failed
from pi_runtime.server.guard import Guard
from pi_runtime.server.jobs import NDJSON, SSE, Event, Job
from pi_runtime.server.metrics import MEDIA
from pi_runtime.server.requests import ClientGone, parsed, read_body, while_connected
from pi_runtime.server.service import Run, Service
from pi_runtime.server.settings import ServerSettings

KEEP_ALIVE = b": keep-alive\n\n"
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class JobType(Protocol):
    """Makes a job of the JSON of a request. Raises ApiError for a wrong one."""

    def of(self, body: object, served: Served) -> Job:
        """The job. It may take long."""


Plain = Callable[[Any, Served], dict[str, Any]]
"""Makes the JSON of an answer that takes no engine. It may take long."""


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


class JobEndpoint:
    """Answers requests that are jobs."""

    def __init__(self, app: App, make: JobType) -> None:
        self._app, self._make, self._service = app, make, app.service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, self._app.settings)
        arrived = time.monotonic()
        try:
            with self._service.admitted() as ticket:
                body = await _body(scope, receive, self._app.settings)
                await while_connected(receive, self._answer(body, reply, ticket, arrived))
        except ClientGone:
            self._service.metrics.cancelled += 1
        except ApiError as error:
            await reply.error(error)

    async def _answer(self, body: bytes, reply: "Reply", ticket: Ticket, arrived: float) -> None:
        nesting, served = self._app.settings.limits.nesting, self._app.served
        job = await self._service.prepare(lambda: self._make.of(parsed(body, nesting), served))
        run = await self._service.begin(job, ticket, arrived)
        with self._service.running(run):
            try:
                await reply.run(run)
            except ApiError as error:
                await reply.error(error, job)
            except Exception as error:
                log_fault(error)
                await reply.error(failed(error), job)


class PlainEndpoint:
    """Answers requests that take no engine, though they may take long."""

    def __init__(self, app: App, answer: Plain) -> None:
        self._app, self._plain, self._service = app, answer, app.service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, self._app.settings)
        try:
            with self._service.admitted():
                body = await _body(scope, receive, self._app.settings)
                await while_connected(receive, self._answer(body, reply))
        except ClientGone:
            self._service.metrics.cancelled += 1
        except ApiError as error:
            await reply.error(error)

    async def _answer(self, body: bytes, reply: "Reply") -> None:
        nesting, served = self._app.settings.limits.nesting, self._app.served

        def answer() -> bytes:
            return to_json(self._plain(parsed(body, nesting), served))

        await reply.whole(await self._service.prepare(answer))


class Reply:
    """Writes the answer to one request."""

    def __init__(self, send: Send, settings: ServerSettings) -> None:
        self._send, self._keep_alive_s = send, settings.keep_alive_s
        self._has_begun = self._has_ended = False

    async def run(self, run: Run) -> None:
        """Write what a run gives: events as they come, or the whole at the end."""
        job = run.job
        while not run.ended:
            if await run.wait(self._keep_alive_s):
                await self._events(job, run.read())
            elif job.streams and job.media == SSE:
                await self._write(job, KEEP_ALIVE)
        if job.streams:
            await self._events(job, job.last())
            await self._end()
        else:
            await self.whole(to_json(job.whole()))

    async def error(self, error: ApiError, job: Job | None = None) -> None:
        """Write an error: as the answer, or as the last events of a stream that has begun."""
        if not self._has_begun:
            await self.whole(to_json(error.body()), error.status, error.headers)
        elif not self._has_ended and job is not None:
            await self._events(job, job.failed(error))
            await self._end()

    async def whole(self, body: bytes, status: int = 200, headers: Any = None) -> None:
        """Write a whole answer."""
        self._has_begun = self._has_ended = True
        pairs = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        pairs += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})
        await self._send({"type": "http.response.body", "body": body})

    async def _events(self, job: Job, events: Sequence[Event]) -> None:
        if events and job.streams:
            await self._write(job, b"".join(encoded(event, job.media) for event in events))

    async def _write(self, job: Job, data: bytes) -> None:
        # The status is said with the first event: what fails before it is an error with a status of its own.
        if not self._has_begun:
            self._has_begun = True
            headers = [(b"content-type", job.media.encode() + b"; charset=utf-8"), *STREAM_HEADERS]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self) -> None:
        self._has_ended = True
        await self._send({"type": "http.response.body", "body": b""})


def to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def encoded(event: Event, media: str) -> bytes:
    """An event as it goes over the wire."""
    data = event.data.encode() if isinstance(event.data, str) else to_json(event.data)
    if media == NDJSON:
        return data + b"\n"
    name = b"" if event.event is None else b"event: " + event.event.encode() + b"\n"
    return name + b"data: " + data + b"\n\n"


async def _body(scope: Scope, receive: Receive, settings: ServerSettings) -> bytes:
    length = next((value.decode() for name, value in scope["headers"] if name == b"content-length"), None)
    return await read_body(receive, settings.limits.body_bytes, length)
