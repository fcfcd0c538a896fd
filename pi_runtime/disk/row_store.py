"""The rows of all FFNs: which are in memory, getting those that are missing, and letting go of them again.

A *request* names neurons of one expert, by array. `RowStore.ranges` cuts requests into ranges of chunks whose missing
rows fit into a region of slots for staged rows: while one range is used, the next one is read into another region.

Shape letters: I neurons, C chunks, X experts.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from pi_runtime.artifact.footprint import CHUNKS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import ROW_ARRAYS
from pi_runtime.disk.arena import RowArena, row_arena
from pi_runtime.disk.kernels import fetching, neuron_cache
from pi_runtime.disk.ram_plan import RamPlan
from pi_runtime.disk.reader import Reader
from pi_runtime.disk.whole_experts import WholeExperts, experts_in_a_batch
from pi_runtime.kernels.data.matrix_view import Ints

REGIONS = 2
"""Regions of staged rows that ranges take in turn; behind them is one for each of two layers' rows read ahead."""


class Request(NamedTuple):
    """Neurons of one expert whose rows are needed, by array."""

    layer: int
    expert: int
    needs: Sequence[tuple[str, Ints]]

    def has(self, name: str) -> bool:
        """Whether rows of this array are needed."""
        return any(name == array for array, _ in self.needs)


class RowRange(NamedTuple):
    """The chunks [begin, end) of one expert's FFN, and the rows of them that are requested."""

    request: Request
    begin: int
    end: int


class RowStore:
    """Slots for rows, and the reader that fills them."""

    def __init__(self, artifact: Artifact, plan: RamPlan, reader: Reader) -> None:
        d = artifact.manifest.decoder
        self.plan, self.reader, self._d_ff = plan, reader, d.d_ff
        self.whole = WholeExperts(artifact, plan)
        self.arenas = {name: row_arena(artifact, name, plan, reader, self.whole.heat.value_U) for name in ROW_ARRAYS}
        self.whole.rows_of = [[arena.rows_L[n] for arena in self.arenas.values()] for n in range(d.n_layers)]
        self.experts_ahead = experts_in_a_batch(self.arenas.values(), reader, d.d_ff)
        self._row_I, self._slot_I = np.empty((2, d.neurons), np.int64)
        self._staged: dict[tuple[str, int], int] = {}
        """Slots of each region that hold rows, by array and region."""
        self._ahead: dict[int, Request] = {}
        """What was read ahead for a layer whose turn is not over, by layer."""
        self._coming_of: dict[int, list[int]] = {}
        """The whole experts that were absent then."""
        self._open: set[int] = set()
        """Layers of whole experts whose turn is not over: it is one for all of their experts."""

    def is_whole(self, layer: int) -> bool:
        """Whether all rows of a layer stay in memory."""
        return all(arena.whole_L[layer] for arena in self.arenas.values())

    def places(self, layer: int, name: str) -> list[tuple[int, int]] | None:
        """Of each expert of a layer where its rows of an array are, and the address of their slots: 0 where all of them
        are in memory, in order. None for an array that is not one of rows."""
        if (arena := self.arenas.get(name.removeprefix("ffn/"))) is None:
            return None
        first_X = range(0, len(arena.rows_L[layer].slot_N), self._d_ff)
        if arena.whole_L[layer]:
            return [(arena.address_of(layer, first), 0) for first in first_X]
        return [(arena.address, arena.rows_L[layer].slot_N[first:].ctypes.data) for first in first_X]

    def ranges(self, requests: Iterable[Request], keep: bool) -> Iterator[RowRange]:
        """Cut requests into ranges, in their order; a range's rows are in memory until the next one is taken.

        The first two are asked for at once, a further one whenever the rows of one are let go. `keep`: rows may enter
        the caches.
        """
        coming = self._coming(requests, keep)
        return self._used(deque(islice(coming, REGIONS)), coming)

    def _coming(self, requests: Iterable[Request], keep: bool) -> Iterator[tuple[RowRange, int]]:
        """Ask for each range, into the regions by turns, as they are taken from here."""
        region = 0
        for request in requests:
            if self._asked_whole(request, region, keep, self.plan.staged):
                yield RowRange(request, 0, CHUNKS), region
                region = (region + 1) % REGIONS
                continue
            for part in self._cut(request):
                yield self._asked(part, region, keep), region
                region = (region + 1) % REGIONS

    def _used(self, asked: deque[tuple[RowRange, int]], coming: Iterator[tuple[RowRange, int]]) -> Iterator[RowRange]:
        """Wait for each of the ranges that are asked for, let it be used, and ask for one more."""
        while asked:
            part, region = asked.popleft()
            self._wait_ahead(part.request.layer)
            self.reader.wait(region)
            yield part
            for name, _ in part.request.needs:
                self._clear(name, part.request.layer, region)
            if part.end == CHUNKS and self.plan.by_expert_L[part.request.layer]:
                for arena in self.arenas.values():
                    neuron_cache.end_unit(arena.rows_L[part.request.layer], part.request.expert * self._d_ff)
            asked.extend(islice(coming, 1))

    def _asked_whole(self, request: Request, region: int, keep: bool, room: int) -> bool:
        """Begin the turn of a request for one array, and to read all that is missing, in one call; False where it is
        more than there is room for, or the request is for more arrays."""
        if keep and self.plan.by_expert_L[request.layer] and self.experts_ahead:
            return self._asked_experts(request, region)
        if len(request.needs) > 1:
            return False
        ((name, neuron_I),) = request.needs
        layer, arena, ahead = request.layer, self.arenas[name], self._ahead.get(request.layer)
        wanted = fetching.Wanted(request.expert * self._d_ff, neuron_I, 0, CHUNKS, keep, arena.region_R[region])
        staged = fetching.fetch_turn(
            arena.rows_L[layer], self.reader.shared, region, wanted, arena.places_L[layer], self._row_I, self._slot_I,
            ahead is not None and ahead.has(name), room, self.reader.threads,
        )  # fmt: skip
        if staged > 0:
            self._staged[name, region] = staged
        return bool(staged >= 0)

    def holds(self, layer: int, expert_X: Ints) -> bool:
        """Whether experts that come and go as a whole are in memory, all of them, and none is still on its way: each
        then counts as used, and stays until the layer after the next one begins."""
        is_ahead = layer in self._ahead
        if not self.whole.are_there(layer, expert_X).all():
            return False
        if is_ahead and self.reader.is_pending(REGIONS + layer % 2):
            return False
        self._wait_ahead(layer)
        for rows, slot_I in zip(self.whole.rows_of[layer], self.whole.slots(layer, expert_X), strict=True):
            rows.clock_7[neuron_cache.TURN] += not is_ahead
            rows.turn_S[slot_I] = rows.clock_7[neuron_cache.TURN]
            rows.counts_2[neuron_cache.HITS] += len(expert_X) * self._d_ff
        self.whole.use(layer, expert_X)
        return True

    def arriving(self, layer: int, expert_X: Ints) -> Iterator[list[int]] | None:
        """Begin to read the absent ones of a layer's experts that come and go as a whole, all of them at once.

        Returns groups of experts, each in memory when it is taken, those that are there now first; None where there is
        no room for all.
        """
        is_there = self.whole.are_there(layer, expert_X)
        there_X, halves = expert_X[is_there], np.array_split(expert_X[~is_there], REGIONS)
        if len(halves[0]) > self.experts_ahead:
            return None
        self._begin_turn(_every_row(layer, self.whole.rows(there_X)))
        self._open.add(layer)
        for region, some_X in enumerate(halves):
            if len(some_X) and not self._asked_experts(_every_row(layer, self.whole.rows(some_X)), region):
                self.reader.wait(0)
                return None
        for rows in self.whole.rows_of[layer]:
            rows.counts_2[neuron_cache.HITS] += len(there_X) * self._d_ff
        self.whole.use(layer, there_X)
        return self._groups(layer, there_X.tolist(), [some_X.tolist() for some_X in halves])

    def _groups(self, layer: int, there: list[int], halves: list[list[int]]) -> Iterator[list[int]]:
        coming = self._coming_of.get(layer, ())
        yield [expert for expert in there if expert not in coming]
        self._wait_ahead(layer)
        yield [expert for expert in there if expert in coming]
        for region, some in enumerate(halves):
            self.reader.wait(region)
            yield some

    def _asked_experts(self, request: Request, region: int) -> bool:
        """Begin the turn of a request for whole experts, and to read those that are missing into the cache; False where
        it has no room for all of them."""
        layer, base = request.layer, request.expert * self._d_ff
        self._begin_turn(request)
        self._open.add(layer)
        if region < REGIONS:
            self.whole.use(layer, (base + request.needs[0][1][:: self._d_ff]) // self._d_ff)
        before = {name: self.arenas[name].counts_L2[layer].copy() for name, _ in request.needs}
        self._asked(RowRange(request, 0, CHUNKS), region, keep=True, stage=False)
        has_all = all(self.arenas[name].rows_L[layer].slot_N[base + row_I].all() for name, row_I in request.needs)
        if region >= REGIONS:
            self._set_counts(layer, before)  # they are counted when they are needed
        elif not has_all:  # what remains is staged, by other reads of the same batch, and counted then
            self.reader.wait(region)
            self._set_counts(layer, before)
        return has_all

    def _set_counts(self, layer: int, counts: Mapping[str, Ints]) -> None:
        for name, counts_2 in counts.items():
            self.arenas[name].counts_L2[layer] = counts_2

    def _cut(self, request: Request) -> list[RowRange]:
        """Begin a turn, so that rows that are there stay; cut the request into ranges that fit into a region."""
        if self._begin_turn(request) <= self.plan.staged:
            return [RowRange(request, 0, CHUNKS)]
        cuts, total = [0], 0
        for chunk, absent in enumerate(self._absent_of_chunks(request).tolist()):
            if total + absent > self.plan.staged:
                cuts.append(chunk)
                total = 0
            total += absent
        return [RowRange(request, begin, end) for begin, end in pairwise([*cuts, CHUNKS])]

    def _begin_turn(self, request: Request) -> int:
        """Begin a turn; returns the absent rows of the array that misses most."""
        most, ahead, is_open = 0, self._ahead.get(request.layer), request.layer in self._open
        for name, neuron_I in request.needs:
            rows, goes_on = self.arenas[name].rows_L[request.layer], is_open or (ahead is not None and ahead.has(name))
            absent = neuron_cache.begin_turn(rows, request.expert * self._d_ff, neuron_I, goes_on)
            most = max(most, absent)
        return most

    def _absent_of_chunks(self, request: Request) -> Ints:
        """The absent rows of each chunk, of the array that misses most there."""
        most_C, absent_C = np.zeros((2, CHUNKS), np.int64)
        for name, neuron_I in request.needs:
            rows = self.arenas[name].rows_L[request.layer]
            neuron_cache.absent_of_chunks(rows, request.expert * self._d_ff, neuron_I, absent_C)
            np.maximum(most_C, absent_C, out=most_C)
        return most_C

    def _asked(self, part: RowRange, region: int, keep: bool, stage: bool = True) -> RowRange:
        """Begin to read what is missing for a range, which is returned. `keep`: it may take slots of the cache; what
        finds none there is left out unless it is to `stage` it."""
        request = part.request
        for name, neuron_I in request.needs:
            arena = self.arenas[name]
            base, rows, places = request.expert * self._d_ff, arena.rows_L[request.layer], arena.places_L[request.layer]
            staging = arena.region_R[region] if stage else -1
            wanted = fetching.Wanted(base, neuron_I, part.begin, part.end, keep, staging)
            self._staged[name, region] = fetching.fetch(
                rows, self.reader.shared, region, wanted, places, self._row_I, self._slot_I
            )
        self.reader.submit(region)
        return part

    def _clear(self, name: str, layer: int, region: int) -> None:
        """Forget the rows in a region of an array."""
        if count := self._staged.pop((name, region), 0):
            arena = self.arenas[name]
            neuron_cache.clear_staged(arena.rows_L[layer], arena.region_R[region], count)

    def read_ahead(self, request: Request) -> None:
        """Begin to read a coming layer's rows: as many of those that are missing as fit into their region.

        With experts the request is for expert 0, and its neurons are rows of the layer.
        """
        layer, region = request.layer, REGIONS + request.layer % 2
        before = {name: self.arenas[name].counts_L2[layer].copy() for name, _ in request.needs}
        if not self._asked_whole(request, region, True, self.plan.ahead):
            if self._begin_turn(request) > self.plan.ahead:
                request = _fitting(request, self.arenas, self.plan.ahead)
            self._asked(RowRange(request, 0, CHUNKS), region, keep=True)
        self._ahead[layer] = request
        self._set_counts(layer, before)  # they are counted when they are needed

    def read_experts_ahead(self, layer: int, expert_X: Ints) -> None:
        """Begin to read those of a coming layer's whole experts that are missing, if any are."""
        absent_X = expert_X[~self.whole.are_there(layer, expert_X)]
        if len(absent_X):
            self._coming_of[layer] = absent_X.tolist()
            request = _every_row(layer, self.whole.rows(expert_X))
            self._asked_experts(request, REGIONS + layer % 2)
            self._ahead[layer] = request

    def _wait_ahead(self, layer: int) -> None:
        """Wait for the rows of a layer that were read ahead, if any were."""
        if layer in self._ahead:
            self.reader.wait(REGIONS + layer % 2)

    def end_layer(self, layer: int) -> None:
        """Let go of a layer's rows that were read ahead."""
        self._ahead.pop(layer, None)
        self._coming_of.pop(layer, None)
        self._open.discard(layer)
        for name in self.arenas:
            self._clear(name, layer, REGIONS + layer % 2)

    def recover(self) -> None:
        """Forget all rows that may have been on their way: all but the pinned ones."""
        self.reader.drain()
        self._ahead.clear()
        self._coming_of.clear()
        self._open.clear()
        self._staged.clear()
        for arena in self.arenas.values():
            for rows in arena.rows_L:
                neuron_cache.forget(rows)
                rows.slot_N[rows.slot_N >= arena.region_R[0]] = 0
            rows.owner_S[arena.region_R[0] :] = -1

    def hits_and_misses(self) -> tuple[int, int]:
        """Rows that were in memory when they were asked for, and that were not, since the beginning."""
        hits, misses = sum(arena.counts_L2.sum(0) for arena in self.arenas.values()).tolist()
        return hits, misses


def _every_row(layer: int, row_I: Ints) -> Request:
    """A request for these rows of a layer in both arrays."""
    return Request(layer, 0, [(name, row_I) for name in ROW_ARRAYS])


def _fitting(request: Request, arenas: Mapping[str, RowArena], most: int) -> Request:
    """The first of the rows of a request, so many that at most so many of them are missing in each array."""
    needs = []
    for name, row_I in request.needs:
        missing_I = np.cumsum(arenas[name].rows_L[request.layer].slot_N[row_I] == 0)
        needs.append((name, row_I[: int(np.searchsorted(missing_I, most, side="right"))]))
    return request._replace(needs=needs)
