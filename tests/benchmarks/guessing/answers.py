"""Answers of a model that chooses them itself, with guesses and without, in turns; each time the same text."""

import random
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from pi_runtime import Model
from pi_runtime.engine.generation import Generation
from pi_runtime.sequence.answer import AnswerSequence
from pi_runtime.sequence.drafts import StepTimes
from pi_runtime.sequence.stats import DraftFigures, Stats

Clock = Callable[[], float]


def clock_of(a: Namespace) -> Clock:
    """What measures seconds."""
    return time.process_time if a.processor_time else time.perf_counter


@dataclass(frozen=True)
class Way:
    """A way to write an answer; its times of steps are those of all answers before."""

    name: str
    speculate: str | int
    times: StepTimes

    def write(self, model: Model, sequence: AnswerSequence, clock: Clock) -> tuple[Generation, float]:
        """An answer that has not begun, written to its end, and its seconds behind the first part."""
        rule = model.speculation(self.speculate, self.times)
        generation = Generation(model.executor, model.new_cache(), sequence, rule)
        next(generation, "")
        began = clock()
        "".join(generation)
        return generation, clock() - began


def interval(ratios: Sequence[float], rng: random.Random) -> str:
    """The geometric mean of ratios, and where it lies in 95 of 100 draws of as many of them."""
    logs = np.log(ratios)
    means = sorted(float(np.mean(rng.choices(logs, k=len(logs)))) for _ in range(2000))
    low, middle, high = (float(np.exp(x)) for x in (means[50], logs.mean(), means[1949]))
    return (
        f"{middle:.3f} times as fast [{low:.3f}, {high:.3f}], median {statistics.median(ratios):.3f}, of {len(ratios)}"
    )


def drafted(stats: Sequence[Stats]) -> str:
    """What became of the drafts of some answers."""
    s = reduce(add, stats, DraftFigures())
    if s.accepted_length is None:
        return "no draft ran"
    share = f", {s.head_accepted_tokens / s.head_guessed_tokens:.0%} of them right" if s.head_guessed_tokens else ""
    tokens = f"{s.guessed_tokens} drafted tokens, {s.acceptance:.0%} right; {s.head_guessed_tokens} by the head{share}"
    return f"{s.checked_drafts} drafts gave {s.accepted_length:.2f} tokens each: {tokens}"
