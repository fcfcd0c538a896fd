"""The commands `plan` and `report`: what can be said of a placement before there is an artifact."""

from pathlib import Path
from typing import Annotated

import typer

from pi_compile.cli.options import (
    Counts,
    CtxSize,
    Curve,
    Debug,
    Density,
    IgnoreConfig,
    Json,
    MachineName,
    NumberFormat,
    Planned,
    RamBudget,
    VramBudget,
)
from pi_runtime import console


def plan(
    model: Planned,
    machine: MachineName = None,
    vram_budget: VramBudget = None,
    ram_budget: RamBudget = None,
    curve: Curve = None,
    density: Density = None,
    counts: Counts = None,
    number_format: NumberFormat = None,
    ctx_size: CtxSize = None,
    ignore_config: IgnoreConfig = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Forecast how a machine would run a model, from its config alone."""
    from pi_compile.cli.plan_request import plan_request
    from pi_compile.cli.rendering import plan_text
    from pi_compile.planning import plan as forecast

    spec = plan_request(
        model,
        machine=machine,
        vram_budget=vram_budget,
        ram_budget=ram_budget,
        curve=curve,
        density=density,
        counts=counts,
        fmt=number_format,
        ctx_size=ctx_size,
        ignore_config=ignore_config or [],
    )
    found = forecast(spec)
    if as_json:
        console.print_json(found)
    else:
        typer.echo(plan_text(found))


def report(
    model: Planned,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")],
    machine: MachineName = None,
    vram_budget: VramBudget = None,
    ram_budget: RamBudget = None,
    curve: Curve = None,
    density: Density = None,
    counts: Counts = None,
    number_format: NumberFormat = None,
    ctx_size: CtxSize = None,
    ignore_config: IgnoreConfig = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Explain a placement on one page, with figures and layer by layer."""
    from pi_compile.cli.plan_request import plan_request
    from pi_compile.files import check_page, write_text
    from pi_compile.report import answer_of, explain, report_page

    check_page(output)
    spec = plan_request(
        model,
        machine=machine,
        vram_budget=vram_budget,
        ram_budget=ram_budget,
        curve=curve,
        density=density,
        counts=counts,
        fmt=number_format,
        ctx_size=ctx_size,
        ignore_config=ignore_config or [],
    )
    with console.progress("solving", "budgets") as progress:
        found = explain(spec, progress)
    page, answer = report_page(found), answer_of(found)
    write_text(output, page)
    if as_json:
        console.print_json({"report": str(output), "bytes": len(page.encode()), "answer": answer})
    else:
        typer.echo(answer)
        console.say(f"{output}: written")
