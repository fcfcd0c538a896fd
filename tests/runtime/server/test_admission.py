"""More requests than are taken on: refused at once with the time to come again, and nothing else suffers."""

import resource
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.paths import GOLDEN
from support.serving import Served, wait_until

from pi_runtime.server.admission import (
    OTHER_FILES,
    Admission,
    Client,
    Connections,
    IncomingBodies,
    listen,
    most_connections,
    network_of,
)
from pi_runtime.server.errors import ApiError
from pi_runtime.server.settings import ServerSettings

Serve = Callable[..., Served]


@contextmanager
def full(served: Served) -> Iterator[None]:
    """All slots and the whole queue are taken."""
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(_sent(served))
        wait_until(lambda: served.engine.stats.running + served.engine.stats.waiting == 8)
        yield
    wait_until(served.is_idle)


@contextmanager
def _sent(served: Served) -> Iterator[None]:
    body = b'{"model": "endless", "prompt": "a", "max_tokens": 4000}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(head + body)
        yield


def test_one_too_many_is_told_when_to_come_again(talker: Served) -> None:
    with full(talker):
        response = talker.complete()
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        assert 1 <= int(response.headers["retry-after"]) <= 60
    assert talker.complete(max_tokens=1).status_code == 200


def test_one_too_many_is_refused_before_its_body_has_come(talker: Served) -> None:
    with full(talker), socket.create_connection(("127.0.0.1", talker.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{")
        connection.settimeout(30)
        assert connection.recv(12) == b"HTTP/1.1 429"


def test_ten_times_too_many_are_answered_or_refused(talker: Served) -> None:
    statuses: Counter[int] = Counter()

    def ask() -> None:
        statuses[talker.complete(max_tokens=5).status_code] += 1

    threads = [threading.Thread(target=ask) for _ in range(80)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) <= {200, 429}
    assert statuses[200] >= 8
    wait_until(talker.is_idle)


def test_answers_are_counted_not_requests() -> None:
    admission = Admission(slots=2, queue=2)
    with admission.ticket("") as first:
        first.reserve(3)
        with admission.ticket("") as second:
            with pytest.raises(ApiError) as refused:
                second.reserve(2)
            assert refused.value.status == 429
        with pytest.raises(ApiError) as refused:
            first.reserve(5)
        assert refused.value.status == 400
        assert admission.answers == 3
    assert admission.answers == 0


def test_the_time_to_come_again_follows_what_answers_take() -> None:
    admission = Admission(slots=2, queue=2)
    assert admission.retry_s == 1
    for _ in range(100):
        admission.count(30.0)
    assert admission.retry_s == 15


def test_one_key_of_several_leaves_places_to_others() -> None:
    admission = Admission(slots=2, queue=2, most_each=3)
    with admission.ticket("one") as first, admission.ticket("one") as second:
        second.reserve(2)
        with pytest.raises(ApiError) as refused, admission.ticket("one"):
            pass
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        with pytest.raises(ApiError) as impossible:
            first.reserve(4)
        assert impossible.value.status == 400
        with admission.ticket("two"):
            assert admission.answers == 4
    with admission.ticket("one") as ticket:
        ticket.reserve(3)
    assert admission.answers == 0


@pytest.mark.parametrize(
    ("keys", "slots", "queue", "each"), [(0, 8, 64, 72), (1, 8, 64, 72), (2, 8, 64, 54), (2, 8, 0, 8), (9, 1, 1, 1)]
)
def test_what_one_key_may_have(keys: int, slots: int, queue: int, each: int) -> None:
    settings = ServerSettings(api_keys=tuple(map(str, range(keys))), slots=slots, queue=queue)
    assert settings.answers_each == each


@pytest.mark.parametrize("sent", [b"", b"{"], ids=["silent", "begun"])
def test_requests_that_do_not_come_take_no_places_of_others(endless: Path, serve: Serve, sent: bytes) -> None:
    one, two = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
    served = serve(endless, slots=1, queue=3, api_keys=("one", "two"))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\nContent-Length: 9\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port))).sendall(head + sent)
        wait_until(lambda: served.service.incoming.bodies == 12)
        body = {"model": served.name, "prompt": "a", "max_tokens": 1}
        assert served.post("/v1/completions", body, headers=one).status_code == 200
        assert served.post("/v1/completions", body, headers=two).status_code == 200
    wait_until(lambda: served.service.incoming.bodies == 0)
    wait_until(served.is_idle)


def test_bodies_that_come_slowly_have_room_for_so_many_bytes() -> None:
    incoming = IncomingBodies(1000)
    with ExitStack() as stack:
        one, two, three = (stack.enter_context(incoming.body(name)) for name in ("one", "one", "another"))
        one(700)
        two(0)
        with pytest.raises(ApiError) as raised:
            two(51)
        assert (raised.value.status, raised.value.code) == (429, "queue_full")
        three(300)
        with pytest.raises(ApiError):
            three(1)
    assert incoming.bodies == 0
    with incoming.body("one") as again:
        again(750)


def client(owner: str = "", address: str | None = "10.0.0.1") -> Client:
    scope: dict[str, Any] = {"owner": owner, "client": None if address is None else (address, 5000)}
    return Client.of(scope)


def test_a_key_tells_more_than_an_address() -> None:
    assert client("key").name == client("key", "10.0.0.2").name
    assert client("key").name != client("other").name
    assert client().name != client(address="10.0.0.2").name
    assert client(address=None).name == ""


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:0:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("no address", "no address", True),
    ],
)
def test_a_network_of_ipv6_is_one_client(one: str, two: str, same: bool) -> None:
    assert (network_of(one) == network_of(two)) is same


Serve = Callable[..., Served]


def test_one_network_leaves_room_for_others() -> None:
    connections = Connections(8)
    assert [connections.admit("a") for _ in range(8)] == [True] * 6 + [False] * 2
    assert [connections.admit("b") for _ in range(3)] == [True, True, False]
    assert (connections.open, connections.refused) == (8, 3)
    connections.end("a")
    assert connections.admit("b")
    assert not connections.admit("b")


def test_what_has_ended_leaves_nothing() -> None:
    connections = Connections(8)
    for n in range(100):
        assert connections.admit(f"network {n}")
        connections.end(f"network {n}")
    assert connections.open == len(connections._of) == 0


@pytest.mark.parametrize(("files", "most"), [(1024, 1024 - OTHER_FILES), (256, 192), (1 << 20, 1000)])
def test_connections_leave_files_for_all_else(files: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert most_connections(1000) == most


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def test_a_connection_is_counted_until_it_is_closed(stack: ExitStack) -> None:
    connections = Connections(4)
    (listening,) = listen("127.0.0.1", 0, connections)
    stack.enter_context(listening).listen()
    address = listening.getsockname()
    accepted = []
    for _ in range(3):
        stack.enter_context(socket.create_connection(address))
        accepted.append(listening.accept()[0])
    one_more = stack.enter_context(socket.create_connection(address))
    with pytest.raises(ConnectionAbortedError):
        listening.accept()
    assert one_more.recv(1) == b""
    accepted.pop().close()
    assert connections.open == 2
    accepted[0].close()
    accepted[0].close()
    assert connections.open == 1
    accepted[1].close()
    assert connections.open == 0


def test_every_address_of_a_host_has_one_port() -> None:
    found = listen("localhost", 0, Connections(1))
    for each in found:
        each.close()
    assert len({each.family for each in found}) == len(found)


def test_several_addresses_have_one_port() -> None:
    found = listen("127.0.0.1,127.0.0.2", 0, Connections(1))
    names = [each.getsockname() for each in found]
    for each in found:
        each.close()
    assert [address for address, _ in names] == ["127.0.0.1", "127.0.0.2"]
    assert len({port for _, port in names}) == 1


def test_a_port_that_is_taken_is_an_error() -> None:
    (first,) = listen("127.0.0.1", 0, Connections(1))
    with first:
        first.listen()
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", first.getsockname()[1], Connections(1))


def silent(served: Served, count: int, source: str) -> list[socket.socket]:
    """Connections from an address of loopback that say nothing."""
    return [socket.create_connection(("127.0.0.1", served.port), source_address=(source, 0)) for _ in range(count)]


def healthy(served: Served, source: str) -> bool:
    with socket.create_connection(("127.0.0.1", served.port), source_address=(source, 0)) as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return connection.recv(100).startswith(b"HTTP/1.1 200")
        except ConnectionError:
            return False


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one address of loopback")
def test_an_address_that_takes_all_it_may_leaves_others_served(endless: Path, serve: Serve) -> None:
    served = serve(endless, connections=8, queue=0, slots=1)
    connections = served.service.metrics.connections
    assert connections.most == 8
    held = silent(served, 20, "127.0.0.2")
    wait_until(lambda: connections.refused == 14)
    assert connections.open == 6
    assert not healthy(served, "127.0.0.2")
    assert healthy(served, "127.0.0.3")
    text = served.get("/metrics").text
    assert "pi_refused_connections_total 15" in text
    assert "pi_connections 7" in text
    for each in held:
        each.close()
    wait_until(lambda: connections.open == 0)
    assert healthy(served, "127.0.0.2")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one address of loopback")
def test_silent_connections_do_not_exhaust_the_files_of_the_process() -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
    code += "from pi_runtime.commands.serve import main; main()"
    command = [sys.executable, "-c", code, str(GOLDEN), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process, ExitStack() as stack:
        try:
            assert process.stderr is not None
            lines: list[str] = []
            while not ({"listening", "ready:"} <= {line.split()[0] for line in lines}):
                lines.append(process.stderr.readline())
                assert lines[-1], lines
            port = int(next(line for line in lines if line.startswith("listening")).rpartition(":")[2])
            threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True).start()
            for _ in range(400):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)))
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.settimeout(30)
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
            assert not any("Too many open files" in line for line in lines)
        finally:
            process.kill()
