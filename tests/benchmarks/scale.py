"""A model of real size through the whole road: announced and measured time and memory, and passes through the model.

    nox -s bench -- scale [--work FOLDER] [--d-model 2048 --d-ff 5632 --layers 22 --vocab 49152]
                          [--fit 16384] [--train 8192] [--steps 20] [--threads 2]

A synthetic ReLU Llama in f16 goes through profile, train and build, with one layer in memory and one worker, each stage
in a process of its own. Where a memory cgroup can be made (as root), a stage may take 1.2 times the memory that it
announces. The text stays short, so the time of a stage is compared with what it announces; the estimates of a 7B and a
70B with the text of a real build follow. The 1.1 B model of the default takes about 45 minutes on two cores.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script, started outside pytest

import torch
from benchmarks.many_workers.simulation import MODELS, PROFILED, training_of
from support.rss import rss_anon, synthetic_llama

from pi_compile.calibration import profiling
from pi_compile.calibration.profiling import ProfileSpec
from pi_compile.pipeline.launching import Build
from pi_compile.recipe import Recipe, default_recipe
from pi_compile.torch_model import Estimate
from pi_compile.training.rung_choice import MeasuredText
from pi_compile.workers import HEARTBEAT, LONE

STAGES = ("profile", "train", "pack")
ROOM = 1.2
"""Memory that a stage may take, over what it announces."""
GROUP = Path("/sys/fs/cgroup/memory/pi-scale"), "memory.limit_in_bytes"
GROUP_2 = Path("/sys/fs/cgroup/pi-scale"), "memory.max"
"""A memory cgroup and its limit, of both versions of cgroups."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder to work in; by default a temporary one")
    sizes = {"d-model": 2048, "d-ff": 5632, "layers": 22, "vocab": 49_152}
    for name, size in (sizes | {"fit": 16_384, "train": 8192, "steps": 20, "threads": 2}).items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    return parser.parse_args()


def prepare(folder: Path, args: argparse.Namespace) -> None:
    """The model, some text, and the recipe."""
    from support.hf import write_tokenizer

    if not (folder / "model" / "config.json").exists():
        shape = {"d_model": args.d_model, "d_ff": args.d_ff, "n_layers": args.layers, "vocab_size": args.vocab}
        nbytes = synthetic_llama(folder / "model", **shape, dtype=torch.float16, per_shard=1)
        write_tokenizer(folder / "model")
        print(f"model of {nbytes / 2**30:.2f} GiB", flush=True)
    (folder / "text").mkdir(exist_ok=True)
    rng = random.Random(0)
    words = ["".join(map(rng.choice, ("abcdefghijklmnop", "aeiou", "bcdfgh"))) for _ in range(400)]
    for n in range(40):
        (folder / "text" / f"{n}.txt").write_text(" ".join(rng.choices(words, k=20_000)))
    recipe = default_recipe("model", corpus=["text"]).model_dump()
    recipe["corpus"] |= {"fit_tokens": args.fit, "tune_tokens": 8192, "report_tokens": 8192}
    recipe["profile"] |= {"layers_at_once": 1, "threads": args.threads}
    recipe["train"] |= {"tokens": args.train, "steps": args.steps}
    recipe["quality"] |= {"perplexity_increase": 0.01}
    (folder / "scale.toml").write_text(Recipe.model_validate(recipe).to_toml())
    shutil.rmtree(folder / ".pi-build", ignore_errors=True)


def run_stage(stage: str, folder: Path) -> None:
    """Run one stage in this process, in a cgroup where there may be one, and print what it took as JSON."""
    limit, passes, found = own_group(), Counter[str](), dict[str, Any]()
    announce, measure = Estimate.announced, MeasuredText._measure

    def announced(e: Estimate, stage: str, tokens: int, workers: int, key: str = "") -> str:
        limit(int(ROOM * e.memory_bytes))
        found.update(began=time.perf_counter(), seconds=e.seconds, memory=e.memory_bytes, peak=0)
        return announce(e, stage, tokens, workers, key)

    def counted(self: MeasuredText, ffn_of: Any, batches: Any) -> None:
        passes[self.text.name] += 1
        measure(self, ffn_of, batches)

    def watch() -> None:
        while True:
            found["peak"] = max(found["peak"], rss_anon())
            time.sleep(0.05)

    Estimate.announced, MeasuredText._measure = announced, counted  # type: ignore[method-assign]
    found |= {"began": time.perf_counter(), "seconds": None, "memory": None, "peak": 0}
    threading.Thread(target=watch, daemon=True).start()
    pipeline = Build(recipe=folder / "scale.toml", until=stage, heartbeat=HEARTBEAT).pipeline(LONE)
    with pipeline.worker:
        if stage == "pack":
            pipeline.pack(folder / "scale.pi")
        else:
            _ = pipeline.profile if stage == "profile" else pipeline.trained
    print(json.dumps({**found, "took": time.perf_counter() - found["began"], "passes": passes}))


def own_group() -> Callable[[int], None]:
    """What limits this process's memory, by a cgroup of its own."""
    for group, name in (GROUP, GROUP_2):
        try:
            group.mkdir(exist_ok=True)
            (group / name).write_text("-1" if name == GROUP[1] else "max")
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            continue
        return lambda nbytes, path=group / name: path.write_text(str(nbytes))  # type: ignore[misc]
    print("no memory cgroup can be made: memory is measured, and not limited", file=sys.stderr)
    return lambda _nbytes: None


def shown(stage: str, found: dict[str, Any]) -> str:
    gib, passes = 2**30, "".join(f", {n} passes of the {text} text" for text, n in found["passes"].items())
    took, peak = found["took"], found["peak"] / gib
    if found["seconds"] is None:
        return f"{stage:8} {took:6.0f} s, {peak:.2f} GiB{passes}"
    seconds, memory = found["seconds"], found["memory"] / gib
    return (
        f"{stage:8} {took:6.0f} s of {seconds:.0f} announced ({took / seconds:.2f}), "
        f"{peak:.2f} GiB of {memory:.2f} announced ({peak / memory:.2f}){passes}"
    )


def estimates(threads: int) -> None:
    """What larger models take on this machine, by the same count."""
    for name, model in MODELS.items():
        work = training_of(model, threads)
        counting = ProfileSpec(layers_at_once=1, threads=threads)
        for stage, e in (
            ("profile", profiling.estimate(work.d, PROFILED, counting)),
            ("train", work.estimate("cpu")),
        ):
            print(
                f"{name:>4} {stage:8} {e.seconds / 3600:6.0f} h by one worker, "
                f"{e.memory_bytes / 2**30:.1f} GiB, {e.disk_bytes / 2**30:.0f} GiB of disk"
            )


def main() -> None:
    args = arguments()
    if args.stage:
        run_stage(args.stage, args.work)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder, args)
        for stage in STAGES:
            command = [sys.executable, __file__, "--work", str(folder), "--stage", stage]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            print(shown(stage, json.loads(done.stdout)), flush=True)
        for group, _ in (GROUP, GROUP_2):
            with suppress(OSError):
                group.rmdir()
    estimates(args.threads)


if __name__ == "__main__":
    main()
