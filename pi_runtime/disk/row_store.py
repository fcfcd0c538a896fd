"""The rows of all FFNs: which are in memory, getting those that are missing, and letting go of them again.

A *request* names neurons of one expert, by array. It is cut into ranges of chunks whose missing rows fit into a region
of transit slots; a range is fetched into one region while another one is used.

Shape letters: I neurons, C chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pi_runtime.artifact.footprint import CHUNKS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.disk.arena import row_arena
from pi_runtime.disk.kernels import neuron_cache
from pi_runtime.disk.ram_plan import ROW_ARRAYS, RamPlan
from pi_runtime.disk.reader import Reader
from pi_runtime.kernels.data.matrix_view import Ints

REGIONS = 2
"""Regions of transit slots that ranges take in turn; behind them is one for each of two layers' rows read ahead."""


@dataclass(frozen=True)
class Request:
    """Neurons of one expert whose rows are needed, by array."""

    layer: int
    expert: int
    needs: Sequence[tuple[str, Ints]]

    def has(self, layer: int, name: str) -> bool:
        """Whether rows of this array of a layer are needed."""
        return self.layer == layer and any(name == array for array, _ in self.needs)


class RowStore:
    """Slots for rows, and the reader that fills them."""

    def __init__(self, artifact: Artifact, plan: RamPlan, reader: Reader) -> None:
        d = artifact.manifest.decoder
        self.plan, self.reader, self._d_ff = plan, reader, d.d_ff
        self.arenas = {name: row_arena(artifact, name, plan, reader) for name in ROW_ARRAYS}
        self._row_I, self._slot_I = np.empty(d.d_ff, np.int64), np.empty(d.d_ff, np.int64)
        self._missing_C = np.zeros(CHUNKS, np.int64)
        self._ahead: Request | None = None

    def ranges(self, request: Request) -> list[tuple[int, int]]:
        """Begin a turn: cut the chunks into ranges whose missing rows fit into a region. Rows that are there stay."""
        most_C = self._begin_turn(request)
        cuts, total = [0], 0
        for chunk, missing in enumerate(most_C.tolist()):
            if total + missing > self.plan.transit:
                cuts.append(chunk)
                total = 0
            total += missing
        return list(zip(cuts, [*cuts[1:], CHUNKS], strict=True))

    def _begin_turn(self, request: Request) -> Ints:
        """The missing rows of each chunk, of the array that misses most."""
        most_C = np.zeros(CHUNKS, np.int64)
        for name, neuron_I in request.needs:
            rows = self.arenas[name].rows_L[request.layer]
            if self._ahead is not None and self._ahead.has(request.layer, name):
                rows.ring_5[neuron_cache.TURN] -= 1  # the turn that reading ahead began: its rows stay
            neuron_cache.begin_turn(rows, request.expert * self._d_ff, neuron_I, self._missing_C)
            np.maximum(most_C, self._missing_C, out=most_C)
        return most_C

    def fetch(self, request: Request, begin: int, end: int, region: int, keep: bool) -> None:
        """Begin to read what is missing for the chunks [begin, end). `keep`: it may take slots of the cache."""
        for name, neuron_I in request.needs:
            arena = self.arenas[name]
            rows, transit = arena.rows_L[request.layer], arena.transit_R[region]
            base = request.expert * self._d_ff
            count, _ = neuron_cache.obtain(rows, base, neuron_I, begin, end, keep, transit, self._row_I, self._slot_I)
            if count:
                place = arena.offset_L[request.layer], arena.nbytes, arena.address
                self.reader.add_rows(region, self._row_I[:count], self._slot_I[:count], *place)
        self.reader.submit(region)

    def wait(self, region: int) -> None:
        """Wait for what was fetched into a region."""
        self.reader.wait(region)

    def release(self, request: Request, region: int) -> None:
        """Let go of the rows of a region."""
        room = self.plan.transit if region < REGIONS else self.plan.ahead
        for name, _ in request.needs:
            arena = self.arenas[name]
            neuron_cache.clear_transit(arena.rows_L[request.layer], arena.transit_R[region], room)

    def read_ahead(self, request: Request) -> None:
        """Begin to read a coming layer's rows, where all that are missing fit into their region."""
        before = {name: self.arenas[name].rows_L[request.layer].counts_2.copy() for name, _ in request.needs}
        if 0 < self._begin_turn(request).sum() <= self.plan.ahead:
            self.fetch(request, 0, CHUNKS, REGIONS + request.layer % 2, keep=True)
            self._ahead = request
        for name, counts_2 in before.items():  # they are counted when they are needed
            self.arenas[name].rows_L[request.layer].counts_2[:] = counts_2

    def wait_ahead(self, layer: int) -> None:
        """Wait for the rows of a layer that were read ahead, if any were."""
        if self._ahead is not None and self._ahead.layer == layer:
            self.wait(REGIONS + layer % 2)

    def end_layer(self, layer: int) -> None:
        """Let go of a layer's rows that were read ahead."""
        if self._ahead is not None and self._ahead.layer == layer:
            self._ahead = None
        for arena in self.arenas.values():
            neuron_cache.clear_transit(arena.rows_L[layer], arena.transit_R[REGIONS + layer % 2], self.plan.ahead)

    def recover(self) -> None:
        """Forget all rows that may have been on their way: all but the pinned ones."""
        self.reader.drain()
        self._ahead = None
        for arena in self.arenas.values():
            for rows in arena.rows_L:
                neuron_cache.forget(rows)
                rows.slot_N[rows.slot_N >= arena.transit_R[0]] = 0
            rows.owner_S[arena.transit_R[0] :] = -1

    def hits_and_misses(self) -> tuple[int, int]:
        """Rows that were in memory when they were asked for, and that were not, since the beginning."""
        counts: list[Ints] = [rows.counts_2 for arena in self.arenas.values() for rows in arena.rows_L]
        hits, misses = np.sum(counts, axis=0).tolist()
        return hits, misses
