"""What commands print: results and the stages that ran, as JSON or as text.

Text is made of the key–value lists and tables of `console`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from pi_runtime import console
from pi_runtime.console import facts, shown, table, text_of
from pi_runtime.errors import size

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
    rows = {n: v for n, v in report.items() if isinstance(v, list) and all(isinstance(row, Mapping) for row in v)}
    tables = [table(value) for value in rows.values() if value]
    values = [(n.replace("_", " "), console.shown(value)) for n, value in report.items() if n not in rows]
    blocks = [*([facts(values)] if values else []), *tables]
    if blocks:
        typer.echo(text_of(*blocks))


def eval_line(found: Mapping[str, Any]) -> str:
    """What the mode that skips most reads and costs beside dense, in a line."""
    from pi_compile.pipeline.summary import reads_line

    mode = list(found["perplexity"])[-1]
    ffn, whole = (found[name][mode] / found[name]["dense"] for name in ("ffn_bytes_per_token", "bytes_per_token"))
    increase = found["perplexity"][mode] / found["perplexity"]["dense"] - 1
    layers = f"{len(found['layers'])} layers, {_rungs(found['layers'])}"
    return f"{mode}: {layers}; {reads_line(ffn, whole)}; perplexity {increase:+.2%}"


def eval_report(found: Mapping[str, Any]) -> dict[str, Any]:
    """The evaluation of a text, with modes as rows."""
    same = found["same_as"]
    modes = [
        {
            "mode": _named(mode, same),
            "perplexity": perplexity,
            "increase": _percent_interval(found["increase_interval"].get(mode)),
            "agreement": found["agreement"].get(mode),
            "kl_divergence": found["kl_divergence"].get(mode),
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


def _named(mode: str, same: Mapping[str, str]) -> str:
    """A mode, with the one that was scored in its place, if one was."""
    return f"{mode}, as {same[mode]}" if mode in same else mode


def task_reports(tasks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The evaluations of tasks, each with modes as rows."""
    reports = []
    for task in tasks:
        head = f"{task['task']}, {task['kind']}, {task['items']:,} questions"
        if task["truncated"]:
            head += f", {task['truncated']:,} of them truncated to the model's context"
        same = task["same_as"]
        rows = [{"mode": _named(mode, same), **_with_intervals(row)} for mode, row in task["modes"].items()]
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
    shared = f", over latents of {d['latent_rank']}" if d.get("latent_rank") else shared
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
