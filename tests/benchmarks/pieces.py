"""What a long prompt costs those who are being answered, and how long its pieces make them wait.

nox -s bench -- pieces [--pieces 8,16,32,64] [--prompt 1500] [--others 1,7] [--layers 4] [--threads N] [--thread-time]

An engine writes some answers while one long prompt arrives. For each piece it prints the share of their speed that the
others keep, the prompt's share of its own speed alone, and the longest step. `--thread-time` counts the time of the
engine's thread in place of the clock's, for one thread on a machine that others use too.
"""

import argparse
import time
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
from support.bench_model import VOCABULARY, add_arguments, opened

from pi_runtime import Engine, Model, Sampling
from pi_runtime.engine import core
from pi_runtime.execution.executor import SequenceResult, SequenceStep

STEPS = 10
GREEDY = Sampling()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=1500)
    parser.add_argument("--pieces", default="8,16,32,64")
    parser.add_argument("--others", default="1,7", help="answers that are being written")
    add_arguments(parser)
    parser.add_argument("--thread-time", action="store_true")
    return parser.parse_args()


class TimedSteps:
    """The seconds of a model's steps."""

    def __init__(self, model: Model, *, thread_time: bool) -> None:
        self.seconds: list[float] = []
        self._clock = time.thread_time if thread_time else time.perf_counter
        self._step = model.executor.step
        model.executor.step = self._timed  # type: ignore[method-assign]

    def _timed(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        began = self._clock()
        found = self._step(sequences)
        self.seconds.append(self._clock() - began)
        return found


def measure(model: Model, steps: TimedSteps, prompt: list[int], others: int, piece: int, alone: float) -> None:
    """Print one row; `alone` is the prompt's speed in tokens/s with nobody else."""
    with Engine(model, slots=others + 1, piece=piece, speculate="off") as engine:
        streams = [engine.generate([n, n + 1], sampling=GREEDY) for n in range(others)]
        for stream in streams:
            next(stream)
        begun = len(steps.seconds)
        while len(steps.seconds) < begun + STEPS + 1:
            time.sleep(0.01)
        plain = float(np.mean(steps.seconds[begun : begun + STEPS]))
        begun, generated = len(steps.seconds), engine.stats.generated_tokens
        "".join(engine.generate(prompt, max_tokens=1, sampling=GREEDY))
        generated = engine.stats.generated_tokens - generated - 1
        seconds = steps.seconds[begun:]
        kept, read = generated / sum(seconds) * plain / others, len(prompt) / sum(seconds) / alone
        print(f"{others:6} {piece:6} {kept:12.0%} {read:12.0%} {max(seconds) * 1e3:12.0f} ms {plain * 1e3:12.0f} ms")


def main() -> None:
    a = arguments()
    if a.thread_time:
        core.time = SimpleNamespace(perf_counter=time.thread_time)  # type: ignore[attr-defined]
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, a.prompt).tolist()
    with opened(a) as model:
        steps = TimedSteps(model, thread_time=a.thread_time)
        "".join(model.generate(prompt, max_tokens=1, sampling=GREEDY))
        alone = len(prompt) / sum(steps.seconds)
        print(f"a prompt of {len(prompt)} tokens alone: {alone:.0f} tokens/s")
        print("others  piece   they keep   the prompt   longest step   step without it")
        for others in map(int, a.others.split(",")):
            for piece in map(int, a.pieces.split(",")):
                measure(model, steps, prompt, others, piece, alone)


if __name__ == "__main__":
    main()
