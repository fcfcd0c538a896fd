"""Timing decoding in batches, and prompts, of one artifact, its modes in turns, within a limit of time."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import mean, median, stdev
from typing import Literal

import numba

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.schema import Manifest
from pi_runtime.commands.bench.beside import LlamaCpp
from pi_runtime.commands.bench.sequences import LEAD, STEPS, Sequences
from pi_runtime.console import Progress
from pi_runtime.engine.model import Model
from pi_runtime.errors import Setting, UsageError, size
from pi_runtime.execution.devices import available_memory


@dataclass(frozen=True, kw_only=True)
class BenchSpec:
    """What to measure, and for how long."""

    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    """Tokens of each prompt."""
    repetitions: int
    limit_s: float
    """Seconds that all may take; 0 sets no limit."""
    threads: int
    """Threads of the CPU."""

    @classmethod
    def parse(cls, batches: str, prompts: str, repetitions: int, limit_s: float, threads: int | None) -> "BenchSpec":
        """The measurement that the flags of `pi-run` ask for. Raises UsageError for values that mean none."""
        if repetitions < 1:
            raise UsageError(setting=Setting("repetitions", repetitions), expected="1 or more")
        if not 0 <= limit_s < math.inf:
            raise UsageError(setting=Setting("seconds", limit_s), expected="a number ≥ 0; 0 sets no limit")
        return cls(
            batches=_numbers("batches", batches),
            prompts=_numbers("prompt_tokens", prompts),
            repetitions=repetitions,
            limit_s=limit_s,
            threads=threads or int(numba.config.NUMBA_NUM_THREADS),
        )


def _numbers(name: str, value: str) -> tuple[int, ...]:
    """The numbers of a list like 1,2,4, in rising order."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(setting=Setting(name, value), expected="numbers of 1 or more, like 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


@dataclass(frozen=True)
class Row:
    """One measurement: a mode, a batch or a prompt, and the seconds of each repetition."""

    mode: str
    phase: Literal["decode", "prompt"]
    batch: int
    """Sequences that run together."""
    tokens: int
    """Tokens of each sequence in one step, or of the prompt."""
    seconds: tuple[float, ...]
    """Time of a step, or of the prompt, in each repetition."""

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens per second of all sequences together, in each repetition."""
        return tuple(self.batch * self.tokens / s for s in self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """The mean of the rates of all repetitions."""
        return mean(self.rates)

    def times(self, other: "Row") -> tuple[float, float, float]:
        """How many times as fast as another row of the same test: the median of the turns, the least, the greatest.

        The median of many turns lies between the two with a probability of 1 − 2^(1 − n), which is 94 % for n = 5.
        """
        found = sorted(theirs / own for own, theirs in zip(self.seconds, other.seconds, strict=False))
        return median(found), found[0], found[-1]

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the rates; None where there is one alone."""
        return stdev(self.rates) if len(self.rates) > 1 else None


Contender = Sequences | LlamaCpp
"""What is timed: this model in a mode, or another engine's."""


def modes_of(manifest: Manifest, wanted: str) -> tuple[str, ...]:
    """The modes to compare: the one asked for, if it leaves out anything in this artifact, and dense."""
    sparse = wanted != "dense" and not (wanted == "auto" and all(RUNGS[layer.rung].dense for layer in manifest.layers))
    return (wanted, "dense") if sparse else ("dense",)


@dataclass
class Bench:
    """One run of the benchmark. `rows` holds what was measured so far, also after an interruption."""

    path: Path
    spec: BenchSpec
    open_model: Callable[[str], Model]
    """Opens the artifact in a mode, and says what the user should know."""
    beside: Callable[[int, int], Contender] | None = None
    """Opens another engine's model, with a context and threads."""
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What was not measured, and why."""
    device: str = ""
    _end: float = math.inf
    _waiting: int = 0
    """Measurements that are still to come."""

    def run(self, wanted: str, progress: Progress) -> None:
        """Measure in the mode asked for, and dense."""
        with Artifact.open(self.path) as artifact:
            modes = [*modes_of(artifact.manifest, wanted)]
        tests = len(self.spec.batches) + len(self.spec.prompts)
        self._waiting = total = len(modes) * tests
        while modes:
            with ExitStack() as stack:
                models = [stack.enter_context(self.open_model(modes.pop(0)))]
                # A GPU may not hold the weights twice: its modes come one after the other.
                while modes and not models[0].device.startswith("cuda"):
                    models.append(stack.enter_context(self.open_model(modes.pop(0))))
                self._check_room(models[0])
                self.device = models[0].device
                for model in models:
                    model.warm_up()
                contenders: list[Contender] = [Sequences(model) for model in models]
                if self.beside is not None:
                    contenders.append(stack.enter_context(closing(self.beside(models[0].context, self.spec.threads))))
                if self._end == math.inf:
                    self._end = time.perf_counter() + (self.spec.limit_s or math.inf)
                progress(total - self._waiting, total)
                for rows in chain(self._decode(contenders), self._prompts(contenders, models[0].context)):
                    self._waiting -= len(models)
                    self.rows += rows
                    progress(total - self._waiting, total)

    def _check_room(self, model: Model) -> None:
        if model.context < LEAD + STEPS:
            raise UsageError(
                f"measuring needs a context of {LEAD + STEPS} tokens",
                found=model.context,
                remedy=("raise ", Setting("context")),
            )

    def _decode(self, contenders: Sequence[Contender]) -> Iterator[list[Row]]:
        token_s = 0.0  # of one sequence of each in the last batch
        for batch in self.spec.batches:
            those = [one for one in contenders if batch <= one.most]
            what, available = f"batch {batch}", available_memory()
            needs = sum(one.bytes_for(batch) for one in those)
            if available is not None and needs > available:
                needed = f"needs {size(needs)} for keys and values"
                self.left_out.append(f"{what}: {needed}, {size(available)} of memory are available")
                yield []
                continue
            new = max(0, batch - those[0].held) * (LEAD + STEPS)  # each of them is sampled
            if not self._has_time(what, token_s * (new + batch * (1 + STEPS))):
                yield []
                continue
            began = time.perf_counter()
            for one in those:
                one.grow(batch)
            seconds = self._in_turns([partial(one.seconds_a_step, batch) for one in those], STEPS, began)
            token_s = sum(each[-1] for each in seconds) / batch
            yield [Row(one.mode, "decode", batch, 1, each) for one, each in zip(those, seconds, strict=True)]

    def _prompts(self, contenders: Sequence[Contender], context: int) -> Iterator[list[Row]]:
        token_s = 0.0
        for tokens in self.spec.prompts:
            what = f"prompt of {tokens}"
            if tokens > context:
                self.left_out.append(f"{what}: the context has {context} tokens")
                yield []
            elif not self._has_time(what, token_s * tokens):
                yield []
            else:
                runs = [partial(one.read_prompt, tokens) for one in contenders]
                seconds = self._in_turns(runs, 1, time.perf_counter())
                token_s = sum(each[-1] for each in seconds) / tokens
                yield [Row(one.mode, "prompt", 1, tokens, each) for one, each in zip(contenders, seconds, strict=True)]

    def _has_time(self, what: str, expected_s: float) -> bool:
        left = self._end - time.perf_counter()
        if self.rows and expected_s > left:
            self.left_out.append(f"{what}: would take about {expected_s:.0f} s, {max(0, left):.0f} s are left")
        return not self.rows or expected_s <= left

    def _in_turns(self, runs: Sequence[Callable[[], float]], runs_of: int, began: float) -> list[tuple[float, ...]]:
        """Run all `spec.repetitions` times, or fewer where this test's part of the time is used up, at least once.

        They take turns, forwards and backwards, so that what else the machine does meets all of them.
        """
        share = (self._end - began) * len(runs) / max(1, self._waiting)
        found: list[list[float]] = [[] for _ in runs]
        for run in runs if runs_of > 1 else ():
            run()  # wakes the threads, and brings weights into memory
        for repetition in range(self.spec.repetitions):
            order = range(len(runs))
            for n in order if repetition % 2 == 0 else reversed(order):
                found[n].append(runs[n]())
            if time.perf_counter() - began + runs_of * sum(each[-1] for each in found) > share:
                break
        return [tuple(each) for each in found]
