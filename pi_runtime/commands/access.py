"""Who may reach a server: its hosts, origins, keys and certificate, as the command line gives them."""

import ipaddress
import re
import ssl
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pi_runtime.errors import InputError, Setting, UsageError, read_error

KEY_CHARS = 16
"""Least length of a key. Nothing slows down those who guess, and a shorter one is seldom a random one."""
NEW_KEY = "openssl rand -hex 32 makes a good one"
_ORIGIN = re.compile(r"\*|localhost|null|[a-z][a-z0-9+.-]*://[^\sA-Z/?#@*]+")
"""What browsers send as an origin, or `*`, or `localhost` for those of this machine."""


def _can_be_a_host(name: str) -> bool:
    """Whether the Host of a request can have this name, which is compared without its port."""
    with suppress(ValueError):
        return name == "*" or ipaddress.ip_address(name) is not None
    return re.fullmatch(r"[^\s/?#@:*\[\]]+", name) is not None


def keys_in(path: Path | None) -> tuple[str, ...]:
    """The keys in a file, one a line. Raises UsageError for a file without any, and for a key that can be guessed."""
    if path is None:
        return ()
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise read_error(Setting("api_key_file", path), error, "name a text file with a key on each line") from None
    keys = {key: n for n, key in enumerate(lines, 1) if key and not key.startswith("#")}
    if not keys:
        raise UsageError(f"{path}: there is no key in it", expected="a key on each line", remedy=NEW_KEY)
    for key, n in keys.items():
        if len(key.split()) > 1:
            raise UsageError(f"{path}, line {n}: a key has no spaces", remedy="put a comment on a line of its own")
        if len(key) < KEY_CHARS:
            raise UsageError(
                f"{path}, line {n}: the key can be guessed",
                expected=f"{KEY_CHARS} characters or more",
                found=len(key),
                remedy=NEW_KEY,
            )
    return tuple(keys)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_hosts(names: Iterable[str]) -> None:
    """Raise UsageError for a name that no request can have as its Host."""
    for name in names:
        if not _can_be_a_host(name):
            raise UsageError(
                "no request can have it",
                setting=Setting("allowed_host", repr(name)),
                expected="a name or an address without scheme, port and path; or *",
                remedy=Setting("allowed_host", "chat.example"),
            )


def check_origins(origins: Iterable[str], *, cors: bool) -> None:
    """Raise UsageError for an origin that no page can have, and for CORS without any."""
    remedy = Setting("allowed_origin", "https://chat.example")
    if cors and not origins:
        raise UsageError((Setting("cors"), " without an origin"), remedy=(remedy, ", or *"))
    for origin in origins:
        if _ORIGIN.fullmatch(origin) is None:
            raise UsageError(
                "no page can have it",
                setting=Setting("allowed_origin", repr(origin)),
                expected="a scheme, a name in small letters and a port if it is not the usual one, no path; null; or *",
                remedy=remedy,
            )


def check_reach(host: str, keys: Iterable[str]) -> None:
    """Raise UsageError for an address that other machines reach, where nobody needs a key."""
    if not keys and not all(map(_is_loopback, host.split(","))):
        raise UsageError(
            (Setting("host", host), " lets other machines in, and there is no key"),
            remedy=(Setting("api_key_file", "FILE"), ", or ", Setting("host", "127.0.0.1")),
        )


def checked_tls(certificate: Path | None, key: Path | None) -> dict[str, Path | None]:
    """The files for TLS, both or neither, as uvicorn has them. Raises UsageError and InputError."""
    given = [path for path in (certificate, key) if path is not None]
    if len(given) == 1:
        raise UsageError((Setting("ssl_certfile"), " and ", Setting("ssl_keyfile"), " go together"))
    for path in given:
        if not path.is_file():
            raise InputError(f"{path}: no such file", remedy="name a PEM file")
    if given:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(given[0], given[-1], password="")
        except (OSError, ValueError) as error:  # SSLError is an OSError
            pair = (Setting("ssl_certfile", given[0]), ", ", Setting("ssl_keyfile", given[1]))
            raise InputError(
                (pair, ": not a certificate with its key"),
                found=error,
                remedy="two PEM files; the key without a password",
            ) from None
    return {"ssl_certfile": certificate, "ssl_keyfile": key}
