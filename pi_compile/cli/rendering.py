"""What commands print: results and the stages that ran, as JSON or as text.

Text is made of the key–value lists and tables of `console`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from pi_runtime import console
from pi_runtime.console import facts, shown, size, table, text_of

if TYPE_CHECKING:
    from pi_compile.machine.doctor import Finding

_LONG = ("attention", "cuts", "context", "gpu_bytes_by_part", "ram_bytes_by_part", "digest")
"""Keys of a placement that a table has no room for."""


def emit(found: Mapping[str, Any], as_json: bool, text: Callable[[Mapping[str, Any]], str]) -> None:
    """Print a result on stdout, as JSON or as its text."""
    if as_json:
        console.print_json(found)
    else:
        typer.echo(text(found))


def show(found: Mapping[str, Any], ran: Sequence[str], as_json: bool, text: Mapping[str, Any] | None = None) -> None:
    """Print a stage's result and which stages ran. `text` is what is printed as text, by default the whole result."""
    if as_json:
        console.print_json({**found, "ran": ran})
        return
    print_report(found if text is None else text)
    console.say(f"made: {', '.join(ran)}" if ran else "nothing to do: everything is up to date")


def show_artifact(packed: Mapping[str, Any], ran: Sequence[str], as_json: bool) -> None:
    """Print what was packed; its path, size and digest go to stderr."""
    show(packed, ran, as_json, {name: rows for name, rows in packed.items() if name == "quantisation"})
    if not as_json:
        console.say(f"{packed['artifact']}: {size(packed['bytes'])}, sha256 {packed['sha256'][:16]}…")


def show_placements(found: Mapping[str, Any], ran: Sequence[str], as_json: bool) -> None:
    """Print a row for each placement."""
    if as_json:
        console.print_json({**found, "ran": ran})
        return
    print_report({"plans": [{k: v for k, v in row.items() if k not in _LONG} for row in found["plans"]]})
    if not found["plans"]:
        console.say("no plans: the machine has no GPU, or nothing on it would pay for a hand-over")


def print_report(report: Mapping[str, Any]) -> None:
    """Print plain values as a key–value list, and lists of rows as tables."""
    tables = [table(value) for value in report.values() if isinstance(value, list) and value]
    values = [
        (name.replace("_", " "), console.shown(value)) for name, value in report.items() if not isinstance(value, list)
    ]
    blocks = [*([facts(values)] if values else []), *tables]
    if blocks:
        typer.echo(text_of(*blocks))


def eval_report(found: Mapping[str, Any]) -> dict[str, Any]:
    """The evaluation of a text, with modes as rows."""
    modes = [
        {
            "mode": mode,
            "perplexity": perplexity,
            "increase": _percent_interval(found["increase_interval"].get(mode)),
            "agreement": found["agreement"].get(mode),
            "bytes_per_token": found["bytes_per_token"].get(mode),
            "ffn_bytes_per_token": found["ffn_bytes_per_token"].get(mode),
            "tokens_per_s": found["tokens_per_s"].get(mode),
        }
        for mode, perplexity in found["perplexity"].items()
    ]
    device = {"device": found["device"]} if found["vram_bytes"] is not None else {}
    if cache := found.get("cache"):
        shown = {**cache, "increase_interval": _percent_interval(cache["increase_interval"])}
        device["cache"] = ", ".join(f"{name.replace('_', ' ')} {console.shown(value)}" for name, value in shown.items())
    return {**device, "tokens": found["tokens"], "modes": modes, "layers": found["layers"]}


def task_reports(tasks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The evaluations of tasks, each with modes as rows."""
    reports = []
    for task in tasks:
        head = f"{task['task']}, {task['kind']}, {task['items']:,} questions"
        if task["truncated"]:
            head += f", {task['truncated']:,} of them truncated to the model's context"
        rows = [{"mode": mode, **_with_intervals(row)} for mode, row in task["modes"].items()]
        chance = {} if task["chance"] is None else {"chance": task["chance"]}
        reports.append({"task": head, **chance, "modes": rows})
    return reports


def _with_intervals(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with each value and its interval as one column: `0.2500 (0.1754 to 0.3430)`."""
    shown: dict[str, Any] = {}
    for name, value in row.items():
        if name.endswith("_interval"):
            share = name.removesuffix("_interval")
            shown[share] = f"{console.shown(shown[share])} ({console.shown(value[0])} to {console.shown(value[1])})"
        else:
            shown[name] = value
    return shown


def _percent_interval(ends: Sequence[float] | None) -> str | None:
    return None if ends is None else f"{ends[0]:+.3%} to {ends[1]:+.3%}"


def status_text(found: Mapping[str, Any]) -> str:
    """The status of a build: stages and time left, then workers and failed tasks in a table each."""
    lines = [("stages", ", ".join(f"{stage} {state}" for stage, state in found["stages"].items()))]
    if found["done"] is not None:
        left = "" if found["eta_seconds"] is None else f", about {found['eta_seconds']:,.0f} s left"
        lines.append(("this stage", f"{found['done']:.0%} done{left}"))
    return text_of(facts(lines), *(table(rows) for rows in (_worker_rows(found), found["failed"]) if rows))


def _worker_rows(found: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "worker": worker["name"],
            "rank": str(worker["rank"]),
            "by": worker["launcher"] or "hand",
            "stage": worker["stage"],
            "task": worker["task"] or "none",
            "since": f"{worker['task_seconds']:,.0f} s" if worker["task"] else "",
            "last sign": "ended" if worker["silent_seconds"] is None else f"{worker['silent_seconds']:,.0f} s ago",
        }
        for worker in found["workers"]
    ]


def plan_text(found: Mapping[str, Any]) -> str:
    """A plan as text: the model, the placement at the budget, and a row for each budget around it."""
    main = next(budget for budget in found["budgets"] if budget["percent"] == 0)
    gpu, ram = main["gpu_bytes_by_part"], main["ram_bytes_by_part"]
    parts = [{"part": part, "GPU": size(gpu[part]), "RAM": size(ram[part])} for part in ram]
    parts += [{"part": "all", "GPU": size(sum(gpu.values())), "RAM": size(sum(ram.values()))}]
    ladder = [table(_ram_rows(found["ram_budgets"]))] if found["ram_budgets"] else []
    return text_of(
        facts(_planned_lines(found)),
        table(parts),
        facts(_placed_lines(found, main)),
        table(_budget_rows(found)),
        *ladder,
    )


def _planned_lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    formats = sorted(set(found["formats"].values()))
    yield "model", f"{found['model']}, {found['parameters'] / 1e9:.2f} B parameters in {', '.join(formats)}"
    yield "machine", f"{found['machine']}; context {found['context']:,}"
    of_experts = " of its experts" if found["experts"] > 1 else ""
    yield "activation", f"{found['density']:.1%} of the neurons{of_experts} fire for a token"
    yield "", found["activation"]
    rank, how = found["predictor_rank"], "at most, as trained" if found["trained"] else "by rule"
    yield "ffn", found["rung"] + ("" if rank is None else f", predictors of rank {rank} {how}")


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
    elif found["disk"] is None:
        yield "disk", "none in the machine profile: all is planned in memory (pi-compile machine measures a disk)"
    yield "a token takes", ", ".join(f"{part} {ms:.1f} ms" for part, ms in main["milliseconds"].items())


def _budget_rows(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each budget, with speeds in tokens/s; where the model does not fit, the reason."""
    rows = []
    for budget in found["budgets"]:
        row = {"budget": f"{budget['percent']:{'+' if budget['percent'] else ''}} %"}
        row |= {"GPU": size(budget["vram_bytes"]), "RAM": size(budget["ram_bytes"])}
        for rule in ("decode", "prefill", "layer_split"):
            row[rule] = f"{budget[f'{rule}_tokens_per_s']:.1f}" if budget["fits"] else "–"
        rows.append({**row, "tokens/s": "" if budget["fits"] else budget["why"]})
    return rows


def _ram_rows(budgets: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each budget of RAM on the CPU alone, with speeds in tokens/s."""
    return [
        {
            "RAM, CPU alone": size(budget["ram_bytes"]),
            "pinned": f"{budget['pinned_share']:.0%}",
            "cached": f"{budget['cached_share']:.0%}",
            "found in RAM": f"{budget['hit_rate']:.1%}",
            "read a token": size(budget["read_bytes"]),
            "decode": f"{budget['decode_tokens_per_s']:.2f}",
        }
        for budget in budgets
    ]


def artifact_text(report: Mapping[str, Any]) -> str:
    """The report of `inspect` as text."""
    whole, formats = report["bytes"], report["formats"]
    stored = [
        {"stored": part, "format": formats.get(part, ""), "bytes": size(n), "share": f"{n / whole:.1%}"}
        for part, n in report["bytes_by_part"].items()
    ]
    plans = [table(_stored_plan_rows(report["plans"]))] if report["plans"] else []
    return text_of(facts(_artifact_lines(report)), table(stored), *plans)


def _artifact_lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "artifact", f"{report['artifact']}, {size(report['bytes'])}, format version {report['format_version']}"
    yield from _model_lines(report["decoder"], report["parameters"])
    yield "layers", _rungs(report["layers"])
    tokens = report["profiled_tokens"]
    yield "profile", f"neurons ordered by their counts over {tokens:,} tokens" if tokens else "none"
    yield "chat template", "yes: pi-run --chat" if report["chat_template"] else "none"
    if report["generation"]:
        yield "sampling", ", ".join(f"{key} {value}" for key, value in report["generation"].items())
    yield from _origin_lines(report["provenance"])
    yield "plans", f"for {len(report['plans'])} GPU budgets" if report["plans"] else "none: runs on the CPU alone"
    if report["row_plans"]:
        budgets = [size(plan["ram_bytes"]) for plan in report["row_plans"]]
        yield "rows on disk", f"plans for RAM budgets of {', '.join(budgets)}, beside the process itself"


def _model_lines(d: Mapping[str, Any], count: int) -> Iterator[tuple[str, str]]:
    yield "model", f"{d['family']}, {_count(count)} parameters, {d['n_layers']} layers, width {d['d_model']:,}"
    shared = "" if d["n_kv_heads"] == d["n_heads"] else f", {d['n_kv_heads']} for keys and values"
    yield "  attention", f"{d['n_heads']} heads of {d['head_dim']}{shared}; context {d['context_length']:,}"
    experts = f"{d['n_experts']} experts, {d['experts_per_token']} a token, of " if d["n_experts"] > 1 else ""
    yield "  ffn", f"{experts}{d['d_ff']:,} neurons, {d['ffn']}, {d['activation']}"
    head = "the embedding, transposed" if d["tied_head"] else "its own"
    yield "  vocabulary", f"{d['vocab_size']:,} tokens; output head: {head}"


def _rungs(layers: Sequence[Mapping[str, Any]]) -> str:
    from pi_runtime.artifact.rungs import RUNGS

    counts = Counter(layer["rung"] for layer in layers)
    text = ", ".join(f"{counts[rung]} {rung}" for rung in RUNGS if counts[rung])
    ranks = sorted(layer["rank"] for layer in layers if layer["rank"] is not None)
    return f"{text}; predictor ranks {ranks[0]} to {ranks[-1]}" if ranks else text


def _stored_plan_rows(plans: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    rows = []
    for plan in plans:
        low, high = plan.get("gpu_expert_share", (0, 0))
        rows.append(
            {
                "budget": size(plan["vram_bytes"]),
                "used": size(plan["used_bytes"]),
                "neurons on the GPU": f"{plan['gpu_neuron_share']:.1%}",
                **({"of an expert's": f"{low:.0%} to {high:.0%}"} if "gpu_expert_share" in plan else {}),
                "objective": plan["objective"],
            }
        )
    return rows


def _origin_lines(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The part of the free-form provenance that `pack` writes."""
    checkpoint = provenance.get("checkpoint")
    files = checkpoint.get("files") if isinstance(checkpoint, dict) else None
    if "pi_toolchain" in provenance:
        yield "made by", f"pi-toolchain {provenance['pi_toolchain']}"
    for number, (name, digest) in enumerate(files.items() if isinstance(files, dict) else ()):
        yield "made from" if not number else "", f"{str(digest)[:16]}  {name}"
    ignored = checkpoint.get("ignored_config") if isinstance(checkpoint, dict) else None
    if isinstance(ignored, list) and ignored:
        yield "ignored keys", f"{', '.join(map(str, ignored))}: declared to be without effect"
    if isinstance(checkpoint, dict) and "declared_activation" in checkpoint:
        yield "activation", f"{checkpoint['declared_activation']}: declared, the file does not say it"


def _count(number: int) -> str:
    """A count in short: 6738415616 → `6.7 B`."""
    for unit, scale in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return str(number)


def findings_text(findings: Iterable["Finding"]) -> str:
    """The findings of `doctor` as text, each with its remedy below it."""
    rows = ([(f.topic, f.found), *([("", f"→ {f.remedy}")] if f.remedy else [])] for f in findings)
    return text_of(facts(row for lines in rows for row in lines))


def sparsify_text(record: Mapping[str, Any]) -> str:
    """What a sparsified model is, with a row for each layer."""
    perplexity, interval = record["perplexity"], record["interval"]
    against = "base" if perplexity["control"] is None else "control"
    spread = f" ({interval[0]:+.2%} to {interval[1]:+.2%})" if interval else ""
    rows = [
        ("folder", record["folder"]),
        ("activation", record["activation"] + (f", threshold {record['threshold']:g}" if record["threshold"] else "")),
        ("sparsity", f"{record['sparsity']:.1%}"),
        ("never fired", f"{record['dead']:.1%}"),
        *((f"perplexity, {name}", shown(value)) for name, value in perplexity.items() if value is not None),
        (f"against {against}", f"{record['perplexity_increase']:+.2%}{spread}"),
        ("tokens", f"{record['tokens']:,}" + (f", {record['ended']}" if record["ended"] else "")),
        *([] if record["stock"] else [("note", record["form"])]),
    ]
    pairs = zip(record["sparsity_by_layer"], record["dead_by_layer"], strict=True)
    layers = [{"layer": n, "sparsity": f"{s:.1%}", "never_fired": f"{d:.1%}"} for n, (s, d) in enumerate(pairs)]
    return text_of(facts(rows), table(layers))
