"""Who a request comes from, where clients are to have equal shares: the key's owner, or else the address."""

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Self

from starlette.types import Scope


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
