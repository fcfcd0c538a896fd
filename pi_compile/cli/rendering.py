"""What the commands that make something print: rows and what ran, as JSON or to read."""

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
        console.say("no plans: the machine has no GPU, or nothing is worth a hand-over to it")
    print_report({"plans": [{k: v for k, v in row.items() if k not in _LONG} for row in rows["plans"]]})


_LONG = ("attention", "cuts", "context", "gpu_bytes", "ram_bytes_by_part", "digest")
"""Keys of a placement that a table has no room for."""


def _done(ran: list[str]) -> str:
    return f"made: {', '.join(ran)}" if ran else "nothing to do: everything is up to date"


def plan_text(found: Mapping[str, Any]) -> str:
    """What is planned, where everything goes at the budget, and a line for each budget around it."""
    lines = [f"{title:16}{text}".rstrip() for title, text in _lines(found)]
    return "\n".join("".join(c if c.isprintable() else "�" for c in line) for line in lines)


def _lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
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
    for part in main["ram"]:
        yield f"  {part}", f"{size(main['gpu'].get(part, 0)):>12}{size(main['ram'][part]):>12}"
    yield "  all", f"{size(sum(main['gpu'].values())):>12}{size(sum(main['ram'].values())):>12}"
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
