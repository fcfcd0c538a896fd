"""Plan: what a machine would do with a model, from its config alone. No weights, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from pi_compile.activation_file import Activations
from pi_compile.curves import TOKENS, curve_counts, find_curve
from pi_compile.errors import ProfileError
from pi_compile.machine_file import Machine
from pi_compile.placement import Placement, place
from pi_compile.planned_model import PlannedModel
from pi_compile.prefill import prefill_tokens_per_s
from pi_compile.rivals import layer_split
from pi_compile.shapes import ModelShape, parameters
from pi_compile.units import GPU, PICO
from pi_compile.untrained import untrained_layers
from pi_compile.workload import Ints, Workload
from pi_runtime.errors import DoesNotFitError, UsageError

AROUND = (-25, 0, 25)
"""Budgets that are looked at, in percent more than what is asked for."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """What is planned."""

    model: PlannedModel
    machine: Machine
    formats: Mapping[str, str]
    context: int
    vram: int
    """Bytes of GPU memory that may be used; 0 on a machine without a GPU."""
    ram: int
    curve: str | None = None
    """Name of a published curve; with `density`. Neither it nor counts: the model's published activation."""
    density: Decimal | None = None
    counts: Path | None = None
    """An activation file of this model."""


@dataclass(frozen=True, kw_only=True)
class Firing:
    """How often each neuron fires, hottest first."""

    counts: Ints
    tokens: int
    source: str


def plan(spec: PlanSpec) -> dict[str, Any]:
    """The placement of least time, and what it gives, at the budget and around it.

    Raises DoesNotFitError where it does not fit at the budget, UsageError or ProfileError where it is not known how
    the model fires.
    """
    shape, firing = spec.model.shape, firing_of(spec)
    work = Workload(
        shape=shape,
        formats=spec.formats,
        tokens=firing.tokens,
        counts=firing.counts,
        layers=untrained_layers(shape),
        context=spec.context,
    )
    return {
        "model": spec.model.name,
        "parameters": parameters(shape),
        "neurons": shape.neurons,
        "machine": spec.machine.name,
        "formats": dict(spec.formats),
        "context": spec.context,
        "activation": firing.source,
        "density": round(float(firing.counts.mean() / firing.tokens), 4),
        "rung": work.layers[0].rung,
        "predictor_rank": work.layers[0].rank,
        "budgets": [_outlook(spec, work, percent) for percent in AROUND],
    }


def firing_of(spec: PlanSpec) -> Firing:
    """Counts from a profile, from the curve that is named, or from what is published of the model."""
    shape, published = spec.model.shape, spec.model.activation
    if spec.counts is not None:
        return _profiled(spec.counts, shape)
    if (spec.curve is None) != (spec.density is None):
        raise UsageError("--curve and --density go together", expected="both, or neither")
    if not shape.sparse:
        every = np.full((shape.n_layers, shape.neurons), TOKENS * shape.experts_per_token // shape.n_experts, np.int64)
        return Firing(counts=every, tokens=TOKENS, source=f"{shape.activation}: no neuron is ever exactly zero")
    if spec.curve is not None and spec.density is not None:
        curve, density, why = find_curve(spec.curve), spec.density, "as given"
    elif published is not None:
        curve, density, why = find_curve(published.curve), published.density, published.source
    else:
        raise UsageError(
            f"{spec.model.name}: nothing is known of how its neurons fire",
            expected="--counts PROFILE, or --curve NAME with --density SHARE",
            remedy="plain ReLU FFN: --curve opt-30b --density 0.03; gated: --curve reglu-70b --density 0.2",
        )
    counts = curve_counts(curve, shape, density).astype(np.int64)
    return Firing(counts=counts, tokens=TOKENS, source=f"curve {curve.name}, density {density} ({why})")


def _profiled(path: Path, shape: ModelShape) -> Firing:
    found = Activations.load(path)
    expected = (shape.n_layers, shape.neurons)
    if found.counts.shape != expected:
        raise ProfileError(f"{path}: of another model", expected=expected, found=found.counts.shape)
    return Firing(
        counts=found.ordered_counts(),
        tokens=found.tokens,
        source=f"counts of {found.tokens} tokens in {path.name}",
    )


def _outlook(spec: PlanSpec, work: Workload, percent: int) -> dict[str, Any]:
    """What one budget gives. Where the machine has no GPU the budget that varies is RAM."""
    vram, ram = (spec.vram * (100 + percent) // 100, spec.ram) if spec.vram else (0, spec.ram * (100 + percent) // 100)
    found: dict[str, Any] = {"percent": percent, "vram_bytes": vram, "ram_bytes": ram}
    try:
        placement = place(work, spec.machine, vram, ram)
    except DoesNotFitError as error:
        if percent == 0:
            raise
        return {**found, "fits": False, "why": error.what}
    return {**found, "fits": True, **_placed(spec, work, placement, vram)}


def _placed(spec: PlanSpec, work: Workload, placement: Placement, vram: int) -> dict[str, Any]:
    choice, time = placement.choice, placement.time
    hot = sum(int(counts[:cut].sum()) for counts, cut in zip(work.counts, choice.cuts, strict=True))
    return {
        "ram": placement.ram_bytes,
        "gpu": placement.gpu_bytes,
        "attention_layers_on_gpu": choice.sides.count(GPU),
        "cuts": list(choice.cuts),
        "activations_on_gpu": round(hot / max(int(work.counts.sum()), 1), 4),
        "decode_tokens_per_s": PICO / time.total,
        "prefill_tokens_per_s": prefill_tokens_per_s(work, spec.machine, choice),
        "milliseconds": {
            "attention": sum(layer.attention for layer in time.layers) / 1e9,
            "predictor": sum(layer.predictor for layer in time.layers) / 1e9,
            "ffn": sum(max(layer.gpu, layer.cpu) for layer in time.layers) / 1e9,
            "hand-over": sum(layer.handover + layer.crossing for layer in time.layers) / 1e9,
            "embedding and head": (time.embedding + time.head) / 1e9,
        },
        "layer_split_tokens_per_s": layer_split(work, spec.machine, vram).tokens_per_s,
    }
