"""Rounds: each contender once, beside a reading of the memory's bandwidth; ratios are taken within a round.

The machine may change its memory speed from one minute to the next. So the contenders alternate, the order is turned
round every time, and what is reported is the median over rounds of ratios to the same round's figures.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pi_runtime.kernels.benchmarks import read_bandwidth
from side_by_side.process import EngineError, Worker, threads

BANDWIDTH_BYTES = 1 << 30
LLAMA_CPP = "llama.cpp"


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
    may_fail: bool = False
    """Whether the comparison goes on without it. Where ours fails, there is nothing to compare."""
    version: str | None = None
    """Of the installed package; None where there is none."""
    build: str | None = None
    """What the engine says it was compiled with; None where it was not asked or gave no answer."""


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One contender in one phase."""

    engine: str
    version: str | None
    build: str | None
    format: str
    mode: str
    isa: str | None
    phase: str
    tokens: int
    """Of the prompt, or of the context before the decoded tokens."""
    parameters: int


@dataclass(frozen=True, kw_only=True)
class FailedRow(_Entry):
    """A contender that did not get through all rounds."""

    failure: str


@dataclass(frozen=True, kw_only=True)
class MeasuredRow(_Entry):
    """Medians over the rounds."""

    density: float
    """Measured share of the neurons whose `rest` was read; 1 where nothing is skipped."""
    read: float
    """Measured share of the rows of `first` that were read."""
    tokens_per_s: float
    ratio_to_llama_cpp: float | None
    """None where llama.cpp was not run, or failed in any round."""
    bytes_per_token: float
    """What must be read: in decode the weights (not the cache); in prefill the weights once, per token."""
    bandwidth: float
    """Of the rounds, bytes per second."""
    share_of_limit: float
    share_with_cache: float
    """The same, counting the keys and values that decoding reads as well."""


Row = MeasuredRow | FailedRow


@dataclass(frozen=True)
class _Sample:
    tokens_per_s: float
    bytes_per_token: float
    density: float
    read: float
    cache_bytes: float


Ask = Callable[[Contender], _Sample]
Sample = TypeVar("Sample")


def in_turns(
    contenders: Sequence[Contender], ask: Callable[[Contender], Sample], rounds: int, before: Callable[[], None]
) -> tuple[list[dict[int, Sample]], dict[int, str]]:
    """Ask every contender once a round; returns each round's answers, and how those failed that did, by their numbers.

    `before` begins a round. There is one round more, the first, which faults pages in and is not counted.
    """
    samples: list[dict[int, Sample]] = []
    failures: dict[int, str] = {}
    for n in range(rounds + 1):
        before()
        found = {}
        for at in range(len(contenders))[:: 1 if n % 2 else -1]:
            if at in failures:
                continue
            try:
                found[at] = ask(contenders[at])
            except EngineError as failure:
                if not contenders[at].may_fail:
                    raise
                failures[at] = str(failure)
            time.sleep(0.02)  # until its threads no longer spin
        samples.append(found)
    return samples[1:], failures


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
    bandwidths: list[float] = []
    measure = lambda: bandwidths.append(read_bandwidth(BANDWIDTH_BYTES, threads()))  # noqa: E731
    samples, failures = in_turns(contenders, ask, rounds, measure)
    del bandwidths[0]
    base = next((at for at, c in enumerate(contenders) if c.engine == LLAMA_CPP and at not in failures), None)
    for at, c in enumerate(contenders):
        told = labels | {name: getattr(c, name) for name in ("engine", "version", "build", "format", "mode", "isa")}
        if at in failures:
            yield FailedRow(failure=failures[at], **told)
        else:
            own = [found[at] for found in samples]
            yield _measured(own, None if base is None else [found[base] for found in samples], bandwidths, told)


def _measured(
    own: list[_Sample], base: list[_Sample] | None, bandwidths: list[float], told: dict[str, Any]
) -> MeasuredRow:
    """`base`: llama.cpp's samples of the same rounds."""
    ratios = [s.tokens_per_s / b.tokens_per_s for s, b in zip(own, base, strict=True)] if base else []
    shares = [s.tokens_per_s * s.bytes_per_token / b for s, b in zip(own, bandwidths, strict=True)]
    cached = [s.tokens_per_s * (s.bytes_per_token + s.cache_bytes) / b for s, b in zip(own, bandwidths, strict=True)]
    return MeasuredRow(
        density=statistics.mean(s.density for s in own),
        read=statistics.mean(s.read for s in own),
        tokens_per_s=statistics.median(s.tokens_per_s for s in own),
        ratio_to_llama_cpp=statistics.median(ratios) if ratios else None,
        bytes_per_token=statistics.mean(s.bytes_per_token for s in own),
        bandwidth=statistics.median(bandwidths),
        share_of_limit=statistics.median(shares),
        share_with_cache=statistics.median(cached),
        **told,
    )
