"""Many workers: speed-up on this machine, what coordination costs, and a simulation of up to 256 workers.

    python tests/benchmarks/workers.py [--tokens 16384] [--layers 8] [--rounds 3]

Measured: `profile` and `train` of a synthetic ReLU Llama by 1 worker with 1 thread, by 1 worker with 2 and by 2 workers
with 1 each, in turns; results of equal threads must be the same. Processes are started beforehand: what is measured is
the work. Simulated, from the measured rate and spread of tasks (`many_workers/simulation.py` says how): a 7B and a 70B.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script, started outside pytest

import numpy as np
import torch
from benchmarks.many_workers.simulation import MODELS, Store, expected, tasks_of
from support.hf import write_tokenizer
from support.rss import synthetic_llama

from pi_compile.calibration.profiling import ProfileSpec
from pi_compile.checkpoint import open_checkpoint
from pi_compile.pipeline import stages
from pi_compile.workers import Rank, Worker, WorkFolder

D_MODEL, D_FF, VOCAB, WINDOW = 768, 3072, 8192, 256
SHARE = 1.8
"""Speed-up that two workers on two quiet cores are to reach."""
EMPTY = 400
"""Tasks that do nothing, to measure what coordination costs."""


@dataclass(frozen=True)
class Streams:
    fit: np.ndarray[Any, Any]
    tune: np.ndarray[Any, Any]
    report: np.ndarray[Any, Any]


def work(model: Path, folder: Path, rank: Rank, threads: int, tokens: int, ready: Barrier, out: Any) -> None:
    """One worker: both stages, and the seconds of each of its tasks."""
    ids = np.random.default_rng(0).integers(0, VOCAB, tokens + 2 * 16 * WINDOW)
    texts = Streams(ids[:tokens], *np.split(ids[tokens:], 2))
    checkpoint, seconds = open_checkpoint(model), list[tuple[str, float]]()
    do = WorkFolder._do

    def timed(self: WorkFolder, taken: Any, make: Any) -> None:
        began = time.perf_counter()
        do(self, taken, make)
        seconds.append((next(iter(taken)), time.perf_counter() - began))

    WorkFolder._do = timed  # type: ignore[method-assign]
    torch.set_num_threads(threads)
    with Worker(folder / "workers", rank) as worker:
        for name in ("profile", "train"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        ready.wait()
        began = time.perf_counter()
        common = {"window": WINDOW, "threads": threads}
        counts = stages.profile(
            checkpoint, texts.fit, layers_at_once=1, scratch=WorkFolder(folder / "profile", worker), **common
        )
        predictors = stages.train(
            checkpoint,
            counts,
            texts,  # type: ignore[arg-type]
            "stand-in",
            tokens=tokens // 4,
            steps=20,
            scratch=WorkFolder(folder / "train", worker),
            **common,
        )
        ready.wait()
        out.put((time.perf_counter() - began, counts.digest(), predictors.digest(), seconds))


def measure(model: Path, workers: int, threads: int, tokens: int) -> tuple[float, set[tuple[str, str]], list[Any]]:
    """Seconds of the whole, the digests that workers came to, and the seconds of each task."""
    context = multiprocessing.get_context("spawn")
    ready, out = context.Barrier(workers), context.Queue()
    with tempfile.TemporaryDirectory() as temporary:
        processes = [
            context.Process(target=work, args=(model, Path(temporary), Rank(n, workers), threads, tokens, ready, out))
            for n in range(workers)
        ]
        for process in processes:
            process.start()
        found = [out.get() for _ in processes]
        for process in processes:
            process.join()
    return max(f[0] for f in found), {f[1:3] for f in found}, [task for f in found for task in f[3]]


def overhead() -> tuple[float, float]:
    """Seconds that a task takes beside its own work, among few tasks and among thousands of finished ones."""

    def per_task(folder: Path, beside: int) -> float:
        folder.mkdir()
        for n in range(beside):
            (folder / f"other-{n}").touch()
        with Worker(folder.with_name("workers")) as worker:
            began = time.perf_counter()
            tasks = {f"task-{n}": (folder / f"task-{n}").touch for n in range(EMPTY)}
            WorkFolder(folder, worker).run(tasks)
            return (time.perf_counter() - began) / EMPTY

    with tempfile.TemporaryDirectory() as temporary:
        return per_task(Path(temporary, "few"), 0), per_task(Path(temporary, "many"), 10_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary)
        shape = {"d_model": D_MODEL, "d_ff": D_FF, "n_layers": arguments.layers, "vocab_size": VOCAB}
        synthetic_llama(model, **shape, dtype=torch.float16, per_shard=1)
        write_tokenizer(model)
        ways = {"1 × 1": (1, 1), "1 × 2": (1, 2), "2 × 1": (2, 1)}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        digests: dict[int, set[tuple[str, str]]] = {}
        tasks: list[tuple[str, float]] = []
        for _ in range(arguments.rounds):
            for name, (workers, threads) in ways.items():
                took, digest, done = measure(model, workers, threads, arguments.tokens)
                seconds[name].append(took)
                digests.setdefault(threads, set()).update(digest)
                if name == "1 × 1":
                    tasks = done
    assert all(len(found) == 1 for found in digests.values()), "workers came to different results"
    print(f"{arguments.layers} layers, d {D_MODEL}, ffn {D_FF}, {arguments.tokens:,} tokens; the same bytes")
    median = {name: statistics.median(times) for name, times in seconds.items()}
    for name, times in seconds.items():
        print(f"{name} (workers × threads)  {median[name]:8.1f} s  ({', '.join(f'{t:.1f}' for t in times)})")
    print(f"2 × 1 against 1 × 1      {median['1 × 1'] / median['2 × 1']:8.2f}   (to reach on two quiet cores: {SHARE})")
    print(f"2 × 1 against 1 × 2      {median['1 × 2'] / median['2 × 1']:8.2f}")
    few, many = overhead()
    shards = [t for name, t in tasks if "-shard-" in name]
    print(f"coordination of a task   {1e3 * few:8.2f} ms, {1e3 * many:.2f} ms beside 10,000 finished ones")
    print(f"median shard             {1e3 * statistics.median(shards):8.0f} ms")
    report(shards, many, median["1 × 1"] / median["1 × 2"])


def report(shards: Sequence[float], listing: float, faster: float) -> None:
    """The simulation, from the rate and the spread of the measured shards; two threads are `faster` than one."""
    per_layer = 4 * D_MODEL**2 + 3 * D_MODEL * D_FF
    rate = 2 * per_layer * ProfileSpec.shard * WINDOW / statistics.median(shards)
    spread = np.array(shards) / statistics.median(shards)
    store = Store(seconds_per_listing=listing)
    print(
        f"\nsimulated: {rate / 1e9:.0f} GFLOP/s a worker with one thread, {faster:.2f} times that with two, "
        f"{store.operations_per_s:,} file operations a second at most"
    )
    head = ("model", "threads", "workers", "makespan h", "speed-up", "wasted", "file ops/s")
    print("".join(f"{title:>11}" for title in head), " bound by")
    for name, model in MODELS.items():
        for threads, speed in ((1, rate), (2, rate * faster)):
            tasks, one = tasks_of(model, speed), 0.0
            for workers in (1, 2, 4, 8, 16, 32, 64, 128, 256):
                found = expected(tasks, workers, spread, store)
                one = one or found.seconds
                print(
                    f"{name:>11}{threads:11d}{workers:11d}{found.seconds / 3600:11.2f}{one / found.seconds:11.1f}"
                    f"{found.wasted:11.1%}{found.operations_per_s:11.1f}  {found.bound}"
                )


if __name__ == "__main__":
    main()
