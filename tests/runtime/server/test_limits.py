"""Limits: of bodies, headers and nesting, of those who send slowly, and of those who read slowly."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from support.serving import Served, serving, slowed, wait_until

from pi_runtime import Grammar, Model
from pi_runtime.errors import UsageError
from pi_runtime.server.settings import Limits
from pi_runtime.text.grammar_check import check_grammar
from pi_runtime.text.sandbox import SandboxLimits

Serve = Callable[..., Served]
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def small(endless: Path) -> Iterator[Served]:
    """A server that takes little, and waits for it."""
    limits = Limits(body_bytes=1000, header_bytes=2000, receive_s=30, nesting=8)
    with serving(endless, limits=limits) as served:
        yield served


@pytest.fixture(scope="module")
def hasty(endless: Path) -> Iterator[Served]:
    """A server that waits for no slow sender."""
    with serving(endless, limits=Limits(receive_s=0.3)) as served:
        yield served


def connected(served: Served) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.settimeout(30)
    return connection


def all_of(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = b""
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found


def test_a_body_that_says_it_is_too_large(small: Served) -> None:
    response = small.complete("a" * 2000)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


def test_a_body_that_becomes_too_large(small: Served) -> None:
    response = httpx.post(f"{small.url}/v1/completions", content=(b"x" * 100 for _ in range(20)), timeout=30)
    assert response.status_code == 413


def test_headers_that_are_too_large(small: Served) -> None:
    with connected(small) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 3000)
        assert all_of(connection).startswith(b"HTTP/1.1 4")


def test_a_body_of_too_many_pieces(endless: Path, serve: Serve) -> None:
    served = serve(endless, limits=Limits(parts=100))
    content = b'{"model": "%s", "prompt": "a", "max_tokens": 1}' % served.name.encode()
    pieces = [content[n : n + 1] for n in range(len(content))]
    head = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    for spaces, answered in ((0, True), (100, False)):
        with connected(served) as connection:
            chunks = b"".join(b"1\r\n%s\r\n" % piece for piece in [*pieces, *[b" "] * spaces])
            connection.sendall(head + chunks + b"0\r\n\r\n")
            assert all_of(connection).startswith(b"HTTP/1.1 200") == answered
    wait_until(served.is_idle)


def test_pieces_of_a_body_that_is_not_read_count_too(endless: Path, serve: Serve) -> None:
    served = serve(endless, limits=Limits(parts=100, receive_s=300), api_keys=("a key of the server",))
    with connected(served) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n")
        assert connection.recv(12) == b"HTTP/1.1 401"
        connection.sendall(b"1\r\na\r\n" * 100)
        all_of(connection)  # the connection ends, though the body has not


@pytest.mark.parametrize("nested", [b"[" * 9, b'{"a":' * 9, b"[" * 900, b'[{"a":' * 5])
def test_json_that_is_nested_too_deep(small: Served, nested: bytes) -> None:
    response = httpx.post(f"{small.url}/v1/completions", content=nested, timeout=30)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "nested_too_deep")


def test_json_of_too_many_parts(endless: Path, serve: Serve) -> None:
    served = serve(endless, limits=Limits(brackets=100))
    response = served.complete([[1]] * 100)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "too_complex")


@pytest.mark.parametrize("body", [b'{"a": "[[[[[[[[[[[[[[[["}', b'["\\"[[[[[[[[[[[["]', b"[[],[],[],[],[],[],[],[]]"])
def test_brackets_in_strings_and_side_by_side_are_not_nested(small: Served, body: bytes) -> None:
    response = httpx.post(f"{small.url}/v1/completions", content=body, timeout=30)
    assert response.json()["error"]["code"] != "nested_too_deep"


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"NaN", b"[1]", b"null", b'{"model": "\\ud800"}', b'"a'])
def test_what_is_no_json_object(small: Served, body: bytes) -> None:
    assert httpx.post(f"{small.url}/v1/completions", content=body, timeout=30).status_code == 400


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /hea",
        HEAD,
        HEAD + b"Content-Length: 9\r\n\r\n{",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    ],
    ids=["nothing", "line", "headers", "body", "chunks"],
)
def test_those_who_stop_sending_are_dropped(hasty: Served, sent: bytes) -> None:
    with connected(hasty) as connection:
        connection.sendall(sent)
        assert all_of(connection) == b""
    wait_until(hasty.is_idle)


def test_those_who_send_a_little_now_and_then_are_dropped(hasty: Served) -> None:
    with connected(hasty) as connection:
        began = time.monotonic()
        with suppress(OSError):  # reset, or broken pipe
            while time.monotonic() - began < 20:
                connection.sendall(b"X")
                time.sleep(0.02)
        assert time.monotonic() - began < 20


def test_a_second_request_on_a_connection_has_its_own_time(endless: Path, serve: Serve) -> None:
    served = serve(endless, limits=Limits(receive_s=2.0))
    with httpx.Client(base_url=served.url) as client:
        for _ in range(5):
            assert client.get("/health").status_code == 200
            time.sleep(0.5)


def test_a_second_request_that_stops_is_dropped(hasty: Served) -> None:
    with connected(hasty) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he")
        assert all_of(connection).count(b"HTTP/1.1 200") == 1


def test_a_request_that_takes_too_long_to_prepare(endless: Path, serve: Serve) -> None:
    gate = threading.Event()

    def held(model: Model) -> None:
        encode = model.tokenizer.encode
        model.tokenizer.encode = lambda *args, **options: gate.wait(30) and encode(*args, **options)

    served = serve(endless, limits=Limits(prepare_s=0.1), changed=held)
    response = served.complete()
    gate.set()
    assert (response.status_code, response.json()["error"]["code"]) == (400, "too_complex")
    assert served.is_idle()


def test_an_answer_may_take_longer_than_sending_may(endless: Path, serve: Serve) -> None:
    served = serve(endless, limits=Limits(receive_s=0.2), changed=slowed(0.05))
    assert served.complete(max_tokens=10).json()["usage"]["completion_tokens"] == 10


def test_a_comment_comes_where_nothing_else_does(endless: Path, serve: Serve) -> None:
    served = serve(endless, keep_alive_s=0.05, changed=slowed(0.3))
    with served.streaming(max_tokens=2) as response:
        text = "".join(response.iter_text())
    assert ": keep-alive\n\n" in text
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("limits", "drops"), [(Limits(pending_bytes=50), False), (Limits(stall_s=0.3), True)], ids=["pending", "stall"]
)
def test_a_reader_who_takes_nothing_does_not_hold_a_slot(
    endless: Path, serve: Serve, limits: Limits, drops: bool
) -> None:
    name = "x" * 4000  # part of every event: so buffers are full soon
    served = serve(endless, limits=limits, context=1 << 20, model_name=name)
    body = f'{{"model": "{name}", "prompt": "a", "max_tokens": 1000000, "stream": true}}'.encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", served.port))
        connection.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: served.engine.stats.running == 1)
        wait_until(lambda: served.engine.stats.running == 0)
        assert served.engine.stats.generated_tokens < 1_000_000
        if drops:
            wait_until(served.is_idle)
        else:
            connection.settimeout(30)
            text = all_until(connection, b"reader_too_slow")
            assert b'"error"' in text
    wait_until(served.is_idle)


def all_until(connection: socket.socket, mark: bytes) -> bytes:
    """What comes up to a mark."""
    found = b""
    while mark not in found:
        data = connection.recv(65536)
        assert data, found[-500:]
        found += data
    return found


HARD = {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}"} for n in range(20)]}


def test_a_grammar_that_would_take_hours_is_refused() -> None:
    with pytest.raises(UsageError, match="too complex"):
        check_grammar(Grammar.json_schema(HARD), SandboxLimits(seconds=1.0))


def test_a_grammar_that_is_none_names_its_field(alphabet: Path, serve: Serve) -> None:
    served = serve(alphabet)
    body = {
        "model": served.name,
        "messages": [{"role": "user", "content": "a"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wrong"}}},
    }
    response = served.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("response_format")
