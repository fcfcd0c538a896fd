"""Results of stages as plain values, rows and columns."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pi_compile.cost_model import CPU, PICO, Workload, costs_of, processors_of, token_time
from pi_compile.machine import Machine
from pi_compile.placement import Placement
from pi_compile.results import WINDOWS, ActivationProfile, LayerWork, PredictorSet
from pi_runtime.artifact.inspection import other_bytes
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rungs import DENSE
from pi_runtime.artifact.schema import Manifest
from pi_runtime.artifact.sizes import BY_NEURON, PARTS, FfnBytes, part_of, scales_name

if TYPE_CHECKING:
    from pi_compile.packing import PackResult


def profile_report(p: ActivationProfile) -> dict[str, Any]:
    """Tokens, and for each layer its density and the share of activations that the hottest fifth of its neurons has.

    Also the shares of activations of neurons that fired in the last 1, 2, 4, 8 tokens; and with experts the shares of
    the tokens that are routed to the busiest and to the idlest expert.
    """
    curve = p.cumulative_curve()
    layers = [
        {
            "layer": n,
            "density": float(density),
            "top_20_share": float(curve[n, 20]),
            "neurons_for_80_percent": float(np.argmax(curve[n] >= 0.8) / 100),
            **_routing(p, n),
            **_persistence(p, n),
        }
        for n, density in enumerate(p.density())
    ]
    return {"tokens": p.tokens, "layers": layers}


def _routing(p: ActivationProfile, layer: int) -> dict[str, float]:
    if p.routed is None:
        return {}
    shares = p.routed[layer] / p.tokens
    return {"busiest_expert": float(shares.max()), "idlest_expert": float(shares.min())}


def _persistence(p: ActivationProfile, layer: int) -> dict[str, float]:
    shares = p.persistent_shares()
    return (
        {} if shares is None else {f"active_in_last_{w}": float(s) for w, s in zip(WINDOWS, shares[layer], strict=True)}
    )


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


def built_line(t: PredictorSet | None, budget: float, artifact: Path) -> str:
    """What was built, in a line: rungs, what a token reads, and what it costs beside what the recipe allows.

    Without a rung that skips, that nothing is gained.
    """
    with closing(Artifact.open(artifact)) as opened:
        m = opened.manifest
    if t is None or all(row.kind.dense for row in t.rows):
        whole = "" if m.ffn_layout == BY_NEURON else ", stored as whole matrices, as fast as a plain pack"
        return f"nothing is gained by skipping here: every layer is dense{whole}; the quality budget is not spent"
    neuron, others = FfnBytes.of(m.decoder, m.formats), other_bytes(m)
    dense = m.decoder.n_layers * m.decoder.experts_per_token * m.decoder.d_ff * (neuron.first + neuron.rest)
    read = sum(row.ffn_bytes for row in t.rows)
    rungs = ", ".join(f"{count} {rung}" for rung, count in Counter(row.rung for row in t.rows).most_common())
    cost = f"perplexity {t.perplexity['increase']:+.2%} (at most {budget:+.2%})"
    return f"{len(t.rows)} layers: {rungs}; {reads_line(read / dense, (others + read) / (others + dense))}; {cost}"


def forecast_line(artifact: Path, profile: ActivationProfile, context: int, machine: Machine) -> str:
    """What a token takes on a machine without a GPU by its profile, and where all FFNs are whole matrices.

    Where the machine's profile says so, also what each token of a prompt takes longer than with these.
    """
    with closing(Artifact.open(artifact)) as opened:
        formats = opened.manifest.formats
    work = Workload.of(profile, formats, context)
    n = work.decoder.n_layers

    def ms(layers: tuple[LayerWork, ...]) -> float:
        costs = costs_of(replace(work, layers=layers), machine)
        return token_time(costs, [CPU] * n, [0] * n, CPU, CPU).total * 1000 / PICO

    own, whole = ms(work.layers), ms((LayerWork(rung=DENSE),) * n)
    neuron, processor = FfnBytes.of(work.decoder, formats), processors_of(machine)[CPU]
    late = sum(processor.prompt_ps(layer, neuron) for layer in work.layers) * 1000 / PICO
    longer = f"; one of a prompt takes {late:.3g} ms longer than there" if late else ""
    return f"by the machine's profile a token takes {own:.3g} ms, and {whole:.3g} ms with whole matrices alone{longer}"


def reads_line(ffn: float, whole: float) -> str:
    """What a token reads: shares of the FFN's bytes of dense, and of all."""
    return f"a token reads {ffn:.0%} of the FFN's bytes of dense, and {whole:.0%} of all"


def place_report(placements: Sequence[Placement]) -> dict[str, Any]:
    """A row for each budget: bytes in both memories, predicted speeds, and what is on the GPU."""
    return {"plans": [_placement(p) for p in placements]}


def _placement(p: Placement) -> dict[str, Any]:
    plan, heuristic = asdict(replace(p.plan, rows=None)), p.heuristic
    digest, predicted, _ = (plan.pop(key) for key in ("digest", "predicted_ns", "rows"))
    from_disk = {"ram_budget": p.ram, "hit_rate": p.hit_rate, "read_bytes": p.read_bytes} if p.rows else {}
    return {
        **plan,
        **from_disk,
        "predicted_tokens_per_s": 1e9 / predicted,
        "gap": p.gap,
        "heuristic_tokens_per_s": None if heuristic is None else 1e9 / heuristic.ns,
        "activations_on_gpu": p.activations_on_gpu,
        "attention_layers_on_gpu": plan["attention"].count("gpu"),
        "smallest_cut": min(plan["cuts"]),
        "largest_cut": max(plan["cuts"]),
        "gpu_bytes_by_part": p.gpu_by_part,
        "ram_bytes_by_part": p.ram_by_part,
        "digest": digest,
    }


def _formats(m: Manifest, part: str) -> list[str]:
    """The block formats of a part's matrices, that of most bytes first."""
    nbytes: Counter[str] = Counter()
    for name, entry in m.arrays.items():
        if part_of(name) == part and scales_name(name) in m.arrays:
            nbytes[entry.format] += entry.nbytes
    return [fmt for fmt, _ in nbytes.most_common()]


def pack_report(result: "PackResult") -> dict[str, Any]:
    """Path, bytes and digest of the artifact, and the errors of parts that were quantised."""
    report: dict[str, Any] = {"artifact": str(result.path), "bytes": result.nbytes, "sha256": result.sha256}
    rows = [
        {
            "part": part,
            "format": " and ".join(_formats(result.manifest, part)),
            "relative_rms_error": result.errors[part].relative,
            "largest_error": result.errors[part].largest,
        }
        for part in PARTS
        if part in result.errors
    ]
    return {**report, "quantisation": rows} if rows else report
