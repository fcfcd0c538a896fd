"""Named tensors of a checkpoint, memory-mapped: shapes and dtypes are known at once, values are read when needed.

The files are `model.safetensors`, or its shards with `model.safetensors.index.json`. Where a checkpoint has neither,
`pytorch_model.bin` or its shards are read through `torch.load(weights_only=True, mmap=True)`, which runs no code and is
the only thing here that needs torch.
"""

import json
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from pi_compile.checkpoint.config import read_json, remedy_for
from pi_compile.checkpoint.folder import ADAPTER_FILE, CONFIG_FILE, PICKLES, SAFETENSORS, WEIGHTS
from pi_compile.errors import CheckpointError
from pi_runtime.artifact import formats
from pi_runtime.artifact.formats import Format

Array = npt.NDArray[Any]
Values = npt.NDArray[np.float32]
Index = slice | npt.NDArray[np.int64]
BF16 = np.dtype([("bfloat16", "<u2")])
"""A bfloat16, which NumPy lacks, by its bits: a type of its own, so that nobody takes it for an integer."""
FORMATS = {BF16 if f.number == "bfloat16" else f.stored: f.name for f in formats.FORMATS.values() if f.number}
"""Type of stored floats → the number format that keeps them."""
_TYPES = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BOOL": "?"} | {
    f"{letter}{8 * nbytes}": f"<{letter.lower()}{nbytes}" for letter in "IU" for nbytes in (1, 2, 4, 8)
}
_OF_SAFETENSORS = {"BF16": BF16} | {name: np.dtype(kind) for name, kind in _TYPES.items()}


class RowReader(Protocol):
    """A tensor from which some rows are read at a time, as float32."""

    @property
    def shape(self) -> Sequence[int]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Index, /) -> Values: ...
    @property
    def grids(self) -> Collection[str]:
        """Block formats that hold all rows as they are stored."""

    def on_grid(self, fmt: Format, index: Index, /) -> tuple[Array, Array] | None:
        """Some rows as they are stored, where a block format holds that exactly: the integers (R, D) that it has, and
        scales (R, B), or scales and minima or zeros (R, 2, B), in binary16."""


@dataclass(frozen=True, eq=False)
class StoredRows:
    """The rows of floats that are `stored` in any format."""

    stored: Array
    grids = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, index: Index, /) -> Values:
        return as_float32(self.stored[index])

    def on_grid(self, _fmt: Format, _index: Index, /) -> tuple[Array, Array] | None:
        """Floats lie on no grid."""
        return None


def as_float32(stored: Array) -> Values:
    """Stored floats as float32, in order in memory; float32 that are so already are not copied."""
    if stored.dtype == BF16:
        return (stored["bfloat16"].astype(np.uint32, order="C") << np.uint32(16)).view(np.float32)
    return np.require(stored, np.float32, ["C", "ALIGNED"])


def type_name(dtype: np.dtype[Any]) -> str:
    """Name of a type of stored numbers: bfloat16, int32."""
    return dtype.name if dtype.names is None else dtype.names[0]


class TensorSource(Protocol):
    """Named tensors of a checkpoint, in any kind of file."""

    location: Path
    """Folder, or the one file."""
    described_by: str
    """Name of the place that says which tensors there should be, for messages."""
    files: tuple[str, ...]
    """Names of the files that are read."""
    names: frozenset[str]
    block_types: frozenset[str]
    """Types of tensors that are dequantised, and that no number format but f32 keeps."""
    powers: bool
    """Whether there are values that a power of two as the scale keeps exactly; see `quantise`."""
    without_effect: frozenset[str]
    """Names of tensors that change nothing, whatever the model is."""
    notices: tuple[str, ...]
    """Lines for the user about how the tensors are stored."""

    def alias(self, name: str, existing: str) -> None: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str:
        """Number format that keeps the values of a tensor; else the name of its type."""
        ...

    def bits(self, name: str) -> float:
        """Stored bits of one value, scales included."""
        ...

    def tensor(self, name: str) -> Array:
        """A whole tensor: as it is stored where a number format keeps it, else its values."""
        ...

    def rows(self, name: str) -> RowReader: ...
    def path(self, name: str) -> Path: ...


class FolderTensors:
    """Tensors in the weight files of a folder; opening them copies nothing."""

    described_by = CONFIG_FILE
    block_types: frozenset[str] = frozenset()
    powers = False
    without_effect: frozenset[str] = frozenset()

    def __init__(self, folder: Path) -> None:
        """Open every weight file of `folder`. Raises CheckpointError if one is missing, damaged or not as indexed."""
        self.location = folder
        main = _main_file(folder)
        index = read_json(folder / main).get("weight_map") if main.endswith(".index.json") else None
        self.files: tuple[str, ...] = (main,) if index is None else (main, *_shards(folder / main, index))
        """Names of the files that are read, index included."""
        self._tensors: dict[str, Array] = {}
        self._file_of: dict[str, str] = {}
        for file in self.files if index is None else self.files[1:]:
            opened = _open_safetensors if file.endswith(".safetensors") else _open_pickle
            for name, tensor in opened(folder / file).items():
                if index is None or index.get(name, file) == file:
                    self._tensors[name], self._file_of[name] = tensor, file
        self.names = frozenset(self._tensors)
        if index is not None:
            _check_index(folder / main, index, self._file_of)
        self.notices = tuple(_left_out(folder, main, self.files))
        """Lines for the user about weights that are not read."""

    def alias(self, name: str, existing: str) -> None:
        """Give a tensor another name as well."""
        self._tensors[name], self._file_of[name] = self._tensors[existing], self._file_of[existing]
        self.names |= {name}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """Number format of a tensor; the name of a type that is not read."""
        dtype = self._tensors[name].dtype
        return FORMATS.get(dtype) or type_name(dtype)

    def bits(self, name: str) -> float:
        return 8 * self._tensors[name].itemsize

    def tensor(self, name: str) -> Array:
        """The mapped tensor: a view of the file's pages. Do not write to it."""
        return self._tensors[name]

    def rows(self, name: str) -> RowReader:
        return StoredRows(self._tensors[name])

    def path(self, name: str) -> Path:
        """File that holds a tensor."""
        return self.location / self._file_of[name]


def _left_out(folder: Path, main: str, read: Collection[str]) -> Iterator[str]:
    """Yield a line about weights of the same form that are not read, and one about an adapter beside the weights."""
    form = next(form for form in WEIGHTS if main in form)
    names = sorted(path.name for path in folder.iterdir() if any(fnmatch(path.name, pattern) for pattern in form))
    others = [name for name in names if name not in read]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        yield f"{main} is read, as transformers reads it: {', '.join(others[:3])}{more} beside it left out"
    if (folder / ADAPTER_FILE).is_file():
        yield f"{ADAPTER_FILE}: the adapter (PEFT) beside the weights is left out; merge it into them to have it"


def _main_file(folder: Path) -> str:
    for name in (*SAFETENSORS, *PICKLES):
        if (folder / name).is_file():
            return name
    raise CheckpointError(
        f"{folder}: no weights",
        expected=f"one of {', '.join((*SAFETENSORS, *PICKLES))}",
        found=", ".join(sorted(p.name for p in folder.iterdir() if p.is_file())),
        remedy="save the model with `save_pretrained`, which writes model.safetensors",
    )


def _shards(path: Path, index: object) -> list[str]:
    """Names of the shards of an index, sorted. They must be plain names, of files beside the index."""
    suffix = ".safetensors" if path.name in SAFETENSORS else ".bin"
    names = list(index.values()) if isinstance(index, dict) else []
    if not names or not all(isinstance(n, str) and Path(n).name == n and n.endswith(suffix) for n in names):
        raise CheckpointError(f"{path}: not an index", expected=f"weight_map: tensor name → name of a {suffix} file")
    shards = sorted(set(names))
    missing = [name for name in shards if not (path.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{path.parent}: {len(missing)} of {len(shards)} shards are missing",
            expected=f"every file that {path.name} names",
            found=f"no {', '.join(missing[:5])}",
            remedy="fetch the missing files of the checkpoint",
        )
    return shards


def _check_index(path: Path, index: Mapping[str, str], file_of: Mapping[str, str]) -> None:
    missing = sorted(name for name in index if name not in file_of)
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} tensors are not in the shard that the index names",
            expected=f"{missing[0]} in {index[missing[0]]}",
            found=f"not there: {', '.join(missing[:5])}",
            remedy="index and shards are of different checkpoints: fetch them again",
        )


def _open_safetensors(path: Path) -> Mapping[str, Array]:
    try:
        with safe_open(path, framework="np"):  # checks the header and that the tensors fill the file
            mapped = np.memmap(path, np.uint8, "r")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a whole safetensors file", found=str(error), remedy=remedy_for(path)
        ) from None
    start = 8 + int.from_bytes(mapped[:8], "little")
    header = json.loads(bytes(mapped[8:start]))
    header.pop("__metadata__", None)
    data = np.asarray(mapped[start:])
    return {name: _mapped(data, entry) for name, entry in header.items()}


def _mapped(data: Array, entry: Mapping[str, Any]) -> Array:
    """One tensor in the data of a safetensors file that has been checked."""
    kind, shape = _OF_SAFETENSORS.get(entry["dtype"]), tuple(entry["shape"])
    if kind is None:
        return _unread({"F8_E4M3": "float8_e4m3fn"}.get(entry["dtype"], entry["dtype"]), shape)
    first, last = entry["data_offsets"]
    return data[first:last].view(kind).reshape(shape)


def _open_pickle(path: Path) -> Mapping[str, Array]:
    import torch  # noqa: PLC0415 (needed here alone)

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path}: holds more than weights, and a pickle's code is never run",
            expected="a file that torch.load(weights_only=True) reads",
            remedy="use a checkpoint in safetensors form",
        ) from None
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a whole torch file of the zip form",
            found=str(error).split("\n")[0],
            remedy=f"{remedy_for(path)}, or convert it to safetensors",
        ) from None
    if not isinstance(state, dict) or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise CheckpointError(
            f"{path}: not a state dict", expected="tensor name → tensor", remedy="save the model with `save_pretrained`"
        )

    return {name: stored_of_torch(tensor) for name, tensor in state.items()}


def stored_of_torch(tensor: Any) -> Array:
    """A tensor of torch as it is stored, in the same memory."""
    import torch  # noqa: PLC0415

    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.detach().view(torch.int16)).view(BF16)
    try:
        return np.asarray(tensor.detach())
    except TypeError:
        return _unread(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _unread(type_name: str, shape: tuple[int, ...]) -> Array:
    """What stands for a tensor of a type that NumPy lacks: it is refused by that name, and never read."""
    return np.broadcast_to(np.zeros((), [(type_name, "V1")]), shape)
