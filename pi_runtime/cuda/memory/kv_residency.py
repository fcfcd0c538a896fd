"""Which sequence's keys and values are in GPU memory.

Graphs work in fixed memory, so the GPU holds the cache of one sequence. When another sequence runs, the GPU's cache is
copied back to its owner's `KVCache` in RAM and the other's is fetched. Rows of RAM that are never copied back are never
touched, and so take no memory.

Shape letters: G key-value heads, S positions, E head width.
"""

import weakref
from collections.abc import Mapping

import torch

from pi_runtime.cuda.memory.devices import Device
from pi_runtime.execution.kv_cache import KVCache


class KVResidency:
    """The caches of the layers whose attention is on the GPU, and the sequence that owns them."""

    def __init__(self, layers: Mapping[int, torch.Tensor], device: Device) -> None:
        self._layers, self._device = layers, device
        self._owner: weakref.ref[KVCache] | None = None

    def acquire(self, cache: KVCache) -> None:
        """Make the GPU hold this sequence's cache. Use it within `device.stream()`."""
        owner = self._owner() if self._owner is not None else None
        if owner is cache:
            return
        if owner is not None:
            self._copy(owner, to_host=True)
        self._owner = None
        self._copy(cache, to_host=False)
        self._owner = weakref.ref(cache)

    def _copy(self, cache: KVCache, *, to_host: bool) -> None:
        held = cache.length
        for layer, device_2GSE in self._layers.items() if held else ():
            host_2GSE = torch.from_numpy(cache.values[layer])
            # Head by head: torch would gather a slice of all heads first, in GPU memory that no budget counts.
            for device_SE, host_SE in zip(device_2GSE.flatten(0, 1), host_2GSE.flatten(0, 1), strict=True):
                if to_host:
                    host_SE[:held].copy_(device_SE[:held])
                else:
                    device_SE[:held].copy_(host_SE[:held])
        self._device.synchronize()
