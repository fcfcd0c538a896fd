"""Plan: what a machine would do with a model, from its config alone. No weights, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from pi_compile.cost_model.default_rungs import untrained_layers
from pi_compile.cost_model.processors import GPU, PICO
from pi_compile.cost_model.workload import Ints, LayerWork, Workload
from pi_compile.errors import ProfileError
from pi_compile.machine.profile import Machine
from pi_compile.placement.activation_file import Activations
from pi_compile.placement.stage import Placement, place
from pi_compile.planning.activation_curves import TOKENS, curve_counts, find_curve
from pi_compile.planning.baselines import layer_split
from pi_compile.planning.model_config import PlannedModel
from pi_compile.planning.prefill_time import prefill_tokens_per_s
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.sizes import parameters
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
    """An activation file of this model; where it has the table of training, rungs and ranks are the table's."""
    objective: str = "time"
    """What the placement is best at; see `placement.place`."""


@dataclass(frozen=True, kw_only=True)
class Firing:
    """How often each neuron fires, hottest first."""

    counts: Ints
    tokens: int
    source: str
    layers: tuple[LayerWork, ...] = ()
    """Rungs and ranks as trained; () where nothing was."""
    routed: Ints | None = None
    """As `Workload` has it."""


def plan(spec: PlanSpec) -> dict[str, Any]:
    """The placement of least time, and what it gives, at the budget and around it.

    Raises DoesNotFitError where it does not fit at the budget, UsageError or ProfileError where it is not known how
    the model fires.
    """
    shape, firing = spec.model.shape, firing_of(spec)
    work = workload_of(spec, firing)
    rungs = {layer.rung for layer in work.layers}
    return {
        "model": spec.model.name,
        "parameters": parameters(shape),
        "neurons": shape.neurons,
        "machine": spec.machine.name,
        "formats": dict(spec.formats),
        "context": spec.context,
        "activation": firing.source,
        "experts": shape.n_experts,
        "density": round(float(firing.counts.mean() / work.routed_part(firing.tokens)), 4),
        "rung": ", ".join(rung for rung in RUNGS if rung in rungs),
        "predictor_rank": max((layer.rank or 0 for layer in work.layers), default=0) or None,
        "trained": bool(firing.layers),
        "budgets": [_outlook(spec, work, percent) for percent in AROUND],
    }


def workload_of(spec: PlanSpec, firing: Firing) -> Workload:
    """What is to be placed; rungs and ranks by rule where they are not trained."""
    return Workload(
        shape=spec.model.shape,
        formats=spec.formats,
        tokens=firing.tokens,
        counts=firing.counts,
        routed=firing.routed,
        layers=firing.layers or untrained_layers(spec.model.shape),
        context=spec.context,
    )


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
            remedy="plain ReLU FFN: --curve opt-30b --density 0.03; gated: --curve reglu-70b --density 0.2; "
            "of a recipe that is built: pi-compile train RECIPE --export PROFILE",
        )
    counts = curve_counts(curve, shape, density).astype(np.int64)
    return Firing(counts=counts, tokens=TOKENS, source=f"curve {curve.name}, density {density} ({why})")


def _profiled(path: Path, shape: Decoder) -> Firing:
    found = Activations.load(path)
    expected = (shape.n_layers, shape.neurons)
    if found.counts.shape != expected:
        raise ProfileError(f"{path}: of another model", expected=expected, found=found.counts.shape)
    return Firing(
        counts=found.ordered_counts(),
        tokens=found.tokens,
        routed=found.routed,
        source=f"counts of {found.tokens} tokens in {path.name}",
        layers=found.layers(),
    )


def _outlook(spec: PlanSpec, work: Workload, percent: int) -> dict[str, Any]:
    """What one budget gives. Where the machine has no GPU the budget that varies is RAM."""
    vram, ram = (spec.vram * (100 + percent) // 100, spec.ram) if spec.vram else (0, spec.ram * (100 + percent) // 100)
    found: dict[str, Any] = {"percent": percent, "vram_bytes": vram, "ram_bytes": ram}
    try:
        placement = place(work, spec.machine, vram, ram, objective=spec.objective)
    except DoesNotFitError as error:
        if percent == 0:
            raise
        return {**found, "fits": False, "why": error.what}
    return {**found, "fits": True, **_placed(spec, work, placement, vram)}


def _placed(spec: PlanSpec, work: Workload, placement: Placement, vram: int) -> dict[str, Any]:
    choice, time = placement.choice, placement.time
    return {
        "ram": placement.ram_bytes,
        "gpu": placement.gpu_bytes,
        "attention_layers_on_gpu": choice.sides.count(GPU),
        "cuts": list(choice.cuts),
        "expert_cuts": list(placement.cuts),
        "activations_on_gpu": round(placement.hot_share, 4),
        "decode_tokens_per_s": PICO / time.total,
        "prefill_tokens_per_s": prefill_tokens_per_s(work, spec.machine, choice),
        "milliseconds": {part: ps / 1e9 for part, ps in time.parts.items()},
        "layer_split_tokens_per_s": layer_split(work, spec.machine, vram).tokens_per_s,
    }
