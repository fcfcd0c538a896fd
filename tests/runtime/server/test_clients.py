"""Whom clients are told apart by: their keys, or else their addresses."""

from typing import Any

import pytest

from pi_runtime.server.clients import Client, network_of


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
