"""Loads as rows: medians over rounds, percentiles over all answers, ratios to llama-server within a round."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from serving.load import Load


@dataclass(frozen=True, kw_only=True)
class LoadRow:
    """One server under one load, over all rounds."""

    server: str
    load: str
    failure: str | None = None
    tokens_per_s: float = 0.0
    first_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The 50th, 95th and 99th percentile."""
    gap_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ratios: tuple[float, ...] = ()
    """Tokens per second ÷ those of llama-server, of each round."""


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that at least such a share of the values does not exceed.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5), percentile([1.0, 2.0], 0.99)
    (2.0, 2.0)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 50th, 95th and 99th."""
    return percentile(values, 0.5), percentile(values, 0.95), percentile(values, 0.99)


def load_row(server: str, load: str, found: Sequence[Load], ratios: Sequence[float]) -> LoadRow:
    """The row of what several rounds measured."""
    return LoadRow(
        server=server,
        load=load,
        tokens_per_s=statistics.median(one.tokens_per_s for one in found),
        first_s=percentiles([s for one in found for s in one.first_s]),
        gap_s=percentiles([s for one in found for s in one.gaps_s]),
        ratios=tuple(ratios),
    )


def print_rows(rows: Sequence[LoadRow]) -> None:
    """A table; times in milliseconds."""
    print(
        f"{'server':14}{'load':24}{'tokens/s':>9}{'first token p50':>17}{'p95':>9}{'p99':>9}"
        f"{'between tokens p50':>20}{'p95':>9}{'p99':>9}  × llama-server"
    )
    for r in rows:
        if r.failure is not None:
            print(f"{r.server:14}{r.load:24}  {r.failure}")
            continue
        first, gap = ([1e3 * s for s in values] for values in (r.first_s, r.gap_s))
        ratio = f"{statistics.median(r.ratios):.2f} ({min(r.ratios):.2f}–{max(r.ratios):.2f})" if r.ratios else ""
        print(
            f"{r.server:14}{r.load:24}{r.tokens_per_s:9.1f}{first[0]:17.0f}{first[1]:9.0f}{first[2]:9.0f}"
            f"{gap[0]:20.1f}{gap[1]:9.1f}{gap[2]:9.1f}  {ratio}",
            flush=True,
        )
