"""Decoding in batches: rates of every contender at every batch in interleaved rounds, and the targets they are held to.

Ratios are taken within a round; what is reported is their median, with the least and the most of the rounds.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from side_by_side.rounds import LLAMA_CPP, Contender, in_turns

Shares = Mapping[str, float]
"""`own`: neurons that a token keeps; `union`, `least`, `most`: those that any of a batch keeps, mean and ends of the
layers."""


@dataclass(frozen=True, kw_only=True)
class BatchRow:
    """One contender at one batch."""

    engine: str
    version: str | None
    build: str | None
    isa: str | None
    format: str
    mode: str
    batch: int
    failure: str | None = None
    """How it ended before it got through all rounds; then there are no figures."""
    tokens_per_s: tuple[float, ...] = ()
    """Of all sequences together, in each round."""
    to_alone: tuple[float, ...] = ()
    """Its rate ÷ its rate with one sequence."""
    to_smaller: tuple[float, ...] = ()
    """Its rate ÷ its rate at the next smaller batch."""
    to_llama_cpp: tuple[float, ...] = ()
    """Its rate ÷ llama.cpp's at the same batch; empty where llama.cpp failed."""
    shares: Shares | None = None


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """Two ways of doing one thing, compared round by round."""

    what: str
    format: str
    tokens_per_s: tuple[float, ...]
    base_tokens_per_s: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Of the first to the second, in each round."""
        return tuple(a / b for a, b in zip(self.tokens_per_s, self.base_tokens_per_s, strict=True))


@dataclass(frozen=True, kw_only=True)
class Target:
    """A ratio that is to be reached."""

    what: str
    wanted: float
    found: tuple[float, ...]
    """In each round; empty where it could not be measured."""

    @property
    def reached(self) -> bool:
        """Whether the median is there."""
        return bool(self.found) and statistics.median(self.found) >= self.wanted


def batch_rows(
    contenders: Sequence[Contender],
    batches: Sequence[int],
    shares: Mapping[str, Sequence[Shares]],
    *,
    context: int,
    tokens: int,
    rounds: int,
) -> list[BatchRow]:
    """Every contender at every batch once a round, `tokens` steps each. `shares`: by mode, one for each batch."""

    def ask(c: Contender) -> float:
        found = c.worker.ask("decode_batch", context=context, tokens=tokens, **c.options)
        return float(c.options["batch"] / statistics.median(found["seconds"]))

    each = [replace(c, options={**c.options, "batch": batch}) for c in contenders for batch in batches]
    samples, failures = in_turns(each, ask, rounds, lambda: None)
    rates = {at: tuple(found[at] for found in samples) for at in range(len(each)) if at not in failures}
    place = {(c.engine, c.mode, c.options["batch"]): at for at, c in enumerate(each)}
    rows = []
    for at, c in enumerate(each):
        batch, told = c.options["batch"], {"engine": c.engine, "version": c.version, "build": c.build, "isa": c.isa}
        labels = {**told, "format": c.format, "mode": c.mode, "batch": batch}
        if at in failures:
            rows.append(BatchRow(failure=failures[at], **labels))
            continue
        smaller = max((b for b in batches if b < batch), default=None)
        bases = [(c.engine, c.mode, 1), (c.engine, c.mode, smaller), (LLAMA_CPP, "dense", batch)]
        ratios = [_ratios(rates[at], rates.get(place.get(base, -1))) for base in bases]
        listed = dict(zip(batches, shares.get(c.mode, ()), strict=False)).get(batch)
        figures = dict(zip(("to_alone", "to_smaller", "to_llama_cpp"), ratios, strict=True))
        rows.append(BatchRow(tokens_per_s=rates[at], **figures, shares=listed, **labels))
    return rows


def pair_row(what: str, own: Contender, base: Contender, ask: Callable[[Contender], float], rounds: int) -> PairRow:
    """Ask both for their rates in turns."""
    samples, _ = in_turns([own, base], ask, rounds, lambda: None)
    rates = [tuple(found[at] for found in samples) for at in range(2)]
    return PairRow(what=what, format=own.format, tokens_per_s=rates[0], base_tokens_per_s=rates[1])


def _ratios(own: Sequence[float], base: Sequence[float] | None) -> tuple[float, ...]:
    return () if base is None else tuple(a / b for a, b in zip(own, base, strict=True))


def targets(rows: Sequence[BatchRow], pairs: Sequence[PairRow], wanted: Mapping[str, float]) -> Iterator[Target]:
    """What decoding is to reach. `wanted`: the least ratio of each pair, by what it compares."""
    ours = [row for row in rows if row.engine != LLAMA_CPP]
    for row in ours:
        name = f"{row.format}, {row.mode}, B = {row.batch}"
        sparse = row.mode.startswith("predicted")
        if row.batch == 1:
            yield Target(what=f"{name} ÷ llama.cpp dense", wanted=2.5 if sparse else 1.0, found=row.to_llama_cpp)
        if sparse and row.batch == 8:
            yield Target(what=f"{name} ÷ alone", wanted=3.0 if row.format == "q4" else 4.0, found=row.to_alone)
            yield Target(what=f"{name} ÷ llama.cpp, B = 8", wanted=1.5, found=row.to_llama_cpp)
    for before, row in pairwise(ours):
        if before.mode == row.mode and before.format == row.format and row.batch <= 16:
            what = f"{row.format}, {row.mode}, B = {row.batch} ÷ B = {before.batch}"
            yield Target(what=what, wanted=1.0, found=row.to_smaller)
    for pair in pairs:
        yield Target(what=f"{pair.format}, {pair.what}", wanted=wanted[pair.what], found=pair.ratios)


def spread(values: Sequence[float]) -> str:
    """The median with the least and the most."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})" if values else ""


def print_batch_rows(rows: Sequence[BatchRow]) -> None:
    """A table, and the build of each engine."""
    print(
        f"{'engine':11}{'format':7}{'isa':9}{'mode':16}{'batch':>6}{'tokens/s':>10}  {'× alone':22}{'× llama.cpp':22}"
        f"{'own':>6}{'union (layers)':>26}"
    )
    for r in rows:
        head = f"{r.engine:11}{r.format:7}{r.isa or '':9}{r.mode:16}{r.batch:6}"
        if r.failure is not None:
            print(f"{head}  {r.failure}")
            continue
        s = r.shares
        listed = "" if s is None else f"{s['own']:6.1%}{s['union']:10.1%} ({s['least']:.1%} to {s['most']:.1%})"
        rate = statistics.median(r.tokens_per_s)
        print(f"{head}{rate:10.1f}  {spread(r.to_alone):22}{spread(r.to_llama_cpp):22}{listed}")
    for engine, version, build in dict.fromkeys((r.engine, r.version, r.build) for r in rows if r.version or r.build):
        print(f"{engine}: {version or 'unknown version'}, build: {build or 'unknown'}")


def print_pair_rows(pairs: Sequence[PairRow]) -> None:
    """A line for each."""
    for p in pairs:
        own, base = statistics.median(p.tokens_per_s), statistics.median(p.base_tokens_per_s)
        print(f"{p.format}, {p.what}: {own:.1f} ÷ {base:.1f} tokens/s = {spread(p.ratios)}")


def print_targets(found: Sequence[Target]) -> None:
    """Each target, and whether it is reached."""
    print("\ntargets: median (least–most of the rounds)")
    for t in found:
        state = "reached" if t.reached else "MISSED" if t.found else "not measured"
        print(f"  {state:13}{t.what}: ≥ {t.wanted:g}, found {spread(t.found) or 'nothing'}")
