"""What each route of sessions does."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from pi_runtime.server.api import sessions
from pi_runtime.server.api.prompt import Prompt
from pi_runtime.server.api.sessions import (
    Beginning,
    SessionObject,
    SessionProgress,
    SessionWriter,
    answer_request,
    stop_token,
)
from pi_runtime.server.exchange import Exchange
from pi_runtime.server.service import Service
from pi_runtime.server.sessions import ServedSession


async def create(exchange: Exchange) -> Response:
    """Make a session."""
    owner, service = exchange.client.owner, exchange.service
    service.sessions.check_room(owner)
    engine, served = service.engine, service.served

    def begin() -> ServedSession:
        beginning = Beginning(exchange.typed(), served)
        salt = service.settings.cache_salt(owner, beginning.cache_salt)
        session = engine.session(beginning.tokens, cache_salt=salt, client=exchange.client.name)
        if beginning.draft:
            session.type(beginning.draft)
        return ServedSession(owner, session, beginning.defaults)

    made = await exchange.beside(begin)
    service.sessions.add(made)
    return _shown(service, made)


async def type_draft(exchange: Exchange) -> Response:
    """Type into the draft of a session."""
    found, service = _found(exchange.service, exchange.scope), exchange.service
    served = service.served
    async with service.sessions.changing(found):
        await exchange.beside(lambda: sessions.type_draft(exchange.typed(), found.session, served))
    return _shown(service, found)


async def answer(exchange: Exchange) -> None:
    """Let a session answer, whole or as a stream. A client that leaves ends the turn."""
    found, service = _found(exchange.service, exchange.scope), exchange.service
    served = service.served

    def read() -> tuple[Prompt, SessionWriter]:
        body = exchange.typed(found.defaults)
        prompt = answer_request(body, found.session, served)
        return prompt, SessionWriter(body, prompt, served, found.id)

    async with service.sessions.changing(found):
        prompt, writer = await exchange.beside(read)
        found.turn = turn = await exchange.begin(prompt)
    try:
        await exchange.respond(turn, writer, streams=prompt.streams)
    finally:
        found.turn, found.is_paused = None, stop_token(prompt, turn.answers[0]) is not None
        service.sessions.touch(found)


async def show(service: Service, request: Request) -> Response:
    """How far a session has come."""
    return _shown(service, _found(service, request.scope))


async def show_all(service: Service, request: Request) -> Response:
    """All sessions of the client, without what they say."""
    found = [_progress(service, session) for session in service.sessions.of(request.scope["owner"])]
    return JSONResponse({"object": "list", "data": found})


async def delete(service: Service, request: Request) -> Response:
    """End a session, and its turn."""
    found = _found(service, request.scope)
    service.sessions.remove(found, "the session was deleted")
    return JSONResponse({"id": found.id, "object": "session.deleted", "deleted": True})


def _found(service: Service, scope: Scope) -> ServedSession:
    return service.sessions.find(scope["path_params"]["id"], scope["owner"])


def _progress(service: Service, found: ServedSession) -> SessionProgress:
    return {
        "id": found.id,
        "object": "session",
        "created": found.created,
        "model": service.served.name,
        "state": found.state,
        "tokens": len(found.session.tokens),
        "idle_limit_s": service.sessions.idle_s,
    }


def _shown(service: Service, found: ServedSession) -> Response:
    shown: SessionObject = {**_progress(service, found), "draft": found.session.draft}
    return JSONResponse(shown)
