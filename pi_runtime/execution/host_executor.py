"""Runs one artifact with all keys and values in this memory: on the CPU, or by a plan with a stand-in for the GPU."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

import numba
import numpy as np

from pi_runtime.artifact.footprint import BLOCK_TOKENS, FEW_TOKENS, KEPT
from pi_runtime.execution.cut import StandIn
from pi_runtime.execution.executor import DiskStats, SequenceResult, SequenceStep
from pi_runtime.execution.host import CpuModel
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.ops import CpuOps
from pi_runtime.execution.pages import PagePool
from pi_runtime.execution.plan_choice import Allocation
from pi_runtime.execution.plan_layout import CPU, GPU
from pi_runtime.execution.rows import MemoryRows, Piece
from pi_runtime.execution.schedule import one_side_schedule, schedule_of
from pi_runtime.kernels.codegen.threads import ONE_AT_A_TIME
from pi_runtime.kernels.data.weight_table import StoredArrays


class HostExecutor:
    """Runs steps on a host with rows from their source.

    By a plan, tokens that select go to both of its sides; prompts run dense on the CPU, whose memory holds everything.
    Where all rows are in memory and one side has all, a step is one compiled call. Close it, or its threads stay.
    """

    def __init__(self, rows: MemoryRows, allocation: Allocation | None = None, notice: str | None = None) -> None:
        self.host, self.rows, self.allocation, self.notice = rows.host, rows, allocation, notice
        self.device_name = "cpu" if allocation is None else "stand-in"
        self.context, self.neurons = self.host.context, self.host.neurons
        self.block_tokens = rows.block_tokens
        d = self.host.manifest.decoder
        self.draft_tokens = BLOCK_TOKENS if not d.recurs else KEPT
        self.guess_head = self.host.new_guess_head() if rows.disk is None else None
        self.ops = CpuOps(self.host, rows, _piece(self.host, self.block_tokens))
        self._schedule = one_side_schedule(d.n_layers, d.mixer_only_layers)
        self.cut = None if allocation is None else StandIn(self.host, rows, allocation.plan)
        self._cut_schedule = () if allocation is None else schedule_of(allocation.plan, d.mixer_only_layers)

    @property
    def disk(self) -> DiskStats | None:
        """What reading rows from disk took; None where all weights are in memory."""
        return self.rows.disk

    @property
    def kv_room(self) -> int | None:
        """Bytes that further keys and values may take; None where nothing limits them."""
        return self.rows.kv_room

    @property
    def keeps_states(self) -> bool:
        """Whether a step can give the residual stream: always, on the CPU."""
        return True

    def step(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        """Run the next tokens of some sequences: weights are read once for as many as a call takes."""
        with self.host.step(sequences, self.block_tokens) as batches:
            parts: Iterable[list[SequenceStep]] = batches
            if self.cut is not None:
                parts = (list(part) for batch in batches for _, part in groupby(batch, lambda s: s.select))
            return [result for part in parts for result in self._run(part)]

    def _run(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        s, tokens = sequences[0], sum(len(s.tokens) for s in sequences)
        if tokens > BLOCK_TOKENS and s.select:  # each token gets the bits that it gets alone
            parts = np.split(s.tokens, range(BLOCK_TOKENS, tokens, BLOCK_TOKENS))
            return [self._run([replace(s, tokens=part_T)]) for part_T in parts][-1]
        with self.rows.step():
            if tokens > FEW_TOKENS or not all(s.select for s in sequences):
                return self._computed(sequences)
            with self.rows.decoding(tokens):
                return self._computed(sequences)

    def _computed(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        observer, threads = sequences[0].observer, self.host.threads
        ops, schedule = self.ops, self._schedule
        if self.cut is not None and sequences[0].select:
            ops, schedule, threads = self.cut, self._cut_schedule, max(1, threads - 1)  # one core is the stand-in's
        elif observer is None and self.rows.are_in_memory:
            return self.ops.run(sequences)
        numba.set_num_threads(threads)
        ops.take(sequences)
        sides = {CPU: ops, GPU: ops}
        for operation in schedule:
            if observer is not None and operation.name == "ffn":
                observer.see(operation.layer, ops.input_TD, self.host.workspace.expert_TK[: len(ops.x_TD)])
            operation.run(sides)
        return self.host.finished(sequences, ops.states_TC)

    def new_pool(self, budget: int | None = None) -> PagePool:
        """Pages for caches of some sequences, with those of the guess head together at most `budget` bytes."""
        return self.host.new_pool(budget, 0 if self.guess_head is None else self.guess_head.page_nbytes)

    def new_cache(self, pool: PagePool | None = None) -> KVCache:
        """An empty cache for one sequence, in pages of a pool, or with a pool of its own."""
        return self.host.new_cache(pool)

    def close(self) -> None:
        """Close the artifact; `step` refuses from now on."""
        with ONE_AT_A_TIME:
            self.host.close()
            self.rows.close()
            if self.cut is not None:
                self.cut.close()


def _piece(host: CpuModel, tokens: int) -> Piece | None:
    """Memory for long pieces of a prompt, where there are any."""
    if tokens <= BLOCK_TOKENS:
        return None
    return Piece(host.workspace, *(np.ones((tokens, host.cfg.d_model), np.float32) for _ in range(2)))


def in_memory(
    artifact: StoredArrays, mode: str, context: int, threads: int, cache: str = "auto",
    taken: Allocation | None = None, notice: str | None = None,
) -> HostExecutor:  # fmt: skip
    """Run an artifact with all of its rows in memory: on the CPU, or by a plan with a stand-in for the GPU."""
    return HostExecutor(MemoryRows(CpuModel(artifact, mode, context, threads, cache)), taken, notice)
