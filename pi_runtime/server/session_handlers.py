"""What each route of sessions does."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from pi_runtime.server.api import sessions
from pi_runtime.server.api.request import GenerateRequest
from pi_runtime.server.api.sessions import (
    Beginning,
    SessionObject,
    SessionProgress,
    SessionRequest,
    SessionWriter,
    TypeRequest,
    answer_body,
    answer_request,
    stop_token,
)
from pi_runtime.server.host import Exchange, Host
from pi_runtime.server.sessions import Entry


async def create(host: Host, exchange: Exchange) -> Response:
    """Make a session."""
    owner, settings, sessions = exchange.scope["owner"], host.settings, host.sessions
    sessions.check_room(owner)
    engine, served = host.service.engine, host.served

    def begin(value: object) -> Entry:
        beginning = Beginning(SessionRequest.of(value), served)
        session = engine.session(beginning.tokens, cache_salt=settings.cache_salt(owner, beginning.cache_salt))
        if beginning.draft:
            session.type(beginning.draft)
        return Entry(owner, session, beginning.defaults)

    entry = await host.prepared(exchange, begin)
    sessions.add(entry)
    return _shown(host, entry)


async def type_draft(host: Host, exchange: Exchange) -> Response:
    """Type into the draft of a session."""
    entry, served = _found(host, exchange.scope), host.served
    async with host.sessions.changing(entry):
        await host.prepared(exchange, lambda value: sessions.type_draft(TypeRequest.of(value), entry.session, served))
    return _shown(host, entry)


async def answer(host: Host, exchange: Exchange) -> None:
    """Let a session answer, whole or as a stream. A client that leaves ends the turn."""
    entry, served = _found(host, exchange.scope), host.served

    def read(value: object) -> tuple[GenerateRequest, SessionWriter]:
        body = answer_body(value, entry.defaults)
        request = answer_request(body, entry.session, served)
        return request, SessionWriter(body, request, served, entry.id)

    async with host.sessions.changing(entry):
        request, writer = await host.prepared(exchange, read)
        entry.turn = turn = await host.service.begin(request, exchange.ticket, exchange.arrived, exchange.client)
    try:
        await host.respond(exchange, turn, writer, streams=request.streams)
    finally:
        entry.turn, entry.is_paused = None, stop_token(request, turn.answers[0]) is not None
        host.sessions.touch(entry)


async def show(host: Host, request: Request) -> Response:
    """How far a session has come."""
    return _shown(host, _found(host, request.scope))


async def show_all(host: Host, request: Request) -> Response:
    """All sessions of the client, without what they say."""
    found = [_progress(host, entry) for entry in host.sessions.of(request.scope["owner"])]
    return JSONResponse({"object": "list", "data": found})


async def delete(host: Host, request: Request) -> Response:
    """End a session, and its turn."""
    entry = _found(host, request.scope)
    host.sessions.remove(entry, "the session was deleted")
    return JSONResponse({"id": entry.id, "object": "session.deleted", "deleted": True})


def _found(host: Host, scope: Scope) -> Entry:
    return host.sessions.find(scope["path_params"]["id"], scope["owner"])


def _progress(host: Host, entry: Entry) -> SessionProgress:
    return {
        "id": entry.id,
        "object": "session",
        "created": entry.created,
        "model": host.served.name,
        "state": entry.state,
        "tokens": len(entry.session.tokens),
        "idle_limit_s": host.sessions.idle_s,
    }


def _shown(host: Host, entry: Entry) -> Response:
    shown: SessionObject = {**_progress(host, entry), "draft": entry.session.draft}
    return JSONResponse(shown)
