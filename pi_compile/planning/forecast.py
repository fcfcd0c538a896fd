"""Plan: how a machine would run a model, from the model's config alone. No weights, no torch.

A prompt is read dense, in blocks of tokens, each part on the processor that holds it. For a block of T tokens a part
takes the longer of reading its weights once and computing with them,

    max( bytes ÷ rate ,  2 T · weights ÷ operations a second )

and the two sides of an FFN overlap as in decoding. A processor without a rate of operations is taken to be bound by
memory. Rows on disk are read once for a block, in large reads, while others are computed; such a run has larger blocks
where its budget has room for them. Hand-overs carry T residuals. The head is left out, because it is computed for the
last token only. Keys and values are left out, because they are few.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pi_compile.cost_model import CPU, GPU, PICO, RowChoice, Workload, interconnect_of
from pi_compile.errors import ProfileError
from pi_compile.machine import Machine, to_units
from pi_compile.placement import Assignment, Placement, Problem, all_cpu, place, ram_ladder
from pi_compile.placement.three_tiers import ThreeTiers
from pi_compile.planning.activation_curves import TOKENS, curve_counts, find_curve
from pi_compile.planning.baselines import Baselines
from pi_compile.planning.model_config import PlannedModel
from pi_compile.results import ActivationProfile, Counts
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.features import lacking
from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.artifact.rows import PROCESS_NBYTES
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.sizes import active_parameters, array_specs, parameters
from pi_runtime.errors import DoesNotFitError, Setting, UsageError

AROUND = (-25, 0, 25)
"""Budgets that are forecast, in percent above the one that is asked for."""
GIB = 2**30
MORE_RAM = 8 * GIB
"""What more of RAM a plan says the gain of."""


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """What to plan: a model, a machine, budgets, and what is known of the activations."""

    model: PlannedModel
    machine: Machine
    formats: Mapping[str, str]
    context: int
    vram: int
    """Bytes of GPU memory that may be used; 0 on a machine without a GPU."""
    ram: int
    curve: str | None = None
    """Name of a published curve; goes with `density`. Without both, and without `counts`, the model's own is taken."""
    density: Decimal | None = None
    counts: Path | None = None
    """An activation profile of this model. If it was trained, rungs and ranks are its own."""
    built: ActivationProfile | None = None
    """What a build measured of this model; taken where nothing else is given."""
    objective: str = "time"
    """What the placement optimises; see `placement.stage`."""

    @property
    def without_gpu(self) -> list[str]:
        """What the model does that the GPU tier does not compute: the machine's GPU is left out then."""
        return lacking(self.model.decoder, "gpu", self.formats) if self.machine.gpu is not None else []


def plan(spec: PlanSpec) -> dict[str, Any]:
    """The best placement at the budget and at those around it, with predicted speeds.

    Raises DoesNotFitError where the model does not fit at the budget, UsageError or ProfileError where nothing is known
    of how its neurons fire.
    """
    without_gpu, spec = spec.without_gpu, on_usable_machine(spec)
    decoder, activation = spec.model.decoder, activation_profile(spec)
    problem = problem_of(spec, activation)
    work, baselines = problem.work, Baselines(problem.work, spec.machine)
    rungs = {layer.rung for layer in work.layers}
    return {
        "model": spec.model.name,
        "parameters": parameters(decoder),
        "active_parameters": active_parameters(decoder),
        "neurons": decoder.neurons,
        "machine": spec.machine.name,
        "machine_source": spec.machine.source,
        "formats": dict(spec.formats),
        "context": spec.context,
        **firing(activation, work),
        "rung": ", ".join(rung for rung in RUNGS if rung in rungs),
        "predictor_rank": max((layer.rank or 0 for layer in work.layers), default=0) or None,
        "trained": bool(activation.layers),
        "gpu_lacks": without_gpu,
        "budgets": [_budget(spec, problem, baselines, percent) for percent in AROUND],
        "more_ram": _more_ram(spec, problem),
        "disk": None if spec.machine.disk is None else spec.machine.disk.name,
        "ram_budgets": [_ram_budget(problem, placement) for placement in ram_budgets(problem, spec.ram)],
    }


def firing(activation: ActivationProfile, work: Workload) -> dict[str, Any]:
    """How the neurons fire, and where that is known from."""
    density = float(activation.counts.mean() / work.of_routed_experts(activation.tokens))
    return {"activation": activation.source, "experts": activation.decoder.n_experts, "density": round(density, 4)}


def on_usable_machine(spec: PlanSpec) -> PlanSpec:
    """The spec without a GPU where the GPU tier does not run the model."""
    if not spec.without_gpu:
        return spec
    return replace(spec, machine=spec.machine.model_copy(update={"gpu": None, "link": None}), vram=0)


def _more_ram(spec: PlanSpec, problem: Problem) -> dict[str, Any]:
    """What `MORE_RAM` bytes more would give at the same GPU budget."""
    ram = spec.ram + MORE_RAM
    placement = place(problem, spec.vram, ram, objective=spec.objective)
    return {"ram_bytes": ram, "decode_tokens_per_s": PICO / placement.time.total}


def problem_of(spec: PlanSpec, activation: ActivationProfile) -> Problem:
    """What is placed: the model with these activations, on the machine."""
    return Problem.of(Workload.of(activation, spec.formats, spec.context), spec.machine)


def ram_budgets(problem: Problem, asked: int) -> tuple[Placement, ...]:
    """Placements on the CPU for a ladder of RAM budgets and the one `asked` for, with all in memory as the last one.

    () for a machine without a disk.
    """
    if problem.rows is None:
        return ()
    _, everything = problem.used(all_cpu(problem.work.decoder.n_layers))
    everything += PROCESS_NBYTES
    found = [p for p in ram_ladder(problem, everything) if p.ram < everything]
    if found and found[0].ram < asked < everything:
        found.append(place(problem, 0, asked))
    return (*sorted(found, key=lambda p: p.ram), place(problem, 0, everything))


def _ram_budget(problem: Problem, placement: Placement) -> dict[str, Any]:
    found = {"ram_bytes": placement.ram, "decode_tokens_per_s": PICO / placement.time.total}
    return {**found, **_from_disk(problem, placement)}


def _from_disk(problem: Problem, placement: Placement) -> dict[str, Any]:
    """How the rows of the CPU's neurons are divided, and what is predicted of it."""
    d, assignment = problem.work.decoder, placement.assignment
    neurons = d.n_layers * d.neurons - sum(assignment.cuts)
    pinned, cached = (sum(getattr(row, name) for row in placement.rows) for name in ("pinned", "cached"))
    return {
        "pinned_share": pinned / max(neurons, 1) if placement.rows else 1.0,
        "cached_share": cached / max(neurons, 1),
        "first_in_ram_layers": sum(row.first for row in placement.rows),
        "hit_rate": placement.hit_rate,
        "read_bytes": placement.read_bytes,
    }


def activation_profile(spec: PlanSpec) -> ActivationProfile:
    """The profile from a file, from the curve that is named, or from what is published of the model."""
    if spec.counts is not None:
        return _of_model(ActivationProfile.load(spec.counts), str(spec.counts), spec.model.decoder)
    if (spec.curve is None) != (spec.density is None):
        raise UsageError((Setting("curve"), " and ", Setting("density"), " go together"), expected="both, or neither")
    if spec.curve is None and spec.built is not None:
        return _of_model(spec.built, spec.built.source, spec.model.decoder)
    if spec.curve is None or spec.density is None or not spec.model.decoder.sparse:
        return published_profile(spec.model)
    return _from_curve(spec.model.decoder, spec.curve, spec.density, "as given")


def published_profile(model: PlannedModel) -> ActivationProfile:
    """What is published of the model; without zeros in its activation every neuron fires for each token."""
    decoder, published = model.decoder, model.activation
    if not decoder.sparse:
        return profile_of_dense(decoder)
    if published is None:
        raise UsageError(
            f"{model.name}: nothing is known of how its neurons fire",
            expected=(
                *(Setting("counts", "PROFILE"), ", or "),
                *(Setting("curve", "NAME"), " with ", Setting("density", "SHARE")),
            ),
            remedy=(
                *("plain ReLU FFN: ", Setting("curve", "opt-30b"), " ", Setting("density", 0.03)),
                *("; gated: ", Setting("curve", "reglu-70b"), " ", Setting("density", 0.2)),
                "; or measured: pi-compile profile RECIPE, then plan RECIPE",
            ),
        )
    return _from_curve(decoder, published.curve, published.density, published.source)


def profile_of_dense(decoder: Decoder) -> ActivationProfile:
    """What is known of a model without zeros: every neuron fires, all experts are taken equally often."""
    routed = TOKENS * decoder.experts_per_token // decoder.n_experts
    counts = np.full((decoder.n_layers, decoder.neurons), routed, np.uint64)
    return _synthetic(decoder, counts, f"{decoder.activation}: no neuron is ever exactly zero")


def _from_curve(decoder: Decoder, name: str, density: Decimal, origin: str) -> ActivationProfile:
    curve = find_curve(name)
    source = f"curve {curve.name}, density {density} ({origin})"
    return _synthetic(decoder, curve_counts(curve, decoder, density), source)


def _synthetic(decoder: Decoder, counts: Counts, source: str) -> ActivationProfile:
    """A profile of counts that are in stored order already."""
    order = np.broadcast_to(np.arange(decoder.neurons, dtype=np.uint32), counts.shape)
    return ActivationProfile(decoder=decoder, tokens=TOKENS, counts=counts, order=order, source=source)


def _of_model(found: ActivationProfile, where: str, decoder: Decoder) -> ActivationProfile:
    expected = (decoder.n_layers, decoder.neurons)
    if found.counts.shape != expected:
        raise ProfileError(f"{where}: of another model", expected=expected, found=found.counts.shape)
    return replace(found, decoder=decoder)


def _budget(spec: PlanSpec, problem: Problem, baselines: Baselines, percent: int) -> dict[str, Any]:
    """The forecast for one budget. On a machine without a GPU the budget that varies is RAM."""
    vram, ram = (spec.vram * (100 + percent) // 100, spec.ram) if spec.vram else (0, spec.ram * (100 + percent) // 100)
    found: dict[str, Any] = {"percent": percent, "vram_bytes": vram, "ram_bytes": ram}
    try:
        placement = place(problem, vram, ram, objective=spec.objective)
    except DoesNotFitError as error:
        if percent == 0:
            raise
        return {**found, "fits": False, "why": error.what}
    split = baselines.layer_split(vram)
    fits = split.ram_bytes + PROCESS_NBYTES <= ram  # whole layers are not read from disk
    rate = split.tokens_per_s if fits else None
    return {**found, "fits": True, **_placed(problem, placement), "layer_split_tokens_per_s": rate}


def _placed(problem: Problem, placement: Placement) -> dict[str, Any]:
    assignment, time = placement.assignment, placement.time
    return {
        "ram_bytes_by_part": placement.ram_by_part,
        "gpu_bytes_by_part": placement.gpu_by_part,
        "attention_layers_on_gpu": assignment.sides.count(GPU),
        "cuts": list(assignment.cuts),
        "expert_cuts": list(placement.expert_cuts),
        "activations_on_gpu": round(placement.activations_on_gpu, 4),
        "decode_tokens_per_s": PICO / time.total,
        "prefill_tokens_per_s": prefill_tokens_per_s(problem, placement),
        "milliseconds": {part: ps / 1e9 for part, ps in time.parts.items()},
        **(_from_disk(problem, placement) if placement.rows else {}),
    }


def compare(specs: Sequence[PlanSpec]) -> dict[str, Any]:
    """The plan of each machine; where the model does not fit, the budget and the reason.

    Raises what `plan` does, DoesNotFitError only where the model fits no machine.
    """
    found: list[dict[str, Any]] = []
    for spec in specs:
        try:
            found.append({"fits": True, **plan(spec)})
        except DoesNotFitError as error:
            if spec is specs[-1] and not any(one["fits"] for one in found):
                raise
            budgets = {"vram_bytes": spec.vram, "ram_bytes": spec.ram}
            found.append({"machine": spec.machine.name, "fits": False, **budgets, "why": error.what})
    return {"machines": found}


def prefill_tokens_per_s(problem: Problem, p: Placement) -> float:
    """Tokens a second of a long prompt with this placement."""
    tokens = BLOCK_TOKENS
    if p.rows and problem.rows is not None:
        tokens = ThreeTiers(problem, problem.rows, p.vram).block_tokens(p.ram - PROCESS_NBYTES)
    return tokens / (block_ps(problem, p.assignment, tokens, p.rows) / PICO)


def block_ps(problem: Problem, a: Assignment, tokens: int, rows: Sequence[RowChoice] = ()) -> int:
    """Picoseconds of one block of tokens through all layers."""
    work, machine, processors = problem.work, problem.machine, problem.costs.processors
    interconnect, parts = interconnect_of(machine), work.parts
    sections = (machine.cpu, machine.gpu)
    operations = [to_units(s.products_gflop_per_s, 10**9) if s and s.products_gflop_per_s else None for s in sections]
    weights = _weights(work)

    def part_ps(side: int, nbytes: int, count: int, part: str) -> int:
        rate = operations[side]
        computing = -(-2 * tokens * count * PICO // rate) if rate else 0
        return processors[side].launch_ps + max(processors[side].ps(nbytes, work.formats[part]), computing)

    handover = interconnect.ps(4 * work.decoder.d_model * tokens) if interconnect else 0
    total, before = 0, a.embedding
    for n, (side, cut) in enumerate(zip(a.sides, a.cuts, strict=True)):
        neurons = 0 if n in work.decoder.mixer_only_layers else work.decoder.neurons
        cold = neurons - cut
        attention = part_ps(side, parts.attention, weights["attention"], "attention")
        hot_ps = part_ps(GPU, cut * parts.neuron, work.of_routed_experts(cut * weights["neuron"]), "ffn") if cut else 0
        cold_ps = (
            part_ps(CPU, cold * parts.neuron, work.of_routed_experts(cold * weights["neuron"]), "ffn") if cold else 0
        )
        if rows and problem.rows is not None:
            cold_ps = max(cold_ps, problem.rows.reads.range_ps(problem.rows.on_disk(n, cold, rows[n])))
        split = cut != (0 if side == CPU else neurons)
        total += attention + max(hot_ps, cold_ps) + (2 * handover if split else 0) + (handover if side != before else 0)
        before = side
    return total


def _weights(work: Workload) -> dict[str, int]:
    """Number of weights in one layer's attention, the mean where layers differ, and in one neuron."""
    d = work.decoder
    specs = array_specs(d, work.formats, [None] * d.n_layers, profiled=False)
    attention = sum(prod(s.shape) for name, s in specs.items() if name.endswith(("attention/qkv", "attention/out")))
    return {"attention": attention // d.n_layers, "neuron": d.neuron_width * (3 if d.ffn == "gated" else 2)}
