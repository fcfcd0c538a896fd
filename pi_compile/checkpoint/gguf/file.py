"""A GGUF file, memory-mapped: its metadata and tensors, or the reason why it cannot be read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType, ReaderField, ReaderTensor

from pi_compile.checkpoint.json_file import remedy_for
from pi_compile.errors import CheckpointError

TENSOR_FORMATS = {Type.F32: "f32", Type.F16: "f16", Type.BF16: "bf16", Type.Q8_0: "q8", Type.Q4_0: "q4"}
"""Tensor type → number format. Blocks of Q8_0 and Q4_0 are those of q8 and q4: 32 columns and a binary16 scale."""
_OUTER_TENSORS = ("token_embd.weight", "output.weight")
# llama-quantize stores embedding or head of a Q4_0 file in Q6_K.
_OUTER_FORMATS = {**TENSOR_FORMATS, Type.Q6_K: "f32"}


_LENGTH = struct.Struct("<Q")
_Parts = tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]


@dataclass(frozen=True, eq=False)
class GgufFile:
    """An opened GGUF file."""

    path: Path
    metadata: Mapping[str, Any]
    """Key → value; lists of strings, which only the tokenizer needs, are empty."""
    tensors: Mapping[str, ReaderTensor]

    @property
    def architecture(self) -> object:
        return self.metadata.get("general.architecture")

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in NumPy's order: the last axis is contiguous."""
        return tuple(int(n) for n in reversed(self.tensors[name].shape))

    def format(self, name: str) -> str:
        """Number format that holds a tensor's values exactly."""
        return _OUTER_FORMATS[self.tensors[name].tensor_type]


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF file.

    Raises CheckpointError if it is damaged, is not a whole model, or has tensors of a type that is not read.
    """
    try:
        reader = _Reader(path, "c")  # copy-on-write: torch takes writable arrays only
        metadata = {key: _value(field) for key, field in reader.fields.items()}
    # The package that reads these bytes checks little of them.
    except (OSError, ValueError, KeyError, IndexError, OverflowError, RecursionError, struct.error) as error:
        raise CheckpointError(f"{path}: not a whole GGUF file", found=str(error), remedy=remedy_for(path)) from None
    file = GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
    if reader.byte_order != "I" or any(t.data_offset % 4 for t in reader.tensors):
        raise CheckpointError(
            f"{path}: a GGUF file of another byte order or alignment", remedy="convert the model again"
        )
    _check_whole(file)
    _check_types(file)
    return file


class _Reader(gguf.GGUFReader):
    def _get(
        self,
        offset: int,
        dtype: npt.DTypeLike,
        count: int = 1,
        override_order: Literal["I", "S", "<"] | None = None,
    ) -> npt.NDArray[Any]:
        # The package returns nothing for items beyond the end, and a damaged file may announce 2⁶⁴ of them.
        values = super()._get(offset, dtype, count, override_order)
        if len(values) != int(count):
            raise ValueError(f"it ends after {len(self.data)} bytes, before its last item")
        return values

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> _Parts:
        """Read lists at once, not item by item as the package does: vocabularies have 10⁵ items and more."""
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item, count = int(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
        data = self.data.data
        start, types = orig_offs + 12, [GGUFValueType.ARRAY, GGUFValueType(item)]
        if types[1] == GGUFValueType.STRING:
            end = start
            for _ in range(count):
                end += 8 + _LENGTH.unpack_from(data, end)[0]
            return end - orig_offs, [], [], types
        if types[1] == GGUFValueType.ARRAY:
            raise ValueError("a list of lists")
        values = self._get(start, self.gguf_scalar_to_np[types[1]], count)
        return 12 + values.nbytes, [values], [0], types


def _value(field: ReaderField) -> Any:
    value = field.contents()
    if field.types[-1:] == [GGUFValueType.FLOAT32]:
        return [_shortest(v) for v in value] if isinstance(value, list) else _shortest(value)
    return value


def _shortest(value: float) -> float:
    """The shortest decimal number that rounds to this float32: 1e-6, not 9.99999997e-7."""
    return float(str(np.float32(value)))


def _check_whole(file: GgufFile) -> None:
    kind, parts = file.metadata.get("general.type", "model"), file.metadata.get("split.count", 1)
    if kind != "model":
        raise CheckpointError(
            f"{file.path}: not a model", expected="general.type = 'model'", found=f"{kind!r}", remedy="name the model"
        )
    if parts not in (0, 1):
        raise CheckpointError(
            f"{file.path}: one of {parts} parts of a model",
            expected="a model in one file",
            remedy="join them: llama-gguf-split --merge FIRST-PART WHOLE",
        )


def _check_types(file: GgufFile) -> None:
    wrong = sorted(
        f"{name} {tensor.tensor_type.name}"
        for name, tensor in file.tensors.items()
        if tensor.tensor_type not in (_OUTER_FORMATS if name in _OUTER_TENSORS else TENSOR_FORMATS)
    )
    if wrong:
        raise CheckpointError(
            f"{file.path}: {len(wrong)} tensors are in a type that is not read",
            expected=", ".join(kind.name for kind in TENSOR_FORMATS),
            found=", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""),
            remedy="use the F16, Q8_0 or Q4_0 file of the model, or make one of its F16 file: "
            "llama-quantize --pure F16-FILE Q4_0-FILE Q4_0",
        )
