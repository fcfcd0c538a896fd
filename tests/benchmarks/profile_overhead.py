"""What counting and sampling cost: one layer at d 2048, ffn 8192, with them as profiling does it, and without.

python tests/benchmarks/profile_overhead.py [--rounds 7] [--threads 1]
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script, started outside pytest

from support.rss import synthetic_llama

from pi_compile.calibration.profiling import ProfileSpec, _Run
from pi_compile.checkpoint import open_checkpoint
from pi_compile.torch_model import ResidentLayers
from pi_compile.torch_model import decoder as td

D_MODEL, D_FF, VOCAB, WINDOW, BATCH = 2048, 8192, 1000, 512, 2
LIMIT = 0.10


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, (BATCH, WINDOW)))
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        shape = {"d_model": D_MODEL, "d_ff": D_FF, "n_layers": 1, "vocab_size": VOCAB}
        synthetic_llama(Path(folder), **shape, dtype=torch.bfloat16, per_shard=1)
        checkpoint = open_checkpoint(folder)
        d, w, ends = checkpoint.decoder, td.layer_weights(checkpoint, 0, "cpu"), td.global_weights(checkpoint, "cpu")
        # A text of a million tokens is sampled this densely.
        spec = ProfileSpec(window=WINDOW, batch=BATCH, cofiring_tokens=max(1, ids.numel() * 4096 // 10**6))
        run = _Run(checkpoint, ids, spec, Path(folder), ResidentLayers(checkpoint, "cpu"))

        def plain() -> torch.Tensor:
            x, inputs = td.before_ffn(d, w, td.embed(d, ends, ids))
            return td.after_ffn(d, w, x, td.ffn_output(w, td.neurons(d, w, inputs)))

        def counting() -> np.ndarray:
            return run.run_batch([w], td.embed(d, ends, ids), 0, 0)[1][0][0]

        _, inputs = td.before_ffn(d, w, td.embed(d, ends, ids))
        wanted = (td.neurons(d, w, inputs) != 0).sum((0, 1))
        np.testing.assert_array_equal(counting(), wanted.numpy())
        # Taken in turns, so that whatever else the machine does falls on both.
        times = [(seconds(plain), seconds(counting)) for _ in range(arguments.rounds)]
    without, with_counts = (statistics.median(column) for column in zip(*times, strict=True))
    overhead = with_counts / without - 1
    print(
        f"one layer, d {D_MODEL}, ffn {D_FF} gated, {ids.numel()} tokens, {arguments.threads} threads; counts checked"
    )
    print(f"plain forward        {without * 1000:8.1f} ms (median of {arguments.rounds})")
    print(f"counting, sampling   {with_counts * 1000:8.1f} ms")
    print(f"overhead             {overhead:8.2%}")
    print(f"limit                {LIMIT:8.2%}")
    print(f"overhead ÷ limit     {overhead / LIMIT:8.2f}")
    if overhead > LIMIT:
        raise SystemExit("the limit is exceeded")


if __name__ == "__main__":
    main()
