"""The rows of all FFNs: two stores behind one face, rows of neurons, and experts that come and go as a whole.

A *request* names neurons of one expert, by array. `RowStore.ranges` cuts requests into ranges of chunks whose missing
rows fit into a region of slots for staged rows: while one range is used, the next one is read into another region.

Shape letters: I neurons.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, pairwise

import numpy as np

from pi_runtime.artifact.footprint import CHUNKS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import ROW_ARRAYS
from pi_runtime.disk.arena import RowArena, row_arena
from pi_runtime.disk.ram_plan import RamPlan
from pi_runtime.disk.reader import Reader
from pi_runtime.disk.row_slots import REGIONS, Request, RowRange, RowSlots
from pi_runtime.disk.whole_experts import ExpertStore, profiled_heat


class RowStore(RowSlots):
    """Rows of neurons, one by one, and `experts` where a layer's are needed as a whole."""

    def __init__(self, artifact: Artifact, plan: RamPlan, reader: Reader) -> None:
        heat = profiled_heat(artifact, plan)
        arenas = {name: row_arena(artifact, name, plan, reader, heat.value_U) for name in ROW_ARRAYS}
        super().__init__(plan, reader, arenas, artifact.manifest.decoder.d_ff)
        self.experts = ExpertStore(self, heat, artifact.manifest.decoder.most_experts)

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
                self.ask(part, region, keep)
                yield part, region
                region = (region + 1) % REGIONS

    def _asked_whole(self, request: Request, region: int, keep: bool, room: int) -> bool:
        """Begin the turn of a request, and to read all that is missing; False where it is more than there is room for,
        or takes more than one call."""
        if keep and self.plan.by_expert_L[request.layer] and self.experts.room:
            return self.experts.ask(request, region)
        return self.begin_and_ask(request, region, keep, room)

    def _used(self, asked: deque[tuple[RowRange, int]], coming: Iterator[tuple[RowRange, int]]) -> Iterator[RowRange]:
        """Wait for each of the ranges that are asked for, let it be used, and ask for one more."""
        while asked:
            part, region = asked.popleft()
            layer, expert, needs = part.request
            self.wait_ahead(layer)
            self.reader.wait(region)
            yield part
            for name, _ in needs:
                self.clear(name, layer, region)
            if part.end == CHUNKS and self.plan.by_expert_L[layer]:
                self.experts.let_go(layer, expert)
            asked.extend(islice(coming, 1))

    def _cut(self, request: Request) -> list[RowRange]:
        """Begin a turn, so that rows that are there stay; cut the request into ranges that fit into a region."""
        if self.begin_turn(request) <= self.plan.staged:
            return [RowRange(request, 0, CHUNKS)]
        cuts, total = [0], 0
        for chunk, absent in enumerate(self.absent_of_chunks(request).tolist()):
            if total + absent > self.plan.staged:
                cuts.append(chunk)
                total = 0
            total += absent
        return [RowRange(request, begin, end) for begin, end in pairwise([*cuts, CHUNKS])]

    def read_ahead(self, request: Request) -> None:
        """Begin to read a coming layer's rows: as many of those that are missing as fit into their region.

        With experts the request is for expert 0, and its neurons are rows of the layer.
        """
        region = REGIONS + request.layer % 2
        with self.uncounted(request):
            if not self._asked_whole(request, region, True, self.plan.ahead):
                if self.begin_turn(request) > self.plan.ahead:
                    request = _fitting(request, self.arenas, self.plan.ahead)
                self.ask(RowRange(request, 0, CHUNKS), region, keep=True)
        self.turns[request.layer].ahead = request


def _fitting(request: Request, arenas: Mapping[str, RowArena], most: int) -> Request:
    """The first of the rows of a request, so many that at most so many of them are missing in each array."""
    needs = []
    for name, row_I in request.needs:
        missing_I = np.cumsum(arenas[name].rows_L[request.layer].slot_N[row_I] == 0)
        needs.append((name, row_I[: int(np.searchsorted(missing_I, most, side="right"))]))
    return request._replace(needs=needs)
