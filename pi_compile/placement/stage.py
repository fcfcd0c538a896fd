"""Place: which parts of a model belong on the GPU.

`time`, the default, minimises the predicted time of a token (`cost`) over all parts at once, subject to the bytes of
both memories (`program`), exactly (`chain`). `hot-mass` is PowerInfer's objective (`hot_mass`). Neurons are stored
hottest group first, so that only *cuts* are looked at: in layer l the neurons before the cut go to the GPU.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

from pi_compile.cost_model.processors import CPU, GPU
from pi_compile.cost_model.token_time import Costs, TokenTime, costs_of, token_time
from pi_compile.cost_model.workload import Workload
from pi_compile.machine.profile import Machine
from pi_compile.placement.formulation import Choice, Sizes, all_cpu, program_of
from pi_compile.placement.greedy import greedy
from pi_compile.placement.hot_mass import hot_mass
from pi_compile.placement.solvers.constrained_path import solve
from pi_runtime.artifact.schema import SIDES, Plan
from pi_runtime.errors import DoesNotFitError

LADDER = (10, 25, 50, 75, 100)
"""Budgets that every artifact has a plan for, in percent of the GPU memory that takes everything."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where everything is for one pair of budgets."""

    objective: str
    solver: str
    vram: int
    """GPU bytes there are."""
    ram: int
    context: int
    """Positions the key-value cache holds."""
    choice: Choice
    cuts: tuple[int, ...]
    """Of each layer and expert, as an artifact stores them."""
    time: TokenTime
    gpu_bytes: Mapping[str, int]
    """Bytes by part."""
    ram_bytes: Mapping[str, int]
    gap: float | None
    """Predicted time over the proven optimum, less 1: 0 from the exact solver; None where time was not minimised."""
    bound_ns: int | None
    """No placement is predicted faster by the linear relaxation alone, which the exact solver starts from."""
    second_opinion: TokenTime | None
    """What the greedy rule reaches, beside the exact solver."""
    hot_share: float
    """Share of all activations that the neurons on the GPU account for."""
    digest: str
    """Of the inputs: shape, formats, counts, rungs, machine, budgets, objective; and of the answer."""

    @property
    def plan(self) -> Plan:
        """What an artifact stores."""
        return Plan(
            objective=self.objective,
            vram_bytes=self.vram,
            used_bytes=sum(self.gpu_bytes.values()),
            ram_bytes=sum(self.ram_bytes.values()),
            context=self.context,
            attention=tuple(SIDES[side] for side in self.choice.sides),
            cuts=self.cuts,
            embedding=SIDES[self.choice.embedding],
            head=SIDES[self.choice.head],
            predicted_ns=self.time.ns,
            digest=self.digest,
        )


def ram_of(machine: Machine, gib: float = 0.0) -> int:
    """RAM budget in bytes; 0 for all that the machine has."""
    return in_bytes(gib or machine.cpu.ram_gib)


def in_bytes(gib: float) -> int:
    """GiB as they were written, in whole bytes, rounded down."""
    return int(Decimal(repr(gib)) * 2**30)


def place(
    work: Workload,
    machine: Machine,
    vram: int,
    ram: int,
    *,
    objective: str = "time",
    solver: str = "exact",
) -> Placement:
    """The best placement within `vram` bytes of GPU memory and `ram` bytes of RAM.

    Ties: least time, then least GPU bytes, then least RAM, then GPU before CPU and larger cuts before smaller, in the
    order embedding, layers, head. Raises DoesNotFitError with the bytes needed and budgets that fit.
    """
    costs, sizes = costs_of(work, machine), Sizes.of(work)
    vram = vram if len(costs.units) > 1 else 0
    bound, second = None, None
    if objective == "hot-mass":
        choice = hot_mass(work, machine, sizes, vram)
    elif solver == "greedy":
        choice = greedy(costs, sizes, vram, ram)
    else:
        choice, bound = _exact(costs, sizes, vram, ram)
        second = greedy(costs, sizes, vram, ram)
    gpu, here = _totals(sizes, choice)
    if here > ram:
        raise _does_not_fit(costs, sizes, vram, ram)
    assert gpu <= vram
    inputs = _inputs(work, machine, vram, ram, objective, solver)
    ram_bytes, gpu_bytes = sizes.used(choice)
    return Placement(
        objective=objective,
        solver=solver,
        vram=vram,
        ram=ram,
        context=work.context,
        choice=choice,
        cuts=tuple(cut for n, c in enumerate(choice.cuts) for cut in work.expert_cuts(n, c)),
        time=_time(costs, choice),
        gpu_bytes=gpu_bytes,
        ram_bytes=ram_bytes,
        gap=None if bound is None else 0.0,
        bound_ns=bound,
        second_opinion=None if second is None else _time(costs, second),
        hot_share=work.hot(choice.cuts) / max(int(work.counts.sum()), 1),
        digest=_sha256({"inputs": inputs, "answer": asdict(choice)}),
    )


def _exact(costs: Costs, sizes: Sizes, vram: int, ram: int) -> tuple[Choice, int]:
    """The optimum, and the relaxation's bound in nanoseconds."""
    nothing = all_cpu(len(costs.layers))
    options = []
    _, here = _totals(sizes, nothing)
    if here <= ram:
        time = _time(costs, nothing).total
        options.append((time, 0, here, nothing, time))
    # The GPU's buffers are needed with the first byte that is placed there.
    capacity = vram - sizes.scratch[GPU]
    if capacity >= 0 and len(costs.units) > 1 and sizes.everything - capacity <= ram:
        program = program_of(costs, sizes)
        way = solve(program.within(capacity, ram - sizes.scratch[CPU]))
        if way is not None:
            choice = program.choice(way)
            assert _time(costs, choice).total == way.cost
            options.append((way.cost, *_totals(sizes, choice), choice, way.bound))
    if not options:
        raise _does_not_fit(costs, sizes, vram, ram)
    best = min(options, key=lambda option: option[:3])
    return best[3], -(-min(option[4] for option in options) // 1000)


def _time(costs: Costs, choice: Choice) -> TokenTime:
    return token_time(costs, choice.sides, choice.cuts, choice.embedding, choice.head)


def _totals(sizes: Sizes, choice: Choice) -> tuple[int, int]:
    """Bytes of (GPU memory, RAM)."""
    ram, gpu = sizes.used(choice)
    return sum(gpu.values()), sum(ram.values())


def _does_not_fit(costs: Costs, sizes: Sizes, vram: int, ram: int) -> DoesNotFitError:
    """What is needed, what there is, and the nearest budgets that fit, one of the two left as it is."""
    _, less = _totals(sizes, greedy(costs, sizes, vram, limit=0))
    more, _ = _totals(sizes, greedy(costs, sizes, 1 << 62, limit=ram))
    fits = [f"{less} bytes of RAM ({less / 2**30:.2f} GiB) with this GPU budget"]
    if sizes.scratch[CPU] <= ram and len(costs.units) > 1:
        fits.append(f"{more} bytes of GPU memory ({more / 2**30:.2f} GiB) with this RAM")
    return DoesNotFitError(
        "the model does not fit: no placement keeps both budgets",
        expected=f"{sizes.everything} bytes in all ({sizes.everything / 2**30:.2f} GiB)",
        found=f"{vram} bytes of GPU memory and {ram} bytes of RAM ({(vram + ram) / 2**30:.2f} GiB together)",
        remedy=" or ".join(fits),
    )


def ladder(
    work: Workload,
    machine: Machine,
    budgets: Sequence[int] = (),
    *,
    ram: int | None = None,
    objective: str = "time",
) -> tuple[Placement, ...]:
    """Placements for a ladder of GPU budgets and any further `budgets` (bytes), by rising budget.

    Without those that place nothing, and of the ladder without those that do not fit into RAM; () for a machine
    without a GPU. Raises DoesNotFitError for a further budget that does not fit, or at which nothing is placed.
    """
    ram = ram_of(machine) if ram is None else ram
    if machine.gpu is None:
        place(work, machine, 0, ram)  # it must fit all the same
        return ()
    most = Sizes.of(work).all_on_gpu
    found = []
    for budget in sorted({most * percent // 100 for percent in LADDER} | set(budgets)):
        try:
            placement = place(work, machine, budget, ram, objective=objective)
        except DoesNotFitError:
            if budget in budgets or budget == most:
                raise
            continue
        if placement.choice.uses_gpu:
            found.append(placement)
        elif budget in budgets:
            raise _nothing_placed(Sizes.of(work), budget)
    return tuple(found)


def _nothing_placed(sizes: Sizes, budget: int) -> DoesNotFitError:
    least = sizes.least_on_gpu
    if budget >= least:
        return DoesNotFitError(
            f"[place] vram_gib: with {budget} bytes nothing is worth a hand-over to the GPU on this machine",
            remedy="raise the budget, or leave it out; or another [place] machine",
        )
    return DoesNotFitError(
        f"[place] vram_gib: {budget} bytes hold no part of the model beside the GPU's buffers",
        expected=f"at least {least} bytes ({least / 2**30:.6f} GiB)",
        remedy="raise the budget, or leave it out",
    )


def _inputs(work: Workload, machine: Machine, vram: int, ram: int, objective: str, solver: str) -> dict[str, Any]:
    """Everything that decides a placement, and nothing else: names and sources do not."""
    return {
        "shape": {**asdict(work.shape), "family": None},
        "formats": dict(work.formats),
        "tokens": work.tokens,
        "counts": hashlib.sha256(work.counts.astype("<i8").tobytes()).hexdigest(),
        **({} if work.routed is None else {"routed": work.routed.tolist()}),
        "layers": [asdict(layer) for layer in work.layers],
        "context": work.context,
        "machine": machine.model_dump(exclude={"name": True, "source": True, "cpu": {"name"}, "gpu": {"name"}}),
        "vram": vram,
        "ram": ram,
        "objective": objective,
        "solver": solver,
    }


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
