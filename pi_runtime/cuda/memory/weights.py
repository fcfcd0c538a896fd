"""The weights that a plan puts on the GPU, loaded and named as in the artifact."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch

from pi_runtime.artifact.gpu_buffers import WEIGHT_ALIGN, weight_padding
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import is_scales, scales_name
from pi_runtime.cuda.kernels.matrix import DTYPES, DeviceMatrix
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.cuda.memory.pinned_staging import PinnedStaging
from pi_runtime.execution.plan_layout import PlacedArray

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
