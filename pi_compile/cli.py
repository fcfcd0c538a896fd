"""`pi-compile`: make and examine artifacts."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from pi_runtime import console

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Compile a checkpoint into one artifact that pi-run runs.",
)

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file (see init).", show_default=False)]
ArtifactPath = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="A packed model.", show_default=False)]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Where to write; default: the recipe's name .pi")]
Json = Annotated[bool, console.JSON]
Debug = Annotated[bool, console.DEBUG]


def main() -> None:
    raise SystemExit(console.run(app))


@app.command()
def init(
    model: Annotated[str, typer.Argument(help="A checkpoint's folder, or a hub name.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The recipe to write.")],
    revision: Annotated[str, typer.Option(help="Commit of a hub name.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing recipe.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a complete recipe for a checkpoint, keeping its number formats."""
    from pi_compile.starting import start_recipe

    recipe = start_recipe(model, output, revision=revision, force=force)
    if as_json:
        console.print_json({"recipe": str(output), **recipe.model_dump()})
    else:
        console.say(f"{output}: written; next: pi-compile build {output}")


@app.command()
def pack(recipe: RecipePath, output: Output = None, as_json: Json = False, debug: Debug = False) -> None:
    """Pack the checkpoint of a recipe into one artifact."""
    from pi_compile.building import pack_recipe

    with console.progress("packing") as progress:
        result = pack_recipe(recipe, output, progress=progress, notice=console.say)
    if as_json:
        console.print_json(result)
    else:
        console.say(f"{result['artifact']}: {console.size(result['bytes'])}, sha256 {result['sha256'][:16]}…")


@app.command()
def build(recipe: RecipePath, output: Output = None, as_json: Json = False, debug: Debug = False) -> None:
    """Run every stage of a recipe: so far, pack."""
    pack(recipe, output, as_json, debug)


@app.command()
def inspect(artifact: ArtifactPath, as_json: Json = False, debug: Debug = False) -> None:
    """Say what an artifact holds."""
    from pi_compile.inspection import inspect as look

    report = look(artifact)
    if as_json:
        console.print_json(report)
    else:
        _print_tree(report)


@app.command()
def verify(artifact: ArtifactPath, as_json: Json = False, debug: Debug = False) -> None:
    """Check every byte of an artifact against its digests."""
    from pi_runtime.artifact.verification import verify as check

    with console.progress("verifying") as progress:
        report = check(artifact, progress)
    if as_json:
        console.print_json(asdict(report))
    else:
        console.say(f"{artifact}: every byte is as it was written")


@app.command()
def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Say what this machine and installation can do, and what is missing."""
    from pi_compile.doctor import examine

    findings = examine()
    if as_json:
        console.print_json({f.topic: {"found": f.found, "remedy": f.remedy} for f in findings})
        return
    for f in findings:
        typer.echo(f"{f.topic:17}{f.found}" + (f"\n{'':17}→ {f.remedy}" if f.remedy else ""))


def _print_tree(value: dict[str, Any], indent: str = "") -> None:
    for key, entry in value.items():
        if isinstance(entry, dict):
            typer.echo(f"{indent}{key}")
            _print_tree(entry, indent + "  ")
        elif key.startswith("bytes") or "bytes_by_part" in indent:
            typer.echo(f"{indent}{key:{24 - len(indent)}}{console.size(entry)}")
        else:
            typer.echo(f"{indent}{key:{24 - len(indent)}}{entry}")
