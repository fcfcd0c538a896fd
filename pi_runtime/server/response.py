"""How the answers to a request are sent: their events as they come, or all of it at once."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.types import Send

from pi_runtime.engine.events import End, PromptLogprobs
from pi_runtime.server.api.answer import SSE, AnswerWriter, GatheredAnswer, Lazily, to_json
from pi_runtime.server.errors import ApiError
from pi_runtime.server.in_flight import InFlight

PIECE_BYTES = 64 << 10
"""What is sent of a whole answer at a time."""
KEEP_ALIVE = b": keep-alive\n\n"
JSON = "application/json"
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class ResponseSender:
    """Sends what a writer makes of answers: bytes as events come, or the whole."""

    def __init__(self, send: Send, writer: AnswerWriter, streams: bool, keep_alive_s: float) -> None:
        self._send, self._writer, self._streams, self._keep_alive_s = send, writer, streams, keep_alive_s
        self._has_begun = False

    async def send(self, request: InFlight) -> None:
        """Send all answers to a request. Raises ApiError for what ends it before."""
        while not request.ended:
            if await request.wait(self._keep_alive_s):
                data = await self._written(request)
            else:
                data = KEEP_ALIVE if self._writer.media == SSE else b""
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
