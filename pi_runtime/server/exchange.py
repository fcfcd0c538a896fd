"""An exchange: one request that has a body, from its admission to the end of its answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from pi_runtime.server.admission import Ticket
from pi_runtime.server.api.answer import AnswerWriter
from pi_runtime.server.api.prompt import Prompt
from pi_runtime.server.clients import Client
from pi_runtime.server.errors import ApiError, failed
from pi_runtime.server.in_flight import InFlight
from pi_runtime.server.json_body import parsed
from pi_runtime.server.openapi import Route
from pi_runtime.server.request_log import plain
from pi_runtime.server.response import ResponseSender
from pi_runtime.server.service import Service

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Exchange:
    """A request that has been admitted, with its body, and where its answer is sent."""

    service: Service
    route: Route
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

    async def beside(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Let a thread call a function that may take long. Raises ApiError for any error, and for too long a time."""
        return await self.service.preparation.run(self.client.name, partial(function, *args, **kwargs))

    def typed(self, defaults: Mapping[str, Any] | None = None) -> Any:
        """The typed body. Raises ApiError 400; it may take long.

        `defaults` are fields that hold where the body does not say otherwise.
        """
        policy = self.service.settings.unknown_fields
        unknown: list[str] | None = None if policy == "refuse" else []
        value = parsed(self.body, self.service.settings.limits)
        if defaults and isinstance(value, dict):
            value = {**defaults, **value}
        found = self.route.read(value, unknown)
        if policy == "warn" and unknown:
            self.scope["unknown_fields"] = ",".join(map(plain, unknown))
        return found

    async def begin(self, prompt: Prompt) -> InFlight:
        """Hand a prompt to the engine. Raises ApiError for what cannot be run."""
        if prompt.goal == "reading":
            self.ticket.release()  # it takes the place of no answer
        else:
            self.ticket.take(prompt.answers)
        service = self.service
        return await self.beside(
            InFlight, prompt, service.engine, service.metrics, service.settings, self.arrived, self.client
        )

    async def respond(self, request: InFlight, writer: AnswerWriter, *, streams: bool) -> None:
        """Send the answers to a request that the engine works on, as they come or all at once."""
        sender = ResponseSender(self.send, writer, streams, self.service.settings.keep_alive_s)
        with self.service.running(request):
            try:
                await sender.send(request)
            except Exception as error:
                self.scope["error"] = found = failed(error)
                await sender.fail(found)


class BodyEndpoint:
    """Answers requests that have a body: each is admitted, read, and handled for as long as its client waits."""

    def __init__(self, service: Service, route: Route) -> None:
        self._service, self._route = service, route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, arrived = self._service, time.monotonic()
        try:
            service.check_room(scope["owner"])  # one too many is refused before its body has come
            with service.arriving.body(Client.of(scope).name) as count:
                body = await read_body(receive, service.settings.limits.body_bytes, Headers(scope=scope), count)
            with service.admitted(scope["owner"]) as ticket:
                exchange = Exchange(service, self._route, scope, send, body, ticket, arrived)
                response = await while_connected(receive, self._route.handler(exchange))
                if response is not None:
                    await response(scope, receive, send)
        except ClientGone:
            service.metrics.cancelled += 1


class ClientGone(Exception):  # noqa: N818  nothing is wrong
    """Nobody waits for the answer any more."""


async def read_body(receive: Receive, most: int, headers: Headers, count: Callable[[int], None]) -> bytes:
    """The whole body. Raises ApiError 413 as soon as it is known to be too large, ClientGone where it ends early.

    `count` is told how many bytes have come."""
    too_large = ApiError(413, f"the body is too large; at most {most} bytes", code="body_too_large")
    if int(headers.get("content-length", 0)) > most:  # h11 has checked that it is a number
        raise too_large
    found = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        count(len(part))
        found += part
        if len(found) > most:
            raise too_large
        more = message.get("more_body", False)
    return bytes(found)


async def while_connected(receive: Receive, answer: Awaitable[T]) -> T:
    """Wait for what answers a request whose body has been read, and cancel it when the client leaves.

    `receive` says nothing more before that. It is asked all the time, because nobody who writes is notified: neither
    starlette's streams nor uvicorn's `send` notice it before something is written.
    """
    task = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
