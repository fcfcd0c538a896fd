"""How many connections there are: a bound in all and for one address, below the files that the process may open.

A connection costs its sender nothing, and needs no key. So there is a bound, and one address has three quarters of it
at most: whoever takes these leaves the others to other addresses. Behind a proxy all connections come from its address,
and three quarters are still many times what runs and waits.

Connections are counted where they are accepted, before TLS begins: one that is not taken is closed then and there.
"""

import socket
import sys
import weakref
from collections import Counter
from typing import Any

from pi_runtime.server.clients import network_of

OF_ONE = 3 / 4
"""Share of all connections that one address may have."""
OTHER_FILES = 128
"""Files that are left for all else: the artifact, its reads, pipes of processes, listening sockets."""


class Connections:
    """Counts the open connections, in all and of each network."""

    def __init__(self, most: int) -> None:
        self.most, self.most_of_one = most, max(1, int(OF_ONE * most))
        self.refused = 0
        """How many connections were not accepted."""
        self._of: Counter[str] = Counter()

    @property
    def open(self) -> int:
        """How many connections are open."""
        return self._of.total()

    def take(self, network: str) -> bool:
        """Count a connection from a network, if it may be accepted; returns whether it may."""
        taken = self.open < self.most and self._of[network] < self.most_of_one
        self._of[network] += taken
        self.refused += not taken
        self._of += Counter()  # without networks that have none
        return taken

    def end(self, network: str) -> None:
        """Count the end of a connection from a network."""
        self._of[network] -= 1
        self._of += Counter()


class ListeningSocket(socket.socket):
    """A listening socket that accepts no more connections than `Connections` allows."""

    connections: Connections

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection. Raises ConnectionAbortedError for one that is not taken."""
        accepted, address = super().accept()
        network = network_of(address[0])
        if not self.connections.take(network):
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
    """A socket for each address of a host, as `asyncio.create_server` opens them. Raises OSError."""
    found: list[ListeningSocket] = []
    try:
        for family, kind, proto, _, address in dict.fromkeys(
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        ):
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
