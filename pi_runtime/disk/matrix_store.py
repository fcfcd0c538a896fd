"""FFNs as whole matrices, of which some are on disk: those of an expert, or of a layer without experts, come and go
together.

A *unit* is what one expert of one layer has of `first`, `up` and `down`, each in its own format; their scales are
resident, and so is what every token needs beside experts: a shared one of its own width, and dense layers. It lies in a
slot, one matrix after the other. All layers share the slots. Of experts the one with the least heat makes room (see
`whole_experts.Heat`). Of layers, which are needed in turn, some stay, and the others go through the slots that are
left.

Shape letters: U units, S slots, L layers, X experts that come from disk.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import BATCHES, unit_matrices, unit_nbytes, units
from pi_runtime.disk.ram_plan import MatrixPlan
from pi_runtime.disk.reader import Reader, page_aligned
from pi_runtime.disk.whole_experts import Heat
from pi_runtime.kernels.data.matrix_view import Ints
from pi_runtime.kernels.data.weight_table import LayerRecords

_READS = range(1, BATCHES)
"""Batches of reads of units; the other one is for rows of an embedding."""


class MatrixStore:
    """The slots of units, and the reads that fill them: as many units are under way at once as there are batches."""

    def __init__(self, artifact: Artifact, plan: MatrixPlan, reader: Reader) -> None:
        m = artifact.manifest
        self.plan, self.reader = plan, reader
        self._experts, self._layers = m.decoder.experts_alike, m.decoder.n_layers
        self._parts_L = [
            {name: (m.arrays[full].offset, nbytes) for name, (full, nbytes) in unit_matrices(m, layer).items()}
            for layer in range(self._layers)
        ]
        self._nbytes, self.has_all = unit_nbytes(m), plan.slots == len(units(m))
        self.heat = Heat(np.zeros(self._layers * self._experts))
        self._slot_U, self._unit_S = (np.full(n, -1, np.int64) for n in (len(self.heat.value_U), plan.slots))
        self._memory = page_aligned(plan.slots * self._nbytes)
        reader.hold(self._memory)
        self.table_LX: LayerRecords | None = None
        """Where kernels look for matrices; `fill` says where they are."""
        self._under_way: dict[int, int] = {}
        """Units on their way, and the batches of their reads."""
        layers = np.array([n for n, parts in enumerate(self._parts_L) if parts])  # some may have no FFN
        pinned = len(layers) if plan.slots >= len(layers) else max(0, plan.slots - len(_READS))
        spread = layers[np.linspace(0, len(layers) - 1, pinned).round().astype(int)] if self._experts == 1 else ()
        self._own = {int(unit): slot for slot, unit in enumerate(spread)}
        """Slots of layers that stay, spread so that others come meanwhile; experts have none of their own."""
        self._unused = set[int]()
        """Units that were read for a use to come."""
        self.misses = 0

    def places(self, layer: int, name: str) -> list[tuple[int, int]] | None:
        """Where each expert has a matrix before it is read: anywhere. None for an array that is none of a unit's."""
        if name.removeprefix("ffn/") not in self._parts_L[layer]:
            return None
        return [(int(self._memory.ctypes.data), 0)] * self._experts

    def fill(self, table_LX: LayerRecords) -> None:
        """Say where kernels look; where all units have slots, they are read now."""
        self.table_LX = table_LX
        for layer in range(self._layers if self.has_all else 0):
            for _ in self.arriving(layer, range(self._experts)):
                pass
        self.misses = 0

    def arriving(self, layer: int, experts: Sequence[int]) -> Iterator[int]:
        """The experts in their order, each in memory when it is taken and until the next one is; others come meanwhile,
        and the next layer where every layer is one unit."""
        own = self._experts if self._parts_L[layer] else 0
        wanted = [layer * self._experts + expert for expert in experts if expert < own]
        self.heat.use(np.array(wanted, np.int64))
        self.misses += sum(bool(self._slot_U[unit] < 0) or unit in self._unused for unit in wanted)
        for n, unit in enumerate(wanted):
            if self._slot_U[unit] < 0:
                self._ask_at_once(unit, layer)
            self._ask_some(wanted[n:], layer)
            if unit in self._under_way:
                self._wait(unit)
            self._unused.discard(unit)
            yield experts[n]
        yield from experts[len(wanted) :]

    def _ask_at_once(self, unit: int, layer: int) -> None:
        """Begin to read a unit, which may drive out any that is not on its way."""
        while not self._ask(unit, [], layer):
            self._wait(next(iter(self._under_way)))

    def _ask_some(self, wanted: list[int], layer: int) -> None:
        """Begin to read absent units that are wanted soon, as long as this drives out none that is wanted sooner."""
        if self._experts == 1:
            coming = (n % self._layers for n in range(layer, layer + self._layers))
            wanted = [n for n in coming if self._parts_L[n]]  # some layers may have no FFN
        for n, unit in enumerate(wanted):
            if self._slot_U[unit] < 0 and not self._ask(unit, wanted[:n] if self._experts == 1 else wanted, layer):
                return

    def _ask(self, unit: int, kept: list[int], layer: int) -> bool:
        """Begin to read a unit; False where no batch is free, or no slot that holds none of those to be kept."""
        batch = next((n for n in _READS if n not in self._under_way.values()), None)
        if batch is None:
            done = [u for u, n in self._under_way.items() if not self.reader.is_pending(n)]
            if not done:
                return False
            batch = self._under_way[done[0]]
            self._wait(done[0])
        held_S, slot_S = np.isin(self._unit_S, [*kept, *self._under_way]), np.arange(len(self._unit_S))
        held_S |= slot_S != self._own[unit] if unit in self._own else slot_S < len(self._own)
        if held_S.all():
            return False
        if self._experts == 1:
            worth_S = np.where(self._unit_S < 0, -np.inf, -((self._unit_S - layer - 1) % self._layers))
        else:
            worth_S = np.where(self._unit_S < 0, -1.0, self.heat.value_U[self._unit_S])
        worth_S[held_S] = np.inf
        self._read(unit, int(worth_S.argmin()), batch)
        return True

    def _read(self, unit: int, slot: int, batch: int) -> None:
        """Begin to read a unit to a slot, in place of what is there."""
        layer, expert = divmod(unit, self._experts)
        if self._unit_S[slot] >= 0:
            self._slot_U[self._unit_S[slot]] = -1
        self._slot_U[unit], self._unit_S[slot], self._under_way[unit] = slot, unit, batch
        self._unused.add(unit)
        target = int(self._memory.ctypes.data) + slot * self._nbytes
        assert self.table_LX is not None
        for name, (offset, nbytes) in self._parts_L[layer].items():
            self.table_LX[name][layer, expert] = target
            self.reader.add_range(batch, offset + expert * nbytes, nbytes, target)
            target += nbytes
        self.reader.submit(batch)

    def _wait(self, unit: int) -> None:
        self.reader.wait(self._under_way[unit])
        del self._under_way[unit]

    def recover(self) -> None:
        """Forget all units that may have been on their way."""
        self.reader.drain()
        gone: Ints = np.array(list(self._under_way), np.int64)
        self._unit_S[self._slot_U[gone]] = -1
        self._slot_U[gone] = -1
        self._under_way.clear()
