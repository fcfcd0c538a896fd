"""The command `sparsify`: one run, or a run that goes on, with its bar or its lines on stderr."""

import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pi_compile.cli.options import Debug, Json, torch_device
from pi_compile.cli.rendering import emit, sparsify_text
from pi_runtime import console
from pi_runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SparsifyOptions:
    """What is trained, and where reports of it go."""

    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="A recipe of sparsify (see init).", show_default=False)
    ] = None
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="The folder to write.")]
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
        str, typer.Option(help="OWNER/NAME: upload the folder to the hub in the end.", show_default=False)
    ] = ""


@console.takes(SparsifyOptions)
def sparsify(options: SparsifyOptions, as_json: Json = False, debug: Debug = False) -> None:
    """Train a dense model until most of its neurons are silent."""
    _check(options)
    from pi_compile.cli.sparsifying import training_bar
    from pi_compile.sparsification import export

    leads = int(os.environ.get("RANK", "0")) == 0
    if options.push and leads:
        export.check_login(options.push)
    with training_bar() as watch:
        record = _trained(options, watch)
    if leads:
        if options.push:
            console.say(f"{export.push(options.output, options.push)}: uploaded")
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


if TYPE_CHECKING:
    from pi_compile.sparsification.training import Point, StepReport, Watch


@contextmanager
def training_bar() -> "Iterator[Watch]":
    """A watch that shows loss, perplexity on the tune text, sparsity, tokens a second and the time left."""
    from pi_compile.sparsification.training import Watch

    if not sys.stderr.isatty():
        yield Watch(point=lambda point: console.say(point_line(point)), notice=console.say)
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[numbers]}"),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True)) as bar:
        shown: dict[str, object] = {"arm": None, "task": None, "perplexity": ""}

        def step(report: "StepReport") -> None:
            if shown["arm"] != report.arm:
                shown.update(
                    arm=report.arm, task=bar.add_task(report.arm, total=report.steps, numbers=""), perplexity=""
                )
            numbers = f"loss {report.loss:.3f}, {report.sparsity:.1%} zero, {report.tokens_per_s:,.0f} tokens/s"
            bar.update(shown["task"], completed=report.step, numbers=f"{numbers}{shown['perplexity']}")  # type: ignore[arg-type]

        def point(found: "Point") -> None:
            shown["perplexity"] = f"; perplexity {found.perplexity:.2f}"
            bar.console.print(point_line(found), highlight=False)

        yield Watch(step, point, lambda line: bar.console.print(line, highlight=False))


def point_line(point: "Point") -> str:
    """An evaluation as a line: perplexity, and the sparsity of each layer."""
    layers = point.sparsity_by_layer
    words = f"step {point.step:,}: loss {point.loss:.3f}, perplexity on the tune text {point.perplexity:.3f}"
    if not layers:
        return words
    each = " ".join(f"{100 * sparsity:.0f}" for sparsity in layers)
    return f"{words}, {statistics.fmean(layers):.1%} zero (by layer, %: {each}), {point.dead:.1%} never fired"
