"""Whose keys and values are in GPU memory.

Graphs work in fixed memory, so the GPU holds one sequence's cache. Its home is the sequence's own `KVCache` in RAM:
when another one comes, what the GPU holds goes home and the other's is fetched. Rows of RAM that never come home are
never touched, and so take no memory.
"""

import weakref
from collections.abc import Mapping

import torch

from pi_runtime.cuda.memory.devices import Device
from pi_runtime.execution.kv_cache import KVCache


class Residence:
    """The caches of the layers whose attention is on the GPU, and the sequence they belong to."""

    def __init__(self, layers: Mapping[int, torch.Tensor], device: Device) -> None:
        self._layers, self._device = layers, device
        self._owner: weakref.ref[KVCache] | None = None

    def take(self, cache: KVCache) -> None:
        """Make the GPU hold this sequence's cache. Call it within `device.at_work()`."""
        owner = self._owner() if self._owner is not None else None
        if owner is cache:
            return
        if owner is not None:
            self._copy(owner, home=True)
        self._owner = None
        self._copy(cache, home=False)
        self._owner = weakref.ref(cache)

    def _copy(self, cache: KVCache, *, home: bool) -> None:
        held = len(cache.tokens)
        for layer, there_2GSE in self._layers.items() if held else ():
            there_XSE, here_XSE = there_2GSE.flatten(0, 1), torch.from_numpy(cache.values[layer]).flatten(0, 1)
            # Head by head: parts of all torch would lay together first, in GPU memory that nobody planned.
            for there_SE, here_SE in zip(there_XSE, here_XSE, strict=True):
                if home:
                    here_SE[:held].copy_(there_SE[:held])
                else:
                    there_SE[:held].copy_(here_SE[:held])
        self._device.synchronize()
