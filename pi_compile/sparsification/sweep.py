"""One recipe at several sparsities: a folder for each, one control for all, and a page that compares them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pi_compile.files import write_text
from pi_compile.report.axes import log_axis
from pi_compile.report.layer_figures import layer_colours
from pi_compile.report.quantities import digits, percent
from pi_compile.report.svg import colour, figure
from pi_compile.report.token_figures import Chart
from pi_compile.sparsification import export
from pi_compile.sparsification.arm import read_arm
from pi_compile.sparsification.continuing import MODEL, kept_of
from pi_compile.sparsification.page import curve, pictures, render
from pi_compile.sparsification.recipe import SparsifyRecipe, read_sparsify_recipe
from pi_compile.sparsification.run import carry_out
from pi_compile.sparsification.training import Point, Watch
from pi_runtime.errors import Setting, UsageError

_MARGIN = 1.03


def sweep(
    recipe_path: Path,
    sparsities: Sequence[float],
    output: Path,
    device: str = "cpu",
    watch: Watch = Watch(),
    track: Sequence[str] = (),
) -> dict[str, Any]:
    """Steer a model to each sparsity, and write `output/SPARSITY` folders and `sweep.html`, `.csv` and `.png`.

    What is done is not done again. The control is trained once, for its text and steps are the same. Returns the
    records under `runs`. Raises UsageError for a sparsity that cannot be steered to or a folder of another recipe, and
    what `sparsify` does.
    """
    recipe = read_sparsify_recipe(recipe_path)
    wanted = sorted(set(sparsities))
    for sparsity in wanted:
        if not 0 < sparsity < 1:
            raise UsageError(setting=Setting("sparsity", sparsity), expected="above 0 and below 1")
    if not output.is_dir():
        export.check_folder(output)
        output.mkdir(exist_ok=True)
    records, first = [], None
    for sparsity in wanted:
        target = recipe.target.model_copy(update={"thresholds": []})
        steer = recipe.steer.model_copy(update={"sparsity": sparsity})
        one, folder = recipe.model_copy(update={"target": target, "steer": steer}), output / f"{sparsity:g}"
        if not folder.exists():
            watch.notice(f"{folder}: to a sparsity of {sparsity:.0%}")
            carry_out(one, recipe_path.resolve().parent, folder, device, watch, track, control_of=first)
        records.append(_finished(folder, one))
        first = first or (folder if recipe.run.control and kept_of(folder).exists() else None)
    _write(output, records, [_points(output / f"{sparsity:g}") for sparsity in wanted])
    return {"folder": str(output), "runs": records}


def _finished(folder: Path, recipe: SparsifyRecipe) -> dict[str, Any]:
    """The record of a folder that is done. Raises UsageError where another recipe made it."""
    try:
        record: dict[str, Any] = json.loads((folder / export.RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = {}
    if record.get("recipe") != recipe.model_dump():
        raise UsageError(
            f"{folder}: is of another recipe", remedy=("name another ", Setting("output"), ", or remove the folder")
        )
    return {"folder": str(folder), **record}


def _points(folder: Path) -> list[Point]:
    kept = kept_of(folder) / f"{MODEL}.json"
    return read_arm(kept).trained.points if kept.exists() else []


def _write(output: Path, records: list[dict[str, Any]], points: list[list[Point]]) -> None:
    """The page, its figures as PNG, and its table as CSV."""
    charts = {"price": _price(records)}
    if all(points):
        charts["perplexity"] = _perplexities(records, points)
    title = f"{Path(records[0]['recipe']['model']['path']).name} at {len(records)} sparsities"
    write_text(output / "sweep.html", render("sweep.html.jinja", title=title, records=records, charts=charts))
    for name, picture in pictures(charts).items():
        (output / f"{name}.png").write_bytes(picture)
    columns = ("wanted", "sparsity", "dead", "threshold", "base", "control", "perplexity", "increase", "low", "high")
    rows = [",".join(f"{value:.9g}" if value is not None else "" for value in _row(record)) for record in records]
    write_text(output / "sweep.csv", "\n".join([",".join(columns), *rows]) + "\n")


def _row(record: dict[str, Any]) -> list[float | None]:
    perplexity = record["perplexity"]
    return [
        record["recipe"]["steer"]["sparsity"],
        record["sparsity"],
        record["dead"],
        record["threshold"],
        perplexity["base"],
        perplexity["control"],
        perplexity["model"],
        record["perplexity_increase"],
        *(record["interval"] or (None, None)),
    ]


def _price(records: list[dict[str, Any]]) -> Chart:
    sparsity = [100 * record["sparsity"] for record in records]
    increase = [100 * record["perplexity_increase"] for record in records]
    with figure(3.3) as (drawn, (axis,)):
        axis.axhline(0, color=colour("ink"), ls=":")
        axis.plot(sparsity, increase, color=colour("accent"), marker="o", ms=4, clip_on=False)
        for at, record in zip(sparsity, records, strict=True):
            if record["interval"]:
                axis.plot([at, at], [100 * end for end in record["interval"]], color=colour("accent"), lw=1)
        axis.set_xlabel("neurons that are 0, %")
        axis.set_title("perplexity, % above")
        axis.grid(visible=True)
        last = records[-1]
        title, at = "Price", percent(last["sparsity"])
        about = f"At {at} zeros perplexity is {100 * last['perplexity_increase']:+.2f} %."
        return Chart.of(drawn, "price", title, about)


def _perplexities(records: list[dict[str, Any]], points: list[list[Point]]) -> Chart:
    names = layer_colours(len(records))
    with figure(3.3) as (drawn, (axis,)):
        for name, found in zip(names, points, strict=True):
            curve(axis, found, [point.perplexity for point in found], name)
        every = [point.perplexity for found in points for point in found]
        log_axis(axis, min(every), max(every), _MARGIN)
        axis.set_title("perplexity, on a logarithmic scale")
        axis.set_xlabel("tokens trained on")
        axis.grid(visible=True)
        title = "Perplexity"
        about = f"At the last evaluation from {digits(min(found[-1].perplexity for found in points))} on."
        legend = tuple(
            (name, "line", percent(r["recipe"]["steer"]["sparsity"])) for name, r in zip(names, records, strict=True)
        )
        return Chart.of(drawn, "perplexity", title, about, legend)
