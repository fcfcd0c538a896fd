"""Everything the report shows: a placement, its time and bytes, and what other budgets and rules would give."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pi_compile.cost_model import CPU, GPU, PICO, Workload
from pi_compile.placement import LADDER, Placement, Problem, place
from pi_compile.planning import (
    AROUND,
    Baselines,
    PlanSpec,
    activation_profile,
    on_usable_machine,
    prefill_tokens_per_s,
    problem_of,
    ram_budgets,
)
from pi_runtime.errors import DoesNotFitError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """One pair of budgets, and the predicted speeds of all rules."""

    vram: int
    ram: int
    asked: bool
    """Whether it is the one that is explained."""
    placement: Placement | None
    """None where nothing keeps both budgets."""
    prefill_tokens_per_s: float | None
    layer_split_tokens_per_s: float
    """Speed with whole layers, dense, as llama.cpp places them."""
    powerinfer_tokens_per_s: float
    """Speed by PowerInfer's rule."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One placement, its inputs, and the budgets around it."""

    spec: PlanSpec
    work: Workload
    source: str
    """Where the counts come from, in words."""
    trained: bool
    """Whether rungs and ranks were trained; else they are by rule."""
    curves: Floats
    """(layers, 101) share of a layer's activations that fall on the hottest 0, 1, … 100 % of its neurons."""
    placement: Placement
    budgets: tuple[Budget, ...]
    """By rising GPU memory, or RAM on a machine without a GPU."""
    all_on_gpu: int
    """GPU memory that takes every part."""
    ram_budgets: tuple[Placement, ...]
    """On the CPU alone, by rising RAM, with all in memory at the end; () for a machine without a disk."""

    @property
    def asked(self) -> Budget:
        return next(budget for budget in self.budgets if budget.asked)

    @cached_property
    def densities(self) -> Floats:
        """(layers,) mean share of the neurons that fire for a token."""
        return np.asarray(self.work.counts.mean(1) / self.work.tokens)

    @cached_property
    def activations_on_gpu(self) -> Floats:
        """(layers,) share of a layer's activations that fall on its neurons on the GPU."""
        counts, cuts = self.work.counts, self.placement.assignment.cuts
        return np.array([c[:cut].sum() / max(c.sum(), 1) for c, cut in zip(counts, cuts, strict=True)])


def explain(spec: PlanSpec, progress: Callable[[int, int], None] | None = None) -> Explanation:
    """Place at the budget, 25 % above and below it, on the CPU alone, and at the budgets that an artifact stores.

    Raises what `forecast.plan` raises.
    """
    spec = on_usable_machine(spec)
    activation = activation_profile(spec)
    problem = problem_of(spec, activation)
    work, baselines = problem.work, Baselines(problem.work, spec.machine)
    placement = place(problem, spec.vram, spec.ram, objective=spec.objective)
    all_on_gpu = problem.sizes.all_on_gpu
    pairs = _pairs(spec, all_on_gpu)
    budgets = []
    for done, (vram, ram) in enumerate(pairs):
        asked = (vram, ram) == (spec.vram, spec.ram)
        budgets.append(_budget(problem, baselines, spec.objective, (vram, ram), placement if asked else None))
        if progress is not None:
            progress(done + 1, len(pairs))
    return Explanation(
        spec=spec,
        work=work,
        source=activation.source,
        trained=bool(activation.layers),
        curves=activation.cumulative_curve(),
        placement=placement,
        budgets=tuple(budgets),
        all_on_gpu=all_on_gpu,
        ram_budgets=ram_budgets(problem, spec.ram),
    )


def _pairs(spec: PlanSpec, all_on_gpu: int) -> list[tuple[int, int]]:
    """The (GPU, RAM) budgets to place for. On a machine without a GPU the budget that varies is RAM."""
    if not spec.vram:
        return [(0, spec.ram * (100 + percent) // 100) for percent in AROUND]
    around = [spec.vram * (100 + percent) // 100 for percent in AROUND]
    ladder = [all_on_gpu * percent // 100 for percent in (0, *LADDER)]
    # Nearly equal budgets would only confuse.
    ladder = [vram for vram in ladder if all(vram == other or abs(vram - other) > vram // 50 for other in around)]
    return [(vram, spec.ram) for vram in sorted({*ladder, *around})]


def _budget(
    problem: Problem, baselines: Baselines, objective: str, budgets: tuple[int, int], asked: Placement | None
) -> Budget:
    (vram, ram), placement, prefill = budgets, asked, None
    if placement is None:
        try:
            placement = place(problem, vram, ram, objective=objective)
        except DoesNotFitError:
            placement = None
    if placement is not None:
        prefill = prefill_tokens_per_s(problem, placement)
    return Budget(
        vram=vram,
        ram=ram,
        asked=asked is not None,
        placement=placement,
        prefill_tokens_per_s=prefill,
        layer_split_tokens_per_s=baselines.layer_split(vram).tokens_per_s,
        powerinfer_tokens_per_s=baselines.powerinfer(vram).tokens_per_s,
    )


def tokens_per_s(placement: Placement) -> float:
    """Predicted speed of decoding."""
    return PICO / placement.time.total


def busy(placement: Placement) -> dict[str, dict[str, int]]:
    """Picoseconds that each processor and the link work for a token, by part. They overlap only within an FFN."""
    busy_ps: dict[str, dict[str, int]] = {
        name: dict.fromkeys(placement.time.parts, 0) for name in ("GPU", "CPU", "link", "disk")
    }
    names, assignment, time = {CPU: "CPU", GPU: "GPU"}, placement.assignment, placement.time
    for side, layer in zip(assignment.sides, time.layers, strict=True):
        busy_ps[names[side]]["attention"] += layer.attention
        busy_ps[names[side]]["predictor"] += layer.predictor
        busy_ps["GPU"]["ffn"] += layer.gpu
        busy_ps["CPU"]["ffn"] += layer.cpu
        if "disk" in placement.time.parts:
            busy_ps["disk"]["disk"] += layer.disk
        busy_ps["link"]["hand-over"] += layer.handover + layer.crossing
    busy_ps[names[assignment.embedding]]["embedding and head"] += time.embedding
    busy_ps[names[assignment.head]]["embedding and head"] += time.head
    return busy_ps
