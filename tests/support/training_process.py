"""Trainings in processes of their own, forked from one that has everything imported: whole, and killed twice each.

python -m support.training_process RECIPE SEED FOLDER PROCESSES KILLED [FOLDER PROCESSES KILLED …]
"""

import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import torch

import support.imported  # noqa: F401
from pi_compile.sparsification.model import load_model, open_base
from pi_compile.sparsification.recipe import read_sparsify_recipe
from pi_compile.sparsification.run import sparsify


def started(recipe: Path, output: Path, rank: int, processes: int, port: int) -> int:
    """Fork a process of a training; its id."""
    child = os.fork()
    if child:
        return child
    if processes > 1:
        found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in found.items()}, MASTER_ADDR="127.0.0.1")
    try:
        sparsify(recipe, output)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def trained(recipe: Path, output: Path, processes: int, delays: list[float]) -> str:
    """Train, kill every process after each of the delays, and go on; the digest of the weights."""
    for delay in [*delays, None]:
        if output.exists():
            break
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = [started(recipe, output, rank, processes, port) for rank in range(processes)]
        if delay is not None:
            time.sleep(delay)
            for child in children:
                os.kill(child, signal.SIGKILL)
        codes = [os.waitpid(child, 0)[1] for child in children]
        if delay is None:
            assert not any(codes), codes
    digest = hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest()
    record = json.loads((output / "sparsify.json").read_text())
    shutil.rmtree(output.with_name(output.name + ".work"), ignore_errors=True)
    return f"{digest} {record['text']['position']['digest']} {record['processes']}"


def main() -> None:
    recipe, seed, triples = Path(sys.argv[1]), int(sys.argv[2]), iter(sys.argv[3:])
    torch.set_num_threads(1)
    load_model(open_base(read_sparsify_recipe(recipe).model, recipe.parent))  # imports what each process would
    for folder, processes, killed in zip(triples, triples, triples, strict=True):
        began, random_delay = time.perf_counter(), random.Random(seed)
        print(folder, trained(recipe, Path(folder, "whole"), int(processes), []))
        took = time.perf_counter() - began
        for n in range(int(killed)):
            delays = [random_delay.uniform(0, took) for _ in range(2)]
            print(folder, trained(recipe, Path(folder, f"killed-{n}"), int(processes), delays))


if __name__ == "__main__":
    main()
