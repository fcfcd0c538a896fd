"""Listening: uvicorn with limits for those who send or read slowly, and with an end that loses nothing.

uvicorn has no limit for the time in which headers or a body come, and none for a reader who takes nothing. Its own
end on a signal closes the door first, so nobody could ask any more how the server is.
"""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import h11
import uvicorn
from h11._state import MIGHT_SWITCH_PROTOCOL
from uvicorn.protocols.http.h11_impl import H11Protocol

from pi_runtime.errors.exit_codes import INTERRUPTED
from pi_runtime.server.connections import Connections, listen, most_connections
from pi_runtime.server.service import Service
from pi_runtime.server.settings import Limits, ServerSettings

KEEP_ALIVE_S = 30
"""Seconds for which a connection stays open without a request: longer than clients keep theirs for the next one."""
REQUEST_ENDED = (h11.DONE, MIGHT_SWITCH_PROTOCOL)
"""States after a whole request; the second where it asks for another protocol, which it will not get."""
CLOSE_S = 5
"""Seconds in which connections must end after the last answer."""


class TooManyPartsError(Exception):
    """A body has come in more parts than the limit."""


class _Connection(h11.Connection):
    """Reads requests whose bodies come in so many parts at most. Each part costs the same, however small it is."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(h11.SERVER, limits.header_bytes)
        self._most, self._parts = limits.parts, 0

    def next_event(self) -> Any:
        """The next event. Raises TooManyPartsError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._parts = 0
        elif isinstance(event, h11.Data):
            self._parts += 1
            if self._parts > self._most:
                raise TooManyPartsError
        return event


class LimitedProtocol(H11Protocol):
    """Ends a connection on which a request, or the taking of an answer, does not come to its end in time, and one whose
    request comes in too many parts.

    Requests that are sent before the answer to the last one has come are not answered.
    """

    limits: Limits
    _receiving: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Connection(self.limits)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._receive()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._receiving)
        _cancel(self._stalled)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_ahead():
            super().data_received(data)

    def handle_events(self) -> None:
        before = self.conn.their_state
        try:
            super().handle_events()
        except TooManyPartsError:
            self.transport.abort()
            return
        if self.conn.trailing_data[0] and self._is_ahead():
            # uvicorn would no longer read, and so not see the client leave.
            self.flow.resume_reading()
        state = self.conn.their_state
        if state is h11.SEND_BODY and before is not h11.SEND_BODY:
            self._receive()  # the body has a time of its own
        elif state is h11.IDLE and self.conn.trailing_data[0]:
            if self._receiving is None:
                self._receive()
        elif state is not h11.SEND_BODY:
            _cancel(self._receiving)
            self._receiving = None

    def _is_ahead(self) -> bool:
        """Whether data comes while a request is being answered. It is dropped: the connection ends with that."""
        if self.conn.their_state not in REQUEST_ENDED or self.cycle.response_complete:
            return False
        self.cycle.keep_alive = False
        return True

    def _receive(self) -> None:
        _cancel(self._receiving)
        self._receiving = self.loop.call_later(self.limits.receive_s, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.limits.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._stalled)
        super().resume_writing()


def protocol(given: Limits) -> type[LimitedProtocol]:
    """uvicorn's HTTP/1.1 with limits of time."""

    class Protocol(LimitedProtocol):
        limits = given

    return Protocol


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class Server(uvicorn.Server):
    """Serves until a signal: then what runs may go on for a while. A second signal ends the process at once."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        listens: Callable[[str], None],
        reload: Callable[[], None] | None = None,
    ) -> None:
        """`listens` is called with the address once connections are accepted, `reload` at each SIGHUP."""
        super().__init__(config)
        self._service, self._listens, self._reload = service, listens, reload
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        service.on_failure = self._handle_failure

    async def startup(self, sockets: Any = None) -> None:
        """Listen, and say so."""
        self._loop = asyncio.get_running_loop()
        if self._service.failure is not None:  # it came before there was a loop
            self.drain()
        await super().startup(self._sockets() if sockets is None else sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            self._listens(f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}")

    def _sockets(self) -> list[socket.socket]:
        """Sockets that take a bounded number of connections. Exits as uvicorn does where it cannot listen."""
        connections = Connections(most_connections(self._service.settings.most_connections))
        self._service.metrics.connections = connections
        try:
            return [*listen(self.config.host, self.config.port, connections)]
        except OSError:
            sys.exit(1)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals. They have been dealt with at the end, so unlike uvicorn this raises none again."""
        if threading.current_thread() is not threading.main_thread():  # no signal comes to another one
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        if self._reload is not None and hasattr(signal, "SIGHUP"):
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._handle_reload)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  uvicorn's
        """Drain at the first signal."""
        if self._draining is not None or self._loop is None:
            os._exit(INTERRUPTED)
        self._loop.call_soon_threadsafe(self.drain)

    def _handle_reload(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._loop is not None and self._reload is not None:
            self._loop.call_soon_threadsafe(self._reload)

    def _handle_failure(self) -> None:
        """Drain, whichever thread says it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Take on nothing more, let what runs end, then stop."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        await self._service.drain()
        self.should_exit = True


def config(app: Any, settings: ServerSettings, **tls: Any) -> uvicorn.Config:
    """uvicorn's settings. It logs nothing: what is worth saying this server says itself."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=protocol(settings.limits),
        loop="asyncio",  # another may accept connections in ways of its own
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a client is who connects, whatever its request says
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_S,
        **tls,
    )
