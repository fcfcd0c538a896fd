"""The contents of an artifact, as plain values."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Manifest
from pi_runtime.artifact.sizes import parameters, without_scales


def inspect(path: Path) -> dict[str, Any]:
    """Describe an artifact: model, formats, bytes by part, rungs, plans, origin. Reads the manifest only."""
    with Artifact.open(path) as artifact:
        m, nbytes = artifact.manifest, artifact.nbytes
    return {
        "artifact": str(path),
        "bytes": nbytes,
        "format_version": m.version,
        "parameters": parameters(m.decoder),
        "decoder": asdict(m.decoder),
        "formats": dict(m.formats),
        "bytes_by_part": bytes_by_part(m, nbytes),
        "layers": [asdict(layer) for layer in m.layers],
        "profiled_tokens": m.profiled_tokens,
        "plans": [_plan(m, n) for n in range(len(m.plans))],
        "row_plans": [asdict(plan) for plan in m.row_plans],
        "chat_template": "chat_template.jinja" in m.files,
        "generation": dict(m.generation),
        "recipe": dict(m.recipe),
        "provenance": dict(m.provenance),
    }


def bytes_by_part(m: Manifest, nbytes: int) -> dict[str, int]:
    """Stored bytes of embedding, attention, ffn, predictor and head, with norms, scales and row padding.

    `other` is the rest of the file: tokenizer, manifest, headers.
    """
    totals: Counter[str] = Counter()
    for array, entry in m.arrays.items():
        name = without_scales(array)
        part = name.split("/")[2] if name.startswith("layers/") else name.split("/")[0]
        totals[{"positions": "embedding", "embedding_norm": "embedding", "final_norm": "head"}.get(part, part)] += (
            entry.nbytes
        )
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


def other_bytes(m: Manifest) -> int:
    """Bytes per token of everything except FFN neurons: attention, norms, head and scales.

    The one row of an untied embedding that a token reads is not counted.
    """
    skipped = ("ffn/first", "ffn/rest", "ffn/up", "ffn/down", "ffn/order", "ffn/counts", "positions")
    total = 0
    for array, entry in m.arrays.items():
        name = without_scales(array)
        local = name.split("/", 2)[-1]
        if name == "embedding" and not m.decoder.tied_head:
            continue
        if local not in skipped and not local.startswith("predictor/"):
            total += entry.nbytes
    return total
