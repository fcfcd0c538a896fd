"""What it gains to read a prompt before it is asked for, and an answer before it comes back.

nox -s bench -- reading_ahead [--parts typed,fast,answers] [--model ARTIFACT] [--tokens 300] [--words 60] [--rounds 5] …

    typed    a message of `--tokens` tokens is typed at `--words` words a minute (five characters each), and read ahead
             once a second: from Enter to the first token, beside the same message sent whole. Its last `--seconds` are
             typed; what comes before is there when the first reading begins
    fast     the same of 1,000 tokens, a byte each, at `--typing` tokens/s, read after each word of 6
    answers  the next turn after an answer of `--answer` tokens, which has been read again as a prompt, beside one that
             reads it then; and what reading it again takes

`--model`: a chat model for `typed`; else, and for the others, a random model of the given shape. Both sides of a
comparison take turns; each round has a salt of its own, so it begins with nothing. Greedy answers, no drafts.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.bench_model import VOCABULARY, add_arguments, opened, verdict
from support.paths import ROOT
from support.requests import settle

from pi_runtime import Engine, Model, Sampling, load
from pi_runtime.engine.stream import Stream

GREEDY = Sampling()
CHARACTERS = 5
"""Of a word, in the words a minute of typists."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="typed,fast,answers")
    parser.add_argument("--model", type=Path)
    for name, default in {"tokens": 300, "words": 60, "rounds": 5, "answer": 200, "typing": 50}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=12.0)
    add_arguments(parser)
    return parser.parse_args()


def message_of(model: Model, tokens: int, rng: random.Random) -> str:
    """So many tokens of words that people use: the license's, in another order each time."""
    words = (ROOT / "LICENSE").read_text().split()
    text = ""
    while len(model.tokenizer.encode(text, prefix=False)) < tokens:
        text += f" {rng.choice(words)}" if text else rng.choice(words)
    return text


def first_token_s(stream: Stream) -> float:
    "".join(stream)
    return stream.stats.first_token_s


@dataclass
class Typist:
    """Types the end of a text, so many characters a second for so many seconds; what is there is read ahead."""

    engine: Engine
    prompt_of: Callable[[str], str]
    rate: float
    seconds: float
    every_s: float
    """Time between two readings."""

    def type(self, text: str, salt: str) -> None:
        """Type a text; its end is now."""
        began, shown = time.monotonic(), ""
        first, read_at = max(0, len(text) - int(self.rate * self.seconds)), began
        while (at := first + int((time.monotonic() - began) * self.rate)) < len(text):
            if time.monotonic() >= read_at and at and text[:at] != shown:
                shown = text[:at]
                self.engine.read(self.prompt_of(shown), cache_salt=salt)
                read_at = time.monotonic() + self.every_s
            time.sleep(0.01)


def compared(name: str, rounds: int, ahead: Callable[[int], float], whole: Callable[[int], float]) -> float:
    """The second time over the first, in rounds; prints both."""
    times = []
    for n in range(rounds):
        pair = dict.fromkeys((ahead, whole) if n % 2 else (whole, ahead), 0.0)
        for call in pair:
            pair[call] = call(n)
        times.append((pair[ahead], pair[whole]))
    ratios = [b / a for a, b in times]
    ms = [f"{statistics.median(side) * 1e3:.1f} ms" for side in zip(*times, strict=True)]
    print(
        f"{name}: first token after {ms[0]}, else {ms[1]}; {statistics.median(ratios):.1f} × sooner "
        f"({min(ratios):.1f} to {max(ratios):.1f}), {rounds} rounds"
    )
    return statistics.median(ratios)


def typed(model: Model, a: argparse.Namespace) -> list[str]:
    def prompt_of(text: str) -> str:
        return model.chat_prompt([{"role": "user", "content": text}]) if a.model else text

    texts = [message_of(model, a.tokens, random.Random(n)) for n in range(a.rounds)]
    rate = a.words * CHARACTERS / 60
    with Engine(model, speculate="off") as engine:

        def ahead(n: int) -> float:
            Typist(engine, prompt_of, rate, a.seconds, 1.0).type(texts[n], f"ahead {n}")
            return whole(n, f"ahead {n}")

        def whole(n: int, salt: str = "") -> float:
            stream = engine.generate(
                prompt_of(texts[n]), max_tokens=1, sampling=GREEDY, cache_salt=salt or f"whole {n}"
            )
            return first_token_s(stream)

        sooner = compared(f"typed, {a.tokens} tokens at {a.words} words a minute", a.rounds, ahead, whole)
    return [verdict("typed, time to first token sent whole ÷ read ahead", sooner, at_least=5)]


def fast(model: Model, a: argparse.Namespace) -> list[str]:
    texts = ["".join(chr(random.Random(n * 2000 + k).randrange(97, 123)) for k in range(1000)) for n in range(a.rounds)]
    with Engine(model, speculate="off") as engine:

        def ahead(n: int) -> float:
            Typist(engine, str, a.typing, 1000 / a.typing, 6 / a.typing).type(texts[n], f"ahead {n}")
            return whole(n, f"ahead {n}")

        def whole(n: int, salt: str = "") -> float:
            return first_token_s(
                engine.generate(texts[n], max_tokens=1, sampling=GREEDY, cache_salt=salt or f"whole {n}")
            )

        sooner = compared(f"fast, 1000 tokens at {a.typing} tokens/s", a.rounds, ahead, whole)
    return [verdict("fast, share of the time to first token that is saved", 1 - 1 / sooner, at_least=0.8)]


def answers(model: Model, a: argparse.Namespace) -> list[str]:
    rng, price = random.Random(4), []
    prompts = [[rng.randrange(300, VOCABULARY) for _ in range(64)] for _ in range(a.rounds)]
    news = [[rng.randrange(300, VOCABULARY) for _ in range(32)] for _ in range(a.rounds)]
    with Engine(model, speculate="off") as engine:

        def turn(n: int, *, reads: bool) -> float:
            salt, engine._store._reads_again = f"{reads} {n}", reads
            stream = engine.generate(
                prompts[n], max_tokens=a.answer, min_tokens=a.answer, sampling=GREEDY, cache_salt=salt
            )
            "".join(stream)
            busy_s = engine.stats.busy_s
            settle(engine)
            if reads:
                price.append((engine.stats.busy_s - busy_s) / (stream.stats.decode_s + stream.stats.prefill_s))
            engine._store._reads_again = False
            talk = [*prompts[n], *stream.token_ids, *news[n]]
            return first_token_s(engine.generate(talk, max_tokens=1, sampling=GREEDY, cache_salt=salt))

        sooner = compared(
            f"answers, a turn of 32 tokens after {a.answer}",
            a.rounds,
            lambda n: turn(n, reads=True),
            lambda n: turn(n, reads=False),
        )
    print(f"answers, time of reading one again ÷ of writing it: {statistics.median(price):.2f}")
    return [verdict("answers, time to first token of the next turn ÷ with the answer read again", sooner, at_least=1.5)]


def main() -> None:
    a, lines = arguments(), list[str]()
    parts = a.parts.split(",")
    if a.model and "typed" in parts:
        with load(a.model, threads=a.threads, device="cpu") as model:
            model.warm_up()
            lines += typed(model, a)
        parts.remove("typed")
    if parts:
        with opened(a) as model:
            lines += [
                line for name in parts for line in {"typed": typed, "fast": fast, "answers": answers}[name](model, a)
            ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
