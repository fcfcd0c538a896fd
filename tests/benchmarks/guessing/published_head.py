"""A published guess head on prompts: `--speculate auto` against `off`."""

import json
import random
import statistics
import time
from argparse import Namespace

from guessing.answers import Way, clock_of, drafted, interval
from pi_runtime import Sampling, load
from pi_runtime.sequence.drafts import StepTimes
from pi_runtime.sequence.stats import Stats

PROMPT = 32
"""Tokens of a prompt."""


def of_a_published_head(a: Namespace) -> None:
    """For temperatures 0 and 1: each prompt is answered without guesses and in each other way, in turns."""
    rng, clock = random.Random(a.seed), clock_of(a)
    with load(a.model, threads=a.threads, device="cpu") as model:
        model.warm_up()
        texts = [json.loads(line)["text"] for line in a.prompts.read_text("utf-8").splitlines()]
        prompts = [ids[:PROMPT] for ids in map(model.tokenizer.encode, texts) if len(ids) > PROMPT]
        for temperature in (0.0, 1.0):
            ways = [
                Way("off", "off", StepTimes()),
                Way("auto", "auto", StepTimes()),
                Way("3 tokens", 3, StepTimes()),
            ]
            ratios: dict[str, list[float]] = {way.name: [] for way in ways[1:]}
            stats: dict[str, list[Stats]] = {way.name: [] for way in ways}
            rates = list[float]()
            until = time.monotonic() + 60 * a.minutes / 2
            for n, prompt in enumerate(prompts):
                if time.monotonic() > until:
                    break
                texts_found, taken_s = {}, {}
                for way in ways[n % len(ways) :] + ways[: n % len(ways)]:
                    sampling = Sampling(temperature=temperature, seed=n)
                    sequence = model.new_answer(prompt, max_tokens=a.tokens, min_tokens=a.tokens, sampling=sampling)
                    answer, taken_s[way.name] = way.write(model, sequence, clock)
                    texts_found[way.name] = answer.token_ids
                    stats[way.name].append(answer.stats)
                assert len({tuple(ids) for ids in texts_found.values()}) == 1, "guesses changed a text"
                if n:  # the first answer compiles kernels
                    rates.append((a.tokens - 1) / taken_s["off"])
                    for name, found in ratios.items():
                        found.append(taken_s["off"] / taken_s[name])
            head = f"temperature {temperature:g}: {len(rates) + 1} answers of {a.tokens} tokens, the same in all ways"
            print(f"{head}; without guesses {statistics.median(rates):.1f} tokens/s")
            for name, found in ratios.items():
                print(f"  {name:14} {interval(found, rng)}; {drafted(stats[name][1:])}")
