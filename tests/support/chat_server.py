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

from pi_runtime.server.routes import chat_page

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
    ahead: list[dict[str, Any]] = field(default_factory=list)
    """What it was asked to read ahead."""
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
    player = Player(script)
    routes = [
        Route("/", player.index),
        Route("/props", player.props),
        Route("/v1/chat/completions", player.answer, methods=["POST"]),
        Route("/v1/completions", player.answer, methods=["POST"]),
    ]
    return Starlette(routes=routes)


class Player:
    """The routes."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def index(self, _: Request) -> Response:
        body, headers = chat_page()
        return Response(body, headers=dict(headers))

    async def props(self, request: Request) -> Response:
        if not self.knows(request):
            return refusal(401, "A key is needed.")
        if self.script.loading:
            self.script.loading -= 1
            return refusal(503, "The model is loading.")
        return JSONResponse(self.script.props)

    def knows(self, request: Request) -> bool:
        """Whether a request has the key, if there is one."""
        key = self.script.key
        return key is None or request.headers.get("authorization") == f"Bearer {key}"

    async def answer(self, request: Request) -> Response:
        if not self.knows(request):
            return refusal(401, "A key is needed.")
        body = await request.json()
        if body.get("max_tokens") == 0:
            self.script.ahead.append(body)
            return JSONResponse({})
        self.script.asked.append(body)
        turns = self.script.turns
        turn = turns.pop(0) if len(turns) > 1 else turns[0]
        if isinstance(turn, Response):
            return turn
        is_chat = "chat" in request.url.path
        return StreamingResponse(self.events(turn, is_chat), media_type="text/event-stream")

    async def events(self, turn: Sequence[str | float], is_chat: bool) -> AsyncIterator[str]:
        """All events of an answer. Who leaves before its end is noticed."""
        count, share = 0, self.script.rows_read_share
        try:
            yield ": waiting\n\n"
            for text in self.script.thoughts:
                yield event({"delta": {"reasoning_content": text}})
            for step in turn:
                if step == GATE:
                    while not self.script.gate.is_set():
                        await asyncio.sleep(0.01)
                        yield ": still here\n\n"
                elif step == LOST:
                    raise ConnectionResetError
                elif isinstance(step, str):
                    count += 1
                    timings = {"predicted_n": count, "predicted_per_second": 24.6, "rows_read_share": share}
                    yield event({"delta": {"content": step}} if is_chat else {"text": step}, timings=timings)
                else:
                    await asyncio.sleep(step)
            yield event({"delta": {}, "finish_reason": "stop"})
            usage = {"prompt_tokens": 21, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 16}}
            yield event(usage=usage)
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.script.left.set()
            raise


def event(choice: dict[str, Any] | None = None, **more: Any) -> str:
    """A chunk of a stream."""
    choices = [] if choice is None else [{"index": 0, **choice}]
    return f"data: {json.dumps({'choices': choices, **more})}\n\n"


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
