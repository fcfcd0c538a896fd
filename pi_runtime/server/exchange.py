"""An exchange: one request that has a body, from its admission to the end of its answer, whole or as a stream."""

import asyncio
import codecs
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from pi_runtime.engine.events import End, PromptLogprobs
from pi_runtime.server.admission import Client, Ticket
from pi_runtime.server.api.answer import AnswerWriter, GatheredAnswer, Lazily, to_json
from pi_runtime.server.api.prompt import Prompt
from pi_runtime.server.errors import ApiError, failed
from pi_runtime.server.in_flight import InFlight
from pi_runtime.server.metrics import plain
from pi_runtime.server.openapi import JSON, Route
from pi_runtime.server.service import Service
from pi_runtime.server.settings import Limits

PIECE_BYTES = 64 << 10
"""What is sent of a whole answer at a time."""
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class ResponseSender:
    """Sends what a writer makes of answers: bytes as events come, or the whole."""

    def __init__(self, send: Send, writer: AnswerWriter, streams: bool, keep_alive_s: float) -> None:
        self._send, self._writer, self._streams, self._keep_alive_s = send, writer, streams, keep_alive_s
        self._has_begun = False

    async def send(self, request: InFlight) -> None:
        """Send all answers to a request. Raises ApiError for what ends it before."""
        while not request.ended:
            has_come = await request.wait(self._keep_alive_s)
            data = await self._written(request)
            if not has_come:
                data = data or self._writer.alive
            if self._streams and data:
                await self._say(data)
        if self._streams:
            await self._say(self._writer.final_events(request.answers), more=False)
        else:
            await self._send_whole(self._whole(request.answers))

    def _whole(self, answers: Sequence[GatheredAnswer]) -> Iterator[bytes]:
        yield from in_parts(self._writer.response(answers))

    async def _send_whole(self, parts: Iterator[bytes]) -> None:
        """Send a JSON in pieces. All log-probabilities take long and much memory: in pieces, beside the loop."""
        piece = await asyncio.to_thread(_piece, parts)
        await self._begin(JSON)
        while len(piece) >= PIECE_BYTES:
            await self._say(piece)
            piece = await asyncio.to_thread(_piece, parts)
        await self._say(piece, more=False)

    async def _written(self, request: InFlight) -> bytes:
        """Add all events that have come to their answers; returns the bytes of a stream."""
        found = []
        for answer, event in request.read():
            # The figures of a whole answer are those of its end.
            answer.events.append(event if self._streams or isinstance(event, End) else replace(event, stats=None))
            if self._streams and isinstance(event, PromptLogprobs):
                found.append(await asyncio.to_thread(self._writer.write, answer, event))  # a prompt may be long
            elif self._streams:
                found.append(self._writer.write(answer, event))
        return b"".join(found)

    async def fail(self, error: ApiError) -> None:
        """Send an error as the last events, if anything was sent; else raise it, for it has a status."""
        if not self._has_begun:
            raise error
        await self._say(self._writer.failed(error) if self._streams else b"", more=False)

    async def _say(self, data: bytes, *, more: bool = True) -> None:
        # The status comes with the first of it: what fails before has a status of its own.
        if not self._has_begun:
            await self._begin(f"{self._writer.media}; charset=utf-8")
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _begin(self, media: str) -> None:
        self._has_begun = True
        headers = [(b"content-type", media.encode()), *(STREAM_HEADERS if self._streams else ())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})


def _piece(parts: Iterator[bytes]) -> bytes:
    """The next parts together, of so many bytes or more; fewer at the end."""
    found = bytearray()
    for part in parts:
        found += part
        if len(found) >= PIECE_BYTES:
            break
    return bytes(found)


def in_parts(value: Any, depth: int = 6) -> Iterator[bytes]:
    """A value's JSON in small parts, as no other thread runs while one is made; items below `depth` are not divided."""
    if not isinstance(value, dict | list | Lazily) or not depth or not value:
        yield to_json(value)
        return
    opening, closing = (b"{", b"}") if isinstance(value, dict) else (b"[", b"]")
    for key in value:
        yield opening
        if isinstance(value, dict):
            yield to_json(key) + b":"
        yield from in_parts(value[key] if isinstance(value, dict) else key, depth - 1)
        opening = b","
    yield closing


QUOTE = ord('"')
OTHERS = bytes(set(range(256)) - set(b'[]{}"'))
"""All bytes but quotes and brackets."""


def parsed(body: bytes, limits: Limits) -> Any:
    """Parse the JSON of a body. Raises ApiError where it is no JSON, or too complex to be read quickly."""
    _check_values(body, limits)
    _check_brackets(body, limits)
    try:
        # In UTF-8 alone, where a byte below 128 is that character: what was counted is what is read.
        text = body.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogatepass")
        return json.loads(text, parse_constant=_refused, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    """A number. One beyond the range would come back as `Infinity`, which JSON has not. Raises ValueError."""
    if math.isinf(found := float(digits)):
        raise ValueError(f"the number {digits[:40]} is too large")
    return found


def _check_values(body: bytes, limits: Limits) -> None:
    """Refuse a body with too many commas: each value but the first of its list or object comes after one."""
    if (found := body.count(b",")) > limits.commas:
        raise ApiError(400, f"the body has {found} commas; at most {limits.commas}", code="too_complex")


def _check_brackets(body: bytes, limits: Limits) -> None:
    most, found = limits.nesting, body.count(b"[") + body.count(b"{")
    if found <= most:
        return
    if found > limits.brackets:
        raise ApiError(400, f"the body has {found} opening brackets; at most {limits.brackets}", code="too_complex")
    depth, in_string = 0, False
    for byte in _brackets_and_quotes(body):
        if byte == QUOTE:
            in_string = not in_string
        elif not in_string:
            depth += 1 if byte in b"[{" else -1
            if depth > most:
                raise ApiError(400, f"the JSON is nested deeper than {most} levels", code="nested_too_deep")


def _brackets_and_quotes(body: bytes) -> bytes:
    """The brackets, and the quotes that begin and end strings. What is left out says nothing of depth, a pair of
    quotes with nothing between them neither."""
    without_escapes = body.replace(rb"\\", b"").replace(rb"\"", b"")
    return without_escapes.translate(None, OTHERS).replace(b'""', b"")


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

    def typed(self) -> Any:
        """The typed body. Raises ApiError 400; it may take long."""
        policy = self.service.settings.unknown_fields
        unknown: list[str] | None = None if policy == "refuse" else []
        found = self.route.body.of(parsed(self.body, self.service.settings.limits), unknown)
        if policy == "warn" and unknown:
            self.scope["unknown_fields"] = ",".join(map(plain, unknown))
        return found

    async def begin(self, prompt: Prompt) -> InFlight:
        """Hand a prompt to the engine. Raises ApiError for what cannot be run."""
        if prompt.goal == "reading":
            self.ticket.release()  # it takes the place of no answer
        else:
            self.ticket.reserve(prompt.answers)
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
            with service.incoming.body(Client.of(scope).name) as count:
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
    found, more = bytearray(), True
    while more:
        # h11 has checked that the length is a number.
        if max(len(found), int(headers.get("content-length", 0))) > most:
            raise ApiError(413, f"the body is too large; at most {most} bytes", code="body_too_large")
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        count(len(part))
        found += part
        more = message.get("more_body", False) or len(found) > most
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
