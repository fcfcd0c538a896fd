"""The weights that a plan puts on the GPU, loaded and named as in the artifact."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch

from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import is_scales, scales_name
from pi_runtime.cuda.kernels.matrix import DTYPES, Matrix
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.cuda.memory.pinned_staging import Staging
from pi_runtime.cuda.plan_layout import Piece

Progress = Callable[[int, int], None]
"""Called with (done, total)."""


@dataclass(frozen=True)
class Weights:
    """Stored arrays on the device, rows of a matrix flat: (rows · k, stored width)."""

    arrays: dict[str, torch.Tensor]
    formats: dict[str, str]
    columns: dict[str, int]

    def matrix(self, name: str) -> Matrix:
        return Matrix(self.formats[name], self.arrays[name], self.arrays.get(scales_name(name)), self.columns[name])

    def vector(self, name: str) -> torch.Tensor | None:
        """float32 numbers; None where the model has none."""
        return self.arrays.get(name)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def load(artifact: Artifact, pieces: Iterable[Piece], device: Device, progress: Progress | None = None) -> Weights:
    """Copy the pieces to the device. Raises DoesNotFitError where its memory ends."""
    wanted = list(pieces)
    total, done = sum(piece.nbytes for piece in wanted), 0
    weights, places = Weights({}, {}, {}), list(accumulate((_aligned(p.nbytes) for p in wanted), initial=0))

    def sent(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    with device.at_work():
        # One piece of memory: the allocator rounds every large one up to 2 MiB.
        memory = torch.empty(places[-1], dtype=torch.uint8, device=device.device)
        staging = Staging(device)
        try:
            for piece, place in zip(wanted, places, strict=False):
                entry = artifact.manifest.arrays[piece.name]
                stored = artifact.array(piece.name)
                dtype = torch.float16 if is_scales(piece.name) else DTYPES[entry.format]
                target = memory[place : place + piece.nbytes].view(dtype)
                if stored.ndim > 1:
                    target = target.view(-1, stored.shape[-1])
                row, k = 0, math.prod(stored.shape[1:-1])
                for low, high in piece.spans:
                    staging.send(stored[low:high], target[row : row + (high - low) * k], sent)
                    row += (high - low) * k
                assert row == len(target), piece
                weights.arrays[piece.name] = target
                if entry.format in DTYPES:
                    weights.formats[piece.name] = entry.format
                    weights.columns[piece.name] = entry.shape[-1]
            device.synchronize()
        finally:
            staging.close()
    return weights


def _aligned(nbytes: int) -> int:
    """As much as keeps the next array where vector loads may begin."""
    return -(-nbytes // 512) * 512
