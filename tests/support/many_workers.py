"""Build recipes with many workers, some of them killed; run as a program by `test_many_workers`.

    python -m support.many_workers PROJECT '[[["small"], 3, 20], [["small", "other"], 2, 0]]' SEED

Everything is imported once, then each worker is a fork. Each triple is a build of some recipes at once, with so many
workers each and so many kills at random moments; a killed worker is replaced. Where a build ends before its kills are
through, it begins anew. Prints for each triple a digest of every result, and how many tasks were lost and done twice.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import support.imported  # noqa: F401
from pi_compile.pipeline.pipeline import Pipeline
from pi_compile.pipeline.store import code_digest
from pi_compile.results.predictor_set import STORE
from pi_compile.workers import Rank, WorkFolder
from pi_runtime.artifact.reader import Artifact


def build(recipe: Path, rank: Rank, log: Path) -> None:
    """One worker's part of a build. The log gets a line where a task begins and where it ends."""
    do = WorkFolder._do

    def logged(self: WorkFolder, taken: Mapping[str, Path], make: Any) -> None:
        name = f"{recipe.stem} {self.path.name} {next(iter(taken))}"
        append(log, f"begin {name}")
        do(self, taken, make)
        append(log, f"end {name}")

    WorkFolder._do = logged  # type: ignore[method-assign]
    silent = nullcontext(lambda _done, _total: None)
    pipeline = Pipeline(recipe, "cpu", lambda _line: None, lambda *_: silent, rank)
    with pipeline.worker:
        pipeline.pack(recipe.with_suffix(".pi"))


def append(log: Path, line: str) -> None:
    with log.open("a") as file:
        file.write(line + "\n")


def start(recipe: Path, rank: Rank, log: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        build(recipe, rank, log)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def run(recipes: Sequence[Path], workers: int, kills: int, log: Path, rng: random.Random) -> int:
    """Build to the end; returns the number of workers killed."""
    killed = 0
    running = {start(r, Rank(n, workers), log): (r, Rank(n, workers)) for r in recipes for n in range(workers)}
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            gone = running.pop(child)
            if os.WIFEXITED(status) and os.WEXITSTATUS(status):
                raise SystemExit("a worker failed")
            if os.WIFSIGNALED(status):
                running[start(*gone, log)] = gone
        elif killed < kills and log.stat().st_size and rng.random() < 0.02:
            os.kill(rng.choice(list(running)), signal.SIGKILL)
            killed += 1
        time.sleep(0.005)
    return killed


def results(recipe: Path) -> dict[str, str]:
    """A digest of each result: of the files of stages, the artifact and the placements in it."""
    files = sorted((recipe.parent / STORE / recipe.stem).glob("*.npz"))
    found = {path.name.partition("-")[0]: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    artifact = recipe.with_suffix(".pi")
    with Artifact.open(artifact) as opened:
        found["placements"] = " ".join(plan.digest for plan in opened.manifest.plans)
    return found | {"artifact": hashlib.sha256(artifact.read_bytes()).hexdigest()}


def main() -> None:
    project, rng = Path(sys.argv[1]), random.Random(int(sys.argv[3]))
    log, told = project / "log.txt", []
    code_digest("pi_compile.pipeline.pipeline")  # reads all sources once, before the forks
    for names, workers, kills in json.loads(sys.argv[2]):
        recipes = [project / f"{name}.toml" for name in names]
        left, seen, lost, twice, leftover = kills, [], 0, 0, []
        while not seen or left > 0:
            log.write_text("")
            killed = run(recipes, workers, left, log, rng)
            lines = Counter(line.split(" ", 1)[0] for line in log.read_text().splitlines())
            ends = Counter(line for line in log.read_text().splitlines() if line.startswith("end"))
            lost, twice, left = lost + lines["begin"] - lines["end"], twice + lines["end"] - len(ends), left - killed
            seen.append({recipe.stem: results(recipe) for recipe in recipes})
            leftover += [
                str(p) for p in (project / STORE).rglob("*") if ".work" in p.name or p.parent.name == "workers"
            ]
            shutil.rmtree(project / STORE)
        assert all(result == seen[0] for result in seen)
        told.append({"results": seen[0], "kills": kills, "lost": lost, "twice": twice, "leftover": leftover})
    print(json.dumps(told))


if __name__ == "__main__":
    main()
