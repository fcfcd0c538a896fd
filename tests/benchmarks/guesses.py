"""What guesses gain: answers that repeat the prompt, answers with edits, and free text.

nox -s bench -- guesses [TEXT …] [--pairs 4] [--tokens 400] [--layers 4] [--mode predicted] [--threads N] …

Prompts and answers are cut from real texts: the files named, or this project's pages. The answer is forced: logits are
computed and the sampler runs, but the next token is the answer's. So acceptance is that of real text, and not of the
loops in which a random model ends. Tokens are pieces of words of up to six letters, or those of `--model`.

    copy   the answer is the prompt's passage
    edit   the passage with every 12th sentence or so left out, and with some words replaced throughout
    free   the passage that follows the prompt's

Each answer is written without guesses and with them, in turns; then all answers of a kind at once, by an engine. Then
the times of blocks are printed, and the targets.

    --part set      a head with random weights, beside the same model, that drafts right as often as it is set to
    --part head     --model ARTIFACT --prompts LINES   a published head, and answers that the model chooses itself
    --part schemas  --model ARTIFACT                   JSON by random schemas, alone and eight at once
"""

import argparse
import random
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from guessing.answers import Clock, Way, clock_of, drafted
from guessing.published_head import of_a_published_head
from guessing.schemas import of_schemas
from support.bench_model import CONTEXT, VOCABULARY, add_arguments, built, opened, verdict
from support.guess_heads import help_head
from support.paths import ROOT

from pi_runtime import Engine, Model, Sampling, load
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.guess_head import GuessHead
from pi_runtime.engine.generation import Generation
from pi_runtime.engine.stream import Stream
from pi_runtime.sequence.answer import AnswerSequence
from pi_runtime.sequence.drafts import StepTimes
from pi_runtime.sequence.sampling import Sampler
from pi_runtime.sequence.sequence import Origin
from pi_runtime.sequence.stats import Stats

INSTRUCTION = "Write the following text again, with the changes that were asked for:"
EDITED_WORDS, DROPPED = 0.03, 1 / 12
ROUNDS = 3
"""How often all answers of a kind are written at once, without drafts and with them; the median ratio counts."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path, default=sorted((ROOT / "docs").rglob("*.md")))
    parser.add_argument("--part", choices=("texts", "set", "head", "schemas"), default="texts")
    parser.add_argument("--pairs", type=int, default=4, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=400, help="length of a passage, or of an answer")
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--right", type=float, default=0.65, help="set: share of right tokens of the head")
    parser.add_argument("--model", type=Path, help="an artifact, in place of a random model")
    parser.add_argument("--prompts", type=Path, help="head: JSON objects with a `text`, one a line")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10, help="head, schemas: begin nothing new after these")
    parser.add_argument("--processor-time", action="store_true", help="where others use the machine, with --threads 1")
    add_arguments(parser)
    return parser.parse_args()


class Words:
    """Tokens of a text: pieces of words and single signs, numbered as they come."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        pieces = re.findall(r" ?\w{1,6}|\s+|[^\w\s]", text)
        return [self._ids.setdefault(piece, 300 + len(self._ids) % (VOCABULARY - 300)) for piece in pieces]


class Forced(Sampler):
    """Chooses as its settings say, and then gives the token of a fixed answer."""

    def __init__(self, model: Model, prompt: int, answer: Sequence[int]) -> None:
        super().__init__(Sampling(), model.manifest.decoder.vocab_size)
        self._prompt, self._answer = prompt, answer

    def __call__(self, logits: Any, seen_ids: Any) -> int:
        super().__call__(logits, seen_ids)
        return self._answer[len(seen_ids) - self._prompt]


def passages(texts: Sequence[Path], tokens: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Passages of the texts and what follows each, at random."""
    whole = "\n\n".join(path.read_text(encoding="utf-8") for path in texts)
    chars = 4 * tokens
    while True:
        at = rng.randrange(max(1, len(whole) - 2 * chars))
        yield whole[at : at + chars], whole[at + chars : at + 2 * chars]


def edited(text: str, rng: random.Random) -> str:
    """The text without some of its sentences, and with some words replaced wherever they stand."""
    sentences = [s for s in re.split(r"(?<=[.:|])\s", text) if rng.random() >= DROPPED]
    words = sorted(set(re.findall(r"\w{4,}", text)))
    found = " ".join(sentences)
    for word in rng.sample(words, max(1, round(EDITED_WORDS * len(words)))):
        found = re.sub(rf"\b{word}\b", word[::-1], found)
    return found


KINDS: dict[str, Callable[[str, str, random.Random], str]] = {
    "copy": lambda passage, _, __: passage,
    "edit": lambda passage, _, rng: edited(passage, rng),
    "free": lambda _, following, __: following,
}


def forced(model: Model, prompt: list[int], answer: list[int]) -> AnswerSequence:
    """An answer that has not begun, and will be this one."""
    begun = model.new_answer(prompt, max_tokens=len(answer))
    begun._sampler = Forced(model, len(prompt), answer)
    return begun


def written(model: Model, prompt: list[int], answer: list[int], way: Way, clock: Clock) -> tuple[Generation, float]:
    """A forced answer, written to its end, and its seconds behind the first token."""
    generation, seconds = way.write(model, forced(model, prompt, answer), clock)
    assert generation.token_ids == answer
    return generation, seconds


def together(model: Model, pairs: Sequence[tuple[list[int], list[int]]], speculate: str | int, clock: Clock) -> float:
    """Tokens per second of answers that an engine writes at once, when all have begun."""
    with Engine(model, slots=len(pairs), speculate=speculate, decode_share=0) as engine:
        sequences = [forced(model, prompt, answer) for prompt, answer in pairs]
        for sequence in sequences:
            engine.submit(sequence, Origin())
        streams = [Stream(sequence, model.executor.neurons) for sequence in sequences]
        for stream in streams:
            next(stream, "")
        began = clock()
        for stream, (_, answer) in zip(streams, pairs, strict=True):
            "".join(stream)
            assert stream.token_ids == answer
        return sum(len(answer) - 1 for _, answer in pairs) / (clock() - began)


def of_texts(a: argparse.Namespace) -> None:
    """Answers that repeat the prompt, answers with edits, and free text."""
    rng, ratios, company, clock = random.Random(a.seed), dict[str, float](), dict[str, float](), clock_of(a)
    speculate = int(a.speculate) if a.speculate.isdecimal() else a.speculate
    times = StepTimes()
    with opened(a) if a.model is None else load(a.model, threads=a.threads, device="cpu") as model:
        words = Words() if a.model is None else model.tokenizer.encode
        print("kind   plain, tokens/s   with guesses   ratio   guessed   right   right of guessed")
        for kind, answer_of in KINDS.items():
            found, pairs = [], []
            for _, (passage, following) in zip(range(a.pairs), passages(a.texts, a.tokens, rng), strict=False):
                prompt = words(f"{INSTRUCTION}\n\n{passage}\n\n")
                answer = words(answer_of(passage, following, rng))
                pairs.append((prompt, answer))
                # By turns the first of the two, because the speed of a machine drifts.
                ways = [Way("off", "off", StepTimes()), Way("drafts", speculate, times)][:: (-1) ** len(pairs)]
                both = [written(model, prompt, answer, way, clock) for way in ways]
                (_, plain_s), (generation, guessed_s) = both[:: (-1) ** len(pairs)]
                found.append(plain_s / guessed_s)
                plain, faster = ((len(answer) - 1) / seconds for seconds in (plain_s, guessed_s))
                guessed = generation.stats
                print(
                    f"{kind:6} {plain:15.1f} {faster:14.1f} {found[-1]:7.2f} "
                    f"{guessed.guessed_tokens:9} {guessed.accepted_tokens:7} {guessed.acceptance or 0:18.0%}"
                )
            ratios[kind] = statistics.median(found)
            rates = [[together(model, pairs, setting, clock) for setting in ("off", speculate)] for _ in range(ROUNDS)]
            company[kind] = statistics.median(on / off for off, on in rates)
            print(f"{kind:6} {rates[-1][0]:15.1f} {rates[-1][1]:14.1f} {company[kind]:7.2f}   {len(pairs)} at once")
        print("tokens of a block: its time ÷ that of one token")
        taken = sorted(times.taken(1).items())
        print("  ".join(f"{tokens}: {seconds / taken[0][1]:.2f}" for tokens, seconds in taken))
    print(verdict("copy, times as fast", ratios["copy"], at_least=2))
    print(verdict("edit, times as fast", ratios["edit"], at_least=2))
    print(verdict("free text, times as fast", ratios["free"], at_least=0.97))
    print(verdict("free text, several at once, times as fast", company["free"], at_least=1))


def usual_head(d: Decoder) -> GuessHead:
    """The shape of a published head: as wide as a layer of its model, reading three of the model's states."""
    return GuessHead(
        states=(d.n_layers // 3, 2 * d.n_layers // 3, d.n_layers),
        format="q8",
        shortlist=min(8192, d.vocab_size),
        n_heads=d.n_heads,
        n_kv_heads=d.n_kv_heads,
        head_dim=d.head_dim,
        d_ff=8 * d.d_model // 3,
        norm_eps=d.norm_eps,
        rotary_frequencies=d.rotary_frequencies,
    )


def of_a_set_head(a: argparse.Namespace) -> None:
    """Answers of random tokens, which a head with random weights drafts right as often as it is set to."""
    rng, clock = random.Random(a.seed), clock_of(a)
    pairs = [tuple([rng.randrange(VOCABULARY) for _ in range(n)] for n in (4, a.tokens)) for _ in range(a.pairs)]
    with built(a, usual_head) as path, pytest.MonkeyPatch.context() as patch:
        help_head(patch, [[*prompt, *answer] for prompt, answer in pairs], a.right, rng)
        for mode, target in (("dense", 1.6), ("predicted", 1.05)):
            found, times, stats = [], StepTimes(), list[Stats]()
            with load(path, mode=mode, context=CONTEXT, threads=a.threads, device="cpu") as model:
                for prompt, answer in pairs[:1] * 2 + pairs:  # the first ones compile kernels
                    ways = [Way("off", "off", StepTimes()), Way("drafts", a.speculate, times)][:: (-1) ** len(found)]
                    taken_s = []
                    for way in ways:
                        generation, seconds = written(model, prompt, answer, way, clock)
                        taken_s.append(seconds)
                        stats += [generation.stats] if way.times is times else []
                    plain_s, guessed_s = taken_s[:: (-1) ** len(found)]
                    found.append(plain_s / guessed_s)
                    rates = f"{a.tokens / plain_s:8.1f} tokens/s, with guesses {a.tokens / guessed_s:8.1f}"
                    print(f"{mode:9} {rates} {found[-1]:7.2f}")
            print(f"{mode}: {drafted(stats[2:])}")
            print(verdict(f"{mode}, times as fast", statistics.median(found[2:]), at_least=target))


def main() -> None:
    a = arguments()
    {"texts": of_texts, "set": of_a_set_head, "head": of_a_published_head, "schemas": of_schemas}[a.part](a)


if __name__ == "__main__":
    main()
