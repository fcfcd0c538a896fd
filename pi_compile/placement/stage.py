"""Place: which parts of a model belong on the GPU, in RAM and on disk.

The objective `time`, the default, minimises the predicted time of a token (`token_time`) over all parts at once, within
the bytes of both memories (`formulation`), exactly (`constrained_path`). The objective `hot-mass` is PowerInfer's
(`hot_mass`). Neurons are stored hottest group first, so that only *cuts* are considered: of each layer the neurons
before its cut go to the GPU. On a machine with a disk, rows of the others may be there (`three_tiers`): the objective
`time` takes the better of the best placement in memory and the best one with rows on disk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pi_compile.cost_model import CPU, GPU, RowChoice, TokenTime, Workload
from pi_compile.files import json_digest
from pi_compile.placement.formulation import Assignment, Problem, Sizes, Solution, all_cpu
from pi_compile.placement.greedy import greedy, hot_mass
from pi_compile.placement.solvers.constrained_path import solve
from pi_compile.placement.three_tiers import ThreeTiers
from pi_runtime.artifact.decoding import attributes
from pi_runtime.artifact.rows import PROCESS_NBYTES
from pi_runtime.artifact.schema import SIDES, Plan, RowPlan
from pi_runtime.errors import DoesNotFitError, NotMetError, Setting


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The placement of all parts for one pair of budgets, and what is predicted of it."""

    objective: str
    solver: str
    vram: int
    """Budget in bytes of GPU memory."""
    ram: int
    """Budget in bytes of RAM, of which `PROCESS_NBYTES` are for the process."""
    context: int
    """Positions the key-value cache holds."""
    assignment: Assignment
    expert_cuts: tuple[int, ...]
    """The cut of each expert of each layer, as an artifact stores them."""
    time: TokenTime
    gpu_bytes: Mapping[str, int]
    """Bytes by part."""
    ram_bytes: Mapping[str, int]
    """Bytes by part."""
    gap: float | None
    """Distance from the proven bound, relative to the objective: 0 from the exact solver; None where nothing is proven
    of the time."""
    bound_ns: int | None
    """Lower bound of the time: by the linear relaxation from which the exact solver starts, or as HiGHS proves it."""
    heuristic: TokenTime | None
    """The time that the greedy heuristic reaches; None where the exact solver was not used."""
    activations_on_gpu: float
    """Share of all activations that the neurons on the GPU account for."""
    digest: str
    """Digest of everything that decides the placement, and of the assignment."""
    rows: tuple[RowChoice, ...] = ()
    """The division of each layer's rows where some are on disk; () where all are in memory."""
    expert_pinned: tuple[int, ...] = ()
    """The rows behind each of `expert_cuts` that are pinned; () where all are in memory."""

    @property
    def hit_rate(self) -> float:
        """Share of the rows that a token needs of the CPU that is predicted to be in RAM."""
        needed, missed = (sum(getattr(row, name) for row in self.rows) for name in ("needed", "missed"))
        return 1 - missed / needed if needed else 1.0

    @property
    def read_bytes(self) -> int:
        """Bytes that a token is predicted to read from disk."""
        return sum(row.read for row in self.rows)

    @property
    def ram_by_part(self) -> dict[str, int]:
        """What the budget of RAM counts: bytes by part, with those of the process."""
        return {**self.ram_bytes, "process": PROCESS_NBYTES}

    @property
    def gpu_by_part(self) -> dict[str, int]:
        """What the budget of GPU memory counts, by the same parts."""
        return {**self.gpu_bytes, "process": 0}

    @property
    def row_plan(self) -> RowPlan:
        """What an artifact stores of a placement with rows on disk: by itself, or within `plan` beside a GPU."""
        beside_gpu = self.assignment.uses_gpu
        return RowPlan(
            ram_bytes=self.ram,
            context=self.context,
            pinned=self.expert_pinned if beside_gpu else tuple(row.pinned for row in self.rows),
            cached=tuple(row.cached for row in self.rows),
            first=tuple(row.first for row in self.rows),
            slot_bytes=sum(row.nbytes for row in self.rows),
            read_bytes=self.read_bytes,
            predicted_ns=self.time.ns,
            digest=self.digest,
        )

    @property
    def plan(self) -> Plan:
        """What an artifact stores of a placement on a GPU, or of one with all in memory."""
        return Plan(
            objective=self.objective,
            vram_bytes=self.vram,
            used_bytes=sum(self.gpu_bytes.values()),
            ram_bytes=sum(self.ram_bytes.values()),
            context=self.context,
            attention=tuple(SIDES[side] for side in self.assignment.sides),
            cuts=self.expert_cuts,
            embedding=SIDES[self.assignment.embedding],
            head=SIDES[self.assignment.head],
            predicted_ns=self.time.ns,
            digest=self.digest,
            rows=self.row_plan if self.rows and self.assignment.uses_gpu else None,
        )


SOLVERS = ("exact", "highs", "greedy")
SECONDS = 60.0
"""Seconds that HiGHS has for one placement."""
LADDER = (10, 25, 50, 75, 100)
"""Budgets that every artifact has a plan for, in percent of the GPU memory that takes everything."""
RAM_LADDER = (0, 5, 10, 25, 50, 75, 90)
"""RAM budgets that an artifact has a plan for where the machine has a disk: room for so many percent of all rows."""


def place(
    problem: Problem,
    vram: int,
    ram: int,
    *,
    objective: str = "time",
    solver: str = "exact",
    seconds: float = SECONDS,
) -> Placement:
    """The best placement within `vram` bytes of GPU memory and `ram` bytes of RAM, with the process.

    `solver`: `exact`; `highs`, which solves either objective as one program within `seconds` and proves its own gap;
    `greedy`, a heuristic for the objective `time`. Ties of `exact`: least time, then least GPU bytes, then least RAM,
    then GPU before CPU and larger cuts before smaller, in the order embedding, layers, head. Raises DoesNotFitError
    with the bytes needed and budgets that fit, NotMetError where `seconds` are too few for HiGHS.
    """
    vram = vram if problem.has_gpu else 0
    room, exact = ram - PROCESS_NBYTES, solver == "exact" and objective == "time"
    found: Solution | None
    if solver == "highs" and vram:
        found = _by_highs(problem, vram, room, objective, seconds)
    elif objective == "hot-mass":
        found = Solution(assignment=hot_mass(problem, vram))
    elif solver == "greedy":
        found = Solution(assignment=greedy(problem, vram, room))
    else:
        found = _exact(problem, vram, room)
    if found is None or (not found.rows and problem.used(found.assignment)[1] > room):
        raise _does_not_fit(problem, vram, ram, disk=exact)
    assignment, work, rows = found.assignment, problem.work, found.rows
    inputs = {**_inputs(problem), "vram": vram, "ram": ram, "objective": objective, "solver": solver}
    if rows:
        tiers = _tiers(problem, vram)
        time, (ram_bytes, gpu_bytes) = tiers.time(assignment, rows), tiers.used(assignment, rows, room)
    else:
        time, (ram_bytes, gpu_bytes) = problem.time(assignment), problem.sizes.used(assignment)
    assert sum(gpu_bytes.values()) <= vram
    assert sum(ram_bytes.values()) <= room
    return Placement(
        objective=objective,
        solver=solver,
        vram=vram,
        ram=ram,
        context=work.context,
        assignment=assignment,
        expert_cuts=tuple(cut for n, c in enumerate(assignment.cuts) for cut in work.expert_cuts(n, c)),
        expert_pinned=_expert_pinned(work, assignment, rows),
        time=time,
        gpu_bytes=gpu_bytes,
        ram_bytes=ram_bytes,
        gap=found.gap,
        bound_ns=found.bound_ns,
        heuristic=problem.time(greedy(problem, vram, room)) if exact and not rows else None,
        activations_on_gpu=work.activations_on_gpu(assignment.cuts),
        digest=json_digest({"inputs": inputs, "answer": {**asdict(assignment), **_divided(rows)}}),
        rows=rows,
    )


def _expert_pinned(work: Workload, a: Assignment, rows: Sequence[RowChoice]) -> tuple[int, ...]:
    """How many rows behind the cut of each layer and expert are pinned: the hottest groups that are left."""
    found: list[int] = []
    for n, (cut, row) in enumerate(zip(a.cuts, rows, strict=False)):
        ends = work.expert_cuts(n, cut + row.pinned), work.expert_cuts(n, cut)
        found += [end - begin for end, begin in zip(*ends, strict=True)]
    return tuple(found)


def _divided(rows: Sequence[RowChoice]) -> dict[str, Any]:
    """What a digest has of rows on disk; nothing where there are none."""
    return {"rows": [[row.pinned, row.cached, row.first] for row in rows]} if rows else {}


def _tiers(problem: Problem, vram: int) -> ThreeTiers:
    """The problem with a disk."""
    assert problem.rows is not None
    return ThreeTiers(problem, problem.rows, vram)


def _exact(problem: Problem, vram: int, ram: int) -> Solution | None:
    """The optimum, and the relaxation's lower bound; None where the model does not fit."""
    found = _in_memory(problem, vram, ram)
    if problem.rows is not None:
        found += [one for budget in {0, vram} for one in _from_disk(_tiers(problem, budget), ram)]
    if not found:
        return None
    bound = min(solution.bound_ns or 0 for *_, solution in found)
    # Of equals the first: one in memory, where there is one.
    return replace(min(found, key=lambda one: one[:2])[3], bound_ns=bound)


def _from_disk(tiers: ThreeTiers, ram: int) -> list[tuple[int, int, int, Solution]]:
    """(picoseconds, GPU bytes, RAM, solution) of the optimum with rows on disk, if there is one."""
    found = tiers.solve(ram)
    if found is None:
        return []
    used_ram, used_vram = (sum(part.values()) for part in tiers.used(found.assignment, found.rows, ram))
    return [(tiers.time(found.assignment, found.rows).total, used_vram, used_ram, found)]


def _in_memory(problem: Problem, vram: int, ram: int) -> list[tuple[int, int, int, Solution]]:
    """(picoseconds, GPU bytes, RAM, solution) of the optima in memory: without the GPU, and with it."""
    found, nothing = [], all_cpu(problem.work.decoder.n_layers)
    _, used_ram = problem.used(nothing)
    if used_ram <= ram:
        time = problem.time(nothing).total
        found.append((time, 0, used_ram, Solution(assignment=nothing, gap=0.0, bound_ns=-(-time // 1000))))
    # The GPU's buffers are needed with the first byte that is placed there.
    sizes = problem.sizes
    free = vram - sizes.workspace[GPU]
    if free >= 0 and problem.has_gpu and sizes.everything - free <= ram:
        path = solve(problem.formulation.within(free, ram - sizes.workspace[CPU]))
        if path is not None:
            assignment = problem.formulation.assignment(path)
            assert problem.time(assignment).total == path.cost
            solution = Solution(assignment=assignment, gap=0.0, bound_ns=-(-path.bound // 1000))
            found.append((path.cost, *problem.used(assignment), solution))
    return found


def _by_highs(problem: Problem, vram: int, ram: int, objective: str, seconds: float) -> Solution | None:
    """HiGHS's solution; None where the model does not fit. Raises NotMetError where it found none in its time."""
    from pi_compile.placement import milp  # noqa: PLC0415  HiGHS, which the default solvers do without

    try:
        if objective == "hot-mass":
            return milp.most_hot_mass(problem, vram, seconds)
        return milp.least_time(problem, vram, ram, seconds)
    except TimeoutError as error:
        raise NotMetError(
            f"HiGHS found no placement in {seconds:g} s",
            expected="at least one placement",
            found=error,
            remedy=(
                *("raise ", Setting("time_limit"), ", or leave ", Setting("solver"), " out"),
                ": the default solver is exact and quicker",
            ),
        ) from None


def _does_not_fit(problem: Problem, vram: int, ram: int, *, disk: bool) -> DoesNotFitError:
    """The error with what is needed, what there is, and the nearest budgets that fit: one raised, the other kept.

    `disk`: rows may be on disk, where the machine has one.
    """
    sizes, room = problem.sizes, ram - PROCESS_NBYTES
    _, enough_ram = problem.used(greedy(problem, vram, ram=0))
    if disk and problem.rows is not None:
        enough_ram = min(enough_ram, *(_tiers(problem, budget).least_ram() for budget in (0, vram)))
    enough_ram, everything = enough_ram + PROCESS_NBYTES, sizes.everything + PROCESS_NBYTES
    enough_vram, _ = problem.used(greedy(problem, 1 << 62, ram=room))
    fits = [f"{enough_ram} bytes of RAM ({enough_ram / 2**30:.2f} GiB) with this GPU budget"]
    if sizes.workspace[CPU] <= room and problem.has_gpu:
        fits.append(f"{enough_vram} bytes of GPU memory ({enough_vram / 2**30:.2f} GiB) with this RAM")
    return DoesNotFitError(
        "the model does not fit: no placement keeps both budgets",
        expected=f"{everything} bytes in all ({everything / 2**30:.2f} GiB)",
        found=f"{vram} bytes of GPU memory and {ram} bytes of RAM ({(vram + ram) / 2**30:.2f} GiB together)",
        remedy=" or ".join(fits),
    )


def ladder(
    problem: Problem,
    budgets: Sequence[int] = (),
    *,
    ram: int | None = None,
    objective: str = "time",
    solver: str = "exact",
    seconds: float = SECONDS,
) -> tuple[Placement, ...]:
    """Placements for a ladder of GPU budgets and any further `budgets` (bytes), by rising budget.

    Budgets of the ladder are left out where nothing is placed or where the model does not fit into RAM beside them.
    Without a GPU there are none of these. On a machine with a disk, placements on the CPU for a ladder of RAM budgets
    up to `ram` come before them, as far as they have rows on disk. Raises DoesNotFitError for a further budget that
    does not fit, or at which nothing is placed.
    """
    ram = problem.machine.ram_bytes() if ram is None else ram
    from_disk = ram_ladder(problem, ram) if objective == "time" and solver == "exact" else ()
    if not problem.has_gpu:
        place(problem, 0, ram)  # it must fit all the same
        return from_disk
    most = problem.sizes.all_on_gpu
    found = []
    for budget in sorted({most * percent // 100 for percent in LADDER} | set(budgets)):
        try:
            placement = place(problem, budget, ram, objective=objective, solver=solver, seconds=seconds)
        except DoesNotFitError:
            if budget in budgets or budget == most:
                raise
            continue
        if placement.assignment.uses_gpu:
            found.append(placement)
        elif budget in budgets:
            raise _nothing_placed(problem.sizes, budget)
    return (*from_disk, *found)


def ram_ladder(problem: Problem, ram: int) -> tuple[Placement, ...]:
    """Placements on the CPU with rows on disk, by rising budget of RAM: a ladder up to `ram`.

    () for a machine without a disk.
    """
    if problem.rows is None:
        return ()
    tiers = _tiers(problem, 0)
    least = PROCESS_NBYTES + tiers.resident + tiers.least_buffers
    budgets = {least + tiers.all_rows * percent // 100 for percent in RAM_LADDER} | {ram}
    found = [place(problem, 0, budget) for budget in sorted(budgets) if least <= budget <= ram]
    return tuple(placement for placement in found if placement.rows)


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


_NAMES: dict[str, Any] = {"version": True, "name": True, "source": True, "cpu": {"name"}, "gpu": {"name"}}
"""What of a machine decides nothing."""


def _inputs(problem: Problem) -> dict[str, Any]:
    """Everything beside budgets and solver that decides a placement, and nothing else: no name, source or version.

    The keys are part of every lock and every stored plan, so they stay whatever the fields are called.
    """
    work, has_disk = problem.work, problem.machine.disk is not None
    return {
        "shape": {**attributes(work.decoder), "family": None},
        "formats": dict(work.formats),
        "tokens": work.tokens,
        "counts": work.counts_digest,
        **({} if work.routed is None else {"routed": work.routed.tolist()}),
        "layers": [{key: getattr(layer, key) for key in ("rung", "rank", "read_ppm")} for layer in work.layers],
        "context": work.context,
        "machine": problem.machine.model_dump(exclude={**_NAMES, "disk": {"name"} if has_disk else True}),
        **({"persistence": None if work.persistence is None else work.persistence.tolist()} if has_disk else {}),
    }
