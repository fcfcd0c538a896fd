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
from pi_runtime.execution.executor import DiskStats, Ints
from pi_runtime.execution.host import CpuModel
from pi_runtime.execution.pages import Allowance
from pi_runtime.execution.rows import FfnTokens, MemoryRows, Piece
from pi_runtime.kernels.codegen.threads import advance_progress
from pi_runtime.kernels.ffn import steps
from pi_runtime.kernels.ffn.memory import tokens_by_expert, tokens_of, whole_batch


class DiskMatrices(MemoryRows):
    """Matrices in memory, and the others in the file. Where all have a place, it is a run in memory."""

    disk: DiskStats

    def __init__(self, host: CpuModel, arrays: ResidentArrays, store: MatrixStore, kv: Allowance) -> None:
        super().__init__(host)
        self.store, self.plan, self.reader, self._arrays, self._kv = store, store.plan, store.reader, arrays, kv
        store.fill(host.table_LX)
        self.are_in_memory = store.has_all
        self.whole_L = [store.has_all] * len(host.table_LX)
        self.block_tokens, self.disk = store.plan.block_tokens, DiskStats()
        self._piece: tuple[Piece, Sequence[slice]] | None = None
        self._is_running = False

    @property
    def kv_room(self) -> int:
        """Bytes that further keys and values may take."""
        return self._kv.left

    def embedded(self, tokens_T: Ints) -> Ints:
        """Read the tokens' rows of the embedding, if they are not there anyway; returns where they are."""
        return self._arrays.embedded(tokens_T)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within it matrices are asked for; where an earlier step ended in an exception, none are taken to come."""
        if self._is_running:
            self.store.recover()
        self._is_running = True
        yield
        self._is_running = False

    @contextmanager
    def decoding(self, tokens: int) -> Iterator[None]:
        """Count what a step with a few tokens that select takes; matrices count as their neurons."""
        before, began = self._counted(), time.perf_counter()
        yield
        found = self._counted() - before
        self.store.heat.age()
        there = len(self.whole_L) * self.host.cfg.experts_per_token * self.are_in_memory
        hits, misses = (self.host.cfg.d_ff * n for n in (found.hits + there, found.misses))
        self.disk += replace(found, tokens=tokens, seconds=time.perf_counter() - began, hits=hits, misses=misses)

    def _counted(self) -> DiskStats:
        s = self.store
        return DiskStats(0, 0.0, self.reader.seconds_waited, s.hits, s.misses, self.reader.bytes_read)

    def take(self, tokens: FfnTokens, *, ahead: bool = True) -> None:
        """Go on with these tokens."""
        super().take(tokens, ahead=ahead)
        self._piece = None

    def take_piece(self, piece: Piece, blocks: Sequence[slice]) -> None:
        """Go on with a long piece of a sequence, in blocks of its tokens."""
        self._piece = piece, blocks

    def ffn(self, layer: int) -> None:
        """x ← x + the FFN, expert by expert as they come."""
        if self._piece is not None:
            self._add_piece(layer, *self._piece)
        elif self.are_in_memory:
            super().ffn(layer)
        else:
            h, ws, (x_TD, input_TD, select_T) = self.host, self.host.workspace, self.tokens
            w_X, tally_T3 = h.table_LX[layer], ws.counts_LT3[layer, : len(x_TD)]
            found = tokens_by_expert(ws.expert_TK[: len(x_TD)], ws.route_weight_TK, h.cfg.experts)
            taken = {e: whole_batch(h.ffn, w_X, e, token_N, select_T[token_N], w_N) for e, token_N, w_N in found}
            tally_T3[:] = 0
            steps.prepare(h.ffn, w_X[0], input_TD)
            for expert in self.store.arriving(layer, list(taken)):
                steps.add_matrices(h.ffn, taken[expert], ws.attended_TD, tally_T3, x_TD)
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
                    steps.add_matrices(h.ffn, batch, h.workspace.attended_TD, tally_T3, piece.x_TD[rows])
                    advance_progress()
