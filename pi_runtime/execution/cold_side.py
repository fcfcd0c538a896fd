"""The CPU's side of a run on a GPU within a budget of RAM: rows behind the cuts are in RAM or on disk.

It is the disk tier's model and rows without its schedule: the GPU's executor says when they are summed. Of what the
plan puts on the GPU nothing is here.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import EMBEDDING_ARRAYS, read_nbytes
from pi_runtime.artifact.schema import Manifest, Plan
from pi_runtime.disk.arena import ResidentArrays
from pi_runtime.disk.behind_cuts import plan_behind_cuts
from pi_runtime.disk.ram_plan import batch_rows, sequence_kv_bytes
from pi_runtime.disk.reader import Reader
from pi_runtime.execution.cpu import CpuModel
from pi_runtime.execution.disk import DiskExecutor
from pi_runtime.execution.disk_ops import DiskOps
from pi_runtime.execution.plan_choice import Allocation
from pi_runtime.execution.plan_layout import placed_arrays
from pi_runtime.execution.tiers import embedding_is_here, ram_fixed_bytes
from pi_runtime.kernels.data.weight_table import ARRAYS


class ColdSide(DiskExecutor):
    """The model as the CPU has it, and its rows. Close it, or its threads stay."""

    def __init__(
        self, artifact: Artifact, mode: str, threads: int, taken: Allocation, budget: int, kv_budget: int | None,
        beside: int,
    ) -> None:  # fmt: skip
        """Divide `budget` bytes of RAM, of which `beside` are what the GPU's executor takes for itself.

        `kv_budget` bytes of it are for keys and values of all layers, because those on the GPU are copied back where
        sequences take turns; None: as many as one sequence takes. Raises DoesNotFitError naming the smallest budget
        that fits.
        """
        m = artifact.manifest
        kv = sequence_kv_bytes(m, taken.context, "auto") if kv_budget is None else kv_budget
        fixed = ram_fixed_bytes(m, taken, "auto", kv) + beside
        plan = plan_behind_cuts(artifact, mode, budget, fixed, taken.plan, _away(m, taken.plan))
        reader = Reader(artifact.path, batch_rows(plan.staged), piece=read_nbytes(m.decoder))
        try:
            super().__init__(artifact, mode, taken.context, threads, "auto", plan, reader, kv)
            self._point_to_divided()
        except BaseException:
            reader.close()
            raise

    @property
    def model(self) -> CpuModel:
        """What computes here."""
        return self._model

    @property
    def ops(self) -> DiskOps:
        """The sums of rows."""
        return self._ops

    def _point_to_divided(self) -> None:
        """Tell the kernels where the cold neurons' scales and biases are."""
        arrays = self._model.artifact
        assert isinstance(arrays, ResidentArrays)
        for layer, w_X in enumerate(self._model.table_LX):
            for field, name in ARRAYS.items():
                if arrays.is_divided(f"layers/{layer}/{name}"):
                    w_X[field] = [arrays.expert_address(f"layers/{layer}/{name}", expert) for expert in range(len(w_X))]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within it rows are asked for; where an earlier turn ended in an exception, none are taken to be there."""
        if self._running:
            self.rows.recover()
        self._running = True
        yield
        self._running = False

    @contextmanager
    def decoding(self, tokens: int) -> Iterator[None]:
        """Count what decoding some tokens together takes, which happens within."""
        before, began = self._counted(), time.perf_counter()
        yield
        self._count(self._counted() - before, tokens, time.perf_counter() - began)


def _away(m: Manifest, plan: Plan) -> dict[str, Sequence[tuple[int, int]]]:
    """The rows of arrays that the GPU alone has."""
    here = EMBEDDING_ARRAYS if embedding_is_here(m, plan) else ()
    return {array.name: array.spans for array in placed_arrays(m, plan) if array.name not in here}
