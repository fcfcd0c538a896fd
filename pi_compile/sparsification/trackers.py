"""Trackers that accelerate knows (TensorBoard, wandb, trackio and others), beside whoever else watches a training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType

from pi_compile.sparsification.recipe import SparsifyRecipe
from pi_compile.sparsification.training import Point, StepReport, Watch
from pi_runtime.errors import Setting, UsageError

_USUAL = "tensorboard"
_NAMED_RUNS = ("wandb", "trackio")
"""Trackers whose runs have a name within a project."""


def chosen(names: Sequence[str]) -> list[str]:
    """The trackers to tell: those named, and TensorBoard where it is installed.

    Raises UsageError for one that accelerate does not know, or that is not installed.
    """
    known = [str(name) for name in LoggerType if name != LoggerType.ALL]
    installed = [str(name) for name in get_available_trackers()]
    for name in names:
        if name not in known:
            raise UsageError(setting=Setting("track", name), expected=" or ".join(known))
        if name not in installed:
            raise UsageError("is not installed", setting=Setting("track", name), remedy=f"pip install {name}")
    return list(dict.fromkeys([*names, *([_USUAL] if _USUAL in installed else [])]))


def start(accelerator: Accelerator, project: str, arm: str, folder: Path, recipe: SparsifyRecipe) -> None:
    """Begin a run of each of the accelerator's trackers. Raises UsageError for one that does not start."""
    accelerator.trackers = []
    accelerator.project_configuration.logging_dir = str(folder / arm)
    names = {name: {"name": f"{project}-{arm}"} for name in _NAMED_RUNS}
    try:
        accelerator.init_trackers(project, _flat(recipe.model_dump()), names)
    except Exception as error:  # each tracker has errors of its own
        raise UsageError(
            "a tracker does not start",
            setting=Setting("track", ", ".join(str(name) for name in accelerator.log_with)),
            found=str(error) or type(error).__name__,
            remedy="see what it asks for, such as a key or WANDB_MODE=offline",
        ) from None


def finish(accelerator: Accelerator) -> None:
    """End the runs that were begun."""
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.trackers = []


def both(watch: Watch, accelerator: Accelerator) -> Watch:
    """The watch, whose reports the accelerator's trackers get too."""

    def step(report: StepReport) -> None:
        names = ("loss", "sparsity", "penalty", "learning_rate", "tokens_per_s")
        accelerator.log({f"training/{name}": getattr(report, name) for name in names}, report.step)
        watch.step(report)

    def point(found: Point) -> None:
        layers = {f"sparsity/layer {layer}": value for layer, value in enumerate(found.sparsity_by_layer)}
        tuned = {"tune text/perplexity": found.perplexity, "tune text/dead": found.dead}
        accelerator.log(tuned | layers, found.step)
        watch.point(found)

    return Watch(step, point, watch.notice)


def _flat(recipe: dict[str, Any]) -> dict[str, str | int | float | bool]:
    """The keys of a recipe with one value each, as trackers take them."""
    found: dict[str, str | int | float | bool] = {}
    for section, values in recipe.items():
        for key, value in values.items() if isinstance(values, dict) else (("", values),):
            name = f"{section}.{key}".removesuffix(".")
            found[name] = value if isinstance(value, (str, int, float)) else json.dumps(value)
    return found
