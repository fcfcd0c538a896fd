"""Running an artifact that is larger than memory: FFN rows come from the file when they are needed.

It goes through the schedule of a run on the CPU: single tokens and short pieces by `disk_ops`, long pieces of prompts
by `disk_prompt`. The kernels are those of a run in memory, and sums have the same order. So the text is the same to the
last bit, at any budget. Where all rows are in memory, a step is one call, as in a run in memory.

Shape letters: L layers, X experts.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import numba
import numpy as np

from pi_runtime.artifact.footprint import BLOCK_TOKENS, FEW_TOKENS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import read_nbytes
from pi_runtime.disk.arena import ResidentArrays, RowArena
from pi_runtime.disk.ram_plan import RamPlan, batch_rows, fixed_bytes, plan_for, sequence_kv_bytes
from pi_runtime.disk.reader import Reader
from pi_runtime.disk.row_store import RowStore
from pi_runtime.execution.cpu import CpuModel, HostExecutor
from pi_runtime.execution.disk_ops import DiskOps
from pi_runtime.execution.disk_prompt import PromptOps
from pi_runtime.execution.executor import DiskStats, Ints, SequenceResult, SequenceStep
from pi_runtime.execution.pages import Allowance
from pi_runtime.execution.plan_layout import CPU
from pi_runtime.execution.schedule import Side, one_side_schedule


class DiskModel(CpuModel):
    """A model of which a row of an untied embedding is read when its token comes."""

    artifact: ResidentArrays | None

    def embedded(self, tokens_T: Ints) -> Ints:
        """Read the tokens' rows of the embedding; returns where they are."""
        assert self.artifact is not None
        return self.artifact.embedded(tokens_T)


class DiskExecutor(HostExecutor):
    """Runs one artifact on the CPU within a budget of memory; see `ram_plan`. Close it, or its threads stay."""

    device_name = "cpu"
    disk: DiskStats

    def __init__(
        self, artifact: Artifact, mode: str, context: int, threads: int, cache: str, plan: RamPlan, reader: Reader,
        kv_nbytes: int,
    ) -> None:  # fmt: skip
        """`reader` reads the artifact's file, with room for `ram_plan.batch_rows` rows; it is closed with this.

        `kv_nbytes`: bytes that keys and values of all sequences may take.
        """
        self.plan, self.reader, self.kv = plan, reader, Allowance(kv_nbytes)
        arrays = ResidentArrays(artifact, plan, reader)
        self._model = model = DiskModel(arrays, mode, context, threads, cache, self.kv)
        self.context, self.neurons = context, model.neurons
        self.rows = RowStore(artifact, plan, reader)
        for name, arena in self.rows.arenas.items():
            self._point_to(name, arena)
        self._ops = DiskOps(model, self.rows)
        self._in_memory = bool(self._ops.whole_L.all())
        self.block_tokens = BLOCK_TOKENS if self._in_memory else plan.block_tokens
        self._prompt_ops = PromptOps(model, self.rows, self.block_tokens)
        self._schedule = one_side_schedule(artifact.manifest.decoder.n_layers)
        self._running = False
        self.disk = DiskStats()

    def _point_to(self, name: str, arena: RowArena) -> None:
        """Tell the kernels where the rows of an array are: in slots, or in order where all of them are in memory."""
        for layer, w_X in enumerate(self._model.table_LX):
            for expert, w in enumerate(w_X):
                first = expert * self._model.cfg.d_ff
                if arena.whole_L[layer]:
                    w[name], w[f"{name}_slots"] = arena.address_of(layer, first), 0
                else:
                    w[name], w[f"{name}_slots"] = arena.address, arena.rows_L[layer].slot_N[first:].ctypes.data

    def step(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        """Run the next tokens of some sequences: rows are read once for as many as a call takes."""
        with self._model.turn(sequences, self.block_tokens) as batches:
            return [result for batch in batches for result in self._run(batch)]

    def _run(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        s = sequences[0]
        if len(s.tokens) > BLOCK_TOKENS and s.select:  # each token gets the bits that it gets alone
            parts = np.split(s.tokens, range(BLOCK_TOKENS, len(s.tokens), BLOCK_TOKENS))
            return [self._run([replace(s, tokens=part_T)]) for part_T in parts][-1]
        if self._running:  # an earlier call ended in an exception
            self.rows.recover()
        self._running = True
        before, began = self._counted(), time.perf_counter()
        results = self._computed(sequences)
        self._running = False
        tokens = sum(len(s.tokens) for s in sequences)
        if all(s.select for s in sequences) and tokens <= FEW_TOKENS:
            self._count(self._counted() - before, tokens, time.perf_counter() - began)
        return results

    def _computed(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        if self._in_memory:
            return self._model.run(sequences)
        ops: DiskOps | PromptOps = self._prompt_ops if len(sequences[0].tokens) > BLOCK_TOKENS else self._ops
        numba.set_num_threads(self._model.threads)
        ops.take(sequences)
        sides: dict[str, Side] = {CPU: ops}
        for operation in self._schedule:
            operation.run(sides)
        return self._model.finished(sequences)

    def _counted(self) -> DiskStats:
        return DiskStats(0, 0.0, self.reader.seconds_waited, *self.rows.hits_and_misses(), self.reader.bytes_read)

    def _count(self, found: DiskStats, tokens: int, seconds: float) -> None:
        """Count what a step with a few tokens took, and learn from it."""
        if not self._in_memory:
            self._ops.learn(tokens, seconds)
        there = int(self._model.workspace.counts_LT3[self._ops.whole_L, :tokens, 1:].sum())
        self.disk += replace(found, tokens=tokens, seconds=seconds, hits=found.hits + there)

    @property
    def kv_room(self) -> int:
        """Bytes that further keys and values may take."""
        return self.kv.left

    def _release(self) -> None:
        self.rows.arenas.clear()


def open_from_disk(
    artifact: Artifact, mode: str, context: int, threads: int, cache: str, budget: int, kv_budget: int | None = None
) -> DiskExecutor:
    """Run an artifact within a budget of memory, divided by `ram_plan.plan_for`.

    `kv_budget`: bytes of it for keys and values of all sequences; None: as many as one sequence takes. Raises
    DoesNotFitError naming the smallest budget that fits.
    """
    kv_nbytes = sequence_kv_bytes(artifact.manifest, context, cache) if kv_budget is None else kv_budget
    plan = plan_for(artifact, mode, budget, fixed_bytes(artifact.manifest, context, cache, kv_nbytes))
    reader = Reader(artifact.path, batch_rows(plan.staged), piece=read_nbytes(artifact.manifest.decoder))
    try:
        return DiskExecutor(artifact, mode, context, threads, cache, plan, reader, kv_nbytes)
    except BaseException:
        reader.close()
        raise
