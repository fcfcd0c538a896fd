"""Which sequences' keys and values are in GPU memory.

Graphs work in fixed memory, so the GPU has a fixed number of pages for each layer, and each sequence that runs has a
table of those that are its own. When other sequences need the room, or others are to share a sequence's pages, the
GPU's pages are copied back to the pages of its `KVCache` in RAM. Layers whose attention is on the GPU are not touched
in pages that are never copied back, and so take no memory.

Shape letters: M sequences, P pages that the GPU has, L pages of one sequence, G key-value heads, S positions of a page,
E head width.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from pi_runtime.cuda.memory.devices import Device
from pi_runtime.execution.executor import Ints
from pi_runtime.execution.kv_cache import KVCache, pages_of
from pi_runtime.execution.pages import PAGE_POSITIONS, by_position
from pi_runtime.kernels.codegen.threads import ONE_AT_A_TIME


@dataclass(frozen=True)
class _Resident:
    """A sequence whose keys and values the GPU holds, and the GPU's pages that they are in."""

    of: weakref.ref[KVCache]
    pages: list[int]

    @property
    def cache(self) -> KVCache | None:
        """None if it is gone, or was closed since."""
        cache = self.of()
        return cache if cache is not None and cache.write_back is not None else None


class KVResidency:
    """The pages of the layers whose attention is on the GPU, and the sequences that have them.

    `layers` are (P, 2, G, S, E) tensors; each holds the positions of one sequence at least.
    """

    def __init__(self, layers: Mapping[int, torch.Tensor], device: Device) -> None:
        self._layers, self._device = layers, device
        self._pages = min((len(pages) for pages in layers.values()), default=0)
        self._residents: list[_Resident] = []
        """The one that ran last comes last."""

    def fitting(self, caches: Sequence[KVCache]) -> int:
        """How many of these sequences, from the first on, the GPU can hold at once with one position more each."""
        if not self._layers:
            return len(caches)
        ends = np.cumsum([pages_of(cache.length + 1) for cache in caches])
        return max(1, int(np.searchsorted(ends, self._pages, "right")))

    def acquire(self, caches: Sequence[KVCache], positions: int, table_ML: Ints) -> None:
        """Make the GPU hold these sequences with so many positions more each, and write the tables of their pages.

        Use it within `device.stream()`.
        """
        if not self._layers:
            return
        held = {id(resident.cache): resident for resident in self._residents if resident.cache is not None}
        own = [held.pop(id(cache), None) for cache in caches]
        others, needed = list(held.values()), [pages_of(cache.length + positions) for cache in caches]
        while sum(needed) > self._pages - sum(len(resident.pages) for resident in others):
            leaving = others.pop(0)
            self._write_back(leaving)
            self._forget(leaving)
        for resident, count in zip(own, needed, strict=True):
            if resident is not None:
                del resident.pages[count:]
        self._residents = [*others, *(resident for resident in own if resident is not None)]
        for cache, found, count, table_L in zip(caches, own, needed, table_ML, strict=True):
            resident = self._bring(cache, count) if found is None else found
            resident.pages.extend(self._free()[: count - len(resident.pages)])
            table_L[:count] = resident.pages

    def release(self) -> None:
        """Let no cache have pages of the GPU any more."""
        for resident in self._residents:
            self._forget(resident)
        self._residents = []

    def _free(self) -> list[int]:
        taken = {page for resident in self._residents for page in resident.pages}
        return [page for page in range(self._pages) if page not in taken]

    def _forget(self, resident: _Resident) -> None:
        if (cache := resident.cache) is not None:
            cache.write_back = None

    def _bring(self, cache: KVCache, pages: int) -> _Resident:
        """Copy a sequence's keys and values into so many pages of the GPU."""
        resident = _Resident(weakref.ref(cache), self._free()[:pages])
        self._residents.append(resident)
        for layer, device_P2GSE in self._layers.items():
            for page, values in zip(resident.pages, cache.page_values(), strict=False):
                device_P2GSE[page].copy_(torch.from_numpy(np.stack(by_position(values[layer]))))
        self._device.synchronize()
        cache.write_back = partial(self._write_back, resident)
        return resident

    def _write_back(self, resident: _Resident) -> None:
        """Copy a sequence's keys and values to its pages in RAM."""
        cache = resident.cache
        if cache is None or cache.length == 0:
            return
        with ONE_AT_A_TIME, self._device.stream():
            for layer, device_P2GSE in self._layers.items():
                for n, (page, values) in enumerate(zip(resident.pages, cache.page_values(), strict=False)):
                    held, count = device_P2GSE[page].cpu().numpy(), cache.length - n * PAGE_POSITIONS
                    for device_GSE, host_GSE in zip(held, by_position(values[layer]), strict=True):
                        host_GSE[:, :count] = device_GSE[:, :count]
