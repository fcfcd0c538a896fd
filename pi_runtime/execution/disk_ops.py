"""The operations of a step with FFN rows from disk: an FFN in parts, while the rows of the next part come.

    attention → names of neurons → rows that are missing → the FFN in parts

The kernels are those of a run in memory, and sums have the same order. A layer whose rows are all in memory is computed
in one call, as in a run in memory.

Shape letters: T tokens, D model width, L layers, N tokens that take one expert, I neurons, C chunks, F neurons of one
expert.
"""

from collections.abc import Sequence

import numpy as np

from pi_runtime.artifact.footprint import BLOCK_TOKENS, FEW_TOKENS, padded_width
from pi_runtime.artifact.rows import ROW_ARRAYS, TWO_PHASES_FROM
from pi_runtime.disk.row_store import Request, RowStore
from pi_runtime.execution.cpu import CpuModel
from pi_runtime.execution.cpu_ops import CpuOps
from pi_runtime.execution.disk_ahead import ReadAhead
from pi_runtime.execution.executor import Ints, SequenceStep
from pi_runtime.kernels.ffn import steps
from pi_runtime.kernels.ffn.experts import tokens_by_expert
from pi_runtime.kernels.ffn.memory import Batch, whole_batch


class DiskOps(CpuOps):
    """The tokens of a step, at most `BLOCK_TOKENS`."""

    def __init__(self, model: CpuModel, rows: RowStore) -> None:
        super().__init__(model)
        d = model.manifest.decoder
        self._rows, self.ahead = rows, ReadAhead(model, rows)
        self.whole_L = np.array([rows.is_whole(layer) for layer in range(d.n_layers)])
        """Layers whose rows all stay in memory."""
        self._all_F = np.arange(d.d_ff)
        self._named_F, self._fire_F = np.empty(d.d_ff + 1, np.int64), np.empty(d.d_ff + 1, np.int64)
        self._carried_TD = np.zeros((BLOCK_TOKENS, padded_width(d.d_model)), np.float32)
        self._whole_L = self.whole_L.tolist()
        self._spared_L = np.zeros(d.n_layers)
        """Share of the named neurons that did not fire lately."""
        self._rest_share = rows.arenas["rest"].nbytes / sum(arena.nbytes for arena in rows.arenas.values())
        self._two_phases_L = list(rows.plan.two_phases_L)
        """Whether a layer's `rest` is read only when it is known what fires: on the gate rung, or where that saves."""

    def take(self, sequences: Sequence[SequenceStep]) -> None:
        """Go on with the next tokens of some sequences."""
        super().take(sequences)
        self._all_select, self._reads_ahead = bool(self.select_T.all()), self.ahead.way.second and self.select_T.any()

    def learn(self, seconds: float) -> None:
        """Learn from a step with a few tokens, which took so long, how to run the next ones."""
        read_L, kept_L = self.model.workspace.counts_LT3[:, : len(self.x_TD), 1:].sum(1).T
        self._spared_L += 0.1 * (1 - kept_L / np.maximum(read_L, 1) - self._spared_L)
        saves_L = self._spared_L * self._rest_share >= TWO_PHASES_FROM
        self._two_phases_L = (saves_L | self._rows.plan.two_phases_L).tolist()
        self.ahead.way.count(seconds / len(self.x_TD))

    def ffn(self, layer: int) -> None:
        """x ← x + the FFN: `CpuOps.ffn` in parts, where rows may be missing."""
        if self._whole_L[layer]:
            super().ffn(layer)
            return
        m, ws, tokens = self.model, self.model.workspace, len(self.x_TD)
        tally_T3 = ws.counts_LT3[layer, :tokens]
        steps.prepare(m.ffn, m.table_LX[layer, 0], self.input_TD)
        tally_T3[:] = 0
        w_X, taken = m.table_LX[layer], tokens_by_expert(ws.expert_TK[:tokens], ws.route_weight_TK, m.cfg.experts)
        for expert, token_N, weight_N in taken:
            batch = whole_batch(m.ffn, w_X, expert, token_N, self.select_T[token_N], weight_N)
            if tokens > FEW_TOKENS or self.count_all:
                self._expert_of_many(layer, batch)
            else:
                self._expert_of_few(layer, batch, is_last=expert == taken[-1][0])
            steps.add_counts(m.ffn, batch, tally_T3)
        self._rows.end_layer(layer)

    def _named(self, e: Batch) -> Ints:
        """The neurons that the tokens of a batch may need."""
        count = steps.name_neurons(self.model.ffn, e, self._named_F)
        return self._all_F if self.count_all or count == self.model.cfg.d_ff else self._named_F[:count]

    def _expert_of_many(self, layer: int, e: Batch) -> None:
        """x ← x + one expert's FFN for its tokens: all rows that they name, chunks in order."""
        named_I = self._named(e)
        request = Request(layer, e.expert, [(name, named_I) for name in ROW_ARRAYS])
        for part in self._rows.ranges([request], keep=bool(e.select_N.any())):
            steps.add_chunks(self.model.ffn, e, self.count_all, part.begin, part.end, self._carried_TD, self.x_TD)

    def _expert_of_few(self, layer: int, e: Batch, is_last: bool) -> None:
        """x ← x + one expert's FFN for its tokens: what fires is listed while rows of `rest` still come."""
        f, named_I, keep = self.model.ffn, self._named(e), self._all_select or bool(e.select_N.any())
        requests = [Request(layer, e.expert, [("first", named_I)])]
        if self._two_phases_L[layer]:
            for part in self._rows.ranges(requests, keep):
                steps.list_chunks(f, e, part.begin, part.end)
            fire_I = self._fire_F[: steps.firing(f, e, self._fire_F)]
            requests = [Request(layer, e.expert, [("rest", fire_I)])]
        else:
            requests.append(Request(layer, e.expert, [("rest", named_I)]))
        ranges = self._rows.ranges(requests, keep)
        if is_last and self._reads_ahead and self.ahead.can_L[layer + 1]:
            # Behind this layer's rows, so that the disk has work while these are waited for.
            arrays = ROW_ARRAYS[:1] if self._two_phases_L[layer + 1] else ROW_ARRAYS
            self.ahead.read(layer + 1, arrays, self.x_TD, self.select_T)
        for part in ranges:
            if part.request.has("first"):
                steps.list_chunks(f, e, part.begin, part.end)
            else:
                steps.sum_chunks(f, e, part.begin, part.end)
        steps.merge(f, e, self.x_TD)
