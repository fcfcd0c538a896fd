"""A placement: the side of every part for one pair of budgets, and what is predicted of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from pi_compile.cost_model import RowChoice, TokenTime
from pi_compile.placement.formulation import Assignment
from pi_runtime.artifact.rows import PROCESS_NBYTES
from pi_runtime.artifact.schema import SIDES, Plan, RowPlan


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
