"""Timing decoding in batches, and prompts, of one artifact, mode after mode, within a limit of time.

Shape letters: L layers.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Literal

import numba
import numpy as np

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.schema import Manifest
from pi_runtime.commands.bench.kept_neurons import KeptNeurons
from pi_runtime.commands.bench.sequences import LEAD, STEPS, Sequences
from pi_runtime.console import Progress, size
from pi_runtime.engine.model import Model
from pi_runtime.errors import Setting, UsageError
from pi_runtime.execution.devices import available_memory
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.sequence.sampling import Sampling

ANSWER_TOKENS = 64
"""Tokens of the answer that is drawn with drafts."""


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


@dataclass(frozen=True, kw_only=True)
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
    own_share_L: tuple[float, ...] | None
    """Share of a layer's neurons that one token keeps, mean over the tokens; None for prompts, which are dense."""
    union_share_L: tuple[float, ...] | None
    """Share of a layer's neurons that any token of a step keeps, mean over the steps."""

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens per second of all sequences together, in each repetition."""
        return tuple(self.batch * self.tokens / s for s in self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """The mean of the rates of all repetitions."""
        return mean(self.rates)

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the rates; None where there is one alone."""
        return stdev(self.rates) if len(self.rates) > 1 else None


@dataclass(frozen=True, kw_only=True)
class DraftedAnswer:
    """What drafts gained in an answer that a model draws by itself, after a random token."""

    mode: str
    tokens: int
    tokens_per_s: float | None
    acceptance: float | None
    accepted_length: float | None
    drafts_won_s: float
    by_head: float | None
    """Share of the drafted tokens that a guess head drafted."""

    @classmethod
    def of(cls, model: Model) -> "DraftedAnswer":
        """Draw the answer."""
        first = int(np.random.default_rng(0).integers(model.manifest.decoder.vocab_size))
        count, sampling = min(ANSWER_TOKENS, model.context - LEAD), Sampling(temperature=1, seed=0)
        prompt = [*model.manifest.text.prefix_ids, first][-LEAD:]
        answer = model.generate(prompt, max_tokens=count, min_tokens=count, sampling=sampling)
        for _ in answer:
            pass
        s = answer.stats
        return cls(
            mode=model.mode,
            tokens=s.generated_tokens,
            tokens_per_s=s.decode_tokens_per_s,
            acceptance=s.acceptance,
            accepted_length=s.accepted_length,
            drafts_won_s=s.drafts_won_s,
            by_head=s.head_guessed_tokens / s.guessed_tokens if s.guessed_tokens else None,
        )


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
    rows: list[Row] = field(default_factory=list)
    drafted: list[DraftedAnswer] = field(default_factory=list)
    """An answer with drafts in each mode for which there was time."""
    left_out: list[str] = field(default_factory=list)
    """What was not measured, and why."""
    device: str = ""
    _end: float = math.inf
    _waiting: int = 0
    """Measurements that are still to come."""

    def run(self, wanted: str, progress: Progress) -> None:
        """Measure in the mode asked for, and dense."""
        with Artifact.open(self.path) as artifact:
            modes = modes_of(artifact.manifest, wanted)
        self._waiting = total = len(modes) * (len(self.spec.batches) + len(self.spec.prompts))
        for mode in modes:
            with self.open_model(mode) as model:
                self._check_room(model)
                self.device = model.device
                model.warm_up()
                if mode == modes[0]:
                    self._end = time.perf_counter() + (self.spec.limit_s or math.inf)
                progress(total - self._waiting, total)
                for row in self._rows(model):
                    self._waiting -= 1
                    self.rows += [] if row is None else [row]
                    progress(total - self._waiting, total)
                token_s = [mean(r.seconds) for r in self.rows if (r.mode, r.phase, r.batch) == (mode, "decode", 1)]
                if token_s and ANSWER_TOKENS * token_s[0] < self._end - time.perf_counter():
                    self.drafted.append(DraftedAnswer.of(model))

    def _check_room(self, model: Model) -> None:
        if model.context < LEAD + STEPS:
            raise UsageError(
                f"measuring needs a context of {LEAD + STEPS} tokens",
                found=model.context,
                remedy=("raise ", Setting("context")),
            )

    def _rows(self, model: Model) -> Iterator[Row | None]:
        kept = None if model.mode == "dense" else self._kept_neurons(model)
        try:
            yield from self._decode(model, Sequences(model, kept))
        finally:
            if kept is not None:
                kept.close()
        yield from self._prompts(model)

    def _kept_neurons(self, model: Model) -> KeptNeurons:
        cache_format = "q8" if model.executor.new_pool().format == "q8" else "auto"
        return KeptNeurons(
            self.path, model.mode, context=model.context, threads=self.spec.threads, cache_format=cache_format
        )

    def _decode(self, model: Model, sequences: Sequences) -> Iterator[Row | None]:
        token_s = 0.0  # of one sequence in the last batch
        for batch in self.spec.batches:
            what, available = f"{model.mode}, batch {batch}", available_memory()
            if available is not None and sequences.bytes_for(batch) > available:
                needs = f"needs {size(sequences.bytes_for(batch))} for keys and values"
                self.left_out.append(f"{what}: {needs}, {size(available)} of memory are available")
                yield None
                continue
            # Each new sequence is sampled, and then runs with its neurons listed, which takes about twice as long.
            new = max(0, batch - len(sequences)) * (LEAD + 3 * STEPS)
            if not self._has_time(what, token_s * (new + batch * (1 + STEPS))):
                yield None
                continue
            began = time.perf_counter()
            sequences.grow(batch)
            seconds = self._repeat(lambda batch=batch: sequences.seconds_a_step(batch), STEPS, began)  # type: ignore[misc]
            token_s = seconds[-1] / batch
            own_L, union_L = sequences.shares(batch)
            yield Row(
                mode=model.mode, phase="decode", batch=batch, tokens=1, seconds=seconds,
                own_share_L=own_L, union_share_L=union_L,
            )  # fmt: skip

    def _prompts(self, model: Model) -> Iterator[Row | None]:
        token_s = 0.0
        for tokens in self.spec.prompts:
            what = f"{model.mode}, prompt of {tokens}"
            if tokens > model.context:
                self.left_out.append(f"{what}: the context has {model.context} tokens")
                yield None
            elif not self._has_time(what, token_s * tokens):
                yield None
            else:
                cache = model.new_cache()
                run = lambda tokens=tokens, cache=cache: _read_prompt(model, cache, tokens)  # noqa: E731
                seconds = self._repeat(run, 1, time.perf_counter())
                token_s = seconds[-1] / tokens
                yield Row(
                    mode=model.mode, phase="prompt", batch=1, tokens=tokens, seconds=seconds,
                    own_share_L=None, union_share_L=None,
                )  # fmt: skip

    def _has_time(self, what: str, expected_s: float) -> bool:
        left = self._end - time.perf_counter()
        if self.rows and expected_s > left:
            self.left_out.append(f"{what}: would take about {expected_s:.0f} s, {max(0, left):.0f} s are left")
        return not self.rows or expected_s <= left

    def _repeat(self, run: Callable[[], float], runs_of: int, began: float) -> tuple[float, ...]:
        """Run `spec.repetitions` times, or fewer where this measurement's part of the time is used up, but once."""
        share = (self._end - began) / max(1, self._waiting)
        found: list[float] = []
        if runs_of > 1:
            run()  # wakes the threads, and brings weights into memory
        while len(found) < self.spec.repetitions:
            found.append(run())
            if time.perf_counter() - began + runs_of * found[-1] > share:
                break
        return tuple(found)


def _read_prompt(model: Model, cache: KVCache, tokens: int) -> float:
    """Read a prompt of random tokens into a cache, which is emptied first; returns the time."""
    token_T = np.random.default_rng(0).integers(0, model.manifest.decoder.vocab_size, tokens)
    cache.truncate(0)
    began = time.perf_counter()
    for start in range(0, tokens, model.executor.block_tokens):
        block = token_T[start : start + model.executor.block_tokens]
        model.executor.step([SequenceStep(cache=cache, tokens=block, select=False)])
    return time.perf_counter() - began
