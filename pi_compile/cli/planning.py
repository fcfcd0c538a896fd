"""The commands `plan` and `report`: what can be said of a placement before there is an artifact."""

from pathlib import Path
from typing import Annotated

import typer

from pi_compile.cli.options import Debug, Json, PlanOptions
from pi_compile.cli.plan_text import comparison_text, plan_text
from pi_compile.cli.rendering import emit
from pi_runtime import console


@console.takes(PlanOptions)
def plan(options: PlanOptions, as_json: Json = False, debug: Debug = False) -> None:
    """Forecast how a machine would run a model, from its config alone.

    Several machines are compared in one table.
    """
    from pi_compile.cli.plan_request import plan_requests
    from pi_compile.planning import compare
    from pi_compile.planning import plan as forecast

    specs = plan_requests(options)
    if len(specs) == 1:
        emit(forecast(specs[0]), as_json, plan_text)
    else:
        emit(compare(specs), as_json, comparison_text)


@console.takes(PlanOptions)
def report(
    options: PlanOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Explain a placement on one page, with figures, layer by layer."""
    from pi_compile.cli.plan_request import plan_request
    from pi_compile.files import check_replaced, write_text
    from pi_compile.report import PAGE_MARK, answer_of, explain, report_page

    check_replaced(output, PAGE_MARK.encode(), "a report")
    spec = plan_request(options)
    with console.progress("solving", "budgets") as progress:
        found = explain(spec, progress)
    page, answer = report_page(found), answer_of(found)
    write_text(output, page)
    emit({"report": str(output), "bytes": len(page.encode()), "answer": answer}, as_json, lambda _: answer)
    if not as_json:
        console.say(f"{output}: written")
