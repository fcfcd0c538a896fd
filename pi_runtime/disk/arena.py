"""What the disk tier holds in memory: resident arrays, and slots for the rows of FFNs.

Shape letters: L layers, S slots, N rows of a layer.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.formats import FORMATS, Array
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import EMBEDDING_ARRAYS, MAPPED, row_nbytes
from pi_runtime.artifact.schema import ArrayEntry
from pi_runtime.disk.kernels import neuron_cache
from pi_runtime.disk.kernels.fetching import Places
from pi_runtime.disk.kernels.neuron_cache import LayerRows
from pi_runtime.disk.ram_plan import MatrixPlan, RamPlan, expert_counts, places_of, resident_nbytes
from pi_runtime.disk.reader import Reader, page_aligned
from pi_runtime.kernels.data.matrix_view import Ints


class ResidentArrays:
    """What is in memory of an artifact's arrays beside rows of FFNs, read past the page cache.

    Rows of an untied embedding are there while their tokens run, unless there is room for all.
    """

    def __init__(self, artifact: Artifact, plan: RamPlan | MatrixPlan, reader: Reader) -> None:
        self.manifest, self._artifact, self._reader = artifact.manifest, artifact, reader
        self._away = plan.away
        resident = resident_nbytes(artifact.manifest, plan.whole_embedding)
        self._ranges = {name: self._held(name, nbytes) for name, nbytes in resident.items()}
        self._nbytes = {name: sum(n for _, n in ranges) for name, ranges in self._ranges.items() if ranges}
        self._places, nbytes = places_of(self._nbytes)
        self._memory = page_aligned(nbytes)
        self._by_token = [
            name for name in EMBEDDING_ARRAYS if name in self._nbytes and self._nbytes[name] < self._entry(name).nbytes
        ]
        reader.hold(self._memory)
        for name in (name for name in self._places if name not in self._by_token):
            target = self._address(name)
            for offset, nbytes in self._ranges[name]:
                reader.read_range(self._entry(name).offset + offset, nbytes, target)
                target += nbytes

    def _held(self, name: str, nbytes: int) -> list[tuple[int, int]]:
        """(Beginning in an array of which so many bytes are resident, bytes) of each range of it that no GPU has."""
        if name not in self._away:
            return [(0, nbytes)]
        entry = self._entry(name)
        ends = [0, *(row for span in self._away[name] for row in span), entry.shape[0]]
        row_nbytes = entry.nbytes // entry.shape[0]
        held = zip(ends[::2], ends[1::2], strict=True)
        return [(low * row_nbytes, (high - low) * row_nbytes) for low, high in held if low < high]

    def places(self, name: str) -> list[tuple[int, int]] | None:
        """Where each expert's rows of an array would begin, and 0, where some rows are here and others are a GPU's.

        Rows behind the expert's cut are at their places from there. 0 where no row from there on is here.
        """
        if name not in self._away or name not in self._places:
            return None
        experts = self.manifest.decoder.n_experts
        return [(self._expert_address(name, self._entry(name).nbytes // experts * n), 0) for n in range(experts)]

    def _expert_address(self, name: str, begin: int) -> int:
        before = 0
        for offset, nbytes in self._ranges[name]:
            if offset + nbytes > begin:
                return self._address(name) + before + begin - offset
            before += nbytes
        return 0

    def _entry(self, name: str) -> ArrayEntry:
        return self.manifest.arrays[name]

    def _address(self, name: str) -> int:
        return int(self._memory.ctypes.data) + self._places[name]

    def array(self, name: str) -> Array:
        """The stored array, rows padded, or so many of its rows as there is room for."""
        if name in MAPPED:
            return self._artifact.array(name)
        entry = self._entry(name)
        fmt = FORMATS[entry.format]
        if name not in self._places:
            return np.empty(0, fmt.stored)
        found = self._memory[self._places[name] :][: self._nbytes[name]].view(fmt.stored)
        shape = fmt.stored_shape(entry.shape)
        return found[: self._nbytes[name] // fmt.itemsize].reshape(-1, *shape[1:])

    def embedded(self, tokens_T: Ints) -> Ints:
        """Read the embedding's rows of at most `BLOCK_TOKENS` tokens, if they are not there anyway; returns where each
        token's row is in `array("embedding")`."""
        if not self._by_token:
            return tokens_T
        row_I, place_T = np.unique(tokens_T, return_inverse=True)
        for name in self._by_token:
            entry = self._entry(name)
            nbytes = entry.nbytes // self.manifest.decoder.vocab_size
            places = Places(entry.offset, nbytes, self._address(name), nbytes)
            read_rows(self._reader, row_I, np.arange(len(row_I)), places)
        return place_T

    def check_unchanged(self) -> None:
        """Raise ArtifactError where the file is no longer the one that was opened."""
        self._reader.check_unchanged()

    def close(self) -> None:
        """Close the reader and the artifact, and free the memory."""
        self._reader.close()
        self._artifact.close()
        self._memory = np.empty(0, np.uint8)


PAGE = 4096
MOST_REFERENCES = 3
"""Chosen on recorded traces (see docs/explanation/disk.md)."""


@dataclass(frozen=True)
class RowArena:
    """Slots for the rows of one array of all layers: an empty one, the layers', and those of staged rows.

    Where this memory stands in for a GPU, its rows lie before the empty slot, in slots with numbers below 0, of which
    nothing else is kept. Those of a GPU have no slot.
    """

    nbytes: int
    """Bytes of one slot: of the longest rows that a layer has."""
    memory: Array
    rows_L: list[LayerRows]
    places_L: list[Places]
    """Where each layer's rows lie in the file, and where slots are."""
    region_R: tuple[int, ...]
    """The first slot of each region of staged rows (see `row_store`)."""
    whole_L: tuple[bool, ...]
    """Whether all rows of a layer are pinned; they then lie in stored order, one right after the other."""
    counts_L2: Ints
    """Rows that were found, and that were not, of each layer."""
    gpu_rows: int = 0
    """Rows that lie before the empty slot."""

    @cached_property
    def address(self) -> int:
        """Where the empty slot is."""
        return int(self.memory.ctypes.data) + self.gpu_rows * self.nbytes

    def address_of(self, layer: int, row: int) -> int:
        """Where a row is of a layer whose rows are all in memory."""
        return self.address + int(self.rows_L[layer].slot_N[0]) * self.nbytes + row * self.places_L[layer].nbytes


def row_arena(
    artifact: Artifact, name: str, plan: RamPlan, reader: Reader, heat_U: npt.NDArray[np.float64]
) -> RowArena:
    """The arena of one array with its pinned rows, and with the caches full of those that fire next most often.

    `heat_U`: of the experts of all layers that share a cache, as `WholeExperts` counts it.
    """
    m, slots = artifact.manifest, plan.slots(name)
    d = m.decoder
    nbytes = row_nbytes(d, m.formats["ffn"])[name]
    assert nbytes <= reader.piece, (nbytes, reader.piece)  # it would be read beyond the reader's memory
    slots_L = plan.first_L if name == "first" else plan.rest_L
    pooled = [n for n, by_expert in enumerate(plan.by_expert_L) if by_expert]
    pool_slots = sum(slots_L[n].cached for n in pooled)
    regions = slots - np.cumsum([plan.ahead, plan.ahead, plan.staged, plan.staged])[::-1]
    ring = int(regions[0]) - pool_slots
    on_gpu = 0 if plan.away else int(plan.cut_LX.sum())
    # Units may be read straight to the ring, which begins at a page.
    memory = page_aligned((on_gpu + slots) * nbytes + PAGE)[-(on_gpu + ring) * nbytes % PAGE :]
    reader.hold(memory)
    shared_S = [np.full(slots, first, np.int64) for first in (-1, 0, -1)]
    pool = neuron_cache.rows_of(d.neurons, ring, ring + pool_slots, MOST_REFERENCES, *shared_S)
    of_pool = iter(neuron_cache.in_one_ring(pool, len(pooled), d.d_ff, heat_U))
    without = d.mixer_only_layers
    whole_L = tuple(n in without or own.pinned == d.neurons for n, own in enumerate(slots_L))
    counts_L2 = np.zeros((len(slots_L), 2), np.int64)
    arena = RowArena(nbytes, memory, [], [], tuple(regions.tolist()), whole_L, counts_L2, on_gpu)
    begin, before = 1, -on_gpu
    for n, own in enumerate(slots_L):
        cached = ring if plan.by_expert_L[n] else begin + own.pinned
        rows = (
            next(of_pool)
            if plan.by_expert_L[n]
            else neuron_cache.rows_of(d.neurons, cached, cached + own.cached, MOST_REFERENCES, *shared_S)
        )._replace(counts_2=counts_L2[n])
        arena.rows_L.append(rows)
        if n in without:
            arena.places_L.append(Places(0, nbytes, arena.address, nbytes))
            continue
        entry = m.arrays[f"layers/{n}/ffn/{name}"]
        places = Places(entry.offset, entry.nbytes // d.neurons, arena.address, nbytes)
        arena.places_L.append(places)
        hottest = np.arange(d.neurons) if whole_L[n] else _hottest(artifact, n, plan)
        if on_gpu:
            first = (np.arange(d.d_ff) < plan.cut_LX[n][:, None]).ravel().nonzero()[0]
            rows.slot_N[first] = np.arange(before, before + len(first))
            read_rows(reader, first, rows.slot_N[first], places)
            before += len(first)
        neuron_cache.place(rows, hottest[: own.pinned], begin)
        neuron_cache.place(rows, hottest[own.pinned : own.pinned + own.cached], cached)
        if whole_L[n]:
            reader.read_range(entry.offset, entry.nbytes, arena.address_of(n, 0))
        else:
            held = np.sort(hottest[: own.pinned + own.cached])
            read_rows(reader, held, rows.slot_N[held], places)
        begin += own.pinned + (0 if plan.by_expert_L[n] else own.cached)
        ring += own.cached if plan.by_expert_L[n] else 0
    return arena


def _hottest(artifact: Artifact, layer: int, plan: RamPlan) -> Ints:
    """The rows of a layer that are not a GPU's: those to be pinned before others, of each expert those that are stored
    first; or expert by expert."""
    d = artifact.manifest.decoder
    row_XF = np.arange(d.neurons).reshape(d.n_experts, d.d_ff)
    if plan.by_expert_L[layer]:
        counts_X = expert_counts(artifact, layer)
        return row_XF[np.argsort(-counts_X, kind="stable")].ravel()
    cut_X1, pinned_X1 = plan.cut_LX[layer][:, None], plan.pinned_LX[layer][:, None]
    rank_XF = np.broadcast_to(np.arange(d.d_ff), row_XF.shape)
    order = np.lexsort((row_XF.ravel(), rank_XF.ravel(), (rank_XF >= cut_X1 + pinned_X1).ravel()))
    return order[(rank_XF >= cut_X1).ravel()[order]]


def read_rows(reader: Reader, row_I: Ints, slot_I: Ints, places: Places) -> None:
    """Read ascending rows to their slots."""
    for first in range(0, len(row_I), reader.rows):
        some = slice(first, first + reader.rows)
        reader.add_rows(0, row_I[some], slot_I[some], *places)
        reader.submit(0)
        reader.wait(0)
