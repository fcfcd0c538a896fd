"""What the routes share: the service, the model as answers speak of it, the sessions, and the document."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pi_runtime.server.admission import Ticket
from pi_runtime.server.api.answer import AnswerWriter
from pi_runtime.server.api.served import Served
from pi_runtime.server.clients import Client
from pi_runtime.server.errors import failed
from pi_runtime.server.in_flight import InFlight
from pi_runtime.server.openapi import Route, document
from pi_runtime.server.requests import ClientGone, read_body, reading, while_connected
from pi_runtime.server.response import ResponseSender
from pi_runtime.server.service import Service
from pi_runtime.server.sessions import Sessions

T = TypeVar("T")


@dataclass(frozen=True)
class Exchange:
    """A request that has been admitted, with its body, and where its answer is sent."""

    scope: Scope
    send: Send
    body: bytes
    ticket: Ticket
    arrived: float
    """When its head had come, by the monotonic clock."""

    @property
    def client(self) -> Client:
        """Who sent the request."""
        return Client.of(self.scope)


class Host:
    """What the routes share."""

    def __init__(self, service: Service, routes: Sequence[Route]) -> None:
        self.service, self.settings, self._routes = service, service.settings, routes
        settings = service.settings
        self.sessions = Sessions(settings.sessions, settings.sessions_each, settings.session_idle_s)

    @cached_property
    def served(self) -> Served:
        """The model as answers speak of it. Raises ApiError (503) before it is there."""
        return Served(self.service.engine.model, self.settings)

    @cached_property
    def document(self) -> bytes:
        """The OpenAPI document, made once, for it takes some tenths of a second."""
        found = document(
            self.settings.model_name, self._routes, refuses_unknown=self.settings.unknown_fields == "refuse"
        )
        return bytes(JSONResponse(found).body)

    async def prepared(self, exchange: Exchange, make: Callable[[Any], T]) -> T:
        """What is made of the JSON of a request, beside the event loop. Raises ApiError for every error."""
        read = reading(exchange.scope, exchange.body, self.settings, make)
        return await self.service.prepare(exchange.client, read)

    async def respond(self, exchange: Exchange, request: InFlight, writer: AnswerWriter, *, streams: bool) -> None:
        """Send what becomes of a request that has begun."""
        sender = ResponseSender(exchange.send, writer, streams, self.settings.keep_alive_s)
        with self.service.running(request):
            try:
                await sender.send(request)
            except Exception as error:
                exchange.scope["error"] = found = failed(error)
                await sender.fail(found)


class BodyEndpoint:
    """Answers requests that have a body: each is admitted, read, and handled for as long as its client waits."""

    def __init__(self, host: Host, handle: Callable[[Exchange], Awaitable[Response | None]]) -> None:
        """`handle` returns the answer, unless it has sent one."""
        self._host, self._handle = host, handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, limits, arrived = self._host.service, self._host.settings.limits, time.monotonic()

        async def handle(exchange: Exchange) -> None:
            response = await self._handle(exchange)
            if response is not None:
                await response(scope, receive, send)

        try:
            with service.admitted(scope["owner"]) as ticket:
                body = await read_body(receive, limits.body_bytes, Headers(scope=scope))
                await while_connected(receive, handle(Exchange(scope, send, body, ticket, arrived)))
        except ClientGone:
            service.metrics.cancelled += 1
