"""A GGUF file, or the parts of a split one, memory-mapped: metadata and tensors, or the reason why it cannot be read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. PowerInfer's files differ in their first four bytes.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType, ReaderField, ReaderTensor

from pi_compile.checkpoint.config import MAGICS, remedy_for
from pi_compile.checkpoint.folder import GGUF_PART
from pi_compile.errors import CheckpointError
from pi_runtime.artifact.formats import FORMATS

_BLOCK_NAMES = """
    Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS
    IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S MXFP4 NVFP4
"""
BLOCK_TYPES = frozenset(Type[name] for name in _BLOCK_NAMES.split())
"""Tensor types that are dequantised where no block format keeps them (see `blocks`)."""
KEPT_TYPES = {Type[f.gguf]: f.name for f in FORMATS.values() if f.gguf and f.gguf not in _BLOCK_NAMES.split()}
"""Tensor type → the number format that holds every value. Q8_0 and Q4_0 are q8 and q4: 32 columns, a binary16 scale."""
_MAGIC, _POWERINFER_MAGIC = (int.from_bytes(magic, "little") for magic in MAGICS)
_OWN_KEYS = ("GGUF.", "split.")
"""Keys that differ between the parts of one model."""


_LENGTH = struct.Struct("<Q")
_STRING_LIST = [GGUFValueType.ARRAY, GGUFValueType.STRING]
_Parts = tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]


@dataclass(frozen=True, eq=False)
class GgufFile:
    """An opened GGUF file with all its parts."""

    path: Path
    """The file, or its first part."""
    metadata: Mapping[str, Any]
    """Key → value; lists of strings, which only the tokenizer needs, are empty."""
    string_lists: Mapping[str, npt.NDArray[np.uint8]]
    """Key → its list of strings as it is stored: the length of each, then its bytes."""
    tensors: Mapping[str, ReaderTensor]
    path_of: Mapping[str, Path]
    """Tensor → the file that holds it."""
    paths: tuple[Path, ...]
    of_powerinfer: bool
    """Whether it was made for PowerInfer, which computes ReLU in every model."""

    @property
    def architecture(self) -> object:
        return self.metadata.get("general.architecture")

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in NumPy's order: the last axis is contiguous."""
        return tuple(int(n) for n in reversed(self.tensors[name].shape))

    def format(self, name: str) -> str:
        """Number format that holds a tensor's values exactly; the name of its type where none does."""
        kind = self.tensors[name].tensor_type
        return KEPT_TYPES.get(kind, kind.name)

    def strings(self, key: str) -> list[str]:
        """The list of strings under a key."""
        data, start, found = bytes(self.string_lists[key]), 0, []
        while start < len(data):
            end = start + 8 + _LENGTH.unpack_from(data, start)[0]
            found.append(data[start + 8 : end].decode())
            start = end
        return found


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF file, or all parts of a split one by its first.

    Raises CheckpointError if it is damaged, is not a whole model, or has tensors of a type that is not read.
    """
    file = _open_one(path)
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(
            f"{path}: not a model", expected="general.type = 'model'", found=f"{kind!r}", remedy="name the model"
        )
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        file = _with_other_parts(file, parts)
    _check_types(file)
    return file


def _open_one(path: Path) -> GgufFile:
    try:
        reader = _Reader(path, "r")
        metadata = {key: _value(field) for key, field in reader.fields.items()}
    # The package that reads these bytes checks little of them.
    except (OSError, ValueError, KeyError, IndexError, OverflowError, RecursionError, struct.error) as error:
        raise CheckpointError(f"{path}: not a whole GGUF file", found=str(error), remedy=remedy_for(path)) from None
    if reader.byte_order != "I" or any(t.data_offset % 4 for t in reader.tensors):
        raise CheckpointError(
            f"{path}: a GGUF file of another byte order or alignment", remedy="convert the model again"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    return GgufFile(
        path=path,
        metadata=metadata,
        string_lists={key: f.parts[-1] for key, f in reader.fields.items() if f.types == _STRING_LIST},
        tensors=tensors,
        path_of=dict.fromkeys(tensors, path),
        paths=(path,),
        of_powerinfer=reader.of_powerinfer,
    )


def _with_other_parts(first: GgufFile, count: object) -> GgufFile:
    """The whole model that `first` begins. Raises CheckpointError unless its parts are all there and of one model."""
    paths = _part_paths(first, count)
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{first.path}: {len(missing)} of its {len(paths)} parts are missing",
            expected=f"all parts in {first.path.parent}",
            found=f"no {', '.join(missing[:4])}",
            remedy="fetch the missing parts",
        )
    parts = [first, *(_open_one(path) for path in paths[1:])]
    for number, part in enumerate(parts):
        _check_part(first, part, number)
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    stored, announced = sum(len(part.tensors) for part in parts), first.metadata.get("split.tensors.count")
    if not len(tensors) == stored == announced:
        raise CheckpointError(
            f"{first.path}: its parts do not make one model",
            expected=f"{announced} tensors in {len(parts)} parts, each once",
            found=f"{stored}, {len(tensors)} of them by different names",
            remedy="fetch all parts of one version of the model",
        )
    path_of = {name: part.path for part in parts for name in part.tensors}
    return replace(first, tensors=tensors, path_of=path_of, paths=tuple(paths))


def _part_paths(first: GgufFile, count: object) -> list[Path]:
    """Where the parts are expected; llama.cpp finds them by their names too."""
    named = GGUF_PART.fullmatch(first.path.name)
    if named is None or type(count) is not int or int(named["count"]) != count or int(named["number"]) != 1:
        raise CheckpointError(
            f"{first.path}: one of {count} parts of a model",
            expected=f"the first part, by its own name: …-00001-of-{count!s:0>5}.gguf, with the others beside it",
            remedy="name the first part or the folder; or join them: llama-gguf-split --merge FIRST-PART WHOLE",
        )
    return [first.path.with_name(f"{named['name']}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]


def _check_part(first: GgufFile, part: GgufFile, number: int) -> None:
    expected = {"split.no": number, "split.count": first.metadata["split.count"]}
    shared = {key: value for key, value in first.metadata.items() if not key.startswith(_OWN_KEYS)}
    found = {key: part.metadata.get(key, value) for key, value in shared.items()}
    wrong = {key for key, value in expected.items() if part.metadata.get(key) != value}
    wrong |= {key for key, value in shared.items() if found[key] != value}
    if wrong:
        key = min(wrong)
        raise CheckpointError(
            f"{part.path}: not part {number + 1} of the model that {first.path.name} begins",
            expected=f"{key} = {(shared | expected)[key]!r}",
            found=repr(part.metadata.get(key)),
            remedy="fetch all parts of one version of the model",
        )


class _Reader(gguf.GGUFReader):
    of_powerinfer = False

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
        if offset == 0 and values[0] == _POWERINFER_MAGIC:
            self.of_powerinfer = True
            return np.array([_MAGIC], np.uint32)
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
            return end - orig_offs, [self.data[start:end]], [], types
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


def _check_types(file: GgufFile) -> None:
    read = KEPT_TYPES.keys() | BLOCK_TYPES
    wrong = [f"{name} {t.tensor_type.name}" for name, t in sorted(file.tensors.items()) if t.tensor_type not in read]
    if wrong:
        raise CheckpointError(
            f"{file.path}: {len(wrong)} tensors are in a type that is not read",
            expected=", ".join(kind.name for kind in sorted(read)),
            found=", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""),
            remedy="use a file of the model in one of these, such as F16, Q8_0 or Q4_K_M",
        )
