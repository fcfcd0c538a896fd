"""JSON by random schemas with guesses and without: one answer at a time, and eight at once."""

import random
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from support.bench_model import verdict
from support.schemas import random_schema

from guessing.answers import Clock, Way, clock_of, drafted, interval
from pi_runtime import Engine, Grammar, Model, Sampling, load
from pi_runtime.engine.stream import Stream
from pi_runtime.sequence.drafts import StepTimes
from pi_runtime.sequence.stats import Stats

AT_ONCE, LEAST_TOKENS, MOST_TOKENS = 8, 4, 48
PROMPT = "A record as JSON:\n"


def requests(count: int, seed: int, fixed: bool) -> Iterator[dict[str, Any]]:
    """Settings of answers by schemas, greedy and drawn by turns. `fixed`: white space is."""
    rng = random.Random(seed)
    for n in range(count):
        schema = random_schema(rng)
        schema.pop("x-guidance", None)
        grammar = Grammar.json_schema(schema, fixed_separators=fixed)
        yield {"grammar": grammar, "max_tokens": MOST_TOKENS, "sampling": Sampling(temperature=n % 2, seed=n)}


def of_schemas(a: Namespace) -> None:
    """Print how many times as fast answers by schemas come with guesses; fails where a text changes."""
    rng = random.Random(a.seed)
    with load(a.model, threads=a.threads, device="cpu") as model:
        model.warm_up()
        for fixed in (True, False):
            name, asked = f"white space {'fixed' if fixed else 'free'}", list(requests(a.schemas, a.seed, fixed))
            for company, measure, target in (("", alone, 1.5 if fixed else 1), (f", {AT_ONCE} at once", together, 1)):
                ratios, stats = [], list[Stats]()
                until = time.monotonic() + 60 * a.minutes / 4
                for ratio, some in measure(model, asked, clock_of(a)):
                    ratios.append(ratio)
                    stats += some
                    if time.monotonic() > until:
                        break
                print(f"{name}{company}: {interval(ratios, rng)}; {drafted(stats)}")
                print(verdict(f"{name}{company}, at the median", statistics.median(ratios), at_least=target))


Measured = Iterator[tuple[float, list[Stats]]]
"""How many times as fast answers came with guesses, and their figures."""


def alone(model: Model, asked: list[dict[str, Any]], clock: Clock) -> Measured:
    """One answer after the other; the first one, which compiles kernels, does not count."""
    ways = [Way("off", "off", StepTimes()), Way("auto", "auto", StepTimes())]
    for n, settings in enumerate(asked):
        both = [way.write(model, model.new_answer(PROMPT, **settings), clock) for way in ways[:: (-1) ** n]]
        (plain, plain_s), (guessed, guessed_s) = both[:: (-1) ** n]
        assert plain.token_ids == guessed.token_ids, "guesses changed a text"
        if plain.stats.generated_tokens >= LEAST_TOKENS and n:
            yield plain_s / guessed_s, [guessed.stats]


def together(model: Model, asked: list[dict[str, Any]], clock: Clock) -> Measured:
    """Eight answers at once by engines of which one guesses; the first eight do not count."""
    slots = {"slots": AT_ONCE, "decode_share": 0.0}
    with Engine(model, speculate="off", **slots) as off, Engine(model, speculate="auto", **slots) as auto:
        for first in range(0, len(asked), AT_ONCE):
            some, found = asked[first : first + AT_ONCE], dict[Engine, tuple[float, list[Stream]]]()
            for settings in some:  # compiles the grammar, which is kept
                model.new_answer(PROMPT, **settings)
            for engine in (off, auto)[:: (-1) ** (first // AT_ONCE)]:
                began = clock()
                streams = [engine.generate(PROMPT, **settings) for settings in some]
                for stream in streams:
                    "".join(stream)
                found[engine] = clock() - began, streams
            (plain_s, plain), (guessed_s, guessed) = found[off], found[auto]
            assert [s.token_ids for s in plain] == [s.token_ids for s in guessed], "guesses changed a text"
            if first:
                yield plain_s / guessed_s, [stream.stats for stream in guessed]
