"""The share of an engine's time that goes into grammars: JSON by random schemas, from a random model.

nox -s bench -- grammar [--slots 1,4,8,16] [--requests 48] [--vocabulary 128000]

The vocabulary has at most so many tokens, trained on Python's own library; the model itself is small (8 layers
of width 1,024), so that the share is an upper bound for larger ones.
"""

import argparse
import random
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from support.schemas import random_schema
from support.synthetic import random_artifact, small_decoder
from tokenizers import decoders, models, pre_tokenizers, trainers

from pi_runtime import Engine, Grammar, Model, Sampling, load
from pi_runtime.artifact.schema import Text
from pi_runtime.text.grammar import GrammarState

END = "<|end|>"


def trained_tokenizer(vocabulary: int) -> tokenizers.Tokenizer:
    """Byte-level BPE with so many tokens; the first one ends a text."""
    found = tokenizers.Tokenizer(models.BPE())
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py"))[:3000]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
    )
    found.train_from_iterator((path.read_text("utf-8", "replace") for path in sources), trainer)
    return found


class Clock:
    """Adds up the processor time of methods."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: type, name: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*args)
            finally:
                self.seconds += time.thread_time() - began

        setattr(owner, name, timed)


def measure(model: Model, clock: Clock, slots: int, requests: int) -> None:
    """Print the rate without grammars and with them, and their share."""
    rng = random.Random(1)
    grammars = [Grammar.json_schema(random_schema(rng)) for _ in range(requests)]
    for chosen in ([None] * requests, grammars):
        with Engine(model, slots=slots, speculate="off") as engine:
            clock.seconds = 0.0
            streams = [
                engine.generate(
                    [5, 6, 7 + k],
                    max_tokens=20 if grammar is None else 40,
                    sampling=Sampling(temperature=1.0, top_k=50, seed=k),
                    grammar=grammar,
                )
                for k, grammar in enumerate(chosen)
            ]
            for stream in streams:
                "".join(stream)
            s = engine.stats
            kind = "free" if chosen[0] is None else "JSON"
            share = clock.seconds / s.busy_s
            print(f"{slots:5} {kind} {s.generated_tokens:7} tokens {s.tokens_per_s:7.1f}/s   grammars {share:6.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", default="1,4,8,16")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--vocabulary", type=int, default=128000)
    asked = parser.parse_args()
    library = trained_tokenizer(asked.vocabulary)
    shape = {"n_layers": 8, "d_model": 1024, "n_heads": 16, "n_kv_heads": 4, "head_dim": 64, "d_ff": 4096}
    decoder = small_decoder(vocab_size=library.get_vocab_size(), context_length=1024, **shape)
    clock = Clock()
    for name in ("allowed", "is_complete"):
        clock.watch(GrammarState, name)
    with tempfile.TemporaryDirectory() as folder:
        path = random_artifact(
            Path(folder) / "random.pi",
            decoder,
            format="q8",
            scale=2.0,
            text=Text(prefix_ids=(), end_ids=(library.token_to_id(END),)),
            files={"tokenizer.json": library.to_str().encode()},
        )
        with load(path, mode="dense", device="cpu") as model:
            model.warm_up()
            began = time.perf_counter()
            _ = model.tokenizer.grammars
            print(f"{library.get_vocab_size()} tokens made ready for grammars in {time.perf_counter() - began:.1f} s")
            for slots in map(int, asked.slots.split(",")):
                measure(model, clock, slots, asked.requests)


if __name__ == "__main__":
    main()
