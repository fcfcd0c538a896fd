"""One opened checkpoint: its decoder, and the values of every artifact array in bounded blocks.

D model width, F neurons, k = 1 (plain) or 2 (gated). Nothing is kept: each block is read from the mapped file when it
is asked for, so that memory does not grow with the model.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pi_compile.checkpoint.families.adapter import Adapter, Piece
from pi_compile.checkpoint.folder import CONFIG_FILE, GENERATION_FILE, TOKENIZER_FILES, find_checkpoint
from pi_compile.checkpoint.resolution import understand
from pi_compile.checkpoint.tensors import Rows, Source
from pi_compile.errors import CheckpointError
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.sizes import PARTS, array_specs

Values = npt.NDArray[np.float32]
Order = npt.NDArray[np.integer[Any]] | Sequence[int]

BLOCK_BYTES = 16 << 20
NEURON_ARRAYS = ("ffn/first", "ffn/first_bias", "ffn/up_bias", "ffn/rest")
"""Arrays of a layer with one row a neuron."""
_ENDS = ("embedding", "embedding_in", "embedding_out", "positions")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint whose every key and tensor is understood. Open one with `open_checkpoint`."""

    location: Path
    """Its folder, or its GGUF file."""
    revision: str | None
    """Commit of a hub model; None for a local folder."""
    adapter: Adapter
    prefix: str
    decoder: Decoder
    source: Source
    notices: tuple[str, ...]
    """What the user should know though it is no error."""
    ignored_config: tuple[str, ...]
    """Config keys that are not understood and declared to be without effect."""

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return self.location if self.location.is_dir() else self.location.parent

    @property
    def family(self) -> str:
        return self.decoder.family

    @cached_property
    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Logical shape of every artifact array that comes from the checkpoint."""
        specs = array_specs(self.decoder, dict.fromkeys(PARTS, "f32"), [None] * self.decoder.n_layers, profiled=False)
        return {name: spec.shape for name, spec in specs.items()}

    def tensor_names(self, array: str) -> tuple[str, ...]:
        """Checkpoint tensors that an artifact array is made of."""
        return tuple(piece.name for piece in self._pieces(array))

    def format(self, part: str) -> str:
        """Number format that keeps a part (embedding, attention, ffn, head) as it is: f32 where formats are mixed.

        Routers do not count: they are f32 in every artifact.
        """
        of_part = [n for n, shape in self.array_shapes.items() if len(shape) > 1 and part_of(n) == part]
        matrices = [name for name in of_part if not name.endswith("/router")]
        found = {self.source.dtype(tensor) for array in matrices for tensor in self.tensor_names(array)}
        return found.pop() if len(found) == 1 else "f32"

    def extremes(self, tensor: str) -> Values:
        """Smallest and largest value of a checkpoint tensor."""
        low, high = torch.aminmax(self.source.tensor(tensor))
        return np.array([low, high], np.float32)

    @cached_property
    def file_digests(self) -> dict[str, str]:
        """sha256 of every file that is read, by name: config, tokenizer, weights. Reads them all once."""
        beside = (CONFIG_FILE, GENERATION_FILE, *TOKENIZER_FILES) if self.location.is_dir() else ()
        names = sorted({*(name for name in beside if (self.folder / name).is_file()), *self.source.files})
        with ThreadPoolExecutor() as pool:
            return dict(zip(names, pool.map(_file_digest, (self.folder / name for name in names)), strict=True))

    def digest(self) -> str:
        """sha256 over names and contents of every file that is read."""
        return hashlib.sha256(json.dumps(self.file_digests, sort_keys=True).encode()).hexdigest()

    def values(self, array: str, order: Order | None = None) -> Values:
        """A whole artifact array. For small arrays and tests: `blocks` bounds memory, this does not."""
        return np.concatenate(list(self.blocks(array, order)))

    def layer_values(self, layer: int, order: Order | None = None) -> dict[str, Values]:
        """All arrays of one layer, without the prefix `layers/N/`."""
        prefix = f"layers/{layer}/"
        names = [name.removeprefix(prefix) for name in self.array_shapes if name.startswith(prefix)]
        return {name: self.values(prefix + name, order if name in NEURON_ARRAYS else None) for name in names}

    def blocks(self, array: str, order: Order | None = None) -> Iterator[Values]:
        """Values of one artifact array as consecutive blocks of rows, each at most `BLOCK_BYTES` or one row.

        `order` permutes the neurons, each expert's among themselves: stored row i is neuron order[i] of the
        checkpoint; only arrays with a row a neuron take it. Raises CheckpointError naming the tensor if a value is not
        finite.
        """
        index = None if order is None else torch.from_numpy(np.array(order, np.int64))
        if index is not None:
            assert array.split("/", 2)[-1] in NEURON_ARRAYS, array
            assert np.array_equal(np.sort(index), np.arange(self.decoder.neurons)), "not a permutation"
        together = self.array_shapes[array][1] if array.endswith("ffn/rest") else None
        return self._joined(self._pieces(array), together, index)

    def check_values(self) -> None:
        """Read all weights once, so that no long work ends at a bad one.

        Raises CheckpointError naming a tensor whose values are not all finite.
        """
        for name in dict.fromkeys(name for array in self.array_shapes for name in self.tensor_names(array)):
            tensor = self.source.rows(name)
            step = _rows_per_block(tensor.shape[1:])
            for start in range(0, len(tensor), step):
                self._check_finite(name, tensor[start : start + step])

    def _check_finite(self, name: str, values: torch.Tensor) -> None:
        low, high = torch.aminmax(values)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise CheckpointError(
                f"{self.source.path(name)}: tensor {name} holds NaN or infinity",
                expected="finite weights",
                remedy="the checkpoint is damaged, or its training diverged: use another",
            )

    def _pieces(self, array: str) -> tuple[Piece, ...]:
        return self.adapter.pieces(array, self.prefix, self.decoder)

    def _joined(self, pieces: tuple[Piece, ...], together: int | None, index: torch.Tensor | None) -> Iterator[Values]:
        """Piece after piece; so many `together` stand side by side: [F, k, D] from k matrices [F, D]."""
        before = 0
        for start in range(0, len(pieces), together or 1):
            side_by_side = pieces[start : start + (together or 1)]
            tensors = [self._matrix(piece) for piece in side_by_side]
            n_rows = len(tensors[0])
            own = None if index is None else index[before : before + n_rows] - before
            assert own is None or (own.min() >= 0 and own.max() < n_rows), "neurons of several experts mixed"
            before += n_rows
            step = _rows_per_block((len(tensors), *tensors[0].shape[1:]))
            for row in range(0, n_rows, step):
                rows = slice(row, row + step)
                parts = [self._read(p, tensor, rows, own) for p, tensor in zip(side_by_side, tensors, strict=True)]
                yield parts[0] if together is None else np.stack(parts, axis=1)

    def _matrix(self, piece: Piece) -> Rows:
        """The tensor in its file, or a copy of the wanted rows or transposed: one pass over the file beats a strided
        one for every block."""
        if piece.rows is None and not piece.transposed:
            return self.source.rows(piece.name)
        tensor = self.source.tensor(piece.name)
        if piece.transposed:
            tensor = tensor.t().contiguous()
        if piece.rows is None:
            return tensor
        blocks = tensor.view(piece.rows.groups, piece.rows.size, *tensor.shape[1:])
        return blocks[:, piece.rows.start : piece.rows.stop].flatten(0, 1)

    def _read(self, piece: Piece, tensor: Rows, rows: slice, index: torch.Tensor | None) -> Values:
        part = tensor[rows] if index is None else tensor[index[rows]]
        values = part.to(torch.float32, memory_format=torch.contiguous_format)
        self._check_finite(piece.name, values)
        return (values + piece.addend if piece.addend else values).numpy()


def open_checkpoint(
    model: str | Path, revision: str | None = None, ignore_config: Collection[str] = (), *, in_recipe: bool = False
) -> Checkpoint:
    """Open a local folder, a GGUF file or a hub name, and check all of it but the values.

    `ignore_config` are config keys that the user declares to be without effect, by flag or `in_recipe`. Raises
    CheckpointError for whatever is missing, damaged, contradictory or not understood, and what `check_keys` raises.
    """
    location = find_checkpoint(model, revision)
    commit = location.name if not Path(model).expanduser().exists() else None
    understood = understand(location, ignore_config, in_recipe=in_recipe)
    return Checkpoint(location=location, revision=commit, **vars(understood))


def part_of(array: str) -> str | None:
    """Part of the model (as in `sizes.PARTS`) that decides an array's number format; None for final norms and the
    head's bias."""
    if array.startswith("layers/"):
        return array.split("/")[2]
    if array in _ENDS:
        return "embedding"
    return "head" if array == "head" else None


def _rows_per_block(row_shape: Sequence[int]) -> int:
    row = 4
    for n in row_shape:
        row *= n
    return max(1, BLOCK_BYTES // row)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
