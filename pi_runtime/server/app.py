"""The application: the routes behind the guard, from the engine's opening to its end.

One request too many is refused before its body is read; one whose body has come whole is admitted: who sends nothing
takes no place of others. While it is answered a task waits for the client to leave: then everything that was begun for
it ends, wherever it is.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pi_runtime.engine.engine import Engine
from pi_runtime.server.edge import ApiKeys, Guard
from pi_runtime.server.errors import ApiError, failed
from pi_runtime.server.exchange import BodyEndpoint
from pi_runtime.server.metrics import RequestLog, Write
from pi_runtime.server.openapi import Route as RouteSpec
from pi_runtime.server.routes import ROUTES, beside
from pi_runtime.server.service import Service
from pi_runtime.server.settings import ServerSettings

SHOWN_HEADERS = ("x-request-id", "x-unknown-fields")
"""Headers of answers that pages of other origins may read."""


def build_app(settings: ServerSettings, open_engine: Callable[[], Engine], log: Write) -> Starlette:
    """The application. It opens the engine when it starts, and closes engine and model when it ends.

    `log` is called with lines of what it does, and for each request if the settings ask for it. `app.state.service` is
    the service, `app.state.keys` are the keys that it takes.
    """
    service = Service(open_engine, settings)
    requests = RequestLog(
        log, service.metrics, every_request=settings.log_requests, as_json=settings.log_format == "json"
    )
    service.on_event = requests.event
    routes = [Route(route.path, _endpoint(service, route), methods=[route.method]) for route in ROUTES]
    requests.paths |= {route.endpoint: route.path for route in routes}

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        await service.close()
        requests.event("the server has stopped")

    handlers = {ApiError: _refuse, HTTPException: _refuse_http, Exception: _refuse_fault}
    keys = ApiKeys(settings.api_keys)
    guards = _guards(settings, requests, keys)
    found = Starlette(routes=routes, middleware=guards, exception_handlers=handlers, lifespan=lifespan)
    found.state.service, found.state.keys = service, keys
    return found


def _endpoint(service: Service, route: RouteSpec) -> Any:
    """What answers the requests of a route: those with a body are admitted first."""
    return partial(route.handler, service) if route.body is None else BodyEndpoint(service, route)


def _guards(settings: ServerSettings, requests: RequestLog, keys: ApiKeys) -> list[Middleware]:
    """The middleware that every request passes before its route."""
    open_paths = [route.path for route in ROUTES if not route.needs_key]
    guard = Middleware(Guard, settings=settings, requests=requests, open_paths=open_paths, keys=keys)
    if not settings.cors:
        return [guard]
    allowed: dict[str, Any] = {"allow_origin_regex": settings.origins, "expose_headers": SHOWN_HEADERS}
    return [Middleware(CORSMiddleware, allow_methods=["GET", "POST", "OPTIONS"], allow_headers=["*"], **allowed), guard]


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope["error"] = error
    return JSONResponse(error.body_at(request.scope["path"]), error.status, error.headers)


async def _refuse_http(request: Request, error: Exception) -> Response:
    """What starlette refuses: paths and methods that there are not."""
    assert isinstance(error, HTTPException)
    meant = beside(request.url.path)
    path = "there is no such path" if meant is None else f"there is no such path; there is {meant}"
    said = {404: path, 405: f"{request.method} is not what this path takes"}
    found = ApiError(error.status_code, said.get(error.status_code, error.detail), headers=error.headers)
    return await _refuse(request, found)


async def _refuse_fault(request: Request, error: Exception) -> Response:
    return await _refuse(request, failed(error))
