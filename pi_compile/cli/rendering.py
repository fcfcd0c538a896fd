"""What commands print: results and the stages that ran, as JSON or as text."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from pi_runtime import console
from pi_runtime.console import size


def show(rows: dict[str, Any], ran: list[str], as_json: bool) -> None:
    if as_json:
        console.print_json({**rows, "ran": ran})
        return
    from pi_compile.pipeline.summary import print_report

    print_report(rows)
    console.say(_done(ran))


def show_artifact(packed: dict[str, Any], ran: list[str], as_json: bool) -> None:
    if as_json:
        console.print_json({**packed, "ran": ran})
    else:
        if "quantisation" in packed:
            from pi_compile.pipeline.summary import print_report

            print_report({"quantisation": packed["quantisation"]})
        console.say(_done(ran))
        console.say(f"{packed['artifact']}: {console.size(packed['bytes'])}, sha256 {packed['sha256'][:16]}…")


def show_placements(rows: dict[str, Any], ran: list[str], as_json: bool) -> None:
    if as_json:
        console.print_json({**rows, "ran": ran})
        return
    from pi_compile.pipeline.summary import print_report

    if not rows["plans"]:
        console.say("no plans: the machine has no GPU, or nothing on it would pay for a hand-over")
    print_report({"plans": [{k: v for k, v in row.items() if k not in _LONG} for row in rows["plans"]]})


_LONG = ("attention", "cuts", "context", "gpu_bytes_by_part", "ram_bytes_by_part", "digest")
"""Keys of a placement that a table has no room for."""


def _done(ran: list[str]) -> str:
    return f"made: {', '.join(ran)}" if ran else "nothing to do: everything is up to date"


def plan_text(found: Mapping[str, Any]) -> str:
    """A plan as text: the model, the placement at the budget, and a line for each budget around it."""
    lines = [f"{title:16}{text}".rstrip() for title, text in _plan_lines(found)]
    return "\n".join(map(_printable, lines))


def _plan_lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    formats = sorted(set(found["formats"].values()))
    yield "model", f"{found['model']}, {found['parameters'] / 1e9:.2f} B parameters in {', '.join(formats)}"
    yield "machine", f"{found['machine']}; context {found['context']:,}"
    of_experts = " of its experts" if found["experts"] > 1 else ""
    yield "activation", f"{found['density']:.1%} of the neurons{of_experts} fire for a token"
    yield "", found["activation"]
    rank, how = found["predictor_rank"], "at most, as trained" if found["trained"] else "by rule"
    yield "ffn", found["rung"] + ("" if rank is None else f", predictors of rank {rank} {how}")
    main = next(budget for budget in found["budgets"] if budget["percent"] == 0)
    yield "", ""
    yield "part", f"{'GPU':>12}{'RAM':>12}"
    gpu, ram = main["gpu_bytes_by_part"], main["ram_bytes_by_part"]
    for part in ram:
        yield f"  {part}", f"{size(gpu[part]):>12}{size(ram[part]):>12}"
    yield "  all", f"{size(sum(gpu.values())):>12}{size(sum(ram.values())):>12}"
    shares = [cut / found["neurons"] for cut in main["cuts"]]
    if any(shares):
        many = f"{min(shares):.0%} to {max(shares):.0%} of a layer's neurons"
        yield "on the GPU", f"{many}, {main['activations_on_gpu']:.0%} of activations"
        if found["experts"] > 1:
            of_expert = [cut * found["experts"] / found["neurons"] for cut in main["expert_cuts"]]
            yield "", f"{min(of_expert):.0%} to {max(of_expert):.0%} of an expert's"
    yield "", ""
    yield "a token takes", ", ".join(f"{part} {ms:.1f} ms" for part, ms in main["milliseconds"].items())
    yield "", ""
    yield "budget", f"{'GPU':>12}{'RAM':>12}{'decode':>12}{'prefill':>12}{'layer split':>14}   tokens/s"
    for budget in found["budgets"]:
        sizes = f"{size(budget['vram_bytes']):>12}{size(budget['ram_bytes']):>12}"
        yield (
            f"  {budget['percent']:{'+' if budget['percent'] else ''}} %",
            sizes + (_rates(budget) if budget["fits"] else f"  {budget['why']}"),
        )


def _rates(budget: Mapping[str, Any]) -> str:
    keys = ("decode_tokens_per_s", "prefill_tokens_per_s")
    rates = "".join(f"{budget[key]:>12.1f}" for key in keys)
    return f"{rates}{budget['layer_split_tokens_per_s']:>14.1f}"


def artifact_text(report: Mapping[str, Any]) -> str:
    """The report of `inspect` as text."""
    return "\n".join(f"{title:18}{_printable(text)}".rstrip() for title, text in _artifact_lines(report))


def _printable(text: str) -> str:
    """The text without control characters: an artifact comes from anyone, and must not steer the terminal."""
    return "".join(c if c.isprintable() else "�" for c in text)


def _artifact_lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "artifact", f"{report['artifact']}, {size(report['bytes'])}, format version {report['format_version']}"
    yield from _model_lines(report["decoder"], report["parameters"])
    yield from _storage_lines(report)
    yield "layers", _rungs(report["layers"])
    tokens = report["profiled_tokens"]
    yield "profile", f"neurons ordered by their counts over {tokens:,} tokens" if tokens else "none"
    yield from _stored_plan_lines(report["plans"])
    yield "chat template", "yes: pi-run --chat" if report["chat_template"] else "none"
    if report["generation"]:
        yield "sampling", ", ".join(f"{key} {value}" for key, value in report["generation"].items())
    yield from _origin_lines(report["provenance"])


def _model_lines(d: Mapping[str, Any], count: int) -> Iterator[tuple[str, str]]:
    yield "model", f"{d['family']}, {_count(count)} parameters, {d['n_layers']} layers, width {d['d_model']:,}"
    shared = "" if d["n_kv_heads"] == d["n_heads"] else f", {d['n_kv_heads']} for keys and values"
    yield "  attention", f"{d['n_heads']} heads of {d['head_dim']}{shared}; context {d['context_length']:,}"
    experts = f"{d['n_experts']} experts, {d['experts_per_token']} a token, of " if d["n_experts"] > 1 else ""
    yield "  ffn", f"{experts}{d['d_ff']:,} neurons, {d['ffn']}, {d['activation']}"
    head = "the embedding, transposed" if d["tied_head"] else "its own"
    yield "  vocabulary", f"{d['vocab_size']:,} tokens; output head: {head}"


def _storage_lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for number, (part, nbytes) in enumerate(report["bytes_by_part"].items()):
        form = report["formats"].get(part, "")
        yield "stored" if not number else "", f"{part:11}{form:6}{size(nbytes):>10}{nbytes / report['bytes']:>8.1%}"


def _rungs(layers: list[dict[str, Any]]) -> str:
    from pi_runtime.artifact.rungs import RUNGS

    counts = Counter(layer["rung"] for layer in layers)
    text = ", ".join(f"{counts[rung]} {rung}" for rung in RUNGS if counts[rung])
    ranks = sorted(layer["rank"] for layer in layers if layer["rank"] is not None)
    return f"{text}; predictor ranks {ranks[0]} to {ranks[-1]}" if ranks else text


def _stored_plan_lines(plans: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    if not plans:
        yield "plans", "none: runs on the CPU alone"
    for number, plan in enumerate(plans):
        used = f"{size(plan['used_bytes']):>10} used of {size(plan['vram_bytes']):>10}"
        low, high = plan.get("gpu_expert_share", (0, 0))
        experts = f" ({low:.0%} to {high:.0%} of an expert's)" if high else ""
        shares = f"{plan['gpu_neuron_share']:6.1%} of neurons{experts}"
        yield "plans" if not number else "", f"{used}, {shares}, {plan['objective']}"


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


def _count(number: int) -> str:
    """A count in short: 6738415616 → `6.7 B`."""
    for unit, scale in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return str(number)
