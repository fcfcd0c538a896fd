"""Reading a long piece of a prompt with rows from disk: each row is read once, while others are computed.

    for each layer, expert and range of chunks:  the rows of the next range are read, all tokens take this one

Shape letters: T tokens, D model width, K experts of a token, N tokens that take one expert.
"""

from collections.abc import Sequence
from itertools import groupby, product

import numpy as np

from pi_runtime.artifact.footprint import BLOCK_TOKENS, padded_width
from pi_runtime.artifact.rows import ROW_ARRAYS
from pi_runtime.disk.row_store import Request, RowRange, RowStore
from pi_runtime.execution.cpu import CpuModel
from pi_runtime.execution.cpu_ops import BlockOps
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.kernels.codegen.threads import advance_progress
from pi_runtime.kernels.ffn import steps
from pi_runtime.kernels.ffn.memory import tokens_of, whole_batch
from pi_runtime.kernels.forward import head


class PromptOps(BlockOps):
    """Runs up to `tokens` tokens of one sequence through each layer together, with every neuron."""

    def __init__(self, model: CpuModel, rows: RowStore, tokens: int) -> None:
        d = model.manifest.decoder
        room = tokens if tokens > BLOCK_TOKENS else 0
        super().__init__(model, *(np.ones((room, d.d_model), np.float32) for _ in range(2)))
        self._rows, self._carried_TD = rows, np.ones((room, padded_width(d.d_model)), np.float32)
        self._named_F, self._all_F = np.empty(d.d_ff + 1, np.int64), np.arange(d.d_ff)

    def take(self, sequences: Sequence[SequenceStep]) -> None:
        """Go on with the next tokens of a sequence."""
        (s,) = sequences
        self.take_piece(s.tokens, s.cache.length, s.cache)

    def embed(self, layer: int) -> None:
        """x ← the tokens' embeddings; behind these the rows of the layers begin to come."""
        super().embed(layer)
        m = self.model
        requests = (self._whole(*which) for which in product(range(len(m.table_LX)), range(m.cfg.experts)))
        self._layers = groupby(self._rows.ranges(requests, keep=False), lambda part: part.request.layer)

    def _whole(self, layer: int, expert: int) -> Request:
        """All rows of an expert that are not a GPU's."""
        row_F = self._all_F[self._rows.plan.cut(layer, expert) :]
        return Request(layer, expert, [(name, row_F) for name in ROW_ARRAYS])

    def ffn(self, layer: int) -> None:
        """x ← x + the FFN, by the ranges of its chunks."""
        found, ranges = next(self._layers)
        assert found == layer
        for part in ranges:
            self._add(part)

    def _add(self, part: RowRange) -> None:
        """Add the sums of a range of an expert's chunks."""
        f, w_X, expert = self.model.ffn, self.model.table_LX[part.request.layer], part.request.expert
        for rows, _ in self.blocks:
            token_N, weight_N = tokens_of(self.expert_TK[rows], self.route_weight_TK[rows], expert)
            if len(token_N) == 0:
                continue
            batch = whole_batch(f, w_X, expert, token_N, np.zeros_like(token_N), weight_N)
            steps.prepare(f, w_X[expert], self.input_TD[rows])
            steps.name_neurons(f, batch, self._named_F)
            steps.add_chunks(f, batch, False, part.begin, part.end, self._carried_TD[rows], self.x_TD[rows])
            advance_progress()

    def head(self, _layer: int) -> None:
        """The logits of the last token."""
        m, x_1D = self.model, self.x_TD[self.tokens - 1 : self.tokens].copy()
        head(m.cfg, m.ends, m.eps, x_1D, m.workspace, m.workspace.logits_TV[:1])
