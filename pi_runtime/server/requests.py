"""Requests as bytes: a body within its limits, and the watch for a client that leaves."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from pi_runtime.server.api.unknown_fields import unknown_fields
from pi_runtime.server.errors import ApiError
from pi_runtime.server.request_log import plain
from pi_runtime.server.settings import Limits, ServerSettings

T = TypeVar("T")

QUOTE = ord('"')
OTHERS = bytes(set(range(256)) - set(b'[]{}"'))
"""All bytes but quotes and brackets."""


async def read_body(receive: Receive, most: int, headers: Headers) -> bytes:
    """The whole body. Raises ApiError 413 as soon as it is known to be too large, ClientGone where it ends early."""
    too_large = ApiError(413, f"the body is too large; at most {most} bytes", code="body_too_large")
    if int(headers.get("content-length", 0)) > most:  # h11 has checked that it is a number
        raise too_large
    found = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        found += message.get("body", b"")
        if len(found) > most:
            raise too_large
        more = message.get("more_body", False)
    return bytes(found)


class ClientGone(Exception):  # noqa: N818  nothing is wrong
    """Nobody waits for the answer any more."""


async def while_connected(receive: Receive, answer: Coroutine[Any, Any, None]) -> None:
    """Run what answers a request whose body has been read, and cancel it when the client leaves.

    `receive` says nothing more before that. It is asked all the time, because a server tells nobody who writes: neither
    starlette's streams nor uvicorn's `send` notice it before something is written.
    """
    task = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def reading(scope: Scope, body: bytes, settings: ServerSettings, make: Callable[[Any], T]) -> Callable[[], T]:
    """What makes something of the JSON of a body. The scope gets `unknown_fields`, names where there are some."""

    def read() -> T:
        with unknown_fields(settings.unknown_fields) as names:
            made = make(parsed(body, settings.limits))
        scope["unknown_fields"] = ",".join(map(plain, names))
        return made

    return read


def parsed(body: bytes, limits: Limits) -> Any:
    """The JSON of a body. Raises ApiError for what is none, or would take those who read it too long."""
    _check_values(body, limits)
    _check_brackets(body, limits)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None


def _check_values(body: bytes, limits: Limits) -> None:
    """Commas are counted, those in texts too: each value but the first of its list or object comes after one."""
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
    """The brackets, and the quotes that begin and end strings. What is left out tells nothing of depth, a pair of
    quotes with nothing between them neither."""
    without_escapes = body.replace(rb"\\", b"").replace(rb"\"", b"")
    return without_escapes.translate(None, OTHERS).replace(b'""', b"")
