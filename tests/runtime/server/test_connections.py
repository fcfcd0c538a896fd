"""Connections: a bound in all and for one address, and what is left for others."""

import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.paths import GOLDEN
from support.serving import Served, wait_until

from pi_runtime.server.connections import OTHER_FILES, Connections, listen, most_connections

Serve = Callable[..., Served]


def test_one_network_leaves_room_for_others() -> None:
    connections = Connections(8)
    assert [connections.take("a") for _ in range(8)] == [True] * 6 + [False] * 2
    assert [connections.take("b") for _ in range(3)] == [True, True, False]
    assert (connections.open, connections.refused) == (8, 3)
    connections.end("a")
    assert connections.take("b")
    assert not connections.take("b")


def test_what_has_ended_leaves_nothing() -> None:
    connections = Connections(8)
    for n in range(100):
        assert connections.take(f"network {n}")
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
