"""The slots of all FFNs' rows: which rows are in memory, and reads of those that are missing.

It is what both stores have in common, `row_store.RowStore` for rows of neurons and `whole_experts.ExpertStore`.

Shape letters: I neurons, C chunks.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pi_runtime.artifact.footprint import CHUNKS
from pi_runtime.disk.arena import RowArena
from pi_runtime.disk.kernels import fetching, neuron_cache
from pi_runtime.disk.ram_plan import RamPlan
from pi_runtime.disk.reader import Reader
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


@dataclass
class Turn:
    """A layer's turn, which is over when its FFN is summed."""

    ahead: Request | None = None
    """What was read before the turn."""
    coming: Sequence[int] = ()
    """The whole experts that were absent then."""
    is_open: bool = False
    """Whether a request of the turn came already, where it is one turn for all of the layer's experts."""


class RowSlots:
    """Slots for rows, and the reader that fills them."""

    def __init__(self, plan: RamPlan, reader: Reader, arenas: dict[str, RowArena], d_ff: int) -> None:
        self.plan, self.reader, self.arenas, self.d_ff = plan, reader, arenas, d_ff
        neurons = len(arenas["first"].rows_L[0].slot_N)
        self._row_I, self._slot_I = np.empty((2, neurons), np.int64)
        self.turns: defaultdict[int, Turn] = defaultdict(Turn)
        """By layer."""
        self._staged: dict[tuple[str, int], int] = {}
        """Slots of each region that hold rows, by array and region."""

    def is_whole(self, layer: int) -> bool:
        """Whether all rows of a layer stay in memory."""
        return all(arena.whole_L[layer] for arena in self.arenas.values())

    def places(self, layer: int, name: str) -> list[tuple[int, int]] | None:
        """Where each expert of a layer has its rows of an array, and the address of their slots.

        The address is 0 where all rows are in memory, in order. None for an array that is not one of rows.
        """
        if (arena := self.arenas.get(name.removeprefix("ffn/"))) is None:
            return None
        first_X = range(0, len(arena.rows_L[layer].slot_N), self.d_ff)
        if arena.whole_L[layer]:
            return [(arena.address_of(layer, first), 0) for first in first_X]
        return [(arena.address, arena.rows_L[layer].slot_N[first:].ctypes.data) for first in first_X]

    def begin_turn(self, request: Request) -> int:
        """Begin a turn, so that rows that are there stay; returns the absent rows of the array that misses most."""
        most, turn = 0, self.turns[request.layer]
        for name, neuron_I in request.needs:
            rows = self.arenas[name].rows_L[request.layer]
            goes_on = turn.is_open or (turn.ahead is not None and turn.ahead.has(name))
            most = max(most, neuron_cache.begin_turn(rows, request.expert * self.d_ff, neuron_I, goes_on))
        return most

    def begin_and_ask(self, request: Request, region: int, keep: bool, room: int) -> bool:
        """Begin the turn of a request for one array, and to read all that is missing, in one call; False where it is
        more than there is room for, or the request is for more arrays."""
        if len(request.needs) > 1:
            return False
        ((name, neuron_I),) = request.needs
        layer, arena, ahead = request.layer, self.arenas[name], self.turns[request.layer].ahead
        wanted = fetching.Wanted(request.expert * self.d_ff, neuron_I, 0, CHUNKS, keep, arena.region_R[region])
        staged = fetching.fetch_turn(
            arena.rows_L[layer], self.reader.shared, region, wanted, arena.places_L[layer], self._row_I, self._slot_I,
            ahead is not None and ahead.has(name), room, self.reader.threads,
        )  # fmt: skip
        if staged > 0:
            self._staged[name, region] = staged
        return bool(staged >= 0)

    def ask(self, part: RowRange, region: int, keep: bool, stage: bool = True) -> None:
        """Begin to read what is missing for a range. `keep`: it may take slots of the cache; what
        finds none there is left out unless it is to `stage` it."""
        request = part.request
        for name, neuron_I in request.needs:
            arena = self.arenas[name]
            base, rows, places = request.expert * self.d_ff, arena.rows_L[request.layer], arena.places_L[request.layer]
            staging = arena.region_R[region] if stage else -1
            wanted = fetching.Wanted(base, neuron_I, part.begin, part.end, keep, staging)
            self._staged[name, region] = fetching.fetch(
                rows, self.reader.shared, region, wanted, places, self._row_I, self._slot_I
            )
        self.reader.submit(region)

    def clear(self, name: str, layer: int, region: int) -> None:
        """Forget the rows in a region of an array."""
        if count := self._staged.pop((name, region), 0):
            arena = self.arenas[name]
            neuron_cache.clear_staged(arena.rows_L[layer], arena.region_R[region], count)

    def absent_of_chunks(self, request: Request) -> Ints:
        """The absent rows of each chunk, of the array that misses most there."""
        most_C, absent_C = np.zeros((2, CHUNKS), np.int64)
        for name, neuron_I in request.needs:
            rows = self.arenas[name].rows_L[request.layer]
            neuron_cache.absent_of_chunks(rows, request.expert * self.d_ff, neuron_I, absent_C)
            np.maximum(most_C, absent_C, out=most_C)
        return most_C

    @contextmanager
    def uncounted(self, request: Request) -> Iterator[None]:
        """Within it rows are asked for that count when they are needed."""
        before = {name: self.arenas[name].counts_L2[request.layer].copy() for name, _ in request.needs}
        yield
        self.set_counts(request.layer, before)

    def set_counts(self, layer: int, counts: Mapping[str, Ints]) -> None:
        """Count as many rows of a layer as found and missed, by array."""
        for name, counts_2 in counts.items():
            self.arenas[name].counts_L2[layer] = counts_2

    def wait_ahead(self, layer: int) -> None:
        """Wait for the rows of a layer that were read ahead, if any were."""
        if self.turns[layer].ahead is not None:
            self.reader.wait(REGIONS + layer % 2)

    def end_layer(self, layer: int) -> None:
        """Let go of a layer's rows that were read ahead: its turn is over."""
        self.turns.pop(layer, None)
        for name in self.arenas:
            self.clear(name, layer, REGIONS + layer % 2)

    def recover(self) -> None:
        """Forget all rows that may have been on their way: all but the pinned ones."""
        self.reader.drain()
        self.turns.clear()
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
