"""Decoding a mixture of experts for several at once: tokens of one step that take the same expert share its rows.

nox -s bench -- experts [--formats q8,q4] [--layers 2] [--batches 1,8] [--hot 0,0.5,0.7] [--no-peer]

Random weights of Qwen3-30B-A3B's published shape, cut to some layers and a vocabulary of 32,000. A random router
spreads tokens evenly: 8 tokens with 8 of 128 experts each take 52 of them. Routers of real models are skewed, and share
more: `--hot` gives the share of hits that the tenth of experts which is taken most often has (0.8 in one that was
published; 0.7 is the most that is reached here); 0 is a router without skew. Each round runs every batch once, and
llama.cpp's with weights of the same shape and skew; printed are the median rate, its ratio to one sequence's in the
same round with the least and the most, and the share of experts that a step takes.
"""

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import numpy as np
from side_by_side.gguf_file import write_gguf
from side_by_side.peers import open_peer
from side_by_side.rounds import LLAMA_CPP, Contender
from side_by_side.shape import CONFIGS
from support.synthetic import random_artifact, small_decoder

from pi_runtime import load
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.execution.executor import SequenceStep

CONFIG = CONFIGS / "Qwen--Qwen3-30B-A3B.json"
CONTEXT, STEPS, OURS = 64, 4, "pi"


def decoder_of(layers: int) -> Decoder:
    """The published shape with fewer layers and tokens."""
    c = json.loads(CONFIG.read_text())
    return small_decoder(
        n_layers=layers, d_model=c["hidden_size"], d_ff=c["moe_intermediate_size"], n_heads=c["num_attention_heads"],
        n_kv_heads=c["num_key_value_heads"], head_dim=c["head_dim"], n_experts=c["num_experts"],
        experts_per_token=c["num_experts_per_tok"], activation="silu", vocab_size=32000, context_length=256,
    )  # fmt: skip


def rows_with_skew(hot: float, d: Decoder) -> np.ndarray:
    """Factors of a router's rows, (rank + 1)⁻ˢ, with which a tenth of the experts has this share of all hits."""
    rng = np.random.default_rng(1)
    value_TX, order = rng.standard_normal((4000, d.n_experts)), rng.permutation(d.n_experts)
    low, high = 0.0, 4.0 if hot else 0.0
    for _ in range(20):
        middle = (low + high) / 2
        rows_X = (order + 1.0) ** -middle
        low, high = (low, middle) if _hits(value_TX * rows_X, d)[: d.n_experts // 10].sum() > hot else (middle, high)
    return np.asarray(rows_X, np.float32) / np.float32(np.sqrt(np.mean(rows_X**2)))


def _hits(value_TX: np.ndarray, d: Decoder) -> np.ndarray:
    """Each expert's share of all hits, the largest first."""
    taken_TK = np.argsort(-value_TX, axis=1)[:, : d.experts_per_token]
    return -np.sort(-np.bincount(taken_TK.ravel(), minlength=d.n_experts)) / taken_TK.size


def experts_of_a_step(rows_X: np.ndarray, batch: int, d: Decoder) -> float:
    """Mean share of experts that so many tokens take."""
    value_TX = np.random.default_rng(2).standard_normal((200 * batch, d.n_experts)) * rows_X
    taken = np.argsort(-value_TX, axis=1)[:, : d.experts_per_token].reshape(200, -1)
    return float(np.mean([len(set(step)) for step in taken.tolist()])) / d.n_experts


def rates(path: Path, batches: list[int], rounds: int, peer: Contender | None) -> dict[tuple[str, int], list[float]]:
    """Tokens a second of all sequences together, by engine and batch, of each round."""
    rng = np.random.default_rng(0)
    engines = (OURS, LLAMA_CPP) if peer is not None else (OURS,)
    found: dict[tuple[str, int], list[float]] = {(engine, batch): [] for engine in engines for batch in batches}
    with load(path) as model:
        caches = [model.new_cache() for _ in range(max(batches))]
        for cache in caches:
            model.logits(rng.integers(0, 32000, CONTEXT).tolist(), cache=cache)
        for n in range(rounds + 1):
            for batch in batches:
                seconds = []
                for _ in range(STEPS):
                    tokens = rng.integers(0, 32000, (batch, 1))
                    steps = [SequenceStep(cache=c, tokens=t, select=True) for c, t in zip(caches, tokens, strict=False)]
                    began = time.perf_counter()
                    model.executor.step(steps)
                    seconds.append(time.perf_counter() - began)
                for cache in caches[:batch]:
                    cache.truncate(CONTEXT)
                theirs = None
                if peer is not None:
                    theirs = peer.worker.ask("decode_batch", batch=batch, context=CONTEXT, tokens=STEPS)["seconds"]
                if n:  # the first round warms up
                    found[OURS, batch].append(batch / statistics.median(seconds))
                    if theirs is not None:
                        found[LLAMA_CPP, batch].append(batch / statistics.median(theirs))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="q8,q4")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--hot", default="0,0.5,0.7")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-peer", action="store_true")
    a = parser.parse_args()
    batches, d = [int(b) for b in a.batches.split(",")], decoder_of(a.layers)
    for fmt, hot in product(a.formats.split(","), map(float, a.hot.split(","))):
        rows_X, peer = rows_with_skew(hot, d), None
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            folder = Path(name)
            random_artifact(folder / "a.pi", d, format=fmt, router_rows=rows_X)
            if not a.no_peer:
                write_gguf(folder / "a.gguf", d, fmt, router_rows=rows_X)
                opening = {"path": str(folder / "a.gguf"), "context": CONTEXT + max(batches) * (STEPS + 1)}
                peer = open_peer(LLAMA_CPP, fmt, stack, limit_s=300, sequences=max(batches), **opening)
            found = rates(folder / "a.pi", batches, a.rounds, peer)
        for (engine, batch), rate in found.items():
            ratios = [one / other for one, other in zip(rate, found[engine, batches[0]], strict=True)]
            print(
                f"{fmt}, hot {hot:g}, {engine}, {batch} at once: {statistics.median(rate):.1f} tokens/s, "
                f"× {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
                f"{experts_of_a_step(rows_X, batch, d):.0%} of the experts",
                flush=True,
            )


if __name__ == "__main__":
    main()
