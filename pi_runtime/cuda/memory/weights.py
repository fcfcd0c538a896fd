"""The weights that a plan puts on the GPU, loaded and named as in the artifact.

They go through two pinned buffers. From pageable memory, as a file's pages are, the driver copies in two steps, one
after the other. Here threads copy a chunk into one pinned buffer while the other buffer is on its way over the link:
the rate is that of the slower step.

Weights of cold neurons are streamed to the GPU for one block of tokens, chunk by chunk. Two chunks' memory takes turns:
while the GPU computes with one, the other is filled.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
import torch

from pi_runtime.artifact.footprint import GEMM_NEURONS
from pi_runtime.artifact.formats import Array
from pi_runtime.artifact.gpu_buffers import WEIGHT_ALIGN, weight_chunk, weight_padding
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import is_scales, scales_name
from pi_runtime.cuda.kernels.ffn_neurons import CODES, Neurons
from pi_runtime.cuda.kernels.matrix import DTYPES, DeviceMatrix
from pi_runtime.cuda.memory.devices import Device, Event, allocate
from pi_runtime.execution.plan_layout import PlacedArray

NBYTES = 32 << 20
"""Bytes of one buffer."""
STAGING_NBYTES = 2 * NBYTES
"""Bytes of both."""
_THREADS = 4
"""Enough for a link of 50 GB/s if the pages are in RAM, and to keep requests queued if they are on disk."""

OnSent = Callable[[int], None]
"""Called with the number of bytes that have been sent since the last call."""


class PinnedStaging:
    """Two pinned buffers that take turns. Use it within `device.stream()`."""

    def __init__(self, device: Device, nbytes: int = NBYTES) -> None:
        self._pinned = [device.pinned(nbytes, torch.uint8) for _ in range(2)]
        self._sent = [device.event() for _ in range(2)]
        self._next = 0
        self._copiers = ThreadPoolExecutor(_THREADS, thread_name_prefix="pi-staging")

    def send(self, source: Array, target: torch.Tensor, on_sent: OnSent | None = None) -> None:
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
            if on_sent is not None:
                on_sent(len(chunk))

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


Progress = Callable[[int, int], None]
"""Called with (done, total)."""


@dataclass(frozen=True)
class DeviceWeights:
    """Stored arrays on the device, a matrix as (rows, stored width)."""

    arrays: dict[str, torch.Tensor]
    formats: dict[str, str]
    columns: dict[str, int]

    def matrix(self, name: str) -> DeviceMatrix:
        values, scales = self.arrays[name], self.arrays.get(scales_name(name))
        by_row = None if scales is None else scales.view(len(values), -1)
        return DeviceMatrix(self.formats[name], values, by_row, self.columns[name])

    def vector(self, name: str) -> torch.Tensor | None:
        """float32 numbers; None if the model has no such array."""
        return self.arrays.get(name)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def load(
    artifact: Artifact, arrays: Iterable[PlacedArray], device: Device, progress: Progress | None = None
) -> DeviceWeights:
    """Copy the arrays to the device; the file's pages are given back on the way.

    Raises DoesNotFitError if its memory does not suffice.
    """
    placed = list(arrays)
    total, done = sum(array.nbytes for array in placed), 0
    weights, offsets = DeviceWeights({}, {}, {}), list(accumulate((_aligned(a.nbytes) for a in placed), initial=0))
    nbytes = total + weight_padding(artifact.manifest.arrays)

    def sent(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        artifact.let_go()
        if progress is not None:
            progress(done, total)

    with device.stream():
        # One allocation: the allocator rounds every large one up to 2 MiB.
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device.device)
        staging = PinnedStaging(device)
        try:
            for array, offset in zip(placed, offsets, strict=False):
                entry = artifact.manifest.arrays[array.name]
                stored = artifact.array(array.name)
                dtype = torch.float16 if is_scales(array.name) else DTYPES[entry.format]
                target = memory[offset : offset + array.nbytes].view(dtype)
                if stored.ndim > 1:
                    target = target.view(-1, stored.shape[-1])
                row, rows_per_neuron = 0, math.prod(stored.shape[1:-1])
                for low, high in array.spans:
                    rows = (high - low) * rows_per_neuron
                    staging.send(stored[low:high], target[row : row + rows], sent)
                    row += rows
                assert row == len(target), array
                weights.arrays[array.name] = target
                if entry.format in DTYPES:
                    weights.formats[array.name] = entry.format
                    weights.columns[array.name] = entry.shape[-1]
            device.synchronize()
        finally:
            staging.close()
    return weights


def _aligned(nbytes: int) -> int:
    """Bytes rounded up so that vector loads may begin at the next array."""
    return -(-nbytes // WEIGHT_ALIGN) * WEIGHT_ALIGN


@dataclass(frozen=True)
class _ChunkBuffer:
    """Memory for one chunk, and the events of its last filling and its last use."""

    arrays: dict[str, torch.Tensor]
    filled: Event
    used: Event


class WeightStreamer:
    """Brings ranges of neurons to the GPU. Use it within `device.stream()`."""

    def __init__(self, artifact: Artifact, device: Device) -> None:
        self._artifact, self._device = artifact, device
        manifest = artifact.manifest
        table = weight_chunk(manifest.arrays, manifest.decoder)
        self._buffers = [_ChunkBuffer(allocate(table, device), device.event(), device.event()) for _ in range(2)]
        for buffer in self._buffers:
            buffer.used.record()  # by the zeros, and by whoever had this memory before
        self._staging = PinnedStaging(device)

    def chunks(self, layer: int, low: int, high: int) -> Iterator[Neurons]:
        """The neurons [low, high) in chunks; a chunk is valid until the second one after it is asked for."""
        starts = range(low, high, GEMM_NEURONS)
        coming = iter([*starts[1:], None])
        if starts:
            self._fill(0, layer, starts[0], high)
        for turn, start in enumerate(starts):
            following = next(coming)
            buffer = self._buffers[turn % 2]
            buffer.filled.wait()
            yield self._neurons(buffer, layer, start, min(high, start + GEMM_NEURONS))
            buffer.used.record()
            if following is not None:
                self._fill((turn + 1) % 2, layer, following, high)

    def _fill(self, turn: int, layer: int, low: int, high: int) -> None:
        buffer, high = self._buffers[turn], min(high, low + GEMM_NEURONS)
        with self._device.copy_stream():
            buffer.used.wait()
            for name, array in buffer.arrays.items():
                source = self._artifact.array(f"layers/{layer}/ffn/{name}")[low:high]
                self._staging.send(source, array[: source.size // array[0].numel()])
            buffer.filled.record()

    def _neurons(self, buffer: _ChunkBuffer, layer: int, low: int, high: int) -> Neurons:
        manifest, count = self._artifact.manifest, high - low

        def matrix(name: str) -> DeviceMatrix:
            entry = manifest.arrays[f"layers/{layer}/ffn/{name}"]
            rows = count * prod(entry.shape[1:-1])
            whole, scales = buffer.arrays[name], buffer.arrays.get(scales_name(name))
            by_row = None if scales is None else scales.view(len(whole), -1)[:rows]
            return DeviceMatrix(entry.format, whole[:rows], by_row, entry.shape[-1])

        def bias(name: str) -> torch.Tensor | None:
            return buffer.arrays[name][:count] if name in buffer.arrays else None

        return Neurons(
            matrix("first"), bias("first_bias"), matrix("rest"), bias("up_bias"), CODES[manifest.decoder.activation]
        )

    def close(self) -> None:
        self._staging.close()
