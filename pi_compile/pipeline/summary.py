"""Results of stages as plain values, and as tables to read."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from pi_compile.placement import Placement
from pi_compile.results import ActivationProfile, PredictorSet
from pi_runtime.artifact.sizes import PARTS

if TYPE_CHECKING:
    from pi_compile.packing import PackResult


def profile_report(p: ActivationProfile) -> dict[str, Any]:
    """Tokens, and for each layer its density and the share of activations that the hottest fifth of its neurons has.

    With experts also the shares of the tokens that are routed to the busiest and to the idlest expert.
    """
    curve = p.cumulative_curve()
    layers = [
        {
            "layer": n,
            "density": float(density),
            "top_20_share": float(curve[n, 20]),
            "neurons_for_80_percent": float(np.argmax(curve[n] >= 0.8) / 100),
            **_routing(p, n),
        }
        for n, density in enumerate(p.density())
    ]
    return {"tokens": p.tokens, "layers": layers}


def _routing(p: ActivationProfile, layer: int) -> dict[str, float]:
    if p.routed is None:
        return {}
    shares = p.routed[layer] / p.tokens
    return {"busiest_expert": float(shares.max()), "idlest_expert": float(shares.min())}


def train_report(t: PredictorSet) -> dict[str, Any]:
    """Perplexities, format of the predictors, FFN bytes relative to the gate rung, time, and the table of layers."""
    read, gate = (sum(getattr(row, name) for row in t.rows) for name in ("ffn_bytes", "gate_bytes"))
    layers = [{"layer": n, **asdict(row)} for n, row in enumerate(t.rows)]
    return {
        **t.perplexity,
        "predictor_format": t.predictor_format,
        "ffn_bytes_over_gate": read / gate,
        "ffn_us": sum(row.ffn_us for row in t.rows),
        "layers": layers,
    }


def place_report(placements: Sequence[Placement]) -> dict[str, Any]:
    """One row a budget: bytes in RAM and VRAM, predicted speed, the greedy heuristic's, and what is on the GPU."""
    return {"plans": [_placement(p) for p in placements]}


def _placement(p: Placement) -> dict[str, Any]:
    plan, heuristic = asdict(p.plan), p.heuristic
    digest, predicted = plan.pop("digest"), plan.pop("predicted_ns")
    return {
        **plan,
        "predicted_tokens_per_s": 1e9 / predicted,
        "gap": p.gap,
        "heuristic_tokens_per_s": None if heuristic is None else 1e9 / heuristic.ns,
        "activations_on_gpu": p.activations_on_gpu,
        "attention_layers_on_gpu": plan["attention"].count("gpu"),
        "smallest_cut": min(plan["cuts"]),
        "largest_cut": max(plan["cuts"]),
        "gpu_bytes_by_part": dict(p.gpu_bytes),
        "ram_bytes_by_part": dict(p.ram_bytes),
        "digest": digest,
    }


def pack_report(result: "PackResult") -> dict[str, Any]:
    """Path, bytes and digest of the artifact, and the errors of parts that were quantised."""
    report: dict[str, Any] = {"artifact": str(result.path), "bytes": result.nbytes, "sha256": result.sha256}
    rows = [
        {
            "part": part,
            "format": result.manifest.formats[part],
            "relative_rms_error": result.errors[part].relative,
            "largest_error": result.errors[part].largest,
        }
        for part in PARTS
        if part in result.errors
    ]
    return {**report, "quantisation": rows} if rows else report


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
            shown[share] = f"{_shown(shown[share])} ({_shown(value[0])} to {_shown(value[1])})"
        else:
            shown[name] = value
    return shown


def _percent_interval(ends: Sequence[float] | None) -> str | None:
    return None if ends is None else f"{ends[0]:+.3%} to {ends[1]:+.3%}"


def print_report(report: Mapping[str, Any]) -> None:
    """Print plain values as lines, and lists of rows as tables."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    # Piped or narrow, a table must not lose its digits: lines may be longer than the terminal.
    console = Console(soft_wrap=True, width=200)
    for name, value in report.items():
        if not isinstance(value, list):
            console.print(f"{name.replace('_', ' ')}: {_shown(value)}", highlight=False)
            continue
        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
        for column in value[0] if value else ():
            table.add_column(column.replace("_", " "), justify="right")
        for row in value:
            table.add_row(*map(_shown, row.values()))
        console.print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.2g}"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
