"""What an operator sees of the server: figures, and lines of the log.

Figures are in Prometheus' text format 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats/. Nothing that
a request says is logged, and no key: a path is its route's, and of an error there are its code and the names of fields.
"""

import json
import re
import secrets
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from platform import python_version
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from pi_runtime.engine.stats import EngineStats
from pi_runtime.sequence.stats import Stats
from pi_runtime.server.admission import Connections
from pi_runtime.server.errors import ApiError

MEDIA = "text/plain; version=0.0.4; charset=utf-8"
TTFT_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
BETWEEN_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)

ENGINE = (
    ("running_answers", "gauge", "Answers in a slot.", "running"),
    ("waiting_answers", "gauge", "Answers that wait for a slot.", "waiting"),
    ("reading_ahead", "gauge", "Prompts that are read ahead, and answers that are read again.", "reading_ahead"),
    ("kv_pages_used", "gauge", "Pages of keys and values in use or kept.", "pages_used"),
    ("kv_pages_kept", "gauge", "Pages of them that a later prompt may begin with.", "pages_kept"),
    ("kv_pages_free", "gauge", "Pages of keys and values that are free.", "pages_free"),
    ("kv_page_bytes", "gauge", "Bytes of 32 positions in all layers.", "page_bytes"),
    ("kv_bytes_used", "gauge", "Bytes of the pages that are used.", "bytes_used"),
    ("kv_disk_pages", "gauge", "Pages of keys and values on disk.", "kv_disk_pages"),
    ("kv_disk_pages_written_total", "counter", "Pages that were written there.", "kv_disk_pages_written"),
    ("kv_disk_tokens_total", "counter", "Tokens of prompts whose keys and values came from there.", "kv_disk_tokens"),
    ("requests_finished_total", "counter", "Answers that have ended, in whatever way.", "finished"),
    ("prompt_tokens_total", "counter", "Tokens of prompts.", "prompt_tokens"),
    ("cached_tokens_total", "counter", "Tokens of prompts that were stored already.", "cached_tokens"),
    ("generated_tokens_total", "counter", "Tokens of answers.", "generated_tokens"),
    ("ahead_tokens_total", "counter", "Tokens that were read ahead or again.", "ahead_tokens"),
    ("guessed_tokens_total", "counter", "Guessed tokens that ran.", "guessed_tokens"),
    ("accepted_tokens_total", "counter", "Guessed tokens that were right.", "accepted_tokens"),
    ("checked_drafts_total", "counter", "Drafts of which any token ran.", "checked_drafts"),
    ("drafts_won_seconds", "gauge", "Time that checked drafts saved up to now.", "drafts_won_s"),
    ("head_guessed_tokens_total", "counter", "Guessed tokens of a guess head that ran.", "head_guessed_tokens"),
    ("head_accepted_tokens_total", "counter", "Those of them that were right.", "head_accepted_tokens"),
    ("preemptions_total", "counter", "Answers that had to wait again because pages ran out.", "preemptions"),
    ("steps_total", "counter", "Steps of the engine, each of which computes all answers that run.", "steps"),
    ("busy_seconds_total", "counter", "Time in which the engine worked.", "busy_s"),
)
"""Name, kind, help, and field of the engine's figures."""
DISK = (
    ("disk_tokens_total", "counter", "Tokens that were decoded with rows from disk.", "tokens"),
    ("disk_seconds_total", "counter", "Time in which they were decoded.", "seconds"),
    ("disk_wait_seconds_total", "counter", "Time of it in which nothing could be computed yet.", "seconds_waited"),
    ("disk_row_hits_total", "counter", "Rows that were in memory when they were needed.", "hits"),
    ("disk_row_misses_total", "counter", "Rows that came from disk.", "misses"),
    ("disk_read_bytes_total", "counter", "Bytes that decoding read from disk.", "bytes_read"),
)
"""The same of a model within a budget of memory: their rates are hit rate, bytes a token, share of time waiting."""


class Histogram:
    """How many values were at most so large, for each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def count(self, value: float, times: int = 1) -> None:
        """Count a value so many times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self._sum += value * times

    def lines(self, name: str) -> Iterator[str]:
        """The lines of the samples of this histogram."""
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


class Metrics:
    """What the server counts beside the engine's own figures. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """Requests by route and status."""
        self.connections = Connections(0)
        """The connections of the server, once it listens."""
        self.cancelled = 0
        """Requests whose client left before the end."""
        self.first_token_s, self.between_tokens_s = Histogram(TTFT_S), Histogram(BETWEEN_S)
        self._started_s = time.time()
        self._prefill_s = self._decode_s = self._rows_read = 0.0
        self._rows_read_tokens = 0

    def count(self, stats: Stats) -> None:
        """Count an answer that has ended."""
        self._prefill_s += stats.prefill_s
        self._decode_s += stats.decode_s
        if stats.rows_read_share is not None:
            self._rows_read += stats.rows_read_share * stats.generated_tokens
            self._rows_read_tokens += stats.generated_tokens

    def text(self, engine: EngineStats | None, *, slots: int, open_requests: int) -> str:
        """All figures in Prometheus' form; `engine` is None until the engine is open, and its figures are left out."""
        return "\n".join([*self._lines(engine, slots, open_requests), ""])

    def _lines(self, engine: EngineStats | None, slots: int, open_requests: int) -> Iterator[str]:
        yield from _head("build_info", "gauge", "1; the versions are in the labels.")
        yield f'pi_build_info{{version="{version("pi-toolchain")}",python="{python_version()}"}} 1'
        yield "# TYPE process_start_time_seconds gauge"  # the name that Prometheus has for it
        yield f"process_start_time_seconds {self._started_s:.3f}"
        yield from _sample("slots", "gauge", "Most answers that run at once.", slots)
        yield from _sample("open_requests", "gauge", "Requests that are being answered, or wait.", open_requests)
        for name, kind, text, field in ENGINE if engine is not None else ():
            yield from _sample(name, kind, text, getattr(engine, field))
        disk = None if engine is None else engine.disk
        for name, kind, text, field in DISK if disk is not None else ():
            yield from _sample(name, kind, text, getattr(disk, field))
        yield from _sample("prefill_seconds_total", "counter", "Time in which answers read prompts.", self._prefill_s)
        yield from _sample("decode_seconds_total", "counter", "Time in which answers were written.", self._decode_s)
        yield from _sample("connections", "gauge", "Connections that are open.", self.connections.open)
        refused = self.connections.refused
        yield from _sample("refused_connections_total", "counter", "Connections that were one too many.", refused)
        yield from _sample("cancelled_requests_total", "counter", "Requests whose client left.", self.cancelled)
        yield from _head("rows_read_share", "summary", "Rows read of all that a dense FFN reads, for each token.")
        yield f"pi_rows_read_share_sum {self._rows_read}"
        yield f"pi_rows_read_share_count {self._rows_read_tokens}"
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to its first text.", self.first_token_s),
            ("time_between_tokens_seconds", "Between tokens of an answer.", self.between_tokens_s),
        ):
            yield from _head(name, "histogram", text)
            yield from histogram.lines(f"pi_{name}")
        yield from _head("http_requests_total", "counter", "Requests by route and status.")
        for (route, status), times in sorted(self.requests.items()):
            yield f'pi_http_requests_total{{route="{route}",status="{status}"}} {times}'


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP pi_{name} {text}"
    yield f"# TYPE pi_{name} {kind}"


def _sample(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield from _head(name, kind, text)
    yield f"pi_{name} {value}"


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
