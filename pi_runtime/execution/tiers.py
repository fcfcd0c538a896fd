"""Three tiers in one run: hot neurons are the GPU's, of the cold ones some rows are in RAM and the others on disk.

    x ← x + Σ hot + Σ cold + bias          the rows of cold neurons come as in `disk_ops`, while the hot ones are summed

The stand-in runs it on every machine: what a plan puts on the GPU lies in this memory too, but counts as the GPU's. So
both budgets are kept, and the text is the same to the last bit as that of the same plan with all cold rows in memory.
"""

from collections.abc import Sequence
from itertools import groupby

import numba
import numpy as np

from pi_runtime.artifact.buffers import cache_format
from pi_runtime.artifact.layer_classes import layer_classes, layer_nbytes
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import EMBEDDING_ARRAYS, PROMPT_TOKENS, read_nbytes
from pi_runtime.artifact.schema import Manifest, Plan
from pi_runtime.disk.behind_cuts import plan_behind_cuts
from pi_runtime.disk.ram_plan import batch_rows, fixed_bytes, resident_nbytes
from pi_runtime.disk.reader import Reader
from pi_runtime.execution.disk import DiskExecutor
from pi_runtime.execution.disk_ops import DiskOps
from pi_runtime.execution.executor import Floats, Ints, SequenceResult, SequenceStep
from pi_runtime.execution.plan_choice import Allocation
from pi_runtime.execution.plan_layout import CPU, GPU, placed_arrays
from pi_runtime.execution.schedule import schedule_of
from pi_runtime.execution.stand_in import ExpertRange, StandInOps, check_divisible
from pi_runtime.kernels.data.weight_table import LayerRecords


class TieredOps(StandInOps):
    """The stand-in's operations, with rows of cold neurons from disk."""

    def __init__(self, rows: DiskOps, plan: Plan) -> None:
        super().__init__(rows.model, plan)
        self._rows = rows

    def take(self, sequences: Sequence[SequenceStep]) -> None:
        """Go on with the next tokens of some sequences."""
        super().take(sequences)
        self._rows.take(sequences)

    def ffn(self, layer: int) -> None:
        """Add both sides' sums, for a few tokens at a time."""
        super().ffn(layer)
        self._rows.end_layer(layer)

    def cold_rows(self, layer: int, w_X: LayerRecords, input_TD: Floats, ranges: Sequence[ExpertRange]) -> Ints:
        """Compute cold neurons of a layer, whose rows come meanwhile; returns what was counted."""
        if self._rows.whole_L[layer]:
            return super().cold_rows(layer, w_X, input_TD, ranges)
        tally_T3, sum_TD = np.zeros((len(input_TD), 3), np.int64), self.cold.sum_TD[: len(input_TD)]
        self._rows.sum_few(layer, input_TD, [r.batch(w_X) for r in ranges], tally_T3, sum_TD)
        return tally_T3[:, 1:]


class TieredExecutor(DiskExecutor):
    """Decodes by a plan without a GPU, as `StandInExecutor` does, within a budget of RAM. Close it.

    Prompts run dense on the CPU, with the rows of the GPU's part in this memory too.
    """

    device_name = "stand-in"
    allocation: Allocation

    def __init__(self, artifact: Artifact, mode: str, threads: int, cache: str, taken: Allocation, budget: int,
                 kv_budget: int | None) -> None:  # fmt: skip
        """Run it within `budget` bytes of RAM, of which `kv_budget` are for keys and values that are the CPU's.

        Raises DoesNotFitError naming the smallest budget that fits.
        """
        m = artifact.manifest
        check_divisible(m)
        own = own_kv_bytes(m, taken, cache) if kv_budget is None else kv_budget
        plan = plan_behind_cuts(artifact, mode, budget, ram_fixed_bytes(m, taken, cache, own), taken.plan)
        reader = Reader(artifact.path, batch_rows(plan.staged), piece=read_nbytes(m.decoder))
        try:
            super().__init__(artifact, mode, taken.context, threads, cache, plan, reader, own + taken.cache)
        except BaseException:
            reader.close()
            raise
        self.allocation, self._tiers = taken, TieredOps(self._ops, taken.plan)
        self._tier_schedule = schedule_of(taken.plan)

    def step(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        """Run the next tokens of some sequences. With selection they go to both sides, unless they are counted."""
        with self._model.turn(sequences, self.block_tokens) as batches:
            parts = [list(part) for batch in batches for _, part in groupby(batch, _by_both)]
            return [result for part in parts for result in self._run(part)]

    def _computed(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        if not _by_both(sequences[0]):
            return super()._computed(sequences)
        numba.set_num_threads(max(1, self._model.threads - 1))  # one core is the stand-in's
        self._tiers.take(sequences)
        for operation in self._tier_schedule:
            operation.run({CPU: self._tiers, GPU: self._tiers})
        return self._model.finished(sequences)

    def _release(self) -> None:
        super()._release()
        self._tiers.close()


def _by_both(s: SequenceStep) -> bool:
    return s.select and not s.count


def own_kv_bytes(m: Manifest, taken: Allocation, cache: str) -> int:
    """Bytes of one sequence's keys and values for the whole context, in layers whose attention is the CPU's."""
    fmt = cache_format(m.formats["attention"], cache)
    kv_L = layer_nbytes(layer_classes(m.decoder, fmt), taken.context, max(PROMPT_TOKENS))
    return sum(nbytes for nbytes, side in zip(kv_L, taken.plan.attention, strict=True) if side == CPU)


def embedding_is_here(m: Manifest, plan: Plan) -> bool:
    """Whether the CPU needs the embedding: for tokens, or as a tied head."""
    return CPU in (plan.embedding, plan.head if m.decoder.tied_head else None)


def ram_fixed_bytes(m: Manifest, taken: Allocation, cache: str, kv_nbytes: int) -> int:
    """Bytes of RAM of a run by a plan that no division changes: what the GPU has is not among them."""
    plan = taken.plan
    resident = resident_nbytes(m, whole_embedding=False)
    on_gpu = {array.name: array.nbytes for array in placed_arrays(m, plan)}
    here = embedding_is_here(m, plan)
    of_gpu = sum(
        0 if name in EMBEDDING_ARRAYS and here else min(nbytes, on_gpu.get(name, 0))
        for name, nbytes in resident.items()
    )
    return fixed_bytes(m, taken.context, cache, kv_nbytes) - of_gpu
