"""Packing a checkpoint larger than its memory bound: peak anonymous memory against 2 layers + 500 MB, and GB/s.

python tests/benchmarks/pack_memory.py [--gigabytes 3]
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script, started outside pytest

from support.hf import write_tokenizer
from support.rss import layer_bytes, pack_in_child, synthetic_llama

from pi_runtime.artifact.verification import verify

D_MODEL, D_FF, VOCAB = 2048, 8192, 64000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    gigabytes = parser.parse_args().gigabytes
    layer = layer_bytes(D_MODEL, D_FF, 2)
    n_layers = max(1, round((gigabytes * 1e9 - 2 * VOCAB * D_MODEL * 2) / layer))
    with tempfile.TemporaryDirectory() as temporary:
        folder, artifact = Path(temporary, "model"), Path(temporary, "model.pi")
        shape = {"d_model": D_MODEL, "d_ff": D_FF, "n_layers": n_layers, "vocab_size": VOCAB}
        total = synthetic_llama(folder, **shape, dtype=torch.bfloat16, per_shard=4)
        write_tokenizer(folder)
        measured = pack_in_child(folder, artifact)
        verify(artifact)
    bound = 2 * layer + 500_000_000
    print(
        f"checkpoint        {total / 1e9:8.2f} GB, {n_layers} layers of {layer / 1e6:.0f} MB, bf16; artifact verified"
    )
    print(f"RssAnon, opened   {measured.before / 1e6:8.0f} MB")
    print(f"RssAnon, peak     {measured.peak / 1e6:8.0f} MB")
    print(f"bound             {bound / 1e6:8.0f} MB (2 layers + 500 MB)")
    print(f"peak ÷ bound      {measured.peak / bound:8.2f}")
    print(f"packed at         {total / 1e9 / measured.seconds:8.2f} GB/s, digests of input and output included")
    if measured.peak > bound:
        raise SystemExit("the bound is exceeded")


if __name__ == "__main__":
    main()
