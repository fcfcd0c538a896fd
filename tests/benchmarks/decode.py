"""Decode speed of the three modes on a synthetic model, beside what the memory allows.

python tests/benchmarks/decode.py [--layers 8] [--d-model 2048] [--d-ff 8192] [--density 0.1] [--rank 512] [--tokens 40]

Llama-shaped, f16, random weights; biases set so that a share `density` of the neurons fires, and predictors that
name half as many again: for speed only, their text is noise. Modes are interleaved token by token, since shared
machines drift.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist

import numba
import numpy as np
from synthetic import bare_manifest, byte_tokenizer, small_decoder

from pi_compile.evaluation import other_bytes
from pi_runtime import load
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.sizes import PARTS, ArraySpec, FfnBytes, array_specs
from pi_runtime.artifact.writer import ArtifactWriter
from pi_runtime.measure import read_bandwidth

MODES = ("dense", "gate", "predicted")


def values(name: str, spec: ArraySpec, density: float, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Matrices of unit-variance outputs; biases let a share `density` through, the predictor half as many again."""
    if name.endswith("norm/weight"):
        yield np.ones(spec.shape, np.float32)
    elif len(spec.shape) == 1:
        share = {"first_bias": density, "bias": 1.5 * density}.get(name.rsplit("/", 1)[1], 0.5)
        yield np.full(spec.shape, NormalDist().inv_cdf(share), np.float32)
    else:
        # One random block again and again: drawing gigabytes would take longer than the measurement.
        block = rng.standard_normal((min(64, spec.shape[0]), *spec.shape[1:]), np.float32) / np.sqrt(spec.shape[-1])
        for start in range(0, spec.shape[0], len(block)):
            yield block[: spec.shape[0] - start]


def build(path: Path, d: Decoder, density: float, rank: int) -> None:
    rng, ranks = np.random.default_rng(0), [rank] * d.n_layers
    formats = dict.fromkeys(PARTS, "f16")
    with ArtifactWriter(path) as writer:
        for name, spec in array_specs(d, formats, ranks, profiled=False).items():
            writer.add_array(name, spec, values(name, spec, density, rng))
        writer.add_file("tokenizer.json", byte_tokenizer())
        writer.finish(bare_manifest(d, formats, ranks))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 8), ("d-model", 2048), ("d-ff", 8192), ("rank", 512), ("tokens", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--density", type=float, default=0.1)
    args = parser.parse_args()
    decoder = small_decoder(
        n_layers=args.layers, d_model=args.d_model, d_ff=args.d_ff, n_heads=32, n_kv_heads=32,
        head_dim=args.d_model // 32, vocab_size=32000, context_length=512, ffn_bias=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pi"
        build(path, decoder, args.density, args.rank)
        measure(path, args.tokens)


def measure(path: Path, tokens: int) -> None:
    models = {mode: load(path, mode=mode) for mode in MODES}
    caches = {mode: model.new_cache() for mode, model in models.items()}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    rows: dict[str, list[np.ndarray]] = {mode: [] for mode in MODES}
    for n in range(tokens + 3):
        for mode, model in models.items():
            began = time.perf_counter()
            _, read = model.decode(n % 256, caches[mode])
            if n >= 3:  # the first ones fault the pages in
                seconds[mode].append(time.perf_counter() - began)
                rows[mode].append(read)
    np.testing.assert_array_equal(rows["dense"][-1], models["dense"].manifest.decoder.d_ff)
    bandwidth = read_bandwidth(1 << 30, numba.config.NUMBA_NUM_THREADS)
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, all threads")
    print(f"{'mode':10} {'tokens/s':>9} {'× dense':>8} {'rows read':>9} {'kept':>6} {'MB/token':>9} {'of limit':>8}")
    dense = statistics.median(seconds["dense"])
    for mode, model in models.items():
        manifest, median = model.manifest, statistics.median(seconds[mode])
        neuron = FfnBytes.of(manifest.decoder, manifest.formats)
        read, kept = np.mean(rows[mode], axis=(0, 1))
        predictor = neuron.predictor(manifest.layers[0].rank or 0) if mode == "predicted" else 0
        ffn = read * neuron.first + kept * neuron.rest + predictor
        nbytes = other_bytes(manifest) + manifest.decoder.n_layers * ffn
        read, kept = read / manifest.decoder.d_ff, kept / manifest.decoder.d_ff
        print(
            f"{mode:10} {1 / median:9.1f} {dense / median:8.2f} {read:9.3f} {kept:6.3f} {nbytes / 1e6:9.1f}"
            f" {nbytes / median / bandwidth:8.2f}"
        )


if __name__ == "__main__":
    main()
