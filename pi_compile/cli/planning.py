"""The commands `plan` and `report`: what can be said of a placement before there is an artifact.

`plan` prints one machine at several budgets, or several machines in one table.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from pi_compile.cli.options import EVERY, Debug, Json, PlanOptions
from pi_compile.cli.rendering import emit
from pi_runtime import console
from pi_runtime.console import facts, table, text_of
from pi_runtime.errors import DoesNotFitError, Setting, size


@console.takes(PlanOptions)
def plan(options: PlanOptions, as_json: Json = False, debug: Debug = False) -> None:
    """Forecast how a machine would run a model, from its config alone.

    With a model and nothing else: this machine, which is measured once, and every number format in one table. Several
    machines are compared in one table.
    """
    from pi_compile.cli.plan_request import compares_formats, model_files, plan_request, plan_requests
    from pi_compile.planning import compare, every_format
    from pi_compile.planning import plan as forecast

    if compares_formats(options):
        spec = plan_request(replace(options, number_format="f16"))
        emit(every_format(spec, model_files(options.model)), as_json, formats_text)
        return
    specs = plan_requests(options)
    if len(specs) == 1:
        try:
            found = forecast(specs[0])
        except DoesNotFitError as error:
            raise _with_formats(error, every_format(specs[0], {})) from None
        emit(found, as_json, plan_text)
    else:
        emit(compare(specs), as_json, comparison_text)


def _with_formats(error: DoesNotFitError, formats: Mapping[str, Any]) -> DoesNotFitError:
    """The error of a format that does not fit, with the one that does, and with what the machine profile lacks."""
    fitting = Setting("format", formats["format"] or EVERY), " runs" if formats["format"] else " compares the formats"
    disk = "" if formats["disk"] else f"; {formats['machine']} has no disk in its profile to run from"
    remedy = (error.remedy or "", "; ", *fitting, disk)
    return DoesNotFitError(error.what, expected=error.expected, found=error.found, remedy=remedy)


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


_BAR = 30
"""Characters of the longest bar."""


def plan_text(found: Mapping[str, Any]) -> str:
    """A plan as text: the model, the placement at the budget, and a row for each budget around it."""
    main = next(budget for budget in found["budgets"] if budget["percent"] == 0)
    gpu, ram = main["gpu_bytes_by_part"], main["ram_bytes_by_part"]
    parts = [{"part": part, "GPU": size(gpu[part]), "RAM": size(ram[part])} for part in ram]
    parts += [{"part": "all", "GPU": size(sum(gpu.values())), "RAM": size(sum(ram.values()))}]
    ladder = [table(_ram_rows(found["ram_budgets"]), left=["curve"])] if found["ram_budgets"] else []
    return text_of(
        facts([("answer", _answer(found, main)), *_planned_lines(found)]),
        table(parts),
        facts(_placed_lines(found, main)),
        table(_budget_rows(found)),
        *ladder,
    )


def _answer(found: Mapping[str, Any], main: Mapping[str, Any]) -> str:
    """Whether it runs within the budget, how fast, and what more memory would give."""
    rate, more = main["decode_tokens_per_s"], found["more_ram"]
    gain = more["decode_tokens_per_s"] / rate - 1
    further = size(more["ram_bytes"] - main["ram_bytes"])
    would = f"give {more['decode_tokens_per_s']:.1f} (+{gain:.0%})" if gain >= 0.005 else "change nothing"
    runs = f"it runs within {_gpu_room(main)}{size(main['ram_bytes'])} of RAM, at {rate:.1f} tokens/s"
    return f"{runs}; {further} more RAM would {would}"


def _in_words(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _planned_lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    formats = sorted(set(found["formats"].values()))
    count, active = (_in_words(found[key]) for key in ("parameters", "active_parameters"))
    yield "model", f"{found['model']}, {count} parameters in {', '.join(formats)}"
    if found["experts"] > 1:
        yield "", f"{active} of them are active for a token"
    yield "machine", f"{found['machine']}; context {found['context']:,}"
    yield "", found["machine_source"]
    yield from _firing_lines(found)
    rank, how = found["predictor_rank"], "at most, as trained" if found["trained"] else "by rule"
    yield "ffn", found["rung"] + ("" if rank is None else f", predictors of rank {rank} {how}")


def _firing_lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    of_experts = " of its experts" if found["experts"] > 1 else ""
    if found["density"] < 1:
        yield "activation", f"{found['density']:.1%} of the neurons{of_experts} fire for a token"
        yield "", found["activation"]
    else:
        yield "activation", found["activation"]


def _placed_lines(found: Mapping[str, Any], main: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    shares = [cut / found["neurons"] for cut in main["cuts"]]
    if any(shares):
        many = f"{min(shares):.0%} to {max(shares):.0%} of a layer's neurons"
        yield "on the GPU", f"{many}, {main['activations_on_gpu']:.0%} of activations"
        if found["experts"] > 1:
            of_expert = [cut * found["experts"] / found["neurons"] for cut in main["expert_cuts"]]
            yield "", f"{min(of_expert):.0%} to {max(of_expert):.0%} of an expert's"
    if "hit_rate" in main:
        yield (
            "rows in RAM",
            f"{main['pinned_share']:.0%} pinned, a cache for {main['cached_share']:.0%}, the rest on disk",
        )
        yield "", f"{main['hit_rate']:.1%} of those that a token needs; it reads {size(main['read_bytes'])}"
    if found["gpu_lacks"]:
        yield "GPU", f"none: the GPU tier does not compute what this model does ({', '.join(found['gpu_lacks'])})"
    if found["disk"] is None:
        yield "disk", "none in the machine profile: all is planned in memory (pi-compile machine measures a disk)"
    yield "a token takes", ", ".join(f"{part} {ms:.1f} ms" for part, ms in main["milliseconds"].items())


def _budget_rows(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each budget, with speeds in tokens/s; where the model does not fit, the reason."""
    rows = []
    for budget in found["budgets"]:
        row = {"budget": f"{budget['percent']:{'+' if budget['percent'] else ''}} %"}
        row |= {"GPU": size(budget["vram_bytes"]), "RAM": size(budget["ram_bytes"])}
        for rule in ("decode", "prefill", "layer_split"):
            row[rule] = _rate(budget, rule)
        rows.append({**row, "tokens/s": "" if budget["fits"] else budget["why"]})
    return rows


def _rate(budget: Mapping[str, Any], rule: str) -> str:
    """Tokens/s by a rule, where the model fits by it."""
    rate = budget.get(f"{rule}_tokens_per_s")
    return "–" if rate is None else f"{rate:.1f}"


def _ram_rows(budgets: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each budget of RAM on the CPU alone, with speeds in tokens/s and bars as long as these."""
    fastest = max(budget["decode_tokens_per_s"] for budget in budgets)
    return [
        {
            "RAM, CPU alone": size(budget["ram_bytes"]),
            "pinned": f"{budget['pinned_share']:.0%}",
            "cached": f"{budget['cached_share']:.0%}",
            "found in RAM": f"{budget['hit_rate']:.1%}",
            "read a token": size(budget["read_bytes"]),
            "decode": f"{budget['decode_tokens_per_s']:.2f}",
            "curve": "█" * max(1, round(_BAR * budget["decode_tokens_per_s"] / fastest)),
        }
        for budget in budgets
    ]


def formats_text(found: Mapping[str, Any]) -> str:
    """Every format as text: whether it runs and what to take, the model and the machine, and a row for each format."""
    lines = [
        ("answer", _formats_answer(found)),
        ("take", found["file"] or (found["format"] and f"its weights, packed in {found['format']}")),
        ("model", f"{found['model']}, {_in_words(found['parameters'])} parameters"),
        ("machine", f"{found['machine']}; context {found['context']:,}"),
        ("", found["machine_source"]),
        *_firing_lines(found),
    ]
    return text_of(facts([line for line in lines if line[1]]), table([_format_row(row) for row in found["formats"]]))


def _formats_answer(found: Mapping[str, Any]) -> str:
    room = f"{_gpu_room(found)}{size(found['ram_bytes'])} of RAM"
    for row in found["formats"]:
        if row["format"] == found["format"]:
            where = "runs" if row["runs"] == "in memory" else "runs from disk"
            return f"it {where}: in {row['format']}, within {room}, at {row['decode_tokens_per_s']:.1f} tokens/s"
    least = min(found["formats"], key=lambda row: row["all_in_ram_bytes"])
    disk = "" if found["disk"] else ", and no disk in the machine profile"
    needs = f"{least['format']}, the smallest, takes {size(least['all_in_ram_bytes'])} in memory"
    return f"it does not run: {needs}; there are {room}{disk}"


def _gpu_room(budget: Mapping[str, Any]) -> str:
    return f"{size(budget['vram_bytes'])} of GPU memory and " if budget["vram_bytes"] else ""


def _format_row(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "format": row["format"],
        "bytes": size(row["bytes"]),
        "all in RAM": size(row["all_in_ram_bytes"]),
        "tokens/s": _rate(row, "decode"),
        "first token of 2,000": f"{row['first_token_s']:.1f} s" if "first_token_s" in row else "–",
        "runs": row["runs"],
    }


def comparison_text(found: Mapping[str, Any]) -> str:
    """Plans for several machines as text: the model, and a row for each machine."""
    one = next(plan for plan in found["machines"] if plan["fits"])
    about = {title: text for title, text in _planned_lines(one) if title != "machine"}
    return text_of(
        facts([*about.items(), ("context", f"{one['context']:,} positions")]),
        table([_machine_row(plan) for plan in found["machines"]]),
    )


def _machine_row(found: Mapping[str, Any]) -> dict[str, str]:
    """A machine's budget and what is predicted within it; where the model does not fit, the reason."""
    main = found if not found["fits"] else next(budget for budget in found["budgets"] if budget["percent"] == 0)
    row = {"machine": found["machine"], "GPU": size(main["vram_bytes"]), "RAM": size(main["ram_bytes"])}
    shares = ("activations_on_gpu", "hit_rate")
    row |= dict(zip(("activations on the GPU", "found in RAM"), (_share(main, key) for key in shares), strict=True))
    for rule in ("decode", "prefill", "layer_split"):
        row[rule] = _rate(main, rule)
    return {**row, "tokens/s": "" if main["fits"] else main["why"]}


def _share(main: Mapping[str, Any], key: str) -> str:
    """A share that holds where the model fits; all rows are found in RAM where none is on disk."""
    return f"{main.get(key, 1.0):.1%}" if main["fits"] else "–"
