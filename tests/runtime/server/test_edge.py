"""Who may ask: hosts, origins and keys, before anything else of a request."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from pi_runtime.server.edge import Guard
from pi_runtime.server.metrics import Metrics, RequestLog
from pi_runtime.server.routes import ROUTES
from pi_runtime.server.settings import LOOPBACK, ServerSettings

OPEN_PATHS = [route.path for route in ROUTES if not route.needs_key]
Headers = list[tuple[str, str]]


def status(settings: ServerSettings, headers: Headers, path: str = "/v1/models", server: str = "127.0.0.1") -> int:
    """The status of a request with these headers, to a guard before an application that says 200 to all."""
    return asked(settings, headers, path, server)[0]


def asked(
    settings: ServerSettings, headers: Headers, path: str = "/v1/models", server: str = "127.0.0.1"
) -> tuple[int, str | None]:
    """The status of such a request, and whose it is for the application; None where that never saw it."""
    found: list[int] = []
    owners: list[str | None] = [None]

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        owners.append(scope["owner"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])
            assert (b"x-content-type-options", b"nosniff") in message["headers"]

    pairs = [(name.encode(), value.encode()) for name, value in headers]
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": path, "server": (server, 8080), "headers": pairs}
    log = RequestLog(lambda _: None, Metrics(), every_request=False)
    asyncio.run(Guard(application, settings, log, OPEN_PATHS)(scope, receive, send))
    return found[0], owners[-1]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", 200),
        ("LocalHost:8080", 200),
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("chat.example", 200),
        ("chat.example:443", 200),
        ("", 403),
        (":8080", 403),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("evil.example:localhost", 403),
        ("localhost@evil.example", 403),
        ("localhost/x", 403),
        ("localhost:x", 403),
        ("[::1", 403),
        ("10.0.0.7", 403),
        ("2130706433", 403),
    ],
)
def test_hosts(host: str, expected: int) -> None:
    settings = ServerSettings(allowed_hosts=(*LOOPBACK, "chat.example"))
    assert status(settings, [("host", host)]) == expected


def test_there_must_be_one_host() -> None:
    assert status(ServerSettings(), []) == 403
    assert status(ServerSettings(), [("host", "localhost"), ("host", "evil.example")]) == 403


def test_the_address_that_was_connected_to_is_a_host() -> None:
    assert status(ServerSettings(), [("host", "10.0.0.7:8080")], server="10.0.0.7") == 200
    assert status(ServerSettings(), [("host", "10.0.0.7:8080")], server="::ffff:10.0.0.7") == 200
    assert status(ServerSettings(), [("host", "10.0.0.8:8080")], server="10.0.0.7") == 403
    assert status(ServerSettings(), [("host", "localhost:8080")], server="/run/socket") == 200
    assert status(ServerSettings(allowed_hosts=("*",)), [("host", "any.example")]) == 200


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://localhost:8080", 200),
        ("https://localhost:8080", 200),
        ("https://chat.example", 200),
        ("http://localhost", 403),
        ("http://localhost:9999", 403),
        ("http://chat.example", 403),
        ("https://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("file://localhost:8080", 403),
    ],
)
def test_origins(origin: str, expected: int) -> None:
    settings = ServerSettings(allowed_origins=("https://chat.example",))
    assert status(settings, [("host", "localhost:8080"), ("origin", origin)]) == expected


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        *((f"{scheme}://{name}{port}", 200) for scheme in ("http", "https") for port in ("", ":3000")
          for name in ("localhost", "127.0.0.1", "[::1]")),
        *((origin, 403) for origin in (
            "http://notlocalhost", "http://localhost.evil.example", "http://localhost:", "http://evil.example:3000",
            "ftp://localhost", "http://127x0x0x1", "http://localhost:3000/x", "null",
        )),
    ],
)  # fmt: skip
def test_origins_of_this_machine(origin: str, expected: int) -> None:
    settings = ServerSettings(allowed_origins=("localhost",))
    assert status(settings, [("host", "localhost:8080"), ("origin", origin)]) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Bearer secret", 200),
        ("bearer secret", 200),
        ("Bearer geheimniß", 200),
        ("Bearer secre", 401),
        ("Bearer secret2", 401),
        ("Bearer", 401),
        ("Basic secret", 401),
        ("secret", 401),
        ("", 401),
        (None, 401),
    ],
)
def test_keys(given: str | None, expected: int) -> None:
    settings = ServerSettings(api_keys=("other", "secret", "geheimniß"))
    headers = [("host", "localhost"), *([] if given is None else [("authorization", given)])]
    for path in ("/v1/models", "/metrics", "/slots", "/props", "/nowhere", "//", "/health/", "/v1/chat/completions"):
        assert status(settings, headers, path) == expected
    for path in ("/", "/health"):
        assert status(settings, headers, path) == 200


def test_of_several_keys_none_is_looked_at() -> None:
    settings = ServerSettings(api_keys=("secret",))
    headers = [("host", "localhost"), *[("authorization", "Bearer secret")] * 2]
    assert status(settings, headers, "/v1/models") == 401


def test_a_request_has_an_owner_that_does_not_show_the_key() -> None:
    def owner(*keys: str, given: str = "", path: str = "/v1/models") -> str | None:
        headers = [("host", "localhost"), *([("authorization", f"Bearer {given}")] if given else [])]
        return asked(ServerSettings(api_keys=keys), headers, path)[1]

    one, two = owner("one", "two", given="one"), owner("one", "two", given="two")
    assert one
    assert two
    assert one != two
    assert "one" not in one
    assert owner("two", "one", given="one") == one
    assert owner("one", given="other") is None
    assert owner("one", given="other", path="/health") == ""
    assert owner() == owner(given="one") == ""


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    settings = ServerSettings(api_keys=("a", "secret"))
    for given in ("a", "x" * 1000):
        status(settings, [("host", "localhost"), ("authorization", f"Bearer {given}")])
    assert len(compared) == 4
    assert {len(value) for pair in compared for value in pair} == {32}
