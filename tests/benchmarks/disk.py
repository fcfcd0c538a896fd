"""Decoding with a share of the FFNs' rows on disk, beside the same model in memory and the device's own rate.

    python tests/benchmarks/disk.py [--format q4] [--layers 4] [--shares 1,0.5,0.1] [--tokens 32]

The device's rate is that of plain threads which read random blocks as large as a row of `first`, past the page cache.
Times are CPU and wall clock: on a machine that others use, CPU time is the steadier one.
"""

import argparse
import mmap
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.bench_model import SHAPE, VOCABULARY
from support.disk_models import from_disk
from support.sparse_model import Spec, build
from support.synthetic import small_decoder

from pi_runtime import Model, load
from pi_runtime.artifact.row_memory import WORKERS
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.disk.ram_plan import row_nbytes
from pi_runtime.execution.executor import DiskStats

CONTEXT = 512


def device_rate(path: Path, block: int, depth: int = WORKERS, seconds: float = 2.0) -> float:
    """Bytes a second of random direct reads of this size, so many at once."""
    fd, blocks, end, done = os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size // block, 0.0, [0] * depth

    def read(n: int) -> None:
        own, buffer = random.Random(n), mmap.mmap(-1, block)
        while time.monotonic() < end:
            os.preadv(fd, [buffer], own.randrange(blocks) * block)
            done[n] += block

    threads = [threading.Thread(target=read, args=(n,)) for n in range(depth)]
    began = time.monotonic()
    end = began + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    return sum(done) / (time.monotonic() - began)


def decode(model: Model, tokens: int, warm: int) -> tuple[np.ndarray, float, DiskStats | None]:
    """Wall seconds of each token after the first ones, CPU seconds a token, and what the disk did for them."""
    cache, rng, walls = model.new_cache(), np.random.default_rng(1), []
    cpu, before = time.process_time(), model.executor.disk
    for n, token in enumerate(rng.integers(0, VOCABULARY, warm + tokens).tolist()):
        if n == warm:
            cpu, before = time.process_time(), model.executor.disk
        began = time.perf_counter()
        model.decode(token, cache)
        walls.append(time.perf_counter() - began)
    cpu = (time.process_time() - cpu) / tokens
    after = model.executor.disk
    return np.array(walls[warm:]), cpu, None if after is None or before is None else after - before


def report(name: str, walls: np.ndarray, cpu: float, disk: DiskStats | None) -> None:
    p50, p90, p99 = np.percentile(walls, [50, 90, 99]) * 1e3
    line = f"{name:12}{1 / walls.mean():7.2f} tokens/s  p50 {p50:6.1f} p90 {p90:6.1f} p99 {p99:6.1f} ms"
    line += f"  CPU {cpu * 1e3:6.1f} ms"
    if disk is not None and disk.bytes_per_token is not None:
        line += f"  hits {disk.hit_rate:.3f}  {disk.bytes_per_token / 1e6:6.2f} MB/token  waiting {disk.wait_share:.2f}"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifact", type=Path, help="one that is there; else one is built")
    parser.add_argument("--format", default="f16")
    for name, default in SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--mode", default="predicted")
    parser.add_argument("--shares", default="1,0.5,0.25,0.1")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = a.artifact or Path(folder) / "model.pi"
        if a.artifact is None:
            decoder = small_decoder(
                n_layers=a.layers, d_model=a.d_model, d_ff=a.d_ff, n_heads=a.heads, n_kv_heads=a.heads // 4,
                head_dim=a.d_model // a.heads, vocab_size=VOCABULARY, context_length=CONTEXT,
            )  # fmt: skip
            formats = {**dict.fromkeys(PARTS, a.format), "predictor": "q4"}
            build(Spec(decoder=decoder, formats=formats, density=a.density, rank=a.d_model // 4), {1.5: path})
        with load(path, mode=a.mode, context=CONTEXT, threads=a.threads, device="cpu") as model:
            block = max(512, row_nbytes(model.manifest, "first"))
            report("in memory", *decode(model, a.tokens, a.warm))
        print(f"the device: {device_rate(path, block) / 1e6:.0f} MB/s at {block} bytes, {WORKERS} at once", flush=True)
        for share in map(float, a.shares.split(",")):
            with from_disk(path, share, a.mode, context=CONTEXT, threads=a.threads) as model:
                report(f"{share:.0%}", *decode(model, a.tokens, a.warm))


if __name__ == "__main__":
    main()
