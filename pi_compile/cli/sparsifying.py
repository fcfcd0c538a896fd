"""The command `sparsify`: one run, or a run that goes on."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pi_compile.cli.options import Debug, Json, torch_device
from pi_compile.cli.rendering import emit, sparsify_text
from pi_runtime import console
from pi_runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SparsifyOptions:
    """What is trained, and who is told."""

    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="A recipe of sparsify (see init).", show_default=False)
    ] = None
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")]
    device: Annotated[str, typer.Option(envvar="PI_DEVICE", help="Where to train: cpu or cuda:N.")] = "cpu"
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Go on with the run that wrote a folder; needs --steps.", show_default=False
        ),
    ] = None
    steps: Annotated[int | None, typer.Option(min=1, help="Further steps, with --resume.", show_default=False)] = None
    track: Annotated[
        list[str] | None,
        typer.Option(help="wandb, trackio or another tracker of accelerate; may be given again.", show_default=False),
    ] = None
    push: Annotated[
        str, typer.Option(metavar="OWNER/NAME", help="Upload the folder to the hub in the end.", show_default=False)
    ] = ""


@console.takes(SparsifyOptions)
def sparsify(options: SparsifyOptions, as_json: Json = False, debug: Debug = False) -> None:
    """Train a dense model until most of its neurons are silent."""
    _check(options)
    from pi_compile.cli.training_bar import training_bar
    from pi_compile.sparsification import hub

    leads = int(os.environ.get("RANK", "0")) == 0
    if options.push and leads:
        hub.check_login(options.push)
    with training_bar() as watch:
        record = _trained(options, watch)
    if leads:
        if options.push:
            console.say(f"{hub.push(options.output, options.push)}: uploaded")
        emit(record, as_json, sparsify_text)


def _check(options: SparsifyOptions) -> None:
    if (options.recipe is None) == (options.resume is None):
        raise UsageError("one of a recipe and --resume FOLDER is needed")
    if (options.steps is None) != (options.resume is None):
        raise UsageError("--resume and --steps belong together: how many steps more")


def _trained(options: SparsifyOptions, watch: Any) -> Mapping[str, Any]:
    from pi_compile.sparsification.run import resume, sparsify

    how = (options.output, torch_device(options.device), watch, options.track or ())
    if options.resume is not None and options.steps is not None:
        return resume(options.resume, options.steps, *how)
    assert options.recipe is not None
    return sparsify(options.recipe, *how)
