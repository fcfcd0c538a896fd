"""One opened checkpoint: its decoder, and the values of every artifact array in bounded blocks.

Each block is read from the mapped file when it is needed and not kept, so that memory does not grow with the model.
Shape letters: D model width, F neurons. `ffn/rest` has one row for each neuron in a plain FFN, two in a gated one.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pi_compile.checkpoint.families.adapter import SourceTensor
from pi_compile.checkpoint.folder import CONFIG_FILE, GENERATION_FILE, TOKENIZER_FILES, find_checkpoint, hub_commit
from pi_compile.checkpoint.resolution import ResolvedCheckpoint, resolve_checkpoint
from pi_compile.checkpoint.tensors import Array, Index, RowReader, StoredRows, TensorSource, Values
from pi_compile.errors import CheckpointError
from pi_compile.files import file_digest, json_digest
from pi_runtime.artifact.formats import FORMATS, WEIGHT_FORMATS, Format
from pi_runtime.artifact.guess_head import guess_layer_arrays
from pi_runtime.artifact.quantisation import as_stored, dequantise, pack_rows, quantise
from pi_runtime.artifact.sizes import BY_NEURON, MIXED, PARTS, WHOLE, array_specs
from pi_runtime.errors import Setting, UsageError

if TYPE_CHECKING:
    from pi_compile.checkpoint.tokenizer_files import TextFiles

Order = npt.NDArray[np.integer[Any]] | Sequence[int]

BLOCK_BYTES = 16 << 20
NEURON_ARRAYS = ("ffn/first", "ffn/first_bias", "ffn/up_bias", "ffn/rest", "ffn/inner_norm")
"""Arrays of a layer that have one row for each neuron."""
_EMBEDDING_ARRAYS = ("embedding", "embedding_in", "embedding_out", "positions")
NOTABLE = 1e-3
"""Share of Σ w² of an array that may underflow: as much as rounding to q5 loses."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint(ResolvedCheckpoint):
    """An opened checkpoint, with the values of its tensors. `open_checkpoint` makes one."""

    revision: str | None
    """Commit of a hub model; None for a local folder."""
    layout: str | tuple[str, ...] = BY_NEURON
    """How the arrays of FFNs, or those of each layer, are made of its tensors (see `sizes.LAYOUTS`)."""
    drafts: bool = False
    """Whether the layer behind the last, which drafts tokens, is among its arrays."""

    def in_layout(self, layout: str) -> "Checkpoint":
        """The same checkpoint with FFNs in a layout. Raises UsageError for one that it cannot have."""
        if layout not in (BY_NEURON, WHOLE):
            raise UsageError(setting=Setting("layout", layout), expected=f"{BY_NEURON}, {WHOLE}")
        if layout != BY_NEURON and (self.decoder.n_experts > 1 or self.decoder.sparse):
            raise UsageError(
                f"{self.folder}: the layout {layout} is for models that compute every neuron",
                expected=f"{BY_NEURON}, as the model is sparse or has experts",
            )
        return replace(self, layout=layout)

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
        formats, ranks = dict.fromkeys(PARTS, "f32"), [None] * self.decoder.n_layers
        specs = array_specs(self.decoder, formats, ranks, False, self.layout)
        layout = self.layout if isinstance(self.layout, str) else MIXED
        own = dict(guess_layer_arrays(self.decoder, formats, layout)) if self.drafts else {}
        return {name: spec.shape for name, spec in (specs | own).items()}

    def tensor_names(self, array: str) -> tuple[str, ...]:
        """Names of the checkpoint tensors that an artifact array is made of."""
        return tuple(tensor.name for tensor in self._source_tensors(array))

    def format(self, part: str) -> str:
        """The number format that keeps the values of a part (embedding, attention, ffn, head).

        It is f32 where floats of several formats are mixed. Where nothing smaller keeps the values, it is the names of
        their block types, which no number format has. Routers and biases do not count: they are f32 in every artifact.
        """
        found = sorted({self.source.dtype(tensor) for tensor in self._matrices(part)})
        if len(found) == 1:
            kept = (name for name in WEIGHT_FORMATS if all(self.keeps(a, name) for a in self._matrix_arrays(part)))
            return found[0] if found[0] in FORMATS else next(kept, found[0])
        floats = all(name in FORMATS and not FORMATS[name].quantised for name in found)
        return "f32" if floats else " and ".join(found)

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

        def kept(tensor: SourceTensor, matrix: RowReader, rows: Index) -> tuple[Array]:
            return (np.full(len(np.arange(len(matrix))[rows]), self._is_kept(tensor, name)),)

        return np.concatenate([rows for (rows,) in self._joined(array, None, kept)])

    def _is_kept(self, tensor: SourceTensor, name: str) -> bool:
        return not tensor.addend and name in getattr(_stored_rows(self.source, tensor), "grids", ())

    def _matrices(self, part: str) -> list[str]:
        """Names of the tensors that the matrices of a part are made of."""
        return [tensor for array in self._matrix_arrays(part) for tensor in self.tensor_names(array)]

    def _matrix_arrays(self, part: str) -> list[str]:
        arrays = [n for n, shape in self.array_shapes.items() if len(shape) > 1 and part_of(n) == part]
        return [n for n in arrays if not n.endswith(("/router", "/expert_bias"))]

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
        return (values for (values,) in self._joined(array, order, lambda *rows: (self._read(*rows),)))

    def stored_blocks(
        self, array: str, fmt: Format, order: Order | None = None
    ) -> Iterator[tuple[Array, Array]] | None:
        """The same blocks in a block format, with their scales, where some tensor lies on its grid already.

        Such tensors are taken bit for bit, the others are quantised. None where no tensor does.
        """
        tensors = [t for t in self._source_tensors(array) if not t.addend] if fmt.quantised else []
        if all(
            self._matrix(tensor).on_grid(fmt, slice(0, 1)) is None
            for tensor in tensors
            if _stored_rows(self.source, tensor)
        ):
            return None
        found = self._joined(array, order, lambda *rows: self._stored(fmt, *rows))
        return ((stored, scales) for stored, scales in found)

    def as_stored(self, array: str, name: str, order: Order | None = None) -> Iterator[Values]:
        """The same blocks of values as a weight format holds them; bit for bit where they lie on its grid."""
        found = self.stored_blocks(array, FORMATS[name], order)
        if found is None:
            blocks = self._in_range(array, FORMATS[name], self.blocks(array, order))
            return (as_stored(name, block, powers=self.source.powers) for block in blocks)
        return (dequantise(FORMATS[name], *stored, self.array_shapes[array][-1]) for stored in found)

    def fitting(self, array: str, name: str, blocks: Iterable[Values]) -> Iterator[Values]:
        """Blocks of an array's values, checked to fit a weight format; the source's own needs no check.

        Raises CheckpointError for values that are too large, and where too much of the array underflows.
        """
        tensors, target = self.tensor_names(array), FORMATS[name]
        if all(self.source.dtype(tensor) == name for tensor in tensors):
            yield from blocks
            return
        lost = of = 0.0
        for block in self._in_range(array, target, blocks):
            lost += target.underflow(block)
            of += float(np.square(block, dtype=np.float64).sum()) if target.underflows_below else 0.0
            yield block
        if lost > NOTABLE * of:
            raise CheckpointError(
                f"{self.folder}: values of {', '.join(tensors)} are too small for {name}",
                expected=f"values that {name} can hold, or so few others that they do not count",
                found=f"{lost / of:.3%} of Σ w² in values that it stores as 0, or with less than three bits",
                remedy=_wider(array, target),
            )

    def _in_range(self, array: str, target: Format, blocks: Iterable[Values]) -> Iterator[Values]:
        for block in blocks:
            if target.overflows(block):
                raise self._too_large(array, target)
            yield block

    def _too_large(self, array: str, target: Format) -> CheckpointError:
        largest = {tensor: self.largest(tensor) for tensor in self.tensor_names(array)}
        wrong = {tensor: value for tensor, value in largest.items() if target.overflows(np.array(value))}
        return CheckpointError(
            f"{self.folder}: values of {', '.join(wrong)} are too large for {target.name}",
            expected=f"values that {target.name} can hold",
            found=f"{max(wrong.values()):.6g}",
            remedy=_wider(array, target),
        )

    def check_values(self) -> None:
        """Read all weights once, so that no long stage fails late at a damaged one.

        Raises CheckpointError naming a tensor whose values are not all finite.
        """
        for name in dict.fromkeys(name for array in self.array_shapes for name in self.tensor_names(array)):
            for block in _row_blocks(self.source.rows(name)):
                self._check_finite(name, block)

    def _check_finite(self, name: str, values: Values) -> None:
        if not (np.isfinite(values.min()) and np.isfinite(values.max())):
            raise CheckpointError(
                f"{self.source.path(name)}: tensor {name} holds NaN or infinity",
                expected="finite weights",
                remedy="the checkpoint is damaged, or its training diverged: use another",
            )

    def _source_tensors(self, array: str) -> tuple[SourceTensor, ...]:
        layer, _, local = array.rpartition("/ffn/")
        if local not in ("up", "down"):
            return self.adapter.source_tensors(array, self.prefix, self.decoder)
        *up, down = self.adapter.source_tensors(f"{layer}/ffn/rest", self.prefix, self.decoder)
        return tuple(up) if local == "up" else (replace(down, transposed=not down.transposed),)

    def _joined(
        self, array: str, order: Order | None, read: Callable[[SourceTensor, RowReader, Index], tuple[Array, ...]]
    ) -> Iterator[tuple[Array, ...]]:
        """What is read of blocks of an array's tensors, one tensor after the other.

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
                found = [read(tensor, matrix, own) for tensor, matrix in zip(group, matrices, strict=True)]
                if rows_per_neuron is None:
                    yield from found
                else:
                    yield tuple(np.stack(each, axis=1) for each in zip(*found, strict=True))

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

    def _stored(self, fmt: Format, tensor: SourceTensor, matrix: RowReader, rows: Index) -> tuple[Array, Array]:
        """Rows in a block format: as they are where they lie on its grid, else quantised."""
        found = None if tensor.addend else matrix.on_grid(fmt, rows)
        return quantise(fmt, self._read(tensor, matrix, rows)) if found is None else pack_rows(fmt, *found)

    def _read(self, tensor: SourceTensor, matrix: RowReader, rows: Index) -> Values:
        values = matrix[rows]
        self._check_finite(tensor.name, values)
        return values + np.float32(tensor.addend) if tensor.addend else values


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


def part_of(array: str) -> str | None:
    """The part of the model (see `sizes.PARTS`) that an array belongs to; None for final norms and the head's bias."""
    if array.startswith("layers/"):
        return array.split("/")[2]
    if array in _EMBEDDING_ARRAYS:
        return "embedding"
    return "head" if array == "head" else None


def _stored_rows(source: TensorSource, tensor: SourceTensor) -> RowReader | None:
    """The tensor, turned if need be, where an array or a part of one is that as it is stored; else None."""
    rows = None if tensor.rows is not None or tensor.stacked else source.rows(tensor.name)
    return getattr(rows, "turned", None) if tensor.transposed else rows


def _row_blocks(rows: RowReader) -> Iterator[Values]:
    step = _rows_per_block(rows.shape[1:])
    return (rows[start : start + step] for start in range(0, len(rows), step))


def _rows_per_block(row_shape: Sequence[int]) -> int:
    row = 4
    for n in row_shape:
        row *= n
    return max(1, BLOCK_BYTES // row)


def _wider(array: str, target: Format) -> str:
    """The remedy for values that a format does not hold."""
    return f'in the recipe: [pack] {part_of(array)} = "{"f32" if target.number == "bfloat16" else "bf16"}"'
