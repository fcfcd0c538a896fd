"""A source of whole matrices some of which are on disk, within a budget of memory (see `matrix_store`).

The kernel is that of a run in memory, and the sums of a token's experts are added in the same order. Of a long piece of
a prompt each matrix is read once.

Shape letters: T tokens, N tokens that take one expert.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.disk.arena import ResidentArrays
from pi_runtime.disk.matrix_store import MatrixStore
from pi_runtime.execution.disk_rows import PartlyOnDisk
from pi_runtime.execution.executor import DiskStats
from pi_runtime.execution.host import CpuModel
from pi_runtime.execution.pages import Allowance
from pi_runtime.execution.rows import Piece
from pi_runtime.kernels.codegen.threads import advance_progress
from pi_runtime.kernels.ffn import steps
from pi_runtime.kernels.ffn.memory import READ, tokens_by_expert, tokens_of, whole_batch


class DiskMatrices(PartlyOnDisk):
    """Matrices in memory, and the others in the file. Where all have a place, it is a run in memory."""

    def __init__(self, host: CpuModel, arrays: ResidentArrays, store: MatrixStore, kv: Allowance) -> None:
        super().__init__(host, arrays, store, kv, [store.has_all] * len(host.table_LX))
        self.store, self.block_tokens = store, store.plan.block_tokens
        store.fill(host.table_LX)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within it matrices are asked for; each step, with prompts too, makes earlier uses count less."""
        with super().step():
            yield
        self.store.heat.age()

    @contextmanager
    def decoding(self, tokens: int) -> Iterator[None]:
        """Count what a step with a few tokens that select takes; matrices count as their neurons."""
        before, began = self._counted(), time.perf_counter()
        yield
        found, asked = self._counted() - before, int(self.host.workspace.counts_LT3[:, :tokens, READ].sum())
        self.disk += replace(found, tokens=tokens, seconds=time.perf_counter() - began, hits=asked - found.misses)

    def _counted(self) -> DiskStats:
        misses = self.store.misses * self.host.cfg.d_ff
        return DiskStats(0, 0.0, self.reader.seconds_waited, 0, misses, self.reader.bytes_read)

    def ffn(self, layer: int) -> None:
        """x ← x + the FFN, expert by expert as they come."""
        if self._piece is not None:
            self._add_piece(layer, *self._piece)
        elif self.are_in_memory:
            super().ffn(layer)
        else:
            h, ws, (x_TD, input_TD, sum_TD, select_T) = self.host, self.host.workspace, self.tokens
            w_X, tally_T3 = h.table_LX[layer], ws.counts_LT3[layer, : len(x_TD)]
            found = tokens_by_expert(ws.expert_TK[: len(x_TD)], ws.route_weight_TK, h.cfg.experts)
            taken = {e: whole_batch(h.ffn, w_X, e, token_N, select_T[token_N], w_N) for e, token_N, w_N in found}
            tally_T3[:] = 0
            steps.prepare(h.ffn, w_X[0], input_TD)
            for expert in self.store.arriving(layer, list(taken)):
                steps.add_matrices(h.ffn, taken[expert], ws.attended_TD, tally_T3, sum_TD)
                advance_progress()

    def _add_piece(self, layer: int, piece: Piece, blocks: Sequence[slice]) -> None:
        """x ← x + the FFN of a piece; each expert is read once."""
        h, w_X, tally_T3 = self.host, self.host.table_LX[layer], np.zeros((BLOCK_TOKENS, 3), np.int64)
        every = piece.expert_TK[: blocks[-1].stop]
        for expert in self.store.arriving(layer, np.unique(every[every >= 0]).tolist()):
            for rows in blocks:
                token_N, weight_N = tokens_of(piece.expert_TK[rows], piece.route_weight_TK[rows], expert)
                if len(token_N):
                    batch = whole_batch(h.ffn, w_X, expert, token_N, np.zeros_like(token_N), weight_N)
                    steps.prepare(h.ffn, w_X[0], piece.input_TD[rows])
                    steps.add_matrices(h.ffn, batch, h.workspace.attended_TD, tally_T3, piece.sum_TD[rows])
                    advance_progress()
