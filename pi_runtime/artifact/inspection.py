"""What an artifact holds, as plain values and as text to read."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import RUNGS, Manifest
from pi_runtime.artifact.sizes import is_scales, without_scales
from pi_runtime.console import size

_INDENT = 18


def inspect(path: Path) -> dict[str, Any]:
    """Model, formats, bytes by part, rungs, plans and origin of an artifact. Reads the manifest only."""
    with Artifact.open(path) as artifact:
        m, nbytes = artifact.manifest, artifact.nbytes
    return {
        "artifact": str(path),
        "bytes": nbytes,
        "format_version": m.version,
        "parameters": parameters(m),
        "decoder": asdict(m.decoder),
        "formats": dict(m.formats),
        "bytes_by_part": bytes_by_part(m, nbytes),
        "layers": [asdict(layer) for layer in m.layers],
        "profiled_tokens": m.profiled_tokens,
        "plans": [_plan(m, n) for n in range(len(m.plans))],
        "chat_template": "chat_template.jinja" in m.files,
        "generation": dict(m.generation),
        "recipe": dict(m.recipe),
        "provenance": dict(m.provenance),
    }


def parameters(m: Manifest) -> int:
    """Weights of the model itself: neither predictors, nor scales, nor order and counts of the neurons."""
    ours = (name for name in m.arrays if "/predictor/" not in name and not is_scales(name))
    return sum(math.prod(m.arrays[name].shape) for name in ours if not name.endswith(("/order", "/counts")))


def bytes_by_part(m: Manifest, nbytes: int) -> dict[str, int]:
    """Stored bytes of embedding, attention, ffn, predictor and head: norms, scales and row padding included. `other` is
    the rest of the file: tokenizer, manifest, headers."""
    totals: Counter[str] = Counter()
    for array, entry in m.arrays.items():
        name = without_scales(array)
        part = name.split("/")[2] if name.startswith("layers/") else name.split("/")[0]
        totals[{"positions": "embedding", "final_norm": "head"}.get(part, part)] += entry.nbytes
    parts = {part: totals[part] for part in ("embedding", "attention", "ffn", "predictor", "head") if totals[part]}
    return {**parts, "other": nbytes - sum(parts.values())}


def _plan(m: Manifest, number: int) -> dict[str, Any]:
    plan = m.plans[number]
    share = sum(plan.cuts) / (m.decoder.neurons * m.decoder.n_layers)
    experts = [cut / m.decoder.d_ff for cut in plan.cuts] if m.decoder.n_experts > 1 else []
    return {
        "objective": plan.objective,
        "vram_bytes": plan.vram_bytes,
        "used_bytes": plan.used_bytes,
        "gpu_neuron_share": share,
        **({"gpu_expert_share": [min(experts), max(experts)]} if experts else {}),
    }


def describe(report: Mapping[str, Any]) -> str:
    """The report of `inspect` as lines to read."""
    return "\n".join(f"{title:{_INDENT}}{_printable(text)}".rstrip() for title, text in _lines(report))


def _printable(text: str) -> str:
    """An artifact may come from anyone: names in it shall not steer the terminal."""
    return "".join(c if c.isprintable() else "�" for c in text)


def _lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "artifact", f"{report['artifact']}, {size(report['bytes'])}, format version {report['format_version']}"
    yield from _model_lines(report["decoder"], report["parameters"])
    yield from _storage_lines(report)
    yield "layers", _rungs(report["layers"])
    tokens = report["profiled_tokens"]
    yield "profile", f"neurons ordered by their counts over {tokens:,} tokens" if tokens else "none"
    yield from _plan_lines(report["plans"])
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
    counts = Counter(layer["rung"] for layer in layers)
    text = ", ".join(f"{counts[rung]} {rung}" for rung in RUNGS if counts[rung])
    ranks = sorted(layer["rank"] for layer in layers if layer["rank"] is not None)
    return f"{text}; predictor ranks {ranks[0]} to {ranks[-1]}" if ranks else text


def _plan_lines(plans: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    if not plans:
        yield "plans", "none: runs on the CPU alone"
    for number, plan in enumerate(plans):
        used = f"{size(plan['used_bytes']):>10} used of {size(plan['vram_bytes']):>10}"
        low, high = plan.get("gpu_expert_share", (0, 0))
        experts = f" ({low:.0%} to {high:.0%} of an expert's)" if high else ""
        shares = f"{plan['gpu_neuron_share']:6.1%} of neurons{experts}"
        yield "plans" if not number else "", f"{used}, {shares}, {plan['objective']}"


def _origin_lines(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of the free-form provenance what `pack` writes."""
    checkpoint = provenance.get("checkpoint")
    files = checkpoint.get("files") if isinstance(checkpoint, dict) else None
    if "pi_toolchain" in provenance:
        yield "made by", f"pi-toolchain {provenance['pi_toolchain']}"
    for number, (name, digest) in enumerate(files.items() if isinstance(files, dict) else ()):
        yield "made from" if not number else "", f"{str(digest)[:16]}  {name}"


def _count(number: int) -> str:
    """6738415616 → `6.7 B`."""
    for unit, scale in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return str(number)
