"""`pi-compile`: make and examine artifacts."""

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pi_compile.cli import artifact, planning, sparsifying
from pi_compile.cli.examples import epilog
from pi_compile.cli.options import BuildOptions, Debug, Export, IgnoreConfig, Json, LayoutOption, Output, RecipePath
from pi_compile.cli.rendering import emit, findings_text, show, show_artifact, show_placements
from pi_runtime import console
from pi_runtime.errors import UsageError
from pi_runtime.errors.exit_codes import check_extra

if TYPE_CHECKING:
    from pi_compile.checkpoint import Checkpoint
    from pi_compile.pipeline.pipeline import Pipeline

_EPILOG = """
Examples:
  pi-compile plan OWNER/NAME
  pi-compile init checkpoint --corpus texts/ -o model.toml
  pi-compile build model.toml -o model.pi

More: docs/tutorials/own-model.md
"""
app = typer.Typer(
    cls=console.GroupedCommands,
    context_settings=console.HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=_EPILOG,
)
_build_command = partial(app.command, cls=console.GroupedCommand, rich_help_panel="Build")
_look_command = partial(app.command, cls=console.GroupedCommand, rich_help_panel="Look")
_tool_command = partial(app.command, cls=console.GroupedCommand, rich_help_panel="Tools")


def main() -> None:
    raise SystemExit(console.run(app))


@app.callback()
def _of_all_commands(version: Annotated[bool, console.VERSION] = False) -> None:
    """Compile a checkpoint into one artifact that pi-run runs."""


@contextmanager
def _pipeline(options: BuildOptions, until: str, output: Path | None = None) -> Iterator["Pipeline"]:
    """The pipeline of this process, with the other workers that `options` ask for. Print results when it has ended."""
    from pi_compile.cli.options import torch_device
    from pi_compile.pipeline.launching import Build, launched

    settings = {**vars(options), "device": torch_device(options.device)}
    with launched(Build(**settings, until=until, output=output)) as pipeline:
        yield pipeline


def _show_stage(options: BuildOptions, export: Path | None, as_json: bool, *, trained: bool) -> None:
    """Run `profile`, or `train` too; print its report, and write what placing needs of the model."""
    from pi_compile.files import check_output
    from pi_compile.pipeline import summary

    if export is not None:
        check_output(export, "export")
    with _pipeline(options, "train" if trained else "profile") as pipeline:
        found = summary.train_report(pipeline.trained) if trained else summary.profile_report(pipeline.profile)
        if export is not None and pipeline.rank.leads:
            (pipeline.refined if trained else pipeline.profile).save(export)
    if pipeline.rank.leads:
        show(found, pipeline.ran, as_json)
        if export is not None:
            console.say(f"{export}: written; name it in [place] activations, relative to the recipe")


@_build_command()
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
    for_sparsify: Annotated[
        bool, typer.Option("--sparsify", help="Write a recipe of sparsify, for a model that is not sparse.")
    ] = False,
    activation: Annotated[
        str,
        typer.Option(
            help="A GGUF file's activation, such as relu. Default: what llama.cpp takes. With --sparsify what it "
            "becomes: fatrelu (the default), relu, drelu or relu2."
        ),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing recipe.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a complete recipe for a checkpoint."""
    from pi_compile.pipeline.recipe_checkpoint import create_recipe
    from pi_compile.recipe import default_recipe

    opened: list[Checkpoint] = []
    kind: dict[str, Any] = {"make": default_recipe, "check": opened.append}
    if for_sparsify:
        from pi_compile.sparsification.model import check_base
        from pi_compile.sparsification.recipe import default_sparsify_recipe

        make = partial(default_sparsify_recipe, activation=activation or "fatrelu")
        kind, activation = {"make": make, "check": lambda found: opened.append(check_base(found))}, ""
    recipe = create_recipe(
        model,
        output,
        revision=revision,
        corpus=corpus or [],
        ignore_config=ignore_config or [],
        activation=activation,
        force=force,
        notice=console.say,
        **kind,
    )
    if as_json:
        console.print_json({"recipe": str(output), **recipe.model_dump()})
    elif for_sparsify:
        if opened[0].decoder.sparse:
            console.say(
                f"{model} is sparse already ({opened[0].decoder.activation}): pi-compile init without --sparsify"
            )
        console.say(f"{output}: written; next: pi-compile sparsify {output} -o FOLDER")
    else:
        for line in steps_after_init(output, opened[0]):
            console.say(line)


_build_command()(sparsifying.sparsify)


@_build_command()
@console.takes(BuildOptions)
def profile(options: BuildOptions, export: Export = None, as_json: Json = False, debug: Debug = False) -> None:
    """Count how often each neuron fires on the recipe's corpus."""
    _show_stage(options, export, as_json, trained=False)


@_build_command()
@console.takes(BuildOptions)
def train(options: BuildOptions, export: Export = None, as_json: Json = False, debug: Debug = False) -> None:
    """Train predictors and choose each layer's sparsity mode."""
    _show_stage(options, export, as_json, trained=True)


@_build_command()
@console.takes(BuildOptions)
def place(
    options: BuildOptions,
    lock: Annotated[bool, typer.Option("--lock", help="Write the placements to the recipe's .lock.")] = False,
    locked: Annotated[bool, typer.Option("--locked", help="Compare them with the recipe's .lock.")] = False,
    solver: Annotated[
        str, typer.Option(help="exact; or highs (an independent proof), or greedy (a heuristic).")
    ] = "exact",
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds for one budget, with --solver highs.")] = 60.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Decide which parts belong on the GPU, for a ladder of budgets."""
    from pi_compile.pipeline import summary
    from pi_compile.pipeline.recipe_placement import check_solver, place_recipe
    from pi_compile.recipe import read_recipe

    recipe = options.recipe
    if lock and locked:
        raise UsageError(
            "--lock does not go with --locked", remedy="--lock writes the file, --locked compares with the one there"
        )
    check_solver(solver, locks=lock or locked)
    if not (lock or locked or read_recipe(recipe).place.activations):
        with _pipeline(options, "place") as pipeline:
            found = summary.place_report(pipeline.place(solver, time_limit))
        if pipeline.rank.leads:
            show_placements(found, pipeline.ran, as_json)
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


@_build_command()
@console.takes(BuildOptions)
def pack(
    options: BuildOptions,
    output: Output = None,
    plain: Annotated[bool, typer.Option("--plain", help="Without profile and predictors: exact, quick.")] = False,
    layout: LayoutOption = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the artifact, with the results of all stages. With --plain without these, of a recipe or of any model."""
    if not plain and layout is None:
        _build(options, output, as_json)
        return
    from pi_compile.machine.doctor import EXTRAS

    check_extra("pack", EXTRAS["pack"])
    from pi_compile.checkpoint.folder import fetch_offer, names_model
    from pi_compile.files import artifact_path
    from pi_compile.pipeline.packed import pack_model, pack_plain

    source = options.recipe.as_posix()  # a hub name too, on Windows
    if names_model(source):
        name = Path(source).resolve().name.removesuffix(".gguf").replace(":", "-")
        path = artifact_path(Path(f"{name}.toml"), output)
        _agree(fetch_offer(source))
        packed = pack_model(source, path, layout=layout, progress=console.progress, notice=console.say)
    else:
        path = artifact_path(options.recipe, output)
        packed = pack_plain(options.recipe, path, layout=layout, progress=console.progress, notice=console.say)
    show_artifact(packed, ["pack"], as_json)


def _agree(offer: str | None) -> None:
    """Ask before anything is fetched. Raises UsageError where nobody can answer, Abort for a no."""
    if offer is None:
        return
    if not sys.stdin.isatty():
        remedy = f"`hf download {offer.partition(':')[0]}` fetches it; then run this again"
        raise UsageError(f"{offer}: is to be fetched, and nobody can be asked", remedy=remedy)
    typer.confirm(f"{offer}. Fetch it?", abort=True, err=True)


@_build_command()
@console.takes(BuildOptions)
def build(options: BuildOptions, output: Output = None, as_json: Json = False, debug: Debug = False) -> None:
    """Run all stages that are not done yet, and write the artifact."""
    _build(options, output, as_json)


def _build(options: BuildOptions, output: Path | None, as_json: bool) -> None:
    from pi_compile.files import artifact_path
    from pi_compile.pipeline.pipeline import forecast
    from pi_compile.pipeline.summary import built_line

    path = artifact_path(options.recipe, output)
    with _pipeline(options, "pack", path) as pipeline:
        packed = pipeline.pack(path)
    if pipeline.rank.leads:
        show_artifact(packed, pipeline.ran, as_json)
        if not as_json:
            trained = None if pipeline.only_dense else pipeline.trained
            built = built_line(trained, pipeline.recipe.quality.perplexity_increase, path)
            if line := forecast(pipeline, path):
                console.say(line)
            console.say(f"{built}; next: pi-run {shlex.quote(str(path))} --prompt 'Once upon a time' --stats")


@_build_command()
def status(
    recipe: RecipePath,
    watch: Annotated[
        float | None,
        typer.Option(min=1, help="Say it again every so many seconds until all is done."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what the workers of a recipe are at, and what failed."""
    from pi_compile.cli.rendering import status_text
    from pi_compile.pipeline.status import build_status, has_ended

    emit(found := build_status(recipe), as_json, status_text)
    while watch is not None and not has_ended(found):
        time.sleep(watch)
        found = build_status(recipe)
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[2J\x1b[H")  # clears the terminal
        emit(found, as_json, status_text)


_look_command("eval")(artifact.evaluate)


@_tool_command()
def machine(
    output: Annotated[Path, typer.Option("--output", "-o", help="The machine profile to write.")],
    disk: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A folder on the disk that models are on. Default: the profile's.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine: memory, disk, and GPU."""
    from pi_compile.files import check_output, write_text
    from pi_compile.machine.measurement import check_disk, measure_machine

    check_output(output)
    if disk is not None:
        check_disk(disk)
    found = measure_machine(disk or output.resolve().parent, console.say, needs_disk=disk is not None)
    write_text(output, found.to_toml())
    emit(found.model_dump(), as_json, lambda _: found.to_toml().rstrip())


for _command in (planning.plan, planning.report, artifact.inspect, artifact.verify):
    _look_command()(_command)


@_tool_command()
def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Say what this machine and this installation can do."""
    from pi_compile.machine.doctor import diagnose

    findings = diagnose()
    report = {f.topic: {"found": f.found, "remedy": f.remedy} for f in findings}
    emit(report, as_json, lambda _: findings_text(findings))


for _info in app.registered_commands:
    _info.epilog = epilog(str(_info.name or getattr(_info.callback, "__name__", "")))


def steps_after_init(recipe: Path, checkpoint: "Checkpoint") -> list[str]:
    """What to do with a recipe of `build`: lines for the user.

    Where no neuron is ever zero there is nothing to profile, so that packing is all; unless its experts are counted.
    """
    from pi_compile.sparsification.recipe import FAMILIES

    d = checkpoint.decoder
    if d.sparse or d.n_experts > 1:
        return [f"{recipe}: written; next: pi-compile build {shlex.quote(str(recipe))}"]
    artifact = recipe.with_suffix(".pi").name
    lines = [
        f"{recipe}: written; next: pi-compile pack --plain {shlex.quote(str(recipe))} -o {shlex.quote(artifact)}",
        f"with {d.activation} no neuron is ever exactly zero: nothing can be skipped, and it runs as fast as dense",
        "what gains all the same: fewer bits ([pack]), drafts (--speculate, on by itself), a published guess head, or "
        "another model: a mixture of experts reads only the experts that a token takes",
    ]
    return [*lines, _sparsify(checkpoint)] if d.family in FAMILIES else lines


def _sparsify(checkpoint: "Checkpoint") -> str:
    """How a model is made sparse; a GGUF file cannot be trained, the checkpoint that it was made from can."""
    of_gguf = checkpoint.location.is_file()
    folder = "FOLDER" if of_gguf else shlex.quote(str(checkpoint.location))
    text = f"pi-compile init {folder} --sparsify -o sparsify.toml, then pi-compile sparsify sparsify.toml -o SPARSE"
    origin = " (FOLDER: the checkpoint that the GGUF file was made from)" if of_gguf else ""
    return f"to make it sparse first: {text}{origin}"
