"""The log: a line for each request where it is asked for, and lines of what an operator must know.

Nothing that a request says is logged, and no key: a path is its route's, and of an error there are its code and the
names of fields.
"""

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from pi_runtime.server.errors import ApiError
from pi_runtime.server.metrics import Metrics

Write = Callable[[str], object]
ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""A request's id that a client may choose."""
FULL_EVERY_S = 10.0
"""Least time between two lines that say that the queue is full."""
FIELD_CHARS = 80
NAMED = ("code", "param", "unknown")
"""Fields of a line that it does not always have."""


def request_id(headers: Headers) -> str:
    """The id that the client gives its request, if it is short and plain; else a new one."""
    given = headers.get("x-request-id", "")
    return given if ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


def plain(name: str) -> str:
    """The name of a field as headers and lines can have it: short, and without anything that could end them.

    >>> plain("messages[0].a b")
    'messages[0].a?b'
    """
    shown = re.sub(r"[^A-Za-z0-9_.$\[\]-]", "?", name[: FIELD_CHARS + 1])
    return shown if len(name) <= FIELD_CHARS else shown[:FIELD_CHARS] + "..."


class RequestLog:
    """Counts requests that have ended, and writes a line for each, and for events, as far as that is wanted.

    Belongs to the event loop's thread.
    """

    def __init__(
        self,
        write: Write,
        metrics: Metrics,
        *,
        every_request: bool,
        as_json: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write, self._metrics, self._every_request, self._clock = write, metrics, every_request, clock
        self._shown = json.dumps if as_json else _line
        self.paths: dict[Any, str] = {}
        """The paths of routes, by their endpoints."""
        self._full_since: float | None = None
        """When it was last said that the queue is full."""
        self._refused = 0
        """Requests that were refused since."""

    def count(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request that has ended with this status after so long."""
        path, error = self.paths.get(scope.get("endpoint"), "other"), scope.get("error")
        self._metrics.requests[path, status] += 1
        if self._every_request:
            self._write(self._shown(_request_fields(scope, path, status, seconds, error)))
        if error is not None and error.code == "queue_full":
            self._count_full()

    def _count_full(self) -> None:
        now = self._clock()
        if self._full_since is not None and now - self._full_since < FULL_EVERY_S:
            self._refused += 1
            return
        more = f", and {self._refused} more since this was last said" if self._refused else ""
        self.event(f"the queue is full: a request was refused{more}")
        self._full_since, self._refused = now, 0

    def event(self, said: str) -> None:
        """Log something that the server does."""
        self._write(self._shown(event_fields(said)))


def event_fields(said: str) -> dict[str, Any]:
    """What a line has that tells of an event."""
    return {"time": _now(), "event": said}


def _request_fields(scope: Scope, path: str, status: int, seconds: float, error: ApiError | None) -> dict[str, Any]:
    """What a line has that tells of a request, in the order of the line."""
    client = scope.get("client")
    wrong = {} if error is None else {"code": error.code, "param": error.param}
    return {
        "time": _now(),
        "client": client[0] if client else "-",
        "id": scope["request_id"],
        "method": scope["method"],
        "route": path,
        "status": status,
        **{name: plain(value) for name, value in wrong.items() if value},
        **({"unknown": scope["unknown_fields"]} if scope.get("unknown_fields") else {}),
        "seconds": round(seconds, 3),
    }


def _line(fields: Mapping[str, Any]) -> str:
    """A line as text: those fields have their names that are not in every line."""
    words = [f"{name}={value}" if name in NAMED else str(value) for name, value in fields.items() if name != "seconds"]
    return " ".join([*words, f"{fields['seconds']:.3f} s"] if "seconds" in fields else words)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
