"""Whose keys and values are in GPU memory.

Graphs work in fixed memory, so the GPU holds one sequence's cache. Its home is the sequence's own `KVCache` in RAM:
when another one comes, what the GPU holds goes home and the other's is fetched. Rows of RAM that never come home are
never touched, and so take no memory.
"""

import weakref
from collections.abc import Mapping

import torch

from pi_runtime.cache import KVCache
from pi_runtime.cuda.devices import Device


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

    def bring_home(self, cache: KVCache) -> None:
        """Make the sequence's cache in RAM complete, if the GPU has it; whoever goes on with it does so there."""
        if self._owner is not None and self._owner() is cache:
            self._copy(cache, home=True)
            self._owner = None

    def _copy(self, cache: KVCache, *, home: bool) -> None:
        held = len(cache.tokens)
        for layer, there in self._layers.items() if held else ():
            here = torch.from_numpy(cache.values[layer])[:, :, :held]
            if home:
                here.copy_(there[:, :, :held])
            else:
                there[:, :, :held].copy_(here)
        self._device.synchronize()
