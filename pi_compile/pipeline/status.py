"""What the workers of a recipe are at, as their files tell; nothing is computed, and no worker is asked."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pi_compile.pipeline.store import WORKERS
from pi_compile.recipe import read_recipe
from pi_compile.results.predictor_set import store_folder
from pi_compile.workers import HEARTBEAT, PATIENCE, failures_in, silence, workers_in

STAGES = ("corpus", "profile", "train", "divide", "quantise", "pack")
SLACK = 5.0
"""Seconds by which a file's time may be late on a network."""
_SHOWN = ("name", "host", "pid", "rank", "launcher", "stage", "task", "task_seconds")


def build_status(recipe: Path) -> dict[str, Any]:
    """Stages, workers and failed tasks of a recipe's builds. `docs/reference/output.md` names the keys.

    A stage is `begun` while it has unfinished work, also after a build was killed. Raises RecipeError.
    """
    read = read_recipe(recipe)
    tokens = {"divide": read.bits.tokens, "quantise": read.quantise.tokens}
    stages = [stage for stage in STAGES if tokens.get(stage, 1)]
    folder = store_folder(recipe)
    begun = {path.name.partition("-")[0]: path for path in sorted(folder.glob("*.work"))}
    shown = [worker | {"silent_seconds": silence(folder / WORKERS, worker)} for worker in workers_in(folder / WORKERS)]
    return {
        "recipe": str(recipe),
        "stages": {stage: _state(folder, stage, begun) for stage in stages},
        **_progress(shown),
        "workers": [{key: worker[key] for key in (*_SHOWN, "silent_seconds")} for worker in shown],
        "failed": [{"stage": stage, **failed} for stage, work in begun.items() for failed in failures_in(work)],
    }


def has_ended(found: Mapping[str, Any]) -> bool:
    """Whether all stages are done, and no worker is at work any more."""
    is_done = all(state == "done" for state in found["stages"].values())
    return is_done and all(worker["silent_seconds"] is None for worker in found["workers"])


def _state(folder: Path, stage: str, begun: Mapping[str, Path]) -> str:
    if stage in begun:
        return "begun"
    made = folder.glob("packed-*.json" if stage == "pack" else f"{stage}-*.npz")
    return "done" if any(made) else "waiting"


def _progress(workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The running stage's share that is done, and the seconds to its end at the rate of the worker that knows most.

    What a worker knows to be done is what all have done. It measures the rate by its own clock. The running stage is
    the latest one that a living worker is at.
    """
    alive = [worker for worker in workers if _lives(worker)]
    latest = max((_order(worker) for worker in alive), default=0)
    there = [worker for worker in alive if _order(worker) == latest]
    known = max(there, key=lambda worker: worker["done"] / max(worker["total"], 1), default=None)
    if known is None or not known["total"]:
        return {"done": None, "eta_seconds": None}
    made = known["done"] - known["done_before"]
    left = (known["total"] - known["done"]) * known["stage_seconds"] / made if made > 0 else None
    return {"done": known["done"] / known["total"], "eta_seconds": left}


def _lives(worker: Mapping[str, Any]) -> bool:
    """Whether a worker's last sign of life is recent enough for it to be at work."""
    silent = worker["silent_seconds"]
    return silent is not None and silent <= PATIENCE * worker.get("heartbeat", HEARTBEAT) + SLACK


def _order(worker: Mapping[str, Any]) -> int:
    """Position of the worker's stage among all; -1 before the first."""
    return STAGES.index(worker["stage"]) if worker["stage"] in STAGES else -1
