"""A trained guess head on prompts that it was not trained on: `--speculate auto` against `off`."""

import json
import random
import time
from argparse import Namespace

from guessing.answers import Way, drafted, interval, rate
from pi_runtime import Sampling, load
from pi_runtime.sequence.speculation import StepTimes
from pi_runtime.sequence.stats import Stats

PROMPT = 32
"""Tokens of a prompt: those of the prompts that a head is trained on."""


def of_a_trained_head(a: Namespace) -> None:
    """For temperatures 0 and 1: each prompt is answered without guesses and in each other way, in turns."""
    rng = random.Random(a.seed)
    with load(a.model, threads=a.threads, device="cpu") as model:
        model.warm_up()
        texts = [json.loads(line)["text"] for line in a.prompts.read_text("utf-8").splitlines()]
        prompts = [ids[:PROMPT] for ids in map(model.tokenizer.encode, texts) if len(ids) > PROMPT]
        for temperature in (0.0, 1.0):
            ways = [
                Way("off", "off", StepTimes()),
                Way("auto", "auto", StepTimes()),
                Way("auto, no head", "auto", StepTimes(), head=False),
                Way("3 tokens", 3, StepTimes()),
            ]
            ratios: dict[str, list[float]] = {way.name: [] for way in ways[1:]}
            stats: dict[str, list[Stats]] = {way.name: [] for way in ways}
            until = time.monotonic() + 60 * a.minutes / 2
            for n, prompt in enumerate(prompts):
                if time.monotonic() > until:
                    break
                texts_found = {}
                for way in ways[n % len(ways) :] + ways[: n % len(ways)]:
                    sampling = Sampling(temperature=temperature, seed=n)
                    sequence = model.new_answer(prompt, max_tokens=a.tokens, min_tokens=a.tokens, sampling=sampling)
                    answer = way.write(model, sequence)
                    texts_found[way.name] = answer.token_ids
                    stats[way.name].append(answer.stats)
                assert len({tuple(ids) for ids in texts_found.values()}) == 1, "guesses changed a text"
                if n:  # the first answer compiles kernels
                    for name, found in ratios.items():
                        found.append(rate(stats[name][-1]) / rate(stats["off"][-1]))
            print(
                f"temperature {temperature:g}: {len(stats['off'])} answers of {a.tokens} tokens, the same in all ways"
            )
            for name, found in ratios.items():
                print(f"  {name:14} {interval(found, rng)}; {drafted(stats[name][1:])}")
