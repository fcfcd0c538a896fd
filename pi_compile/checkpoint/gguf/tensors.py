"""Tensors of a GGUF file; quantised values are dequantised when they are read."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from pi_compile.checkpoint.gguf.architectures import ROPE_DIVISORS, architecture
from pi_compile.checkpoint.gguf.blocks import KEPT, has_lowest, taken
from pi_compile.checkpoint.gguf.file import BLOCK_TYPES, GgufFile
from pi_compile.checkpoint.gguf.of_families import LONG_FACTORS
from pi_compile.checkpoint.tensors import BF16, Array, Index, Values, as_float32
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import FORMATS, ROW_FORMATS, Format

_GRIDS = {kind: FORMATS[name] for name, kind in KEPT.items()}
"""Tensor type → the block format that has its integers and scales."""
_EXPERTS = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))_exps(\.weight)")
_FUSED_EXPERTS = re.compile(r"(blk\.\d+\.ffn_)gate_up_exps(\.weight)")
_FUSED = re.compile(r"(blk\.\d+\.attn_)qkv(\.(?:weight|bias))")
_HEADS = re.compile(r"(blk\.\d+\.attn_[kv]_b)(\.weight)")
_GATED = re.compile(r"(blk\.\d+\.ffn_)up(\.weight)")
_ROTATED = re.compile(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)")


@dataclass(frozen=True)
class _StoredTensor:
    """Where the values of a tensor are in the file."""

    name: str
    item: int | None = None
    """Its index in a tensor of all experts, or of all heads; None for a tensor of its own."""
    start: int = 0
    stop: int | None = None
    """Its rows are `start` to `stop` of a tensor of several, such as queries, keys and values; None for the last."""


@dataclass(frozen=True, eq=False)
class _GgufRows:
    """Rows of a tensor as they are stored, and the order in which they are wanted."""

    data: Array
    tensor_type: Type
    order: npt.NDArray[np.int64] | None
    shape: tuple[int, ...]
    factor: float = 1.0
    """What multiplies the values of the tensor's type."""

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Index, /) -> Values:
        return as_float32(self.stored(index))

    def stored(self, index: Index) -> Array:
        """Some rows, as they are stored where they are floats."""
        data = self.data[index if self.order is None else self.order[index]]
        if self.tensor_type == Type.BF16:
            return data.view(BF16)
        if self.tensor_type in (Type.F32, Type.F16):
            return data
        with np.errstate(over="ignore"):  # what is too large for a float32 becomes infinite, and is refused
            return gguf.dequantize(data, self.tensor_type) * np.float32(self.factor)

    @cached_property
    def grids(self) -> tuple[str, ...]:
        """The block format of the tensor's type, if there is one, and those that have more bits for the same."""
        own = _GRIDS.get(self.tensor_type)
        parts = range(0, len(self) if own is not None and own.mirrored else 0, 4096)
        if own is None or any(has_lowest(own, self._rows(slice(n, n + 4096))) for n in parts):
            return ()
        others = () if not own.summed else (FORMATS[name] for name in ROW_FORMATS)
        wider = (f for f in others if f.quantised and f.offset == own.offset and f.bits > own.bits)
        return (own.name, *(f.name for f in wider))

    def on_grid(self, fmt: Format, index: Index) -> tuple[Array, Array] | None:
        """Blocks that a format holds, and their scales."""
        return taken(_GRIDS[self.tensor_type], self._rows(index), self.factor) if fmt.name in self.grids else None

    def _rows(self, index: Index) -> Array:
        return self.data[index if self.order is None else self.order[index]]


class GgufTensors:
    """Tensors of a GGUF file by its own names; those of experts and heads, of queries, keys and values,
    and of gate and up, are told apart.

    An expert's tensor is named as llama.cpp did before it joined them: `blk.0.ffn_up.3.weight`.
    """

    described_by = "its metadata"
    block_types = frozenset(kind.name for kind in BLOCK_TYPES)
    without_effect: frozenset[str] = frozenset()
    notices: tuple[str, ...] = ()

    def __init__(self, file: GgufFile, decoder: Decoder) -> None:
        self._file, self._decoder = file, decoder
        self._permuted = architecture(file).permuted
        self.powers = any(tensor.tensor_type == Type.MXFP4 for tensor in file.tensors.values())
        self.location = file.path
        self.files: tuple[str, ...] = tuple(path.name for path in file.paths)
        self._stored = {name: stored for whole in file.tensors for name, stored in self._told_apart(whole)}
        for name in (ROPE_DIVISORS, *LONG_FACTORS, *self._beside_nvfp4()):
            self._stored.pop(name, None)
        self.names = frozenset(self._stored)
        self._rows: dict[str, _GgufRows] = {}

    def _beside_nvfp4(self) -> Iterator[str]:
        """Names that tensors have which scale those of NVFP4, or say how inputs were rounded to it."""
        for name, tensor in self._file.tensors.items():
            if tensor.tensor_type == Type.NVFP4:
                yield from (name.removesuffix("weight") + kind for kind in ("scale", "input_scale"))

    def _told_apart(self, name: str) -> Iterator[tuple[str, _StoredTensor]]:
        d = self._decoder
        experts, fused, shape = _EXPERTS.fullmatch(name), _FUSED.fullmatch(name), self._file.shape(name)
        heads, gated, both = (pattern.fullmatch(name) for pattern in (_HEADS, _GATED, _FUSED_EXPERTS))
        parts, count = (experts, d.experts_routed) if experts else (heads, d.n_heads)
        is_joined = d.ffn == "gated" and name.replace("_up", "_gate") not in self._file.tensors
        if parts and len(shape) == 3 and shape[0] == count:
            ending = [f".{e}" for e in range(count)] if heads or d.n_experts > 1 else [""]
            yield from ((f"{parts[1]}{end}{parts[2]}", _StoredTensor(name, item=e)) for e, end in enumerate(ending))
        elif both and shape[:2] == (d.experts_routed, 2 * d.d_ff):
            for e in range(d.experts_routed):
                yield f"{both[1]}gate.{e}{both[2]}", _StoredTensor(name, item=e, stop=d.d_ff)
                yield f"{both[1]}up.{e}{both[2]}", _StoredTensor(name, item=e, start=d.d_ff)
        elif gated and is_joined and shape[:1] == (2 * d.d_ff,):
            yield f"{gated[1]}gate{gated[2]}", _StoredTensor(name, stop=d.d_ff)
            yield f"{gated[1]}up{gated[2]}", _StoredTensor(name, start=d.d_ff)
        elif fused and int(name.split(".")[1]) not in d.recurrent_layers:
            queries, keys, _ = d.of_layer(int(name.split(".")[1])).qkv_parts
            rows = ((0, queries), (queries, queries + keys), (queries + keys, None))
            for part, (start, stop) in zip("qkv", rows, strict=True):
                yield f"{fused[1]}{part}{fused[2]}", _StoredTensor(name, start=start, stop=stop)
        else:
            yield name, _StoredTensor(name)

    def alias(self, name: str, existing: str) -> None:
        """Give a tensor another name as well."""
        self._stored[name] = self._stored[existing]
        self.names |= {name}

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored[name]
        shape = self._file.shape(stored.name)[0 if stored.item is None else 1 :]
        return (len(range(shape[0])[stored.start : stored.stop]), *shape[1:]) if shape else shape

    def dtype(self, name: str) -> str:
        """Number format that holds the values exactly; the name of the tensor's type where none does."""
        return self._file.format(self._stored[name].name)

    def bits(self, name: str) -> float:
        """Stored bits of one value, scales included."""
        tensor = self._file.tensors[self._stored[name].name]
        return 8 * float(tensor.n_bytes) / float(tensor.n_elements)

    def tensor(self, name: str) -> Array:
        """A view of the file's pages where the values are stored in order and not quantised, else a copy."""
        return self.rows(name).stored(slice(None))

    def rows(self, name: str) -> _GgufRows:
        """The rows of the tensor; only those that are read are dequantised."""
        if name not in self._rows:
            self._rows[name] = self._opened(name)
        return self._rows[name]

    def _opened(self, name: str) -> _GgufRows:
        stored, rotated = self._stored[name], _ROTATED.fullmatch(name) if self._permuted else None
        tensor = self._file.tensors[stored.name]
        whole = np.asarray(tensor.data if stored.item is None else tensor.data[stored.item])
        data = whole[stored.start : stored.stop]
        heads = {"q": self._decoder.n_heads, "k": self._decoder.n_kv_heads}
        order = None if rotated is None else _unpermuted_rows(len(data), heads[rotated[1]])
        scales = self._file.tensors.get(stored.name.removesuffix("weight") + "scale")
        factor = float(scales.data[stored.item or 0]) if scales and tensor.tensor_type == Type.NVFP4 else 1.0
        return _GgufRows(data, tensor.tensor_type, order, self.shape(name), factor)

    def path(self, name: str) -> Path:
        """File that holds a tensor."""
        return self._file.path_of[self._stored[name].name]


def _unpermuted_rows(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """The place in the file of each row that transformers has.

    llama.cpp rotates columns 2 j and 2 j + 1 of a head together, transformers j and j + width / 2.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)
