"""A source of rows some of which are on disk, within a budget of memory (see `ram_plan`).

Shape letters: T tokens, L layers, D model width.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.disk.arena import ResidentArrays
from pi_runtime.disk.row_store import RowStore
from pi_runtime.execution.disk_ahead import ReadAhead
from pi_runtime.execution.disk_sums import RowSums
from pi_runtime.execution.executor import DiskStats, Floats, Ints
from pi_runtime.execution.host import CpuModel
from pi_runtime.execution.pages import Allowance
from pi_runtime.execution.rows import FfnTokens, MemoryRows, Piece
from pi_runtime.kernels.ffn.experts import Taken
from pi_runtime.kernels.ffn.memory import Batch
from pi_runtime.kernels.split_ffn import NeuronLists


class DiskRows(MemoryRows):
    """Rows in memory, and the others in the file. A layer whose rows are all in memory is run as in a run in memory."""

    disk: DiskStats

    def __init__(self, host: CpuModel, arrays: ResidentArrays, store: RowStore, kv: Allowance) -> None:
        super().__init__(host)
        self.store, self.plan, self.reader, self._arrays, self._kv = store, store.plan, store.reader, arrays, kv
        self.whole_L = [store.is_whole(layer) for layer in range(len(self.whole_L))]
        self.are_in_memory = all(self.whole_L)
        self.block_tokens = BLOCK_TOKENS if self.are_in_memory else self.plan.block_tokens
        self.disk, self.ahead = DiskStats(), ReadAhead(host, store)
        self._sums = RowSums(host, store, self.ahead, self.block_tokens)
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
    def turn(self) -> Iterator[None]:
        """Within it rows are asked for; where an earlier turn ended in an exception, none are taken to be there."""
        if self._is_running:
            self.store.recover()
        self._is_running = True
        yield
        self._is_running = False

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
        self._piece = None
        self._sums.take(tokens)
        self.ahead.take(tokens if ahead else None)

    def take_piece(self, piece: Piece, blocks: Sequence[slice]) -> None:
        """Go on with a long piece of a sequence, with every neuron, in blocks of its tokens."""
        self._piece = piece, blocks

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
