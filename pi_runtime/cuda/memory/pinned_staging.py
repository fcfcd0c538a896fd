"""From mapped files to the GPU, through two pinned buffers.

A file's pages are pageable, and a copy from them makes the driver copy twice, one piece after the other. Here threads
copy a piece into one pinned buffer while the other one is on its way over the link: the rate is the slower one's.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch

from pi_runtime.artifact.formats import Array
from pi_runtime.cuda.memory.devices import Device

NBYTES = 32 << 20
"""Of one buffer."""
_THREADS = 4
"""Enough for a link of 50 GB/s where the pages are in RAM, and to keep requests queued where they are on disk."""

Progress = Callable[[int], None]
"""Told how many more bytes have gone."""


class Staging:
    """Two pinned buffers; the next piece goes through the one that was used first. Use it within `device.at_work()`."""

    def __init__(self, device: Device, nbytes: int = NBYTES) -> None:
        self._pinned = [device.pinned(nbytes, torch.uint8) for _ in range(2)]
        self._sent = [device.event() for _ in range(2)]
        self._next = 0
        self._copiers = ThreadPoolExecutor(_THREADS, thread_name_prefix="pi-staging")

    def send(self, source: Array, target: torch.Tensor, progress: Progress | None = None) -> None:
        """Copy a contiguous array's bytes to a contiguous tensor on the device. Returns before they have arrived."""
        from_bytes = source.reshape(-1).view(np.uint8)
        to_bytes = target.reshape(-1).view(torch.uint8)
        assert to_bytes.data_ptr() == target.data_ptr(), "a copy would be filled instead"
        assert len(from_bytes) == len(to_bytes), (source.shape, target.shape)
        size = len(self._pinned[0])
        for start in range(0, len(from_bytes), size):
            piece = from_bytes[start : start + size]
            buffer, sent = self._pinned[self._next], self._sent[self._next]
            self._next = 1 - self._next
            sent.synchronize()
            self._copy(piece, buffer.numpy()[: len(piece)])
            to_bytes[start : start + len(piece)].copy_(buffer[: len(piece)], non_blocking=True)
            sent.record()
            if progress is not None:
                progress(len(piece))

    def _copy(self, source: Array, target: Array) -> None:
        step = -(-len(source) // _THREADS)
        parts = [slice(n, n + step) for n in range(0, len(source), step)]
        copies = [self._copiers.submit(np.copyto, target[part], source[part]) for part in parts]
        try:
            for copy in copies:
                copy.result()
        finally:
            wait(copies)  # an interrupted one shall not go on into the next piece's bytes

    def close(self) -> None:
        """Wait for what is on its way, and free the buffers."""
        for sent in self._sent:
            sent.synchronize()
        self._copiers.shutdown()
        self._pinned.clear()
