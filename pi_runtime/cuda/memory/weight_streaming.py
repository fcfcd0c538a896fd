"""Cold neurons of a layer on the GPU for one block of tokens: their weights come over the link piece by piece.

Two pieces' memory takes turns: while the GPU computes with one, the other is on its way.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pi_runtime.artifact.footprint import GEMM_NEURONS
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Manifest
from pi_runtime.artifact.sizes import scales_name
from pi_runtime.cuda.kernels.activations import CODES
from pi_runtime.cuda.kernels.ffn_neurons import Neurons
from pi_runtime.cuda.kernels.matrix import DTYPES, Matrix
from pi_runtime.cuda.memory.devices import Device, Event
from pi_runtime.cuda.memory.pinned_staging import Staging

NAMES = ("first", "rest")


def piece_shapes(manifest: Manifest) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    """Stored shape of the arrays of one piece, by their short names."""
    entries = {name: manifest.arrays[f"layers/0/ffn/{name}"] for name in NAMES}
    found = {}
    for name, entry in entries.items():
        fmt, k = FORMATS[entry.format], entry.shape[1] if len(entry.shape) == 3 else 1
        rows = min(GEMM_NEURONS, manifest.decoder.d_ff) * k  # of one expert, where there are more
        found[name] = ((rows, fmt.stored_shape(entry.shape)[-1]), DTYPES[entry.format])
        if fmt.quantised:
            scales = manifest.arrays[scales_name(f"layers/0/ffn/{name}")]
            width = FORMATS[scales.format].stored_shape(scales.shape)[-1]
            found[scales_name(name)] = ((rows, width), torch.float16)
    return found


def streaming_bytes(manifest: Manifest) -> int:
    """GPU memory for two pieces."""
    return 2 * sum(rows * width * dtype.itemsize for (rows, width), dtype in piece_shapes(manifest).values())


@dataclass(frozen=True)
class _Piece:
    """Memory for one piece: when it was last filled, and last used."""

    arrays: dict[str, torch.Tensor]
    filled: Event
    used: Event


class Streamer:
    """Brings ranges of neurons to the GPU. Use it within `device.at_work()`."""

    def __init__(self, artifact: Artifact, device: Device) -> None:
        self._artifact, self._device = artifact, device
        shapes = piece_shapes(artifact.manifest)
        self._pieces = [
            _Piece(
                {name: torch.zeros(s, dtype=dtype, device=device.device) for name, (s, dtype) in shapes.items()},
                device.event(),
                device.event(),
            )
            for _ in range(2)
        ]
        for piece in self._pieces:
            piece.used.record()  # by whoever had this memory before, and by the zeros
        self._staging = Staging(device)

    def pieces(self, layer: int, low: int, high: int) -> Iterator[Neurons]:
        """The neurons [low, high) in pieces, each valid until the next but one is asked for."""
        starts = range(low, high, GEMM_NEURONS)
        coming = iter([*starts[1:], None])
        if starts:
            self._fill(0, layer, starts[0], high)
        for turn, start in enumerate(starts):
            following = next(coming)
            piece = self._pieces[turn % 2]
            piece.filled.wait()
            yield self._neurons(piece, layer, start, min(high, start + GEMM_NEURONS))
            piece.used.record()
            if following is not None:
                self._fill((turn + 1) % 2, layer, following, high)

    def _fill(self, turn: int, layer: int, low: int, high: int) -> None:
        piece, high = self._pieces[turn], min(high, low + GEMM_NEURONS)
        with self._device.copying():
            piece.used.wait()
            for name, array in piece.arrays.items():
                source = self._artifact.array(f"layers/{layer}/ffn/{name}")[low:high]
                rows = source.size // source.shape[-1]
                self._staging.send(source, array[:rows])
            piece.filled.record()

    def _neurons(self, piece: _Piece, layer: int, low: int, high: int) -> Neurons:
        manifest, count = self._artifact.manifest, high - low

        def matrix(name: str) -> Matrix:
            entry = manifest.arrays[f"layers/{layer}/ffn/{name}"]
            k = entry.shape[1] if len(entry.shape) == 3 else 1
            scales = piece.arrays.get(scales_name(name))
            columns = entry.shape[-1]
            return Matrix(
                entry.format, piece.arrays[name][: count * k], None if scales is None else scales[: count * k], columns
            )

        def bias(name: str) -> torch.Tensor | None:
            full = f"layers/{layer}/ffn/{name}"
            if full not in manifest.arrays:
                return None
            # Through pinned memory: of another's copy the host would wait for the end.
            here = self._device.pinned(count, torch.float32)
            here.numpy()[:] = self._artifact.array(full)[low:high]
            return here.to(self._device.device, non_blocking=True)

        return Neurons(
            matrix("first"), bias("first_bias"), matrix("rest"), bias("up_bias"), CODES[manifest.decoder.activation]
        )

    def close(self) -> None:
        self._staging.close()
