"""Fields that a request has and the server does not know: refused, named, or passed over.

Whoever reads requests says which with `unknown_fields`; where nobody does, they are refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

from pi_runtime.server.errors import ApiError

Policy = Literal["refuse", "warn", "ignore"]
MOST_NAMED = 10
"""Unknown fields of a request that are named."""

_NAMES: ContextVar[list[str] | None] = ContextVar("names of unknown fields", default=None)


@contextmanager
def unknown_fields(policy: Policy) -> Iterator[list[str]]:
    """Let this thread read a request; returns a list that the names of unknown fields come into, if they are to."""
    names: list[str] = []
    token = _NAMES.set(None if policy == "refuse" else names)
    try:
        yield names
    finally:
        _NAMES.reset(token)
        if policy == "ignore":
            names.clear()


def found_unknown(names: list[str]) -> None:
    """Take the names of a request's unknown fields. Raises ApiError 400 where these are refused."""
    known = _NAMES.get()
    if known is not None:
        known += names[: MOST_NAMED - len(known)]
    elif names:
        raise ApiError(400, f"{names[0]}: unknown field", param=names[0], code="unknown_parameter")
