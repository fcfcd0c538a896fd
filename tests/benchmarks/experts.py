"""Decoding a mixture of experts for several at once: tokens of one step that take the same expert share its rows.

nox -s bench -- experts [--formats q8,q4] [--layers 2] [--batches 1,8]

Random weights of Qwen3-30B-A3B's published shape, cut to some layers and a vocabulary of 32,000. A random router
spreads tokens evenly: 8 tokens with 8 of 128 experts each take 52 of them. Routers of real models are skewed, and share
more. Each round runs every batch once; printed are the median rate, its ratio to one sequence's in the same round with
the least and the most, and the share of experts that a step takes.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from side_by_side.shape import CONFIGS
from support.synthetic import random_artifact, small_decoder

from pi_runtime import load
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.execution.executor import SequenceStep

CONFIG = CONFIGS / "Qwen--Qwen3-30B-A3B.json"
CONTEXT, STEPS = 64, 4


def decoder_of(layers: int) -> Decoder:
    """The published shape with fewer layers and tokens."""
    c = json.loads(CONFIG.read_text())
    return small_decoder(
        n_layers=layers, d_model=c["hidden_size"], d_ff=c["moe_intermediate_size"], n_heads=c["num_attention_heads"],
        n_kv_heads=c["num_key_value_heads"], head_dim=c["head_dim"], n_experts=c["num_experts"],
        experts_per_token=c["num_experts_per_tok"], activation="silu", vocab_size=32000, context_length=256,
    )  # fmt: skip


def rates(path: Path, batches: list[int], rounds: int) -> dict[int, list[float]]:
    """Tokens a second of all sequences together, of each batch in each round."""
    rng = np.random.default_rng(0)
    found: dict[int, list[float]] = {batch: [] for batch in batches}
    with load(path) as model:
        caches = [model.new_cache() for _ in range(max(batches))]
        for cache in caches:
            model.logits(rng.integers(0, 32000, CONTEXT).tolist(), cache=cache)
        for n in range(rounds + 1):
            for batch in batches:
                began = time.perf_counter()
                for _ in range(STEPS):
                    tokens = rng.integers(0, 32000, (batch, 1))
                    model.executor.step(
                        [SequenceStep(cache=c, tokens=t, select=True) for c, t in zip(caches, tokens, strict=False)]
                    )
                if n:  # the first round warms up
                    found[batch].append(batch * STEPS / (time.perf_counter() - began))
                for cache in caches[:batch]:
                    cache.truncate(CONTEXT)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="q8,q4")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=9)
    a = parser.parse_args()
    batches, decoder = [int(b) for b in a.batches.split(",")], decoder_of(a.layers)
    taken = decoder.experts_per_token / decoder.n_experts
    for fmt in a.formats.split(","):
        with tempfile.TemporaryDirectory() as folder:
            found = rates(random_artifact(Path(folder) / "a.pi", decoder, format=fmt), batches, a.rounds)
        for batch, rate in found.items():
            ratios = [one / other for one, other in zip(rate, found[batches[0]], strict=True)]
            print(
                f"{fmt}, {batch} at once: {statistics.median(rate):.1f} tokens/s, × {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}), {1 - (1 - taken) ** batch:.0%} of the experts",
                flush=True,
            )


if __name__ == "__main__":
    main()
