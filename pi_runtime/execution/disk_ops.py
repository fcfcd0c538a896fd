"""The operations of a step with FFN rows from disk: an FFN in parts, while the rows of the next part come.

    attention → names of neurons → rows that are missing → the FFN in parts

The kernels are those of a run in memory, and sums have the same order. A layer whose rows are all in memory is computed
in one call, as in a run in memory.

Shape letters: T tokens, D model width, L layers, N tokens that take one expert, I neurons, C chunks, F neurons of one
expert.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from pi_runtime.artifact.footprint import BLOCK_TOKENS, CHUNKS, FEW_TOKENS, padded_width
from pi_runtime.artifact.rows import ROW_ARRAYS, TWO_PHASES_FROM
from pi_runtime.disk.row_store import REGIONS, Request, RowStore
from pi_runtime.execution.cpu import CpuModel
from pi_runtime.execution.cpu_ops import CpuOps, token_blocks
from pi_runtime.execution.disk_ahead import ReadAhead
from pi_runtime.execution.executor import Floats, Ints, SequenceStep
from pi_runtime.kernels.codegen.threads import advance_progress
from pi_runtime.kernels.ffn import steps
from pi_runtime.kernels.ffn.memory import Batch, Taken, every_token, tokens_by_expert, whole_batch
from pi_runtime.kernels.split_ffn import NeuronLists, name_listed


class DiskOps(CpuOps):
    """The tokens of a step, at most `BLOCK_TOKENS`. Rows before a cut are somebody else's, and always there."""

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
        self._all_select = bool(self.select_T.all())
        few = len(self.x_TD) <= FEW_TOKENS
        self._reads_ahead = few and not self.ahead.is_exact and self.ahead.way.second and bool(self.select_T.any())

    def take_few(self, x_TD: Floats, input_TD: Floats) -> None:
        """Go on with a few tokens that select; who gives them has run all before their FFN."""
        self.x_TD, self.input_TD, self.select_T = x_TD, input_TD, np.ones(len(x_TD), np.int64)
        self.count_all, self._all_select, self._reads_ahead = False, True, False

    def learn(self, tokens: int, seconds: float) -> None:
        """Learn from a step with a few tokens, which took so long, how to run the next ones."""
        read_L, kept_L = self.model.workspace.counts_LT3[:, :tokens, 1:].sum(1).T
        self._spared_L += 0.1 * (1 - kept_L / np.maximum(read_L, 1) - self._spared_L)
        saves_L = self._spared_L * self._rest_share >= TWO_PHASES_FROM
        self._two_phases_L = (saves_L | self._rows.plan.two_phases_L).tolist()
        self.ahead.way.count(seconds / tokens)
        self._rows.whole.heat.age()

    def attention(self, layer: int) -> None:
        """x ← x + attention(x); rows of experts that are known before it come meanwhile."""
        few = len(self.x_TD) <= FEW_TOKENS and not self.count_all
        if self.ahead.is_exact and few and self.ahead.can_L[layer] and self.select_T.any():
            self._read_ahead(layer)
        super().attention(layer)

    def _read_ahead(self, layer: int) -> None:
        arrays = ROW_ARRAYS[:1] if self._two_phases_L[layer] else ROW_ARRAYS
        self.ahead.read(layer, arrays, self.x_TD, self.select_T)

    def ffn(self, layer: int) -> None:
        """x ← x + the FFN: `CpuOps.ffn` in parts, where rows may be missing."""
        if self._whole_L[layer]:
            super().ffn(layer)
            return
        m, ws, tokens = self.model, self.model.workspace, len(self.x_TD)
        w_X, taken = m.table_LX[layer], tokens_by_expert(ws.expert_TK[:tokens], ws.route_weight_TK, m.cfg.experts)
        few, by_expert = tokens <= FEW_TOKENS and not self.count_all, self._rows.plan.by_expert_L[layer]
        if few and by_expert and self._rows.holds(layer, np.array([expert for expert, _, _ in taken])):
            if self._reads_ahead and self.ahead.can_L[layer + 1]:
                self._read_ahead(layer + 1)
            super().ffn(layer)
            self._rows.end_layer(layer)
            return
        tally_T3 = ws.counts_LT3[layer, :tokens]
        steps.prepare(m.ffn, m.table_LX[layer, 0], self.input_TD)
        tally_T3[:] = 0
        batches = {e: whole_batch(m.ffn, w_X, e, token_N, self.select_T[token_N], w_N) for e, token_N, w_N in taken}
        if by_expert:
            self._whole_experts(layer, batches, few, tally_T3)
        elif few:
            self._add_few(layer, list(batches.values()), tally_T3, self.x_TD)
        else:
            for batch in batches.values():
                self._expert_of_many(layer, batch)
                steps.add_counts(m.ffn, batch, tally_T3)
        self._rows.end_layer(layer)

    def end_layer(self, layer: int) -> None:
        """Let go of rows that were read for a layer ahead of its turn."""
        self._rows.end_layer(layer)

    def sum_few(
        self, layer: int, input_TD: Floats, batches: Sequence[Batch], tally_T3: Ints, y_TD: Floats,
        listed: NeuronLists | None = None,
    ) -> None:  # fmt: skip
        """y ← neurons of some experts, one after the other, for a few tokens; `tally_T3` ← their counts.

        `listed`: what was selected elsewhere, where the layer's rung selects.
        """
        y_TD[:], tally_T3[:] = 0, 0
        steps.prepare(self.model.ffn, self.model.table_LX[layer, 0], input_TD)
        self._add_few(layer, batches, tally_T3, y_TD, listed)

    def _add_few(
        self, layer: int, batches: Sequence[Batch], tally_T3: Ints, y_TD: Floats, listed: NeuronLists | None = None
    ) -> None:
        for batch in batches:
            self._expert_of_few(layer, batch, y_TD, listed, is_last=batch is batches[-1])
            steps.add_counts(self.model.ffn, batch, tally_T3)

    def add_dense(
        self, layer: int, taken: Sequence[Taken], input_TD: Floats, carried_TD: Floats, y_TD: Floats,
        tally_T3: Ints | None = None,
    ) -> None:  # fmt: skip
        """y ← y + all neurons behind the cuts of some experts, in blocks of the tokens that take them.

        Each row is read once. `tally_T3` ← tally + what fires, for at most `BLOCK_TOKENS` tokens. `carried_TD` is room
        for sums.
        """
        f, w_X, d_ff = self.model.ffn, self.model.table_LX[layer], self.model.cfg.d_ff
        cut_of = {expert: self._rows.plan.cut(layer, expert) for expert, _, _ in taken}
        tokens_of = {expert: (token_N, weight_N) for expert, token_N, weight_N in taken}
        requests = [Request(layer, e, [(name, self._all_F[cut:]) for name in ROW_ARRAYS]) for e, cut in cut_of.items()]
        for part in self._rows.ranges(requests, keep=False):
            expert, (token_N, weight_N) = part.request.expert, tokens_of[part.request.expert]
            for block in token_blocks(len(token_N)):
                some_N = token_N[block]
                x_ND, y_ND = input_TD[some_N], np.zeros((len(some_N), input_TD.shape[1]), np.float32)
                batch = every_token(w_X, expert, cut_of[expert], d_ff, len(some_N), select=False)
                steps.prepare(f, w_X[expert], x_ND)
                steps.name_neurons(f, batch, self._named_F)
                count = tally_T3 is not None
                steps.add_chunks(f, batch, count, part.begin, part.end, carried_TD[block], y_ND)
                if part.end == CHUNKS:
                    y_TD[some_N] += weight_N[block, None] * y_ND
                if part.end == CHUNKS and tally_T3 is not None:
                    steps.add_counts(f, batch, tally_T3)
            advance_progress()
        self._rows.end_layer(layer)

    def _whole_experts(self, layer: int, batches: Mapping[int, Batch], few: bool, tally_T3: Ints) -> None:
        """x ← x + the FFNs of experts all of whose rows are needed: the next ones come while one is computed."""
        one = few and len(self.x_TD) == 1 and len(batches) <= BLOCK_TOKENS
        arriving = self._rows.arriving(layer, np.array(list(batches))) if one else None
        if arriving is not None:
            self._as_they_come(layer, batches, arriving, tally_T3)
            return
        f, needs = self.model.ffn, [(name, self._all_F) for name in ROW_ARRAYS]
        requests = [Request(layer, expert, needs) for expert in batches]
        ahead = requests[-REGIONS:][0] if few and self._reads_ahead and self.ahead.can_L[layer + 1] else None
        for part in self._rows.ranges(requests, bool(self.select_T.any())):
            if part.request is ahead and part.begin == 0:  # the last rows of this layer are asked for
                self._read_ahead(layer + 1)
            e = batches[part.request.expert]
            if part.begin == 0:
                steps.name_neurons(f, e, self._named_F)
            if few:
                steps.list_chunks(f, e, part.begin, part.end)
                steps.sum_chunks(f, e, part.begin, part.end)
            else:
                steps.add_chunks(f, e, self.count_all, part.begin, part.end, self._carried_TD, self.x_TD)
            if part.end == CHUNKS:
                if few:
                    steps.merge(f, e, self.x_TD)
                steps.add_counts(f, e, tally_T3)

    def _as_they_come(
        self, layer: int, batches: Mapping[int, Batch], arriving: Iterator[list[int]], tally_T3: Ints
    ) -> None:
        """x ← x + the FFNs of one token's experts: those that are there are computed while others come.

        Their sums wait, so that they are added in the order of the experts.
        """
        if self._reads_ahead and self.ahead.can_L[layer + 1]:
            self._read_ahead(layer + 1)
        f, d_model = self.model.ffn, self.x_TD.shape[1]
        sum_X1D = self._carried_TD.reshape(-1)[: len(batches) * d_model].reshape(-1, 1, d_model)
        sum_X1D.fill(-0.0)  # which changes no number that is added to it
        sums = dict(zip(batches, sum_X1D, strict=True))
        for expert in chain.from_iterable(arriving):
            e = batches[expert]
            steps.name_neurons(f, e, self._named_F)
            steps.list_chunks(f, e, 0, CHUNKS)
            steps.sum_chunks(f, e, 0, CHUNKS)
            steps.merge(f, e, sums[expert])
            steps.add_counts(f, e, tally_T3)
        for sum_1D in sum_X1D:
            self.x_TD += sum_1D

    def _named(self, layer: int, e: Batch, listed: NeuronLists | None = None) -> Ints:
        """The neurons that the tokens of a batch may need from here."""
        if listed is None:
            count = steps.name_neurons(self.model.ffn, e, self._named_F)
        else:
            count = name_listed(self.model.ffn, e, listed, self._named_F)
        named_I = self._all_F if self.count_all or count == self.model.cfg.d_ff else self._named_F[:count]
        return self._behind_cut(layer, e, named_I)

    def _behind_cut(self, layer: int, e: Batch, neuron_I: Ints) -> Ints:
        """Those of some neurons, in ascending order, whose rows may have to be read."""
        cut = self._rows.plan.cut(layer, e.expert)
        return neuron_I[np.searchsorted(neuron_I, cut) :] if cut else neuron_I

    def _expert_of_many(self, layer: int, e: Batch) -> None:
        """x ← x + one expert's FFN for its tokens: all rows that they name, chunks in order."""
        named_I = self._named(layer, e)
        request = Request(layer, e.expert, [(name, named_I) for name in ROW_ARRAYS])
        for part in self._rows.ranges([request], keep=bool(e.select_N.any())):
            steps.add_chunks(self.model.ffn, e, self.count_all, part.begin, part.end, self._carried_TD, self.x_TD)

    def _expert_of_few(self, layer: int, e: Batch, y_TD: Floats, listed: NeuronLists | None, is_last: bool) -> None:
        """y ← y + one expert's FFN for its tokens: what fires is listed while rows of `rest` still come."""
        f, named_I, keep = self.model.ffn, self._named(layer, e, listed), self._all_select or bool(e.select_N.any())
        requests = [Request(layer, e.expert, [("first", named_I)])]
        if self._two_phases_L[layer]:
            for part in self._rows.ranges(requests, keep):
                steps.list_chunks(f, e, part.begin, part.end)
            fire_I = self._behind_cut(layer, e, self._fire_F[: steps.firing(f, e, self._fire_F)])
            requests = [Request(layer, e.expert, [("rest", fire_I)])]
        else:
            requests.append(Request(layer, e.expert, [("rest", named_I)]))
        ranges = self._rows.ranges(requests, keep)
        if is_last and self._reads_ahead and self.ahead.can_L[layer + 1]:
            # Behind this layer's rows, so that the disk has work while these are waited for.
            self._read_ahead(layer + 1)
        for part in ranges:
            if part.request.has("first"):
                steps.list_chunks(f, e, part.begin, part.end)
            else:
                steps.sum_chunks(f, e, part.begin, part.end)
        steps.merge(f, e, y_TD)
