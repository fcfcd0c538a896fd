"""A server that plays what it is told, for what the page must cope with and a real one cannot be made to do at will."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pi_runtime.server.page import page

PROPS = {"model": "demo", "chat_template": "{{ messages }}", "context": 4096, "mode": "predicted", "device": "cpu"}
Turn = Sequence[str | float] | Response
"""What one request is answered with: pieces of text, numbers as pauses in seconds, `GATE`; or a whole response."""
GATE = "<gate>"
"""A piece at which the answer waits until `Script.gate` is set."""
LOST = "<lost>"
"""A piece at which the connection breaks."""


@dataclass
class Script:
    """What the server is to do, and what it was asked."""

    turns: list[Turn] = field(default_factory=list)
    """For one request after the other; the last one stays."""
    props: dict[str, Any] = field(default_factory=lambda: dict(PROPS))
    key: str | None = None
    loading: int = 0
    """How many more times /props says that the model is loading."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a client left before its answer was complete."""
    thoughts: Sequence[str] = ()
    """Pieces of `reasoning_content` that come before each answer."""
    rows_read_share: float | None = 0.38


def refusal(status: int, message: str, **headers: str) -> JSONResponse:
    """An error in OpenAI's form."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers)


def scripted_app(script: Script) -> Starlette:
    """An application that serves the page, and plays the script to it."""

    async def index(request: Request) -> Response:
        body, headers = page()
        return Response(body, headers=dict(headers))

    async def props(request: Request) -> Response:
        if (refused := key_refused(request)) is not None:
            return refused
        if script.loading:
            script.loading -= 1
            return refusal(503, "The model is loading.")
        return JSONResponse(script.props)

    def key_refused(request: Request) -> Response | None:
        if script.key and request.headers.get("authorization") != f"Bearer {script.key}":
            return refusal(401, "A key is needed.")
        return None

    async def answer(request: Request) -> Response:
        if (refused := key_refused(request)) is not None:
            return refused
        script.asked.append(await request.json())
        turn = script.turns.pop(0) if len(script.turns) > 1 else script.turns[0]
        if isinstance(turn, Response):
            return turn
        return StreamingResponse(events(turn, "chat" in request.url.path), media_type="text/event-stream")

    async def events(turn: Sequence[str | float], chat: bool) -> AsyncIterator[str]:
        def event(choices: list[dict[str, Any]], **more: Any) -> str:
            return f"data: {json.dumps({'choices': choices, **more})}\n\n"

        def piece(text: str) -> dict[str, Any]:
            return {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}

        count = 0
        try:
            yield ": waiting\n\n"
            for text in script.thoughts:
                yield event([{"index": 0, "delta": {"reasoning_content": text}}])
            for step in turn:
                if step == GATE:
                    while not script.gate.is_set():
                        await asyncio.sleep(0.01)
                        yield ": still here\n\n"
                elif step == LOST:
                    raise ConnectionResetError
                elif isinstance(step, str):
                    count += 1
                    timings = {
                        "predicted_n": count,
                        "predicted_per_second": 24.6,
                        "rows_read_share": script.rows_read_share,
                    }
                    yield event([piece(step)], timings=timings)
                else:
                    await asyncio.sleep(step)
            yield event([{"index": 0, "delta": {}, "finish_reason": "stop"}])
            usage = {"prompt_tokens": 21, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 16}}
            yield event([], usage=usage)
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            script.left.set()
            raise

    routes = [
        Route("/", index),
        Route("/props", props),
        Route("/v1/chat/completions", answer, methods=["POST"]),
        Route("/v1/completions", answer, methods=["POST"]),
    ]
    return Starlette(routes=routes)


@contextmanager
def served(app: Any) -> Iterator[str]:
    """An application on a port of its own, in a thread: yields its address."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        config = uvicorn.Config(app, log_level="critical", lifespan="off", ws="none", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(20)
