"""`pi-compile`: make and examine artifacts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pi_compile.cli import artifact, planning
from pi_compile.cli.options import Debug, Device, Export, IgnoreConfig, Json, Output, RecipePath
from pi_compile.cli.rendering import emit, findings_text, show, show_artifact, show_placements
from pi_runtime import console

if TYPE_CHECKING:
    from pi_compile.pipeline.pipeline import Pipeline

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Compile a checkpoint into one artifact that pi-run runs.",
)


def main() -> None:
    raise SystemExit(console.run(app))


@contextmanager
def _pipeline(recipe: Path, device: str) -> Iterator["Pipeline"]:
    from pi_compile.cli.options import torch_device
    from pi_compile.pipeline.pipeline import Pipeline

    pipeline = Pipeline(recipe, torch_device(device), console.say, console.progress)
    _ = pipeline.checkpoint  # must be usable before a folder is made for results
    with pipeline.store.exclusive(console.say):
        yield pipeline


def _show_stage(recipe: Path, device: str, export: Path | None, as_json: bool, *, trained: bool) -> None:
    """Run `profile`, or `train` too; print its report, and write what placing needs of the model."""
    from pi_compile.files import check_output
    from pi_compile.pipeline import summary

    if export is not None:
        check_output(export)
    with _pipeline(recipe, device) as pipeline:
        found = summary.train_report(pipeline.trained) if trained else summary.profile_report(pipeline.profile)
        show(found, pipeline.ran, as_json)
        if export is not None:
            (pipeline.refined if trained else pipeline.profile).save(export)
            console.say(f"{export}: written; name it in [place] activations, relative to the recipe")


@app.command()
def init(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A checkpoint's folder, a GGUF file, or a hub name.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The recipe to write.")],
    corpus: Annotated[
        list[str] | None, typer.Option(help="Text to profile on; may be given again. Default: Python's documentation.")
    ] = None,
    revision: Annotated[str, typer.Option(help="Commit of a hub name.")] = "",
    ignore_config: IgnoreConfig = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing recipe.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a complete recipe for a checkpoint."""
    from pi_compile.pipeline.init_recipe import create_recipe

    recipe = create_recipe(
        model,
        output,
        revision=revision,
        corpus=corpus or [],
        ignore_config=ignore_config or [],
        force=force,
        notice=console.say,
    )
    if as_json:
        console.print_json({"recipe": str(output), **recipe.model_dump()})
    else:
        console.say(f"{output}: written; next: pi-compile build {output}")


@app.command()
def profile(
    recipe: RecipePath, export: Export = None, device: Device = "cpu", as_json: Json = False, debug: Debug = False
) -> None:
    """Count how often each neuron fires on the recipe's corpus."""
    _show_stage(recipe, device, export, as_json, trained=False)


@app.command()
def train(
    recipe: RecipePath, export: Export = None, device: Device = "cpu", as_json: Json = False, debug: Debug = False
) -> None:
    """Train predictors and choose each layer's rung."""
    _show_stage(recipe, device, export, as_json, trained=True)


@app.command()
def place(
    recipe: RecipePath,
    lock: Annotated[bool, typer.Option("--lock", help="Write the placements to the recipe's .lock.")] = False,
    locked: Annotated[bool, typer.Option("--locked", help="Compare them with the recipe's .lock.")] = False,
    solver: Annotated[
        str, typer.Option(help="exact; or highs (an independent proof), or greedy (a heuristic).")
    ] = "exact",
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds for one budget, with --solver highs.")] = 60.0,
    device: Device = "cpu",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Decide which parts belong on the GPU, for a ladder of budgets."""
    from pi_compile.pipeline import summary
    from pi_compile.pipeline.recipe_placement import check_solver, place_recipe
    from pi_compile.recipe import read_recipe

    check_solver(solver, locks=lock or locked)
    if not (lock or locked or read_recipe(recipe).place.activations):
        with _pipeline(recipe, device) as pipeline:
            show_placements(summary.place_report(pipeline.place(solver, time_limit)), pipeline.ran, as_json)
        return
    from pi_compile.files import write_text
    from pi_compile.pipeline import lock_file

    placed = place_recipe(recipe, solver, time_limit)
    path = lock_file.lock_path(recipe)
    if locked:
        lock_file.check_lock(path, placed)
    elif lock:
        write_text(path, lock_file.lock_text(placed))
    show_placements(summary.place_report(placed.placements), ["place"], as_json)
    if lock or locked:
        console.say(f"{path}: {'written' if not locked else 'recomputed: the same'}")


@app.command()
def pack(
    recipe: RecipePath,
    output: Output = None,
    plain: Annotated[bool, typer.Option("--plain", help="Without profile and predictors: exact, quick.")] = False,
    device: Device = "cpu",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the artifact, with the results of all stages."""
    if not plain:
        build(recipe, output, device, as_json, debug)
        return
    from pi_compile.files import artifact_path
    from pi_compile.pipeline.pipeline import pack_plain

    with console.progress("packing") as progress:
        packed = pack_plain(recipe, artifact_path(recipe, output), progress=progress, notice=console.say)
    show_artifact(packed, ["pack"], as_json)


@app.command()
def build(
    recipe: RecipePath, output: Output = None, device: Device = "cpu", as_json: Json = False, debug: Debug = False
) -> None:
    """Run all stages that are not done yet, and write the artifact."""
    from pi_compile.files import artifact_path

    path = artifact_path(recipe, output)
    with _pipeline(recipe, device) as pipeline:
        show_artifact(pipeline.pack(path), pipeline.ran, as_json)


app.command("eval")(artifact.evaluate)


@app.command()
def machine(
    output: Annotated[Path, typer.Option("--output", "-o", help="The machine profile to write.")],
    disk: Annotated[
        Path | None,
        typer.Option(help="A folder on the disk that models are on. Default: the profile's.", show_default=False),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine: memory, disk, and GPU."""
    from pi_compile.files import check_output, write_text
    from pi_compile.machine.measurement import measure_machine

    check_output(output)
    found = measure_machine(disk or output.resolve().parent)
    write_text(output, found.to_toml())
    emit(found.model_dump(), as_json, lambda _: found.to_toml().rstrip())


app.command()(planning.plan)
app.command()(planning.report)
app.command()(artifact.inspect)
app.command()(artifact.verify)


@app.command()
def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Say what this machine and this installation can do."""
    from pi_compile.machine.doctor import diagnose

    findings = diagnose()
    report = {f.topic: {"found": f.found, "remedy": f.remedy} for f in findings}
    emit(report, as_json, lambda _: findings_text(findings))
