"""What an artifact holds, as plain values to print."""

from collections import Counter
from pathlib import Path
from typing import Any

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Manifest


def inspect(path: Path) -> dict[str, Any]:
    """Model, formats, bytes by part, rungs, plans and origin of an artifact. Reads the manifest only."""
    with Artifact.open(path) as artifact:
        m, d = artifact.manifest, artifact.manifest.decoder
        return {
            "artifact": str(path),
            "bytes": path.stat().st_size,
            "format_version": m.version,
            "family": d.family,
            "decoder": {
                "layers": d.n_layers,
                "d_model": d.d_model,
                "d_ff": d.d_ff,
                "heads": f"{d.n_heads} × {d.head_dim}, {d.n_kv_heads} for keys and values",
                "vocabulary": d.vocab_size,
                "context": d.context_length,
                "ffn": f"{d.ffn}, {d.activation}",
                "head": "tied to the embedding" if d.tied_head else "own",
            },
            "formats": dict(m.formats),
            "bytes_by_part": bytes_by_part(m),
            "rungs": dict(Counter(layer.rung for layer in m.layers)),
            "profiled_tokens": m.profiled_tokens,
            "plans": [
                {"objective": p.objective, "vram_bytes": p.vram_bytes, "used_bytes": p.used_bytes} for p in m.plans
            ],
            "chat_template": "chat_template.jinja" in m.files,
            "provenance": dict(m.provenance),
        }


def bytes_by_part(m: Manifest) -> dict[str, int]:
    """Stored bytes of embedding, attention, ffn, predictor, head and norms together, padding included."""
    totals: Counter[str] = Counter()
    for name, entry in m.arrays.items():
        part = name.split("/")[2] if name.startswith("layers/") else name.split("/")[0]
        totals[{"positions": "embedding", "final_norm": "head"}.get(part, part)] += entry.nbytes
    return dict(totals)
