"""One opened checkpoint: its decoder, and the values of every artifact array in bounded blocks.

Each block is read from the mapped file when it is needed and not kept, so that memory does not grow with the model.
Shape letters: D model width, F neurons. `ffn/rest` has one row for each neuron in a plain FFN, two in a gated one.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pi_compile.checkpoint.families.adapter import SourceTensor, uncut
from pi_compile.checkpoint.folder import CONFIG_FILE, GENERATION_FILE, TOKENIZER_FILES, find_checkpoint, hub_commit
from pi_compile.checkpoint.resolution import ResolvedCheckpoint, resolve_checkpoint
from pi_compile.checkpoint.tensors import Array, Index, RowReader, StoredRows, TensorSource, Values
from pi_compile.errors import CheckpointError
from pi_compile.files import file_digest, json_digest
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import FORMATS, WEIGHT_FORMATS
from pi_runtime.artifact.guess_head import guess_layer_arrays
from pi_runtime.artifact.sizes import APART, BY_NEURON, MIXED, PARTS, WHOLE, ArraySpec, array_specs, part_of
from pi_runtime.errors import Setting, UsageError

if TYPE_CHECKING:
    from pi_compile.checkpoint.tokenizer_files import TextFiles

Order = npt.NDArray[np.integer[Any]] | Sequence[int]

BLOCK_BYTES = 4 << 20
NEURON_ARRAYS = ("ffn/first", "ffn/first_bias", "ffn/up_bias", "ffn/rest", "ffn/inner_norm")
"""Arrays of a layer that have one row for each neuron."""

Piece = tuple[SourceTensor, RowReader, Index]
"""Some rows of a tensor: the tensor, how it is read, and which rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint(ResolvedCheckpoint):
    """An opened checkpoint, with the values of its tensors. `open_checkpoint` makes one."""

    revision: str | None
    """Commit of a hub model; None for a local folder."""
    layout: str | tuple[str, ...] = BY_NEURON
    """How the arrays of FFNs, or those of each layer, are made of its tensors (see `sizes.LAYOUTS`)."""
    cut: Decoder | None = None
    """The decoder by neuron, as adapters know it, where whole matrices have another."""
    apart: frozenset[str] = frozenset()
    """Matrices of keys and values that stand apart from queries."""
    importance: Mapping[str, Array] = field(default_factory=dict)
    """What a plain error of each column (D,), or (k, D), of a matrix costs where that is known: it weighs rounding."""
    drafts: bool = False
    """Whether the layer behind the last, which drafts tokens, is among its arrays."""

    def with_formats(self, formats: Iterable[str]) -> "Checkpoint":
        """The same checkpoint with those keys and values apart that are named among formats (see `sizes.APART`)."""
        return replace(self, apart=frozenset(name for name in formats if name.endswith(tuple(APART))))

    def in_layout(self, layout: str) -> "Checkpoint":
        """The same checkpoint with FFNs in a layout. Raises UsageError for one that it cannot have."""
        if layout not in (BY_NEURON, WHOLE):
            raise UsageError(setting=Setting("layout", layout), expected=f"{BY_NEURON}, {WHOLE}")
        if layout != BY_NEURON and self.decoder.sparse:
            raise UsageError(
                f"{self.folder}: the layout {layout} is for models that compute every neuron",
                expected=f"{BY_NEURON}, as the model is sparse",
            )
        cut = self.cut or self.decoder
        return replace(self, layout=layout, decoder=cut.uncut() if layout == WHOLE else cut, cut=cut)

    @property
    def keeps_whole(self) -> bool:
        """Whether FFNs that are not skipped keep their blocks as whole matrices, and not by neuron."""
        if self.decoder.sparse or self.in_layout(BY_NEURON).format("ffn") in FORMATS:
            return False
        return self.in_layout(WHOLE).format("ffn") in FORMATS

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
        formats, ranks = dict.fromkeys((*PARTS, *self.apart), "f32"), [None] * self.decoder.n_layers
        specs = array_specs(self.decoder, formats, ranks, False, self.layout)
        layout = self.layout if isinstance(self.layout, str) else MIXED
        own = dict(guess_layer_arrays(self.decoder, formats, layout)) if self.drafts else {}
        return {name: spec.shape for name, spec in (specs | own).items()}

    def tensor_names(self, array: str) -> tuple[str, ...]:
        """Names of the checkpoint tensors that an artifact array is made of."""
        return tuple(tensor.name for tensor in self._source_tensors(array))

    def format(self, part: str) -> str:
        """The number format that keeps the values of a part (embedding, attention, ffn, head).

        It is f32 where floats of several formats are mixed, and the one with most bytes where matrices of a layer have
        block formats of their own (see `matrix_formats`). Where nothing smaller keeps the values, it is the names of
        their block types, which no number format has. Routers and biases do not count: they are f32 in every artifact.
        """
        found = {name for array, name in self.array_formats.items() if part_of(array) == part}
        if len(found) == 1:
            return found.pop()
        if part in ("attention", "ffn") and found <= FORMATS.keys() and any(FORMATS[name].quantised for name in found):
            return max(found, key=long_row_nbytes)
        return self._format_of(self._matrix_arrays(part))

    def matrix_formats(self) -> dict[str, str]:
        """The formats of matrices of the layers that have another one than their part, and of keys and values that
        no format keeps with queries."""
        parts = {part: self.format(part) for part in ("attention", "ffn")}
        own = ((array, name, parts.get(str(part_of(array)))) for array, name in self.array_formats.items())
        return {a: name for a, name, of in own if of in FORMATS and (name != of or a.endswith(tuple(APART)))}

    @cached_property
    def array_formats(self) -> dict[str, str]:
        """What `format` says of each matrix alone, with keys and values apart where need be."""
        apart = self.with_formats(self.with_formats(())._of_other_types())
        arrays = (array for part in PARTS for array in apart._matrix_arrays(part))
        return {array: apart._format_of([array]) for array in arrays}

    def _of_other_types(self) -> Iterator[str]:
        """Keys and values with other types than queries, where no format keeps all; values also where keys have one."""
        d = self.decoder
        without = {*d.recurrent_layers, *d.ffn_only_layers} if not d.latent_rank else range(d.n_layers)
        for layer in sorted({*range(d.n_layers)} - {*without}):
            array = f"layers/{layer}/attention/qkv"
            kinds = [self.source.dtype(tensor) for tensor in self.tensor_names(array)]
            if len(kinds) == 1 + len(APART) and self._format_of([array]) not in FORMATS:
                yield from (f"layers/{layer}/{name}" for n, name in enumerate(APART, 2) if len(set(kinds[:n])) > 1)

    def _format_of(self, arrays: Sequence[str]) -> str:
        """The format of fewest bytes that keeps all of some matrices; else the names of their tensors' types."""
        found = sorted({self.source.dtype(tensor) for array in arrays for tensor in self.tensor_names(array)})
        if all(name in FORMATS and not FORMATS[name].quantised for name in found):
            return found[0] if len(found) == 1 else "f32"
        kept = [
            name
            for name in WEIGHT_FORMATS
            if FORMATS[name].quantised and all(self.keeps(array, name) for array in arrays)
        ]
        return min(kept, key=long_row_nbytes, default="") or " and ".join(found)

    def formats(self) -> dict[str, str]:
        """Number format of each part as it is stored (see `format`); the head's where it is not the embedding."""
        parts = ("embedding", "attention", "ffn", *(() if self.decoder.tied_head else ("head",)))
        return {part: self.format(part) for part in parts}

    def bits(self, part: str) -> float:
        """Mean bits of a part's values as they are stored, scales included."""
        sizes = {tensor: math.prod(self.source.shape(tensor)) for tensor in self._matrices(part)}
        return sum(n * self.source.bits(tensor) for tensor, n in sizes.items()) / sum(sizes.values())

    def keeps(self, array: str, name: str) -> bool:
        """Whether a block format holds an array bit for bit, as `stored_blocks` takes it."""
        return all(self._is_kept(tensor, name) for tensor in self._source_tensors(array))

    def kept_rows(self, array: str, name: str) -> Array:
        """Which rows (R,), or (R, k), of an array a block format holds bit for bit."""

        def kept(tensor: SourceTensor, matrix: RowReader, rows: Index) -> Array:
            return np.full(len(np.arange(len(matrix))[rows]), self._is_kept(tensor, name))

        return np.concatenate([joined(array, [kept(*piece) for piece in block]) for block in self.pieces(array)])

    def _is_kept(self, tensor: SourceTensor, name: str) -> bool:
        return not tensor.is_changed and name in getattr(_stored_rows(self.source, tensor), "grids", ())

    def _matrices(self, part: str) -> list[str]:
        """Names of the tensors that the matrices of a part are made of."""
        return [tensor for array in self._matrix_arrays(part) for tensor in self.tensor_names(array)]

    def _matrix_arrays(self, part: str) -> list[str]:
        arrays = [n for n, shape in self.array_shapes.items() if len(shape) > 1 and part_of(n) == part]
        return [n for n in arrays if not n.endswith(("/router", "/expert_bias", "/gates", "/conv"))]

    def largest(self, tensor: str) -> float:
        """Largest magnitude of the values of a checkpoint tensor."""
        return max(float(np.abs(block).max()) for block in _row_blocks(self.source.rows(tensor)))

    @cached_property
    def file_digests(self) -> dict[str, str]:
        """File name → sha256 of every file that is read: config, tokenizer, weights. Reads them all once."""
        beside = (CONFIG_FILE, GENERATION_FILE, *TOKENIZER_FILES) if self.location.is_dir() else ()
        names = sorted({*(name for name in beside if (self.folder / name).is_file()), *self.source.files})
        with ThreadPoolExecutor() as pool:
            return dict(zip(names, pool.map(file_digest, (self.folder / name for name in names)), strict=True))

    @cached_property
    def text_files(self) -> "TextFiles":
        """Tokenizer, chat template, end tokens and sampling defaults; see `read_text_files` for what it raises."""
        from pi_compile.checkpoint.tokenizer_files import read_text_files  # noqa: PLC0415 (imports transformers)

        return read_text_files(self.location, self.decoder.vocab_size, self.config.fields, self.gguf)

    def digest(self) -> str:
        """sha256 of the contents of every file that is read, and of a declared activation.

        In a folder names say which file is which, and count too; a GGUF file may have any name.
        """
        declared = {"activation": self.declared_activation} if self.declared_activation else {}
        files = self.file_digests if self.location.is_dir() else {"gguf": list(self.file_digests.values())}
        return json_digest({**files, **declared})

    def values(self, array: str, order: Order | None = None) -> Values:
        """The values of a whole artifact array, which must fit in memory; `blocks` has no such limit."""
        values, row = np.empty(self.array_shapes[array], np.float32), 0
        for block in self.blocks(array, order):
            values[row : row + len(block)] = block
            row += len(block)
        return values

    def layer_values(self, layer: int, order: Order | None = None) -> dict[str, Values]:
        """All arrays of one layer, without the prefix `layers/N/`."""
        prefix = f"layers/{layer}/"
        names = [name.removeprefix(prefix) for name in self.array_shapes if name.startswith(prefix)]
        return {name: self.values(prefix + name, order if name in NEURON_ARRAYS else None) for name in names}

    def blocks(self, array: str, order: Order | None = None) -> Iterator[Values]:
        """Values of one artifact array as consecutive blocks of rows, each at most `BLOCK_BYTES` or one row.

        `order` permutes the neurons of each expert: stored row i is neuron order[i] of the checkpoint. Only
        `NEURON_ARRAYS` take it. Raises CheckpointError naming the tensor if a value is not finite.
        """
        if not self._source_tensors(array):
            return iter([np.ones(self.array_shapes[array], np.float32)])
        return (joined(array, [self.read(*piece) for piece in block]) for block in self.pieces(array, order))

    def check_values(self) -> None:
        """Read all weights once, so that no long stage fails late at a damaged one.

        Raises CheckpointError naming a tensor whose values are not all finite.
        """
        for name in dict.fromkeys(name for array in self.array_shapes for name in self.tensor_names(array)):
            for block in _row_blocks(self.source.rows(name)):
                self.check_finite(name, block)

    def check_finite(self, name: str, values: Values) -> None:
        if not (np.isfinite(values.min()) and np.isfinite(values.max())):
            raise CheckpointError(
                f"{self.source.path(name)}: tensor {name} holds NaN or infinity",
                expected="finite weights",
                remedy="the checkpoint is damaged, or its training diverged: use another",
            )

    @cached_property
    def _sources(self) -> dict[str, tuple[SourceTensor, ...]]:
        """What arrays are made of, as far as it was asked."""
        return {}

    def _source_tensors(self, array: str) -> tuple[SourceTensor, ...]:
        if array not in self._sources:
            self._sources[array] = self._found_tensors(array)
        return self._sources[array]

    def _found_tensors(self, array: str) -> tuple[SourceTensor, ...]:
        layer, _, local = array.rpartition("/attention/")
        if local in ("qkv", "k", "v"):
            whole = self._of_adapter(f"{layer}/attention/qkv")
            ends = dict(zip(("k", "v"), whole[1:], strict=False)) if self.apart else {}
            apart = [end for name, end in ends.items() if f"{layer}/attention/{name}" in self.apart]
            return tuple(tensor for tensor in whole if tensor not in apart) if local == "qkv" else (ends[local],)
        layer, _, local = array.rpartition("/ffn/")
        name = local.removeprefix("shared_")
        if name not in ("up", "down"):
            return self._uncut(array, self._of_adapter(f"{layer}/ffn/{name}" if name == "first" else array))
        rest = self._of_adapter(f"{layer}/ffn/rest")
        rows = 2 if self.decoder.ffn == "gated" else 1  # of a neuron, whose last one is that of `down`
        if name == "up":
            return self._uncut(array, rest[::rows])
        downs = tuple(replace(down, transposed=not down.transposed) for down in rest[rows - 1 :: rows])
        return self._uncut(array, downs)

    def _of_adapter(self, array: str) -> tuple[SourceTensor, ...]:
        return tuple(self.adapter.source_tensors(array, self.prefix, self.cut or self.decoder))

    def _uncut(self, array: str, tensors: tuple[SourceTensor, ...]) -> tuple[SourceTensor, ...]:
        """What an array has of these: where FFNs are not cut, that of one or that of experts."""
        is_whole = f"{array.rpartition('/ffn/')[0]}/ffn/down" in self.array_shapes
        return uncut(tensors, shared="/shared_" in array) if is_whole else tensors

    def pieces(self, array: str, order: Order | None = None) -> Iterator[list[Piece]]:
        """What each block of an array is read from, one tensor after the other.

        In `ffn/rest` as many tensors [F, D] as a neuron has rows together make blocks [rows, rows of a neuron, D].
        """
        index = None if order is None else np.array(order, np.int64)
        if index is not None:
            assert array.split("/", 2)[-1] in NEURON_ARRAYS, array
            assert np.array_equal(np.sort(index), np.arange(self.decoder.neurons)), "not a permutation"
        rows_per_neuron = self.array_shapes[array][1] if array.endswith("ffn/rest") else None
        tensors = self._source_tensors(array)
        rows_before = 0
        for start in range(0, len(tensors), rows_per_neuron or 1):
            group = tensors[start : start + (rows_per_neuron or 1)]
            matrices = [self._matrix(tensor) for tensor in group]
            n_rows = len(matrices[0])
            own_index = None if index is None else index[rows_before : rows_before + n_rows] - rows_before
            in_expert = own_index is None or (own_index.min() >= 0 and own_index.max() < n_rows)
            assert in_expert, "neurons of several experts mixed"
            rows_before += n_rows
            step = _rows_per_block((len(matrices), *matrices[0].shape[1:]))
            for row in range(0, n_rows, step):
                rows = slice(row, row + step)
                own = rows if own_index is None else own_index[rows]
                yield [(tensor, matrix, own) for tensor, matrix in zip(group, matrices, strict=True)]

    def _matrix(self, tensor: SourceTensor) -> RowReader:
        """The mapped tensor; where it is transposed or only some rows are wanted, a copy.

        Making the copy reads the file once; without it, every block would read with strides.
        """
        if (rows := _stored_rows(self.source, tensor)) is not None:
            return rows
        if tensor.item is not None:
            (matrix,) = self.source.rows(tensor.name)[tensor.item : tensor.item + 1]
            return StoredRows(tensor.taken(np.ascontiguousarray(matrix.mT) if tensor.transposed else matrix))
        if tensor.rows is not None and tensor.rows.start == tensor.rows.stop:
            columns = self.source.shape(tensor.name)[0 if tensor.transposed else 1]
            return StoredRows(np.zeros((tensor.padded, columns), np.float32))
        values = self.source.tensor(tensor.name)
        if tensor.transposed:
            values = np.ascontiguousarray(values.mT)
        if tensor.stacked:
            values = values.reshape(-1, *values.shape[2:])
        return StoredRows(tensor.taken(values))

    def read(self, tensor: SourceTensor, matrix: RowReader, rows: Index) -> Values:
        values = matrix[rows]
        self.check_finite(tensor.name, values)
        return tensor.changed(values)


def open_checkpoint(
    model: str | Path,
    revision: str | None = None,
    ignore_config: Collection[str] = (),
    *,
    activation: str = "",
    in_recipe: bool = False,
) -> Checkpoint:
    """Open a local folder, a GGUF file or a hub name, and check everything but the values.

    `ignore_config` names config keys that, as the user says, have no effect: by flag, or `in_recipe`. `activation` is
    that of a GGUF file, which does not say it; empty for what llama.cpp takes. Raises CheckpointError for anything that
    is missing, damaged, contradictory or unknown, and what `check_keys` raises.

    >>> checkpoint = open_checkpoint("recipes/demo")
    >>> checkpoint.decoder.family, checkpoint.decoder.n_layers, checkpoint.decoder.d_ff
    ('llama', 4, 1024)
    """
    location = find_checkpoint(model, revision)
    commit = None if Path(model).expanduser().exists() else hub_commit(location)
    resolved = resolve_checkpoint(location, ignore_config, activation, in_recipe=in_recipe)
    return Checkpoint(revision=commit, **vars(resolved))


def long_row_nbytes(name: str) -> int:
    """Bytes of a long row in a weight format, with its scales."""
    return ArraySpec(name, (1, 8192)).nbytes_with_scales


def _stored_rows(source: TensorSource, tensor: SourceTensor) -> RowReader | None:
    """The tensor, turned if need be, where an array or a part of one is that as it is stored; else None."""
    if tensor.item is not None:
        matrix = getattr(source.rows(tensor.name), "matrix", None)
        return matrix(tensor.item, tensor.taken) if matrix and not tensor.transposed else None
    rows = None if tensor.rows is not None or tensor.stacked else source.rows(tensor.name)
    return getattr(rows, "turned", None) if tensor.transposed else rows


def joined(array: str, parts: Sequence[Array]) -> Array:
    """What was made of each piece of a block, as rows of the array."""
    return np.stack(parts, axis=1) if array.endswith("ffn/rest") else parts[0]


def _row_blocks(rows: RowReader) -> Iterator[Values]:
    step = _rows_per_block(rows.shape[1:])
    return (rows[start : start + step] for start in range(0, len(rows), step))


def _rows_per_block(row_shape: Sequence[int]) -> int:
    row = 4
    for n in row_shape:
        row *= n
    return max(1, BLOCK_BYTES // row)
