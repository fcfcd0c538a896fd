"""From mapped files to the GPU, through two pinned buffers.

From pageable memory, as a file's pages are, the driver copies in two steps, one after the other. Here threads copy a
chunk into one pinned buffer while the other buffer is on its way over the link: the rate is that of the slower step.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch

from pi_runtime.artifact.formats import Array
from pi_runtime.cuda.memory.devices import Device

NBYTES = 32 << 20
"""Bytes of one buffer."""
STAGING_NBYTES = 2 * NBYTES
"""Bytes of both."""
_THREADS = 4
"""Enough for a link of 50 GB/s if the pages are in RAM, and to keep requests queued if they are on disk."""

Progress = Callable[[int], None]
"""Called with the number of bytes that have been sent since the last call."""


class PinnedStaging:
    """Two pinned buffers that take turns. Use it within `device.stream()`."""

    def __init__(self, device: Device, nbytes: int = NBYTES) -> None:
        self._pinned = [device.pinned(nbytes, torch.uint8) for _ in range(2)]
        self._sent = [device.event() for _ in range(2)]
        self._next = 0
        self._copiers = ThreadPoolExecutor(_THREADS, thread_name_prefix="pi-staging")

    def send(self, source: Array, target: torch.Tensor, progress: Progress | None = None) -> None:
        """Copy a contiguous array's bytes to a contiguous tensor on the device; returns before they have arrived."""
        from_bytes = source.reshape(-1).view(np.uint8)
        to_bytes = target.reshape(-1).view(torch.uint8)
        assert to_bytes.data_ptr() == target.data_ptr(), "a copy would be filled instead"
        assert len(from_bytes) == len(to_bytes), (source.shape, target.shape)
        size = len(self._pinned[0])
        for start in range(0, len(from_bytes), size):
            chunk = from_bytes[start : start + size]
            buffer, sent = self._pinned[self._next], self._sent[self._next]
            self._next = 1 - self._next
            sent.synchronize()
            self._copy(chunk, buffer.numpy()[: len(chunk)])
            to_bytes[start : start + len(chunk)].copy_(buffer[: len(chunk)], non_blocking=True)
            sent.record()
            if progress is not None:
                progress(len(chunk))

    def _copy(self, source: Array, target: Array) -> None:
        step = -(-len(source) // _THREADS)
        parts = [slice(n, n + step) for n in range(0, len(source), step)]
        copies = [self._copiers.submit(np.copyto, target[part], source[part]) for part in parts]
        try:
            for copy in copies:
                copy.result()
        finally:
            wait(copies)  # after an interrupt no thread may go on writing into the buffer

    def close(self) -> None:
        """Wait for all copies, and free the buffers."""
        for sent in self._sent:
            sent.synchronize()
        self._copiers.shutdown()
        self._pinned.clear()
