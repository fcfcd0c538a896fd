"""The rows of all FFNs: which are in memory, getting those that are missing, and letting go of them again.

A *request* names neurons of one expert, by array. It is cut into ranges of chunks whose missing rows fit into a region
of transit slots; a range is fetched into one region while another one is used.

Shape letters: I neurons, C chunks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pi_runtime.artifact.footprint import CHUNKS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.disk.arena import row_arena
from pi_runtime.disk.kernels import fetching, neuron_cache
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

    def has(self, name: str) -> bool:
        """Whether rows of this array are needed."""
        return any(name == array for array, _ in self.needs)


@dataclass(frozen=True)
class Work:
    """A range of the chunks of one expert's FFN: the rows it needs, and what is then computed."""

    request: Request
    begin: int
    end: int
    compute: Callable[[int, int], None]


class RowStore:
    """Slots for rows, and the reader that fills them."""

    def __init__(self, artifact: Artifact, plan: RamPlan, reader: Reader) -> None:
        d = artifact.manifest.decoder
        self.plan, self.reader, self._d_ff = plan, reader, d.d_ff
        self.arenas = {name: row_arena(artifact, name, plan, reader) for name in ROW_ARRAYS}
        self._row_I, self._slot_I = np.empty(d.d_ff, np.int64), np.empty(d.d_ff, np.int64)
        self._in_transit: dict[tuple[str, int], int] = {}
        """Slots of each region that hold rows, by array and region."""
        self._ahead: dict[int, Request] = {}
        """What was read ahead for a layer whose turn is not over, by layer."""

    def is_whole(self, layer: int) -> bool:
        """Whether all rows of a layer stay in memory."""
        return all(arena.whole_L[layer] for arena in self.arenas.values())

    def works(self, request: Request, compute: Callable[[int, int], None]) -> list[Work]:
        """Begin a turn: cut a computation into ranges of chunks whose missing rows fit into a region.

        Rows that are there stay.
        """
        if self._begin_turn(request) <= self.plan.transit:
            return [Work(request, 0, CHUNKS, compute)]
        cuts, total = [0], 0
        for chunk, absent in enumerate(self._absent_of_chunks(request).tolist()):
            if total + absent > self.plan.transit:
                cuts.append(chunk)
                total = 0
            total += absent
        return [Work(request, begin, end, compute) for begin, end in zip(cuts, [*cuts[1:], CHUNKS], strict=True)]

    def work_off(self, works: Sequence[Work], keep: bool, meanwhile: Callable[[], None] | None = None) -> None:
        """Compute ranges in order, each while the rows of the next one are read. `keep`: rows may enter the cache.

        `meanwhile` is called when the last range has been asked for, before anything is waited for.
        """
        for n in range(-1, len(works)):
            if n + 1 < len(works):
                following = works[n + 1]
                self.fetch(following.request, following.begin, following.end, (n + 1) % REGIONS, keep)
            if n + 2 == len(works) and meanwhile is not None:
                meanwhile()
            if n >= 0:
                self._wait_ahead(works[n].request.layer)
                self.reader.wait(n % REGIONS)
                works[n].compute(works[n].begin, works[n].end)
                self.release(works[n].request, n % REGIONS)

    def _begin_turn(self, request: Request) -> int:
        """Begin a turn; returns the absent rows of the array that misses most."""
        most = 0
        for name, neuron_I in request.needs:
            rows = self.arenas[name].rows_L[request.layer]
            if request.layer in self._ahead and self._ahead[request.layer].has(name):
                rows.ring_5[neuron_cache.TURN] -= 1  # the turn that reading ahead began: its rows stay
            most = max(most, neuron_cache.begin_turn(rows, request.expert * self._d_ff, neuron_I))
        return most

    def _absent_of_chunks(self, request: Request) -> Ints:
        """The absent rows of each chunk, of the array that misses most there."""
        most_C, absent_C = np.zeros((2, CHUNKS), np.int64)
        for name, neuron_I in request.needs:
            rows = self.arenas[name].rows_L[request.layer]
            neuron_cache.absent_of_chunks(rows, request.expert * self._d_ff, neuron_I, absent_C)
            np.maximum(most_C, absent_C, out=most_C)
        return most_C

    def fetch(self, request: Request, begin: int, end: int, region: int, keep: bool) -> None:
        """Begin to read what is missing for the chunks [begin, end). `keep`: it may take slots of the cache."""
        for name, neuron_I in request.needs:
            arena = self.arenas[name]
            wanted = request.expert * self._d_ff, neuron_I, begin, end, keep, arena.transit_R[region]
            place = arena.offset_L[request.layer], arena.nbytes, arena.address
            self._in_transit[name, region] = fetching.fetch(
                arena.rows_L[request.layer], self.reader.shared, region, *wanted, self._row_I, self._slot_I, *place
            )
        self.reader.submit(region)

    def release(self, request: Request, region: int) -> None:
        """Let go of the rows of a region."""
        for name, _ in request.needs:
            self._clear(name, request.layer, region)

    def _clear(self, name: str, layer: int, region: int) -> None:
        """Forget the rows in a region of an array."""
        if count := self._in_transit.pop((name, region), 0):
            arena = self.arenas[name]
            neuron_cache.clear_transit(arena.rows_L[layer], arena.transit_R[region], count)

    def read_ahead(self, request: Request) -> None:
        """Begin to read a coming layer's rows: as many of those that are missing as fit into their region.

        With experts the request is for expert 0, and its neurons are rows of the layer.
        """
        layer = request.layer
        before = {name: self.arenas[name].counts_L2[layer].copy() for name, _ in request.needs}
        if self._begin_turn(request) > self.plan.ahead:
            request = replace(request, needs=[(name, self._fitting(layer, name, i)) for name, i in request.needs])
        self.fetch(request, 0, CHUNKS, REGIONS + layer % 2, keep=True)
        self._ahead[layer] = request
        for name, counts_2 in before.items():  # they are counted when they are needed
            self.arenas[name].counts_L2[layer] = counts_2

    def _fitting(self, layer: int, name: str, row_I: Ints) -> Ints:
        """The first of some rows, so many that those of them that are missing fit into the region."""
        missing_I = np.cumsum(self.arenas[name].rows_L[layer].slot_N[row_I] == 0)
        return row_I[: int(np.searchsorted(missing_I, self.plan.ahead, side="right"))]

    def _wait_ahead(self, layer: int) -> None:
        """Wait for the rows of a layer that were read ahead, if any were."""
        if layer in self._ahead:
            self.reader.wait(REGIONS + layer % 2)

    def end_layer(self, layer: int) -> None:
        """Let go of a layer's rows that were read ahead."""
        self._ahead.pop(layer, None)
        for name in self.arenas:
            self._clear(name, layer, REGIONS + layer % 2)

    def recover(self) -> None:
        """Forget all rows that may have been on their way: all but the pinned ones."""
        self.reader.drain()
        self._ahead.clear()
        self._in_transit.clear()
        for arena in self.arenas.values():
            for rows in arena.rows_L:
                neuron_cache.forget(rows)
                rows.slot_N[rows.slot_N >= arena.transit_R[0]] = 0
            rows.owner_S[arena.transit_R[0] :] = -1

    def hits_and_misses(self) -> tuple[int, int]:
        """Rows that were in memory when they were asked for, and that were not, since the beginning."""
        hits, misses = sum(arena.counts_L2.sum(0) for arena in self.arenas.values()).tolist()
        return hits, misses
