"""Streams cold neurons to the GPU for one block of tokens: their weights come over the link chunk by chunk.

Two chunks' memory takes turns: while the GPU computes with one, the other is filled.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pi_runtime.artifact.footprint import GEMM_NEURONS
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import ArrayEntry, Manifest
from pi_runtime.artifact.sizes import scales_name
from pi_runtime.cuda.kernels.activations import CODES
from pi_runtime.cuda.kernels.ffn_neurons import Neurons
from pi_runtime.cuda.kernels.matrix import DTYPES, DeviceMatrix
from pi_runtime.cuda.memory.devices import Device, Event
from pi_runtime.cuda.memory.pinned_staging import PinnedStaging

NAMES = ("first", "rest")


def chunk_shapes(manifest: Manifest) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    """Stored shape and dtype of the arrays of one chunk, by their short names."""
    entries = {name: manifest.arrays[f"layers/0/ffn/{name}"] for name in NAMES}
    found = {}
    for name, entry in entries.items():
        fmt = FORMATS[entry.format]
        rows = min(GEMM_NEURONS, manifest.decoder.d_ff) * _rows_per_neuron(entry)  # of one expert, where there are more
        found[name] = ((rows, fmt.stored_shape(entry.shape)[-1]), DTYPES[entry.format])
        if fmt.quantised:
            scales = manifest.arrays[scales_name(f"layers/0/ffn/{name}")]
            width = FORMATS[scales.format].stored_shape(scales.shape)[-1]
            found[scales_name(name)] = ((rows, width), torch.float16)
    return found


def _rows_per_neuron(entry: ArrayEntry) -> int:
    return entry.shape[1] if len(entry.shape) == 3 else 1


def streaming_bytes(manifest: Manifest) -> int:
    """GPU memory for two chunks."""
    return 2 * sum(rows * width * dtype.itemsize for (rows, width), dtype in chunk_shapes(manifest).values())


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
        shapes = chunk_shapes(artifact.manifest)
        self._buffers = [
            _ChunkBuffer(
                {name: torch.zeros(s, dtype=dtype, device=device.device) for name, (s, dtype) in shapes.items()},
                device.event(),
                device.event(),
            )
            for _ in range(2)
        ]
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
                rows = source.size // source.shape[-1]
                self._staging.send(source, array[:rows])
            buffer.filled.record()

    def _neurons(self, buffer: _ChunkBuffer, layer: int, low: int, high: int) -> Neurons:
        manifest, count = self._artifact.manifest, high - low

        def matrix(name: str) -> DeviceMatrix:
            entry = manifest.arrays[f"layers/{layer}/ffn/{name}"]
            rows = count * _rows_per_neuron(entry)
            scales = buffer.arrays.get(scales_name(name))
            values = buffer.arrays[name][:rows]
            return DeviceMatrix(entry.format, values, None if scales is None else scales[:rows], entry.shape[-1])

        def bias(name: str) -> torch.Tensor | None:
            full = f"layers/{layer}/ffn/{name}"
            if full not in manifest.arrays:
                return None
            # Pinned memory: the host would wait for a copy from pageable memory to end.
            pinned = self._device.pinned(count, torch.float32)
            pinned.numpy()[:] = self._artifact.array(full)[low:high]
            return pinned.to(self._device.device, non_blocking=True)

        return Neurons(
            matrix("first"), bias("first_bias"), matrix("rest"), bias("up_bias"), CODES[manifest.decoder.activation]
        )

    def close(self) -> None:
        self._staging.close()
