"""Rounds: each contender once, beside a reading of the memory's bandwidth; ratios are taken within a round.

The machine may change its memory speed from one minute to the next. So the contenders alternate, the order is turned
round every time, and what is reported is the median over rounds of ratios to the same round's figures.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pi_runtime.kernels.benchmarks import read_bandwidth
from side_by_side.process import Worker, threads

BANDWIDTH_BYTES = 1 << 30
PEER = "llama.cpp"


@dataclass(frozen=True)
class Contender:
    """One engine in one mode."""

    engine: str
    format: str
    mode: str
    isa: str | None
    """None where an engine does not say."""
    worker: Worker
    options: dict[str, Any] = field(default_factory=dict)
    """What its requests carry beside the lengths: our workers hold several models."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians of one contender in one phase."""

    engine: str
    format: str
    mode: str
    density: float
    """Measured share of the neurons whose `rest` was read; 1 where nothing is skipped."""
    read: float
    """Measured share of the rows of `first` that were read."""
    phase: str
    tokens: int
    """Of the prompt, or of the context before the decoded tokens."""
    parameters: int
    tokens_per_s: float
    ratio_to_llama_cpp: float | None
    bytes_per_token: float
    """What must be read: in decode the weights (not the cache); in prefill the weights once, per token."""
    bandwidth: float
    """Of the rounds, bytes per second."""
    share_of_limit: float
    share_with_cache: float
    """The same, counting the keys and values that decoding reads as well."""
    isa: str | None


@dataclass(frozen=True)
class _Sample:
    tokens_per_s: float
    bytes_per_token: float
    density: float
    read: float
    cache_bytes: float


Ask = Callable[[Contender], _Sample]


def decode_rows(
    contenders: Sequence[Contender], *, context: int, rounds: int, tokens: int, parameters: int
) -> list[Row]:
    """Decode `tokens` tokens a round after a context."""

    def ask(c: Contender) -> _Sample:
        found = c.worker.ask("decode", context=context, tokens=tokens, **c.options)
        speed = 1 / statistics.median(found["seconds"])
        return _Sample(speed, found["bytes_per_token"], found["density"], found["read"], found["cache_bytes"])

    return list(_rows(contenders, ask, rounds, phase="decode", tokens=context, parameters=parameters))


def prefill_rows(contenders: Sequence[Contender], *, tokens: int, rounds: int, parameters: int) -> list[Row]:
    """One prompt of `tokens` tokens a round."""

    def ask(c: Contender) -> _Sample:
        found = c.worker.ask("prefill", tokens=tokens, **c.options)
        return _Sample(tokens / found["seconds"], found["bytes_per_token"], 1.0, 1.0, 0.0)

    return list(_rows(contenders, ask, rounds, phase="prefill", tokens=tokens, parameters=parameters))


def _rows(contenders: Sequence[Contender], ask: Ask, rounds: int, **labels: Any) -> Iterator[Row]:
    samples: list[dict[int, _Sample]] = []
    bandwidths = []
    for n in range(rounds + 1):
        bandwidth = read_bandwidth(BANDWIDTH_BYTES, threads())
        found = {}
        for at in range(len(contenders))[:: 1 if n % 2 else -1]:
            found[at] = ask(contenders[at])
            time.sleep(0.02)  # until its threads no longer spin
        if n:  # the first round faults pages in
            samples.append(found)
            bandwidths.append(bandwidth)
    peers = [at for at, c in enumerate(contenders) if c.engine == PEER]
    for at, c in enumerate(contenders):
        own = [found[at] for found in samples]
        ratios = [found[at].tokens_per_s / found[peers[0]].tokens_per_s for found in samples] if peers else []
        shares = [s.tokens_per_s * s.bytes_per_token / b for s, b in zip(own, bandwidths, strict=True)]
        cached = [
            s.tokens_per_s * (s.bytes_per_token + s.cache_bytes) / b for s, b in zip(own, bandwidths, strict=True)
        ]
        yield Row(
            engine=c.engine,
            format=c.format,
            mode=c.mode,
            isa=c.isa,
            density=statistics.mean(s.density for s in own),
            read=statistics.mean(s.read for s in own),
            tokens_per_s=statistics.median(s.tokens_per_s for s in own),
            ratio_to_llama_cpp=statistics.median(ratios) if ratios else None,
            bytes_per_token=statistics.mean(s.bytes_per_token for s in own),
            bandwidth=statistics.median(bandwidths),
            share_of_limit=statistics.median(shares),
            share_with_cache=statistics.median(cached),
            **labels,
        )
