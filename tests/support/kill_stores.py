"""Run engines that share a folder of pages, killing them at random moments; run as a program by `test_store`.

    python -m support.kill_stores ARTIFACT FOLDER KILLS SEED

Each engine answers prompts in random order, compares each answer with the model's own, and is killed meanwhile. Prints
how many were killed, how many tokens the last, undisturbed one read from disk, and what it left in the folder.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from pi_runtime import Engine, load
from pi_runtime.artifact.layer_classes import sequence_nbytes
from pi_runtime.engine import page_files
from pi_runtime.engine.store import DiskStorey

PROMPTS = [[(7 * k + n) % 200 for n in range(100)] for k in range(12)]
TOKENS = 6


def serve(artifact: Path, folder: Path, wanted: list[list[int]], ready: int, seed: int) -> int:
    """Answer every prompt some times over; returns the tokens that were read from disk."""
    rng = random.Random(seed)
    with load(artifact, mode="dense", threads=1) as model:
        classes = model.executor.new_pool().classes
        budget, page = sequence_nbytes(classes, 128, 64), sum(one.page.nbytes for one in classes)
        with Engine(model, slots=2, kv_budget=budget, kv_disk=folder, kv_disk_budget=25 * page) as engine:
            os.write(ready, b"r")
            for n in rng.choices(range(len(PROMPTS)), k=60):
                answer = engine.generate(PROMPTS[n], max_tokens=TOKENS)
                "".join(answer)
                assert answer.token_ids == wanted[n], n
            return engine.stats.kv_disk_tokens


def in_child(artifact: Path, folder: Path, wanted: list[list[int]], seed: int, kill_within: float | None) -> int | None:
    """Run an engine in a process of its own; returns what it read, or None where it was killed."""
    ready, told = os.pipe()
    result, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(tell, str(serve(artifact, folder, wanted, told, seed)).encode())
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    for one in (told, tell):
        os.close(one)
    os.read(ready, 1)
    if kill_within is not None:
        time.sleep(random.Random(seed).uniform(0, kill_within))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    found = os.read(result, 20)
    for one in (ready, result):
        os.close(one)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit("an engine failed")
    return None if os.WIFSIGNALED(status) else int(found)


def answers(artifact: Path) -> list[list[int]]:
    """What the model answers by itself: in a process of its own, because this one forks."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        with load(artifact, mode="dense", threads=1) as model:
            found = [model.generate(prompt, max_tokens=TOKENS) for prompt in PROMPTS]
            for answer in found:
                "".join(answer)
            os.write(told, json.dumps([answer.token_ids for answer in found]).encode())
        os._exit(0)
    os.close(told)
    _, status = os.waitpid(child, 0)
    assert status == 0
    with os.fdopen(ready) as file:
        known: list[list[int]] = json.load(file)
    return known


def main() -> None:
    artifact, folder, kills, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    DiskStorey.pays = True  # type: ignore[method-assign,assignment]  # a small model computes faster than a disk reads
    page_files.WAIT_S = 0.01
    wanted, killed = answers(artifact), 0
    began = time.monotonic()
    in_child(artifact, folder, wanted, seed, None)
    whole = time.monotonic() - began
    for n in range(1, 10 * kills):
        killed += in_child(artifact, folder, wanted, seed + n, whole / 2) is None
        if killed == kills:
            break
    read = in_child(artifact, folder, wanted, seed, None)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    print(json.dumps({"killed": killed, "read": read, "files": sizes}))


if __name__ == "__main__":
    main()
