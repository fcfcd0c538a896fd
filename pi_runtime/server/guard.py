"""Who may ask: Host, Origin and key are looked at before anything else of a request.

A page on another site can make a browser send requests here, even under a name of its own that leads to this machine.
So a Host must be a name that was allowed, or the address that was connected to, and an Origin must be the server's own
or one that was allowed.
"""

import hashlib
import hmac
import time
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pi_runtime.server.clients import address_of
from pi_runtime.server.errors import ApiError
from pi_runtime.server.request_log import RequestLog, request_id
from pi_runtime.server.settings import ServerSettings

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
        self._origins = set(settings.allowed_origins)
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
        given = headers.getlist("authorization")
        owner = self._owner(given) if self._keys else ""
        if owner is not None:
            return owner
        if scope["path"] in self._open_paths:
            return ""
        found = "the API key is wrong" if given else "there is no API key"
        said = f"{found}; send one of the server's as Authorization: Bearer KEY"
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
        return own or origin in self._origins or "*" in self._origins

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
