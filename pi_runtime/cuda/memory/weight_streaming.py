"""Streams cold neurons to the GPU for one block of tokens: their weights come over the link chunk by chunk.

Two chunks' memory takes turns: while the GPU computes with one, the other is filled.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from pi_runtime.artifact.footprint import GEMM_NEURONS
from pi_runtime.artifact.gpu_buffers import weight_chunk
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import scales_name
from pi_runtime.cuda.kernels.activations import CODES
from pi_runtime.cuda.kernels.ffn_neurons import Neurons
from pi_runtime.cuda.kernels.matrix import DeviceMatrix
from pi_runtime.cuda.memory.devices import Device, Event, allocate
from pi_runtime.cuda.memory.pinned_staging import PinnedStaging


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
