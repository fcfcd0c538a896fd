"""What the disk tier holds in memory: resident arrays, and slots for the rows of FFNs.

Shape letters: L layers, S slots, N rows of a layer.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pi_runtime.artifact.formats import FORMATS, Array
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import row_nbytes
from pi_runtime.disk.kernels import neuron_cache
from pi_runtime.disk.kernels.neuron_cache import Rows
from pi_runtime.disk.ram_plan import RamPlan, resident_places
from pi_runtime.disk.reader import Reader, page_aligned
from pi_runtime.kernels.data.matrix_view import Ints


class ResidentArrays:
    """The arrays of an artifact that are in memory as a whole, read past the page cache."""

    def __init__(self, artifact: Artifact, reader: Reader) -> None:
        self.manifest, self._artifact, self._reader = artifact.manifest, artifact, reader
        self._places, nbytes = resident_places(artifact.manifest)
        self._memory = page_aligned(nbytes)
        reader.hold(self._memory)
        for name, place in self._places.items():
            entry = artifact.manifest.arrays[name]
            reader.read_range(entry.offset, entry.nbytes, int(self._memory.ctypes.data) + place)

    def array(self, name: str) -> Array:
        """The stored array, rows padded; an empty one for rows that are read when they are needed."""
        entry = self.manifest.arrays[name]
        fmt = FORMATS[entry.format]
        if name not in self._places:
            return np.empty(0, fmt.stored)
        count = entry.nbytes // fmt.itemsize
        return (
            self._memory[self._places[name] :][: entry.nbytes]
            .view(fmt.stored)[:count]
            .reshape(fmt.stored_shape(entry.shape))
        )

    def check_unchanged(self) -> None:
        """Raise ArtifactError where the file is no longer the one that was opened."""
        self._reader.check_unchanged()

    def close(self) -> None:
        """Close the reader and the artifact, and free the memory."""
        self._reader.close()
        self._artifact.close()
        self._memory = np.empty(0, np.uint8)


MOST_REFERENCES = 3
"""Chosen on recorded traces (see docs/explanation/disk.md)."""


@dataclass(frozen=True)
class RowArena:
    """Slots for the rows of one array of all layers: an empty one, the layers', and those of staged rows."""

    nbytes: int
    """Of one row."""
    memory: Array
    rows_L: list[Rows]
    offset_L: list[int]
    """Where in the file each layer's rows begin."""
    region_R: tuple[int, ...]
    """The first slot of each region of staged rows (see `row_store`)."""
    whole_L: tuple[bool, ...]
    """Whether all rows of a layer are pinned; they then lie in stored order."""
    counts_L2: Ints
    """Rows that were found, and that were not, of each layer."""

    @cached_property
    def address(self) -> int:
        """Where the first slot is."""
        return int(self.memory.ctypes.data)

    def address_of(self, layer: int, row: int) -> int:
        """Where a row is that is in memory."""
        return self.address + int(self.rows_L[layer].slot_N[row]) * self.nbytes


def row_arena(artifact: Artifact, name: str, plan: RamPlan, reader: Reader) -> RowArena:
    """The arena of one array with its pinned rows, and with the caches full of those that fire next most often."""
    m, slots = artifact.manifest, plan.slots(name)
    d = m.decoder
    nbytes = row_nbytes(d, m.formats["ffn"])[name]
    assert nbytes <= reader.piece, (nbytes, reader.piece)  # it would be read beyond the reader's memory
    memory = page_aligned(slots * nbytes)
    reader.hold(memory)
    owner_S, references_S, turn_S = (np.full(slots, first, np.int64) for first in (-1, 0, -1))
    rows_L: list[Rows] = []
    offset_L: list[int] = []
    begin = 1
    regions = slots - np.cumsum([plan.ahead, plan.ahead, plan.staged, plan.staged])[::-1]
    slots_L = plan.first_L if name == "first" else plan.rest_L
    whole_L = tuple(own.pinned == d.neurons for own in slots_L)
    counts_L2 = np.zeros((len(slots_L), 2), np.int64)
    arena = RowArena(nbytes, memory, rows_L, offset_L, tuple(regions.tolist()), whole_L, counts_L2)
    for n, own in enumerate(slots_L):
        cached = begin + own.pinned
        rows = neuron_cache.rows_of(
            d.neurons, cached, cached + own.cached, MOST_REFERENCES, owner_S, references_S, turn_S
        )
        rows = rows._replace(counts_2=counts_L2[n])
        rows_L.append(rows)
        offset_L.append(m.arrays[f"layers/{n}/ffn/{name}"].offset)
        if whole_L[n]:
            neuron_cache.place(rows, np.arange(d.neurons), begin)
            reader.read_range(offset_L[-1], d.neurons * nbytes, arena.address_of(n, 0))
        else:
            held = _hottest(own.pinned + own.cached, d.n_experts, d.d_ff)
            neuron_cache.place(rows, held, begin)
            _read_rows(reader, np.sort(held), rows.slot_N, offset_L[-1], nbytes, arena.address)
        begin = cached + own.cached
    return arena


def _hottest(count: int, experts: int, neurons: int) -> Ints:
    """So many rows of a layer: of each expert those that are stored first, pinned ones before others."""
    by_heat = np.arange(experts * neurons).reshape(experts, neurons).T.ravel()
    return by_heat[:count]


def _read_rows(reader: Reader, row_I: Ints, slot_N: Ints, offset: int, nbytes: int, target: int) -> None:
    """Read ascending rows to their slots."""
    most = reader.rows
    for first in range(0, len(row_I), most):
        some = row_I[first : first + most]
        reader.add_rows(0, some, slot_N[some], offset, nbytes, target)
        reader.submit(0)
        reader.wait(0)
