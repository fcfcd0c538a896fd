"""Training samples: texts pushed through the layers one by one, with one layer's FFN inputs on disk.

Shape letters: N samples, which are the tokens of all windows, D model width; `ids_NT` has N windows of T tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr

from pi_compile.checkpoint import Checkpoint
from pi_compile.torch_model import HiddenStates
from pi_compile.torch_model import decoder as td
from pi_compile.training.quality import BATCH

CHUNK = 4096
"""Samples read at once, and in one chunk of the file."""
NEURON_VALUES = 1 << 24
"""Neuron values that an array in memory may hold."""


@dataclass(frozen=True, eq=False)
class Samples:
    """FFN inputs (N, D) of one layer."""

    array: "zarr.Array[Any]"
    state: float
    """Σ ‖x‖² of the states after the layer."""
    device: str

    def blocks(self, rows: int = CHUNK) -> Iterator[torch.Tensor]:
        """All samples in their order, in blocks of `rows`."""
        for start in range(0, self.array.shape[0], CHUNK):
            yield from torch.split(self._chunk(start), rows)

    def batches(self, size: int, rng: np.random.Generator) -> Iterator[torch.Tensor]:
        """Endless batches in random order; one chunk of the file is in memory at a time."""
        starts = np.arange(0, self.array.shape[0], CHUNK)
        while True:
            for start in rng.permutation(starts):
                chunk = self._chunk(start)
                order = torch.from_numpy(rng.permutation(len(chunk))).to(self.device)
                yield from torch.split(chunk[order], size)

    def _chunk(self, start: int) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self.array[start : start + CHUNK])).to(self.device)


def push_through(
    checkpoint: Checkpoint, n: int, w: td.NamedTensors, ids_NT: torch.Tensor, *, scratch: Path, name: str, device: str
) -> Samples:
    """Push a text's hidden states through layer n, which has the weights `w`, and keep the layer's FFN inputs.

    Layers come in their order. `name` is the text's, for the files in `scratch`.
    """
    d = checkpoint.decoder
    states = HiddenStates(scratch, name, (*ids_NT.shape, d.d_model))
    samples = zarr.create_array(
        scratch / f"{name}-inputs.zarr",
        shape=(ids_NT.numel(), d.d_model),
        chunks=(min(CHUNK, ids_NT.numel()), d.d_model),
        dtype="float32",
        compressors=None,
        overwrite=True,
    )
    global_w = td.global_weights(checkpoint, device) if n == 0 else {}
    before, after, state = states.before(n), states.before(n + 1), 0.0
    with torch.inference_mode():
        for start in range(0, len(ids_NT), BATCH):
            rows = slice(start, start + BATCH)
            if n == 0:
                x = td.embed(d, global_w, ids_NT[rows].to(device))
            else:
                x = torch.from_numpy(before[rows].copy()).to(device)
            x, inputs = td.before_ffn(d, w, x)
            flat = inputs.flatten(0, 1).numpy(force=True)
            samples[start * ids_NT.shape[1] : start * ids_NT.shape[1] + len(flat)] = flat
            x = td.after_ffn(d, w, x, td.ffn_output(w, td.neurons(d, w, inputs)))
            after[rows] = x.numpy(force=True)
            state += float(x.square().sum())
    return Samples(samples, state, device)
