"""How much the server takes on, in all and of one client: answers, bodies on their way, and connections.

Answers run in the engine's slots, or wait; more are refused at once. Where there are several keys, one of them may have
so many of these that others still come in.
"""

import math
import socket
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Self

from starlette.types import Scope

from pi_runtime.server.errors import ApiError


@dataclass(frozen=True)
class Client:
    """Who sent a request."""

    owner: str
    """The digest of its key; "" where no key is asked for."""
    network: str
    """The address or network that it comes from, as `network_of` has it."""

    @classmethod
    def of(cls, scope: Scope) -> Self:
        """The client of a request that the guard let in."""
        host, _ = scope.get("client") or ("", 0)
        return cls(scope["owner"], network_of(host))

    @property
    def name(self) -> str:
        """The name by which clients are distinguished."""
        return self.owner or self.network


def network_of(host: str) -> str:
    """The address of a client. Of IPv6 it is the network of 64 bits: a machine has all of its addresses.

    >>> network_of("::ffff:10.0.0.1"), network_of("2001:db8::1") == network_of("2001:db8::2:0:1")
    ('10.0.0.1', True)
    """
    try:
        found = address_of(host)
    except ValueError:
        return host
    return str(IPv6Address(int(found) >> 64 << 64)) if isinstance(found, IPv6Address) else str(found)


def address_of(text: str) -> IPv4Address | IPv6Address:
    """An address; one of IPv4 is the same where a socket of IPv6 has it. Raises ValueError for none."""
    found = ip_address(text)
    return getattr(found, "ipv4_mapped", None) or found


LONGEST_RETRY_S = 60
LATEST = 0.1
"""Weight of the latest answer in the mean time of one."""


class Ticket:
    """Counts the answers that one request takes of the server's slots and queue."""

    def __init__(self, admission: "Admission", owner: str) -> None:
        self._admission, self._owner, self._answers = admission, owner, 0
        self.reserve(1)

    def reserve(self, answers: int) -> None:
        """Let a request have so many answers in all. Raises ApiError (429) where they do not fit beside others."""
        admission, more = self._admission, max(answers, 1) - self._answers
        if answers > admission.most_each:
            raise ApiError(400, f"{answers} answers", param="n", code="too_many_answers")
        admission.check(self._owner, more)
        admission.of[self._owner] += more
        self._answers += more

    def release(self) -> None:
        """Let others have what this request took, once it has ended."""
        self._admission.of[self._owner] -= self._answers
        self._answers = 0


class Admission:
    """Counts the answers of all requests. Belongs to the event loop's thread, so nothing it does waits."""

    def __init__(self, slots: int, queue: int, most_each: int | None = None) -> None:
        self.slots, self.queue, self.most = slots, queue, slots + queue
        self.most_each = self.most if most_each is None else most_each
        """Most answers that run or wait of one owner."""
        self.of: Counter[str] = Counter()
        """Answers that run or wait, by owner."""
        self._answer_s = 1.0

    @property
    def answers(self) -> int:
        """Answers that run or wait."""
        return self.of.total()

    def check(self, owner: str, more: int = 1) -> None:
        """Raise ApiError (429) where so many answers more of an owner do not fit beside those that run or wait."""
        if self.answers + more > self.most:
            raise self.full(f"the server is busy: {self.slots} answers run and {self.queue} may wait")
        if self.of[owner] + more > self.most_each:
            raise self.full(f"you have as many answers as one key may: {self.most_each} that run or wait")

    @contextmanager
    def ticket(self, owner: str) -> Iterator[Ticket]:
        """Count one answer of an owner for as long as the block runs. Raises ApiError (429) where none is left."""
        ticket = Ticket(self, owner)
        try:
            yield ticket
        finally:
            ticket.release()

    def full(self, said: str) -> ApiError:
        """The error (429) that refuses an answer for which slots and queue have no room."""
        return ApiError(429, said, code="queue_full", headers={"Retry-After": str(self.retry_s)})

    def count(self, seconds: float) -> None:
        """Count an answer that took so long in a slot."""
        self._answer_s += LATEST * (seconds - self._answer_s)

    @property
    def retry_s(self) -> int:
        """Whole seconds after which a place in the queue is likely to be free: one answer ends every so often."""
        return min(max(1, math.ceil(self._answer_s / self.slots)), LONGEST_RETRY_S)


class IncomingBodies:
    """Bytes of bodies that have not come whole, of all clients and of each. Who sends nothing takes nothing of them.

    A client has three quarters at most, so that who sends many large bodies slowly leaves room for others.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.bodies = 0
        """Bodies that are coming."""
        self._of: Counter[str] = Counter()

    @contextmanager
    def body(self, client: str) -> Iterator[Callable[[int], None]]:
        """Counts the bytes of one body until the block ends, by the function that it gives.

        That is called with how many have come now, and raises ApiError (429) where there is no room for them.
        """
        counted = 0

        def count(nbytes: int) -> None:
            nonlocal counted
            if self._of.total() + nbytes > self._most or self._of[client] + nbytes > 3 * self._most // 4:
                said = "the server is busy receiving requests"
                raise ApiError(429, said, code="queue_full", headers={"Retry-After": "5"})
            self._of[client] += nbytes
            counted += nbytes

        self.bodies += 1
        try:
            yield count
        finally:
            self.bodies -= 1
            self._of[client] -= counted
            self._of += Counter()  # without clients that have none


OF_ONE = 3 / 4
"""Share of all connections that one address may have."""
OTHER_FILES = 128
"""Files that are left for all else: the artifact, its reads, pipes of processes, listening sockets."""


class Connections:
    """Counts the open connections, in all and of each network.

    A connection costs its sender nothing, and needs no key. So there is a bound, below the files that the process may
    open, and one address has three quarters of it at most: whoever takes these leaves the others to other addresses.
    Behind a proxy all connections come from its address, and three quarters are still many times what runs and waits.
    """

    def __init__(self, most: int) -> None:
        self.most, self.most_of_one = most, max(1, int(OF_ONE * most))
        self.refused = 0
        """How many connections were not accepted."""
        self._of: Counter[str] = Counter()

    @property
    def open(self) -> int:
        """How many connections are open."""
        return self._of.total()

    def admit(self, network: str) -> bool:
        """Count a connection from a network, if it may be accepted; returns whether it may."""
        has_room = self.open < self.most and self._of[network] < self.most_of_one
        self._of[network] += has_room
        self.refused += not has_room
        self._of += Counter()  # without networks that have none
        return has_room

    def end(self, network: str) -> None:
        """Count the end of a connection from a network."""
        self._of[network] -= 1
        self._of += Counter()


class ListeningSocket(socket.socket):
    """A listening socket that accepts no more connections than `Connections` allows.

    They are counted before TLS begins: one that is not admitted is closed then and there.
    """

    connections: Connections

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection. Raises ConnectionAbortedError for one that is not admitted."""
        accepted, address = super().accept()
        network = network_of(address[0])
        if not self.connections.admit(network):
            accepted.close()
            raise ConnectionAbortedError
        found = _Counted(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        found.ended = weakref.finalize(found, self.connections.end, network)
        return found, address


class _Counted(socket.socket):
    """A connection that is counted until it is closed."""

    ended: "weakref.finalize[[str], _Counted]"

    def close(self) -> None:
        super().close()
        self.ended()


def most_connections(wanted: int) -> int:
    """The number of connections: those that are wanted, or fewer where this process may open too few files."""
    if sys.platform == "win32":
        return wanted
    import resource  # noqa: PLC0415  Windows has none

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files == resource.RLIM_INFINITY else min(wanted, files - min(OTHER_FILES, files // 4))


def listen(host: str, port: int, connections: Connections) -> list[ListeningSocket]:
    """A socket for each address of a host, or of several between commas, as `asyncio.create_server` opens them.

    Raises OSError.
    """
    found: list[ListeningSocket] = []
    kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
    try:
        addresses = [one for name in host.split(",") for one in socket.getaddrinfo(name, port, type=kind, flags=flags)]
        for family, kind, proto, _, address in dict.fromkeys(addresses):
            opened = ListeningSocket(family, kind, proto)
            opened.connections = connections
            found.append(opened)
            if sys.platform != "win32":
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            opened.bind((address[0], port, *address[2:]))
            port = opened.getsockname()[1]  # a free one is the same for all
    except OSError:
        for opened in found:
            opened.close()
        raise
    return found
