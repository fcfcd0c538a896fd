"""The sessions of a server: which there are, whose turn it is, and when one that nobody uses is dropped.

Everything here belongs to the event loop's thread; what takes long goes to the service's threads.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pi_runtime.engine.session import Session
from pi_runtime.server.admission import Ticket
from pi_runtime.server.api.served import Served, new_id
from pi_runtime.server.api.sessions import AnswerJob, Beginning, SessionObject, SessionProgress, State, typed
from pi_runtime.server.clients import Client
from pi_runtime.server.errors import ApiError
from pi_runtime.server.jobs import Job
from pi_runtime.server.requests import reading
from pi_runtime.server.runs import Run
from pi_runtime.server.service import Service
from pi_runtime.server.settings import ServerSettings

T = TypeVar("T")

REMEMBERED = 1000
"""Sessions that are no more, of which it is still known why."""


class Entry:
    """One session, as the server keeps it."""

    def __init__(self, owner: str, session: Session, defaults: Mapping[str, Any]) -> None:
        self.id, self.created = new_id("session_"), int(time.time())
        self.owner = owner
        """Whose it is: for all others it is not there."""
        self.session, self.defaults = session, defaults
        self.run: Run | None = None
        """The turn that is being answered."""
        self.is_paused = False
        """Whether the latest turn ended with a stop token."""
        self.lock = asyncio.Lock()
        """Held while something changes the session; what is typed fast waits for it."""
        self.timer: asyncio.TimerHandle | None = None

    @property
    def state(self) -> State:
        """What it does at present."""
        if self.run is not None:
            return "answering"
        return "paused" if self.is_paused else "idle"

    def check_idle(self) -> None:
        """Raise ApiError (409) while a turn is being answered."""
        if self.run is not None:
            raise ApiError(
                409, "the session is still answering: read its answer to the end, or leave it", code="session_busy"
            )


class Sessions:
    """All sessions of a server, by their ids. At most `most`, and `most_each` of one owner; one that is idle so long
    is dropped."""

    def __init__(self, most: int, most_each: int, idle_s: float) -> None:
        self._most, self._most_each, self.idle_s = most, most_each, idle_s
        self._entries: dict[str, Entry] = {}
        self._gone: OrderedDict[tuple[str, str], str] = OrderedDict()
        """Why sessions are no more, by owner and id."""

    def of(self, owner: str) -> list[Entry]:
        """All of an owner, the oldest first."""
        return [entry for entry in self._entries.values() if entry.owner == owner]

    def check_room(self, owner: str) -> None:
        """Raise ApiError (429) where there are as many as there may be, of all or of this owner."""
        if len(self.of(owner)) >= self._most_each:
            raise _too_many(f"you hold {self._most_each} sessions, which is the most; delete one")
        if len(self._entries) >= self._most:
            raise _too_many(f"the server holds {self._most} sessions, which is the most")

    def add(self, entry: Entry) -> None:
        """Keep a session. Raises ApiError (429) where there is no room."""
        self.check_room(entry.owner)
        self._entries[entry.id] = entry
        self.touch(entry)

    def find(self, session_id: str, owner: str) -> Entry:
        """An owner's session. Raises ApiError (404), which tells the owner what became of it where that is known."""
        entry = self._entries.get(session_id)
        if entry is None or entry.owner != owner:
            why = self._gone.get((owner, session_id), f"there is no session {session_id[:80]!r}")
            raise ApiError(404, why, code="session_not_found")
        return entry

    def touch(self, entry: Entry) -> None:
        """Count its idle time from now on."""
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.id in self._entries:
            entry.timer = asyncio.get_running_loop().call_later(self.idle_s, self._expire, entry)

    def remove(self, entry: Entry, why: str) -> None:
        """End a session and the turn that is being answered, and remember why."""
        del self._entries[entry.id]
        self._gone[entry.owner, entry.id] = why
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.run is not None:
            entry.run.fail(ApiError(409, why, code="session_deleted"))
        entry.session.close()

    def _expire(self, entry: Entry) -> None:
        if entry.run is not None or entry.lock.locked():
            self.touch(entry)
        else:
            self.remove(entry, f"the session was dropped: nobody used it for {self.idle_s:g} s")

    @asynccontextmanager
    async def changing(self, entry: Entry) -> AsyncIterator[None]:
        """A time in which nothing else changes the session. Raises ApiError (409) while a turn is being answered."""
        entry.check_idle()
        async with entry.lock:
            self.find(entry.id, entry.owner)
            entry.check_idle()
            try:
                yield
            finally:
                self.touch(entry)


def _too_many(said: str) -> ApiError:
    return ApiError(429, said, code="too_many_sessions", headers={"Retry-After": "5"})


class Host(Protocol):
    """What the routes need of the application."""

    service: Service
    settings: ServerSettings

    @property
    def served(self) -> Served:
        """The model as answers speak of it."""

    def admitted(
        self, scope: Scope, receive: Receive, answer: Callable[[bytes, Ticket], Coroutine[Any, Any, None]]
    ) -> Coroutine[Any, Any, None]:
        """Admit a request, read its body, and let it be answered for as long as its client waits."""

    def write(self, job: Job, run: Run, scope: Scope, send: Send) -> Coroutine[Any, Any, None]:
        """Write what becomes of a job that has begun."""


@dataclass(frozen=True)
class Call:
    """A request that has been admitted, with its body."""

    scope: Scope
    body: bytes
    ticket: Ticket
    send: Send

    @property
    def client(self) -> Client:
        """Who sent it."""
        return Client.of(self.scope)


class SessionRoutes:
    """What each route does."""

    def __init__(self, host: Host) -> None:
        self._host = host
        settings = host.settings
        self.sessions = Sessions(settings.sessions, settings.sessions_each, settings.session_idle_s)

    async def create(self, call: Call) -> Response:
        """Make a session."""
        owner, settings = call.scope["owner"], self._host.settings
        self.sessions.check_room(owner)
        engine, served = self._host.service.engine, self._host.served

        def begin(value: Any) -> Entry:
            beginning = Beginning(value, served)
            session = engine.session(beginning.tokens, cache_salt=settings.cache_salt(owner, beginning.cache_salt))
            if beginning.draft:
                session.type(beginning.draft)
            return Entry(owner, session, beginning.defaults)

        entry = await self._prepared(call, begin)
        self.sessions.add(entry)
        return self._shown(entry)

    async def type(self, call: Call) -> Response:
        """Type into its draft."""
        entry, served = self._found(call.scope), self._host.served
        async with self.sessions.changing(entry):
            await self._prepared(call, lambda value: typed(value, entry.session, served))
        return self._shown(entry)

    async def answer(self, call: Call) -> None:
        """Let it answer, whole or as a stream. A client that leaves ends the turn."""
        arrived, entry = time.monotonic(), self._found(call.scope)
        service, served = self._host.service, self._host.served
        async with self.sessions.changing(entry):
            known: dict[str, Any] = {"session_id": entry.id, "session": entry.session, "defaults": entry.defaults}
            job = await self._prepared(call, lambda value: AnswerJob(value, served, **known))
            entry.run = await service.begin(job, call.ticket, arrived, call.client)
        try:
            await self._host.write(job, entry.run, call.scope, call.send)
        finally:
            entry.run, entry.is_paused = None, job.pauses
            self.sessions.touch(entry)

    async def show(self, request: Request) -> Response:
        """How far it has come."""
        return self._shown(self._found(request.scope))

    async def show_all(self, request: Request) -> Response:
        """All of the client's, without what they say."""
        found = [self._progress(entry) for entry in self.sessions.of(request.scope["owner"])]
        return JSONResponse({"object": "list", "data": found})

    async def delete(self, request: Request) -> Response:
        """End it, and its turn."""
        entry = self._found(request.scope)
        self.sessions.remove(entry, "the session was deleted")
        return JSONResponse({"id": entry.id, "object": "session.deleted", "deleted": True})

    def _found(self, scope: Scope) -> Entry:
        return self.sessions.find(scope["path_params"]["id"], scope["owner"])

    async def _prepared(self, call: Call, make: Callable[[Any], T]) -> T:
        read = reading(call.scope, call.body, self._host.settings, make)
        return await self._host.service.prepare(call.client, read)

    def _progress(self, entry: Entry) -> SessionProgress:
        return {
            "id": entry.id,
            "object": "session",
            "created": entry.created,
            "model": self._host.served.name,
            "state": entry.state,
            "tokens": len(entry.session.tokens),
            "idle_limit_s": self.sessions.idle_s,
        }

    def _shown(self, entry: Entry) -> Response:
        shown: SessionObject = {**self._progress(entry), "draft": entry.session.draft}
        return JSONResponse(shown)


class SessionEndpoint:
    """Answers requests that have a body."""

    def __init__(self, host: Host, answer: Callable[[Call], Coroutine[Any, Any, Response | None]]) -> None:
        self._host, self._answer = host, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def admitted(body: bytes, ticket: Ticket) -> None:
            response = await self._answer(Call(scope, body, ticket, send))
            if response is not None:
                await response(scope, receive, send)

        await self._host.admitted(scope, receive, admitted)


def session_routes(host: Host) -> list[Route]:
    """All routes of sessions."""
    routes = SessionRoutes(host)
    return [
        Route("/v1/sessions", routes.show_all, methods=["GET"]),
        Route("/v1/sessions", SessionEndpoint(host, routes.create), methods=["POST"]),
        Route("/v1/sessions/{id}", routes.show, methods=["GET"]),
        Route("/v1/sessions/{id}", routes.delete, methods=["DELETE"]),
        Route("/v1/sessions/{id}/type", SessionEndpoint(host, routes.type), methods=["POST"]),
        Route("/v1/sessions/{id}/answer", SessionEndpoint(host, routes.answer), methods=["POST"]),
    ]
