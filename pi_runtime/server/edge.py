"""Where requests come in: who may ask, limits for those who send or read slowly, and an end that loses nothing.

Host, Origin and key are looked at before anything else of a request. uvicorn has no limit for the time in which headers
or a body come, and none for a reader who takes nothing. Its own end on a signal closes the door first, so nobody could
ask any more how the server is.
"""

import asyncio
import hashlib
import hmac
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from h11._state import MIGHT_SWITCH_PROTOCOL
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pi_runtime.errors.exit_codes import INTERRUPTED
from pi_runtime.server.admission import Connections, address_of, listen, most_connections
from pi_runtime.server.errors import ApiError
from pi_runtime.server.metrics import RequestLog, request_id
from pi_runtime.server.service import Service
from pi_runtime.server.settings import Limits, ServerSettings

OWNER_CHARS = 16
SHOWN_CHARS = 80
CLIENT_LEFT = 499
"""Counted in place of a status where the client had left before there was one, as nginx does."""


class ApiKeys:
    """The keys of a server, any of which opens every route. They may be replaced while it runs."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._digests)

    def replace(self, keys: Iterable[str]) -> None:
        """Take these keys from now on. What runs goes on, whatever key began it."""
        self._digests = [_digest(key.encode()) for key in keys]

    def owner(self, key: str) -> str | None:
        """The owner of a key; None where it is none of these."""
        # Every key is compared, and digests have one length: the time says nothing.
        digest = _digest(key.encode("latin-1", "replace"))
        found = [hmac.compare_digest(digest, ours) for ours in self._digests]
        return digest.hex()[:OWNER_CHARS] if any(found) else None


class Guard:
    """Refuses requests that may not be answered, and has all of them counted.

    A page on another site can make a browser send requests here, even under a name of its own that leads to this
    machine. So a Host must be a name that was allowed, or the address that was connected to, and an Origin must be the
    server's own or one that was allowed.

    A scope gets `owner`, which says whose a request is (a digest of the key that opened it, "" where it needed none),
    `request_id`, and `error` for one that is refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        requests: RequestLog,
        open_paths: Sequence[str] = (),
        keys: ApiKeys | None = None,
    ) -> None:
        """`requests` counts every request at its end. `open_paths` need no key. `keys`: None takes the settings'."""
        self._app, self._requests, self._open_paths = app, requests, open_paths
        self._hosts = {name.lower() for name in settings.allowed_hosts}
        self._origins = re.compile(settings.origins)
        self._keys = ApiKeys(settings.api_keys) if keys is None else keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, headers = time.perf_counter(), CLIENT_LEFT, Headers(scope=scope)
        scope["request_id"] = request_id(headers)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answer = MutableHeaders(scope=message)
                answer["x-content-type-options"] = "nosniff"
                answer["x-request-id"] = scope["request_id"]
                if scope.get("unknown_fields"):
                    answer["x-unknown-fields"] = scope["unknown_fields"]
            await send(message)

        try:
            scope["owner"] = self._check(scope, headers)
        except ApiError as error:
            scope["error"] = error
            await JSONResponse(error.body_at(scope["path"]), error.status, error.headers)(scope, receive, watched)
        else:
            await self._app(scope, receive, watched)
        finally:
            self._requests.count(scope, status, time.perf_counter() - began)

    def _check(self, scope: Scope, headers: Headers) -> str:
        """The owner of a request. Raises ApiError for one that may not be answered."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_known(hosts[0], scope.get("server")):
            named = (
                f"the Host {hosts[0][:SHOWN_CHARS]!r} is not allowed" if len(hosts) == 1 else "there must be one Host"
            )
            raise ApiError(403, f"{named}; start the server with --allowed-host NAME to allow it", code="wrong_host")
        for origin in headers.getlist("origin"):
            if not self._may_call(origin, hosts[0]):
                named = f"the Origin {origin[:SHOWN_CHARS]!r} is not allowed"
                said = f"{named}; start the server with --allowed-origin to allow it"
                raise ApiError(403, said, code="wrong_origin")
        given = headers.getlist("authorization") or [f"Bearer {key}" for key in headers.getlist("x-api-key")]
        owner = self._owner(given) if self._keys else ""
        if owner is not None:
            return owner
        if scope["path"] in self._open_paths:
            return ""
        found = "the API key is wrong" if given else "there is no API key"
        said = f"{found}; send one of the server's as Authorization: Bearer KEY, or as X-Api-Key"
        raise ApiError(401, said, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _is_known(self, host: str, server: tuple[str, int | None] | None) -> bool:
        """Whether a Host is one of ours: an allowed name, or the very address that was connected to."""
        try:
            parts = urlsplit(f"//{host}")
            name, _ = parts.hostname, parts.port
        except ValueError:
            return False
        if not name or parts.username is not None or parts.path:
            return False
        return "*" in self._hosts or name in self._hosts or (server is not None and _same_address(name, server[0]))

    def _may_call(self, origin: str, host: str) -> bool:
        scheme, _, place = origin.partition("://")
        own = scheme in ("http", "https") and place.lower() == host.lower()
        return own or self._origins.fullmatch(origin) is not None

    def _owner(self, given: Sequence[str]) -> str | None:
        """The owner of the key that is given; None where it is none of the server's."""
        if len(given) != 1:  # thousands fit the headers, and each costs a look at every key
            return None
        scheme, _, key = given[0].partition(" ")
        owner = self._keys.owner(key.strip())
        return owner if scheme.lower() == "bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _same_address(name: str, address: str) -> bool:
    try:
        return address_of(name) == address_of(address)
    except ValueError:
        return False


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
