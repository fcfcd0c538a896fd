"""Build a recipe again and again, killing it at random moments; run as a program by `test_pipeline`.

    python -m support.kill_builds RECIPE OUTPUT KILLS SEED

Everything is imported once, then each build is a fork: a kill costs milliseconds, not the seconds of an import. Prints
how many builds were killed and the sha256 of what the last, undisturbed one left.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch

import support.imported  # noqa: F401
from pi_compile.pipeline.pipeline import Pipeline
from pi_compile.results.predictor_set import STORE


def build(recipe: Path, output: Path) -> dict[str, object]:
    torch.set_num_threads(1)
    silent = nullcontext(lambda _done, _total: None)
    pipeline = Pipeline(recipe, "cpu", lambda _line: None, lambda *_: silent)
    with pipeline.worker:
        return pipeline.pack(output)


def in_child(recipe: Path, output: Path, kill_after: float | None) -> bool:
    """Whether the build was killed."""
    child = os.fork()
    if child == 0:
        try:
            build(recipe, output)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    found, status, until = 0, 0, time.perf_counter() + (kill_after or 0)
    while kill_after is not None and not found and time.perf_counter() < until:
        time.sleep(0.001)
        found, status = os.waitpid(child, os.WNOHANG)
    if not found:
        if kill_after is not None:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit("a build failed")
    return os.WIFSIGNALED(status)


def main() -> None:
    recipe, output = Path(sys.argv[1]), Path(sys.argv[2])
    kills, rng = int(sys.argv[3]), random.Random(int(sys.argv[4]))
    began = time.perf_counter()
    scratch = recipe.with_name("undisturbed.toml")
    scratch.write_bytes(recipe.read_bytes())
    in_child(scratch, output.with_name("undisturbed.pi"), None)
    whole = time.perf_counter() - began
    killed = 0
    while killed < kills:
        # Late moments are of no use once the early stages are done: each kill comes within a share of what is left.
        began = time.perf_counter()
        if in_child(recipe, output, rng.uniform(0, whole * (1 - killed / kills) + 0.02)):
            killed += 1
        else:  # it was done before: begin again; the first build may have compiled kernels, and taken far longer
            whole = max(whole / 2, time.perf_counter() - began)
            shutil.rmtree(recipe.parent / STORE / recipe.stem)
            output.unlink()
    in_child(recipe, output, None)
    undisturbed = build(scratch, output.with_name("undisturbed.pi"))
    print(
        json.dumps({"killed": killed, "sha256": build(recipe, output)["sha256"], "undisturbed": undisturbed["sha256"]})
    )


if __name__ == "__main__":
    main()
