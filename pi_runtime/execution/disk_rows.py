"""A source of rows some of which are on disk, within a budget of memory (see `ram_plan`).

An FFN is summed in parts, while the rows of the next part come:

    names of neurons → rows that are missing → the FFN in parts

The kernels are those of a run in memory, and sums have the same order. Of a long piece of a prompt each row is read
once:

    for each layer, expert and range of chunks:  the rows of the next range are read, all tokens take this one

Shape letters: T tokens, D model width, L layers, N tokens that take one expert, I neurons, C chunks, F neurons of one
expert.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, groupby, product

import numpy as np

from pi_runtime.artifact.footprint import BLOCK_TOKENS, CHUNKS, FEW_TOKENS, padded_width
from pi_runtime.artifact.rows import ROW_ARRAYS
from pi_runtime.disk.arena import ResidentArrays
from pi_runtime.disk.matrix_store import MatrixStore
from pi_runtime.disk.row_slots import REGIONS, Request, RowRange
from pi_runtime.disk.row_store import RowStore
from pi_runtime.execution.disk_ahead import ReadAhead
from pi_runtime.execution.executor import DiskStats, Floats, Ints
from pi_runtime.execution.host import CpuModel, token_blocks
from pi_runtime.execution.pages import Allowance
from pi_runtime.execution.rows import FfnTokens, MemoryRows, Piece
from pi_runtime.kernels.codegen.threads import advance_progress
from pi_runtime.kernels.ffn import steps
from pi_runtime.kernels.ffn.memory import Batch, Taken, every_token, tokens_by_expert, tokens_of, whole_batch
from pi_runtime.kernels.split_ffn import NeuronLists, name_listed


class PartlyOnDisk(MemoryRows):
    """What a run within a budget of memory has of its FFNs there; the rest of them is in the file."""

    disk: DiskStats

    def __init__(
        self, host: CpuModel, arrays: ResidentArrays, store: RowStore | MatrixStore, kv: Allowance, whole_L: list[bool]
    ) -> None:
        super().__init__(host)
        self.plan, self.reader, self.whole_L, self._arrays, self._kv = store.plan, store.reader, whole_L, arrays, kv
        self.are_in_memory, self.disk, self._recover = all(whole_L), DiskStats(), store.recover
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
        """Within it rows are asked for; where an earlier step ended in an exception, none are taken to be there."""
        if self._is_running:
            self._recover()
        self._is_running = True
        yield
        self._is_running = False

    def take(self, tokens: FfnTokens, *, ahead: bool = True) -> None:
        """Go on with these tokens; `ahead`: what next layers will need may be read before their turn."""
        super().take(tokens, ahead=ahead)
        self._piece = None

    def take_piece(self, piece: Piece, blocks: Sequence[slice]) -> None:
        """Go on with a long piece of a sequence, with every neuron, in blocks of its tokens."""
        self._piece = piece, blocks


class DiskRows(PartlyOnDisk):
    """Rows in memory, and the others in the file. A layer whose rows are all in memory is run as in a run in memory."""

    def __init__(self, host: CpuModel, arrays: ResidentArrays, store: RowStore, kv: Allowance) -> None:
        super().__init__(host, arrays, store, kv, [store.is_whole(layer) for layer in range(len(host.table_LX))])
        self.store = store
        self.block_tokens = BLOCK_TOKENS if self.are_in_memory else self.plan.block_tokens
        self.ahead = ReadAhead(host, store)
        self._sums = RowSums(host, store, self.ahead, self.block_tokens)

    @contextmanager
    def decoding(self, tokens: int) -> Iterator[None]:
        """Count what a step with a few tokens that select takes, and learn from it how to run the next ones."""
        before, began = self._counted(), time.perf_counter()
        yield
        found, seconds = self._counted() - before, time.perf_counter() - began
        counts_LT2 = self.host.workspace.counts_LT3[:, :tokens, 1:]
        if not self.are_in_memory:
            self.ahead.learn(counts_LT2, seconds / tokens)
            self.store.experts.heat.age()
        there = int(counts_LT2[self.whole_L].sum())
        self.disk += replace(found, tokens=tokens, seconds=seconds, hits=found.hits + there)

    def _counted(self) -> DiskStats:
        return DiskStats(0, 0.0, self.reader.seconds_waited, *self.store.hits_and_misses(), self.reader.bytes_read)

    def take(self, tokens: FfnTokens, *, ahead: bool = True) -> None:
        """Go on with these tokens; `ahead`: what next layers will need may be read before their turn."""
        super().take(tokens)
        self._sums.take(tokens)
        self.ahead.take(tokens if ahead else None)

    def before_attention(self, layer: int) -> None:
        """Begin to read rows of experts that are known before attention; behind its embeddings all rows of a piece."""
        if self._piece is None:
            self.ahead.before_attention(layer)
        elif layer == 0:
            self._sums.begin_piece()

    def ffn(self, layer: int) -> None:
        """x ← x + the FFN: in parts, where rows may be missing."""
        if self._piece is not None:
            self._sums.add_piece(layer, *self._piece)
        elif self.whole_L[layer]:
            super().ffn(layer)
        else:
            if not self._sums.add(layer):
                super().ffn(layer)
            self.end_layer(layer)

    def sum_few(
        self, layer: int, input_TD: Floats, batches: Sequence[Batch], tally_T3: Ints, y_TD: Floats,
        listed: NeuronLists | None = None,
    ) -> None:  # fmt: skip
        """y ← neurons of some experts, whose rows come meanwhile; see `MemoryRows`."""
        if self.whole_L[layer]:
            super().sum_few(layer, input_TD, batches, tally_T3, y_TD, listed)
        else:
            self._sums.sum_few(layer, input_TD, batches, tally_T3, y_TD, listed)

    def add_dense(
        self, layer: int, taken: Sequence[Taken], cut_X: Sequence[int], input_TD: Floats, y_TD: Floats
    ) -> None:
        """y ← y + all neurons behind the cuts of some experts, each of whose rows is read once."""
        if self.whole_L[layer]:
            super().add_dense(layer, taken, cut_X, input_TD, y_TD)
        else:
            self._sums.add_dense(layer, taken, input_TD, y_TD)
            self.end_layer(layer)

    def end_layer(self, layer: int) -> None:
        """Let go of rows that were read for a layer ahead of its turn."""
        self.store.end_layer(layer)

    def close(self) -> None:
        """Let go of all rows; their reader is closed with the host's arrays."""
        self.store.arenas.clear()


class RowSums:
    """Sums of rows of a store. Rows before a cut are somebody else's, and always there."""

    def __init__(self, host: CpuModel, store: RowStore, ahead: ReadAhead, block_tokens: int) -> None:
        d = host.manifest.decoder
        self.host, self._rows, self._ahead = host, store, ahead
        self._all_F = np.arange(d.d_ff)
        self._named_F, self._fire_F = np.empty(d.d_ff + 1, np.int64), np.empty(d.d_ff + 1, np.int64)
        self._carried_TD = np.ones((max(BLOCK_TOKENS, block_tokens), padded_width(d.neuron_width)), np.float32)
        """Sums to which rows are still to be added."""

    def take(self, tokens: FfnTokens) -> None:
        """Go on with these tokens."""
        self.x_TD, self.input_TD, self.sum_TD, self.select_T = tokens
        self._all_select = bool(self.select_T.all())

    def begin_piece(self) -> None:
        """Begin to read the rows of all layers, one after the other."""
        layers, experts = self.host.manifest.decoder.ffn_layers, self.host.cfg.experts
        requests = (self._whole(*which) for which in product(layers, range(experts)))
        self._layers = groupby(self._rows.ranges(requests, keep=False), lambda part: part.request.layer)

    def _whole(self, layer: int, expert: int) -> Request:
        """All rows of an expert that are not a GPU's."""
        row_F = self._all_F[self._rows.plan.cut(layer, expert) :]
        return Request(layer, expert, [(name, row_F) for name in ROW_ARRAYS])

    def add_piece(self, layer: int, piece: Piece, blocks: Sequence[slice]) -> None:
        """x ← x + the FFN of a piece, every neuron of it, by the ranges of its chunks."""
        found, ranges = next(self._layers)
        assert found == layer
        for part in ranges:
            for rows in blocks:
                self._add_to_block(part, piece, rows)

    def _add_to_block(self, part: RowRange, piece: Piece, rows: slice) -> None:
        """Add the sums of a range of an expert's chunks to a block of a piece."""
        f, w_X, expert = self.host.ffn, self.host.table_LX[part.request.layer], part.request.expert
        token_N, weight_N = tokens_of(piece.expert_TK[rows], piece.route_weight_TK[rows], expert)
        if len(token_N) == 0:
            return
        batch = whole_batch(f, w_X, expert, token_N, np.zeros_like(token_N), weight_N)
        steps.prepare(f, w_X[expert], piece.input_TD[rows])
        steps.name_neurons(f, batch, self._named_F)
        steps.add_chunks(f, batch, part.begin, part.end, self._carried_TD[rows], piece.sum_TD[rows])
        advance_progress()

    def add(self, layer: int) -> bool:
        """x ← x + the FFN of the tokens; False, and nothing is done, where all rows that it needs are there."""
        h, ws, tokens = self.host, self.host.workspace, len(self.x_TD)
        w_X, taken = h.table_LX[layer], tokens_by_expert(ws.expert_TK[:tokens], ws.route_weight_TK, h.cfg.experts)
        few, by_expert = tokens <= FEW_TOKENS, self._rows.plan.by_expert_L[layer]
        if few and by_expert and self._rows.experts.holds(layer, np.array([expert for expert, _, _ in taken])):
            self._ahead.next(layer)
            return False
        tally_T3 = ws.counts_LT3[layer, :tokens]
        steps.prepare(h.ffn, w_X[0], self.input_TD)
        tally_T3[:] = 0
        batches = {e: whole_batch(h.ffn, w_X, e, token_N, self.select_T[token_N], w_N) for e, token_N, w_N in taken}
        if by_expert:
            self._whole_experts(layer, batches, few, tally_T3)
        elif few:
            self._add_few(layer, list(batches.values()), tally_T3, self.sum_TD)
        else:
            for batch in batches.values():
                self._expert_of_many(layer, batch)
                steps.add_counts(h.ffn, batch, tally_T3)
        return True

    def sum_few(
        self, layer: int, input_TD: Floats, batches: Sequence[Batch], tally_T3: Ints, y_TD: Floats,
        listed: NeuronLists | None = None,
    ) -> None:  # fmt: skip
        """y ← neurons of some experts, one after the other, for a few tokens; `tally_T3` ← their counts.

        `listed`: what was selected elsewhere, where the layer's rung selects.
        """
        y_TD[:], tally_T3[:] = 0, 0
        steps.prepare(self.host.ffn, self.host.table_LX[layer, 0], input_TD)
        self._add_few(layer, batches, tally_T3, y_TD, listed)

    def _add_few(
        self, layer: int, batches: Sequence[Batch], tally_T3: Ints, y_TD: Floats, listed: NeuronLists | None = None
    ) -> None:
        for batch in batches:
            self._expert_of_few(layer, batch, y_TD, listed, is_last=batch is batches[-1])
            steps.add_counts(self.host.ffn, batch, tally_T3)

    def add_dense(self, layer: int, taken: Sequence[Taken], input_TD: Floats, y_TD: Floats) -> None:
        """y ← y + all neurons behind the cuts of some experts, in blocks of the tokens that take them.

        Each row is read once.
        """
        f, w_X, d_ff = self.host.ffn, self.host.table_LX[layer], self.host.cfg.d_ff
        cut_of = {expert: self._rows.plan.cut(layer, expert) for expert, _, _ in taken}
        tokens_of = {expert: (token_N, weight_N) for expert, token_N, weight_N in taken}
        requests = [self._whole(layer, expert) for expert in cut_of]
        most = max(len(token_N) for token_N, _ in tokens_of.values())
        carried_TD = np.empty((most, padded_width(self.host.cfg.neuron_width)), np.float32)
        for part in self._rows.ranges(requests, keep=False):
            expert, (token_N, weight_N) = part.request.expert, tokens_of[part.request.expert]
            for block in token_blocks(len(token_N)):
                some_N = token_N[block]
                x_ND, y_ND = input_TD[some_N], np.zeros((len(some_N), input_TD.shape[1]), np.float32)
                batch = every_token(w_X, expert, cut_of[expert], d_ff, len(some_N), select=False)
                steps.prepare(f, w_X[expert], x_ND)
                steps.name_neurons(f, batch, self._named_F)
                steps.add_chunks(f, batch, part.begin, part.end, carried_TD[block], y_ND)
                if part.end == CHUNKS:
                    y_TD[some_N] += weight_N[block, None] * y_ND
            advance_progress()

    def _whole_experts(self, layer: int, batches: Mapping[int, Batch], few: bool, tally_T3: Ints) -> None:
        """x ← x + the FFNs of experts all of whose rows are needed: the next ones come while one is computed."""
        one = few and len(self.x_TD) == 1 and len(batches) <= BLOCK_TOKENS
        arriving = self._rows.experts.arriving(layer, np.array(list(batches))) if one else None
        if arriving is not None:
            self._as_they_come(layer, batches, arriving, tally_T3)
            return
        f, needs = self.host.ffn, [(name, self._all_F) for name in ROW_ARRAYS]
        requests = [Request(layer, expert, needs) for expert in batches]
        last = requests[-REGIONS:][0]
        for part in self._rows.ranges(requests, bool(self.select_T.any())):
            if part.request is last and part.begin == 0:  # the last rows of this layer are asked for
                self._ahead.next(layer)
            e = batches[part.request.expert]
            if part.begin == 0:
                steps.name_neurons(f, e, self._named_F)
            if few:
                steps.list_chunks(f, e, part.begin, part.end)
                steps.sum_chunks(f, e, part.begin, part.end)
            else:
                steps.add_chunks(f, e, part.begin, part.end, self._carried_TD, self.sum_TD)
            if part.end == CHUNKS:
                if few:
                    steps.merge(f, e, self.sum_TD)
                steps.add_counts(f, e, tally_T3)

    def _as_they_come(
        self, layer: int, batches: Mapping[int, Batch], arriving: Iterator[list[int]], tally_T3: Ints
    ) -> None:
        """x ← x + the FFNs of one token's experts: those that are there are computed while others come.

        Their sums wait, so that they are added in the order of the experts.
        """
        self._ahead.next(layer)
        f, width = self.host.ffn, self.sum_TD.shape[1]
        sum_X1D = self._carried_TD.reshape(-1)[: len(batches) * width].reshape(-1, 1, width)
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
            self.sum_TD += sum_1D

    def _named(self, layer: int, e: Batch, listed: NeuronLists | None = None) -> Ints:
        """The neurons that the tokens of a batch may need from here."""
        if listed is None:
            count = steps.name_neurons(self.host.ffn, e, self._named_F)
        else:
            count = name_listed(self.host.ffn, e, listed, self._named_F)
        named_I = self._all_F if count == self.host.cfg.d_ff else self._named_F[:count]
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
            steps.add_chunks(self.host.ffn, e, part.begin, part.end, self._carried_TD, self.sum_TD)

    def _expert_of_few(self, layer: int, e: Batch, y_TD: Floats, listed: NeuronLists | None, is_last: bool) -> None:
        """y ← y + one expert's FFN for its tokens: what fires is listed while rows of `rest` still come."""
        f, named_I, keep = self.host.ffn, self._named(layer, e, listed), self._all_select or bool(e.select_N.any())
        requests = [Request(layer, e.expert, [("first", named_I)])]
        if self._ahead.two_phases.by_layer[layer]:
            for part in self._rows.ranges(requests, keep):
                steps.list_chunks(f, e, part.begin, part.end)
            fire_I = self._behind_cut(layer, e, self._fire_F[: steps.firing(f, e, self._fire_F)])
            requests = [Request(layer, e.expert, [("rest", fire_I)])]
        else:
            requests.append(Request(layer, e.expert, [("rest", named_I)]))
        ranges = self._rows.ranges(requests, keep)
        if is_last:  # behind this layer's rows, so that the disk has work while these are waited for
            self._ahead.next(layer)
        for part in ranges:
            if part.request.has("first"):
                steps.list_chunks(f, e, part.begin, part.end)
            else:
                steps.sum_chunks(f, e, part.begin, part.end)
        steps.merge(f, e, y_TD)
