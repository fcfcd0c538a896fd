"""How the answer of a job is written: its events as they come, or all of it at once."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.types import Send

from pi_runtime.server.errors import ApiError
from pi_runtime.server.jobs import NDJSON, SSE, Event, Job
from pi_runtime.server.runs import Run

KEEP_ALIVE = b": keep-alive\n\n"
JSON = "application/json"
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


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
                await self._events(await run.read())
            elif job.streams and job.media == SSE:
                await self._say(KEEP_ALIVE)
        if job.streams:
            await self._events(job.last())
            await self._say(b"", more=False)
        else:
            # All log-probabilities at once take long: beside the loop.
            found = await asyncio.to_thread(lambda: b"".join(in_pieces(job.whole())))
            await self._begin(JSON)
            await self._say(found, more=False)

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
    return ENCODER.encode(value).encode("utf-8", "replace")


def in_pieces(value: Any, depth: int = 6) -> Iterator[bytes]:
    """The same in pieces, as small as items at this depth: while one is made no other thread runs."""
    if not value or not depth or not isinstance(value, dict | list):
        yield to_json(value)
        return
    opening, closing = (b"{", b"}") if isinstance(value, dict) else (b"[", b"]")
    for key in value:
        yield opening
        if isinstance(value, dict):
            yield to_json(key) + b":"
        yield from in_pieces(value[key] if isinstance(value, dict) else key, depth - 1)
        opening = b","
    yield closing


def encoded(event: Event, media: str) -> bytes:
    """An event as it goes over the wire."""
    data = event.data.encode() if isinstance(event.data, str) else to_json(event.data)
    if media == NDJSON:
        return data + b"\n"
    name = b"" if event.event is None else b"event: " + event.event.encode() + b"\n"
    return name + b"data: " + data + b"\n\n"
