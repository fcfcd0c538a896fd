"""Figures in Prometheus' text format 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats/."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from platform import python_version

from pi_runtime.engine.stats import EngineStats
from pi_runtime.sequence.stats import Stats
from pi_runtime.server.connections import Connections

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
