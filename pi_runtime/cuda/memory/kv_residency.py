"""Which sequence's keys and values are in GPU memory.

Graphs work in fixed memory, so the GPU holds the cache of one sequence, its positions side by side. When another
sequence runs, or others are to share the pages, the GPU's cache is copied back to the pages of its owner's `KVCache` in
RAM. Layers whose attention is on the GPU are not touched in pages that are never copied back, and so take no memory.

Shape letters: G key-value heads, S positions, E head width.
"""

import weakref
from collections.abc import Mapping

import numpy as np
import torch

from pi_runtime.cuda.memory.devices import Device
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import PAGE_POSITIONS
from pi_runtime.kernels.codegen.threads import ONE_AT_A_TIME


class KVResidency:
    """The caches of the layers whose attention is on the GPU, and the sequence that owns them."""

    def __init__(self, layers: Mapping[int, torch.Tensor], device: Device) -> None:
        self._layers, self._device = layers, device
        self._owner: weakref.ref[KVCache] | None = None

    def acquire(self, cache: KVCache) -> None:
        """Make the GPU hold this sequence's cache. Use it within `device.stream()`."""
        if self._find_owner() is cache:
            return
        self._write_back()
        self.release()
        self._to_device(cache)
        self._owner, cache.write_back = weakref.ref(cache), self._write_back

    def release(self) -> None:
        """Let no cache own the GPU's memory any more."""
        if (owner := self._find_owner()) is not None:
            owner.write_back = None
        self._owner = None

    def _find_owner(self) -> KVCache | None:
        """The cache whose positions the GPU holds; none if it is gone, or was closed since."""
        owner = self._owner() if self._owner is not None else None
        return owner if owner is not None and owner.write_back is not None else None

    def _to_device(self, cache: KVCache) -> None:
        held, pages = cache.length, cache.page_values()
        for layer, device_2GSE in self._layers.items() if held else ():
            host_2GSE = torch.from_numpy(np.concatenate([page[layer] for page in pages], axis=2))
            # Head by head: torch would gather a slice of all heads first, in GPU memory that no budget counts.
            for device_SE, host_SE in zip(device_2GSE.flatten(0, 1), host_2GSE.flatten(0, 1), strict=True):
                device_SE[:held].copy_(host_SE[:held])
        self._device.synchronize()

    def _write_back(self) -> None:
        """Copy the GPU's cache to its owner's pages."""
        owner = self._find_owner()
        if owner is None or owner.length == 0:
            return
        with ONE_AT_A_TIME, self._device.stream():
            for layer, device_2GSE in self._layers.items():
                heads = [device_SE[: owner.length].cpu().numpy() for device_SE in device_2GSE.flatten(0, 1)]
                host_2GSE = np.reshape(heads, (*device_2GSE.shape[:2], owner.length, device_2GSE.shape[3]))
                for n, page in enumerate(owner.page_values()):
                    part_2GSE = host_2GSE[:, :, n * PAGE_POSITIONS : (n + 1) * PAGE_POSITIONS]
                    page[layer, :, :, : part_2GSE.shape[2]] = part_2GSE
