"""Tensors of a GGUF file under Hugging Face's names: values as they are, or dequantised when asked for."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type

from pi_compile.checkpoint.gguf.config import ROPE_DIVISORS, architecture
from pi_compile.checkpoint.gguf.file import GgufFile
from pi_runtime.artifact.decoder import Decoder

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+\.weight)")


@dataclass(frozen=True)
class _Stored:
    """Where the values of a tensor are."""

    name: str
    expert: int | None
    """Its place in a tensor of all experts."""
    heads: int | None
    """Heads whose rows are stored in the order of llama.cpp's rotation."""


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of a tensor as they are stored, and the order in which they are wanted."""

    data: npt.NDArray[Any]
    kind: Type
    order: npt.NDArray[np.int64] | None
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: slice | torch.Tensor, /) -> torch.Tensor:
        wanted = index if isinstance(index, slice) else index.numpy()
        data = self.data[wanted if self.order is None else self.order[wanted]]
        if self.kind == Type.BF16:
            return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
        stored = self.kind in (Type.F32, Type.F16)
        return torch.from_numpy(data if stored else gguf.dequantize(data, self.kind))


class GgufSource:
    """As `TensorSource`. Names that belong to no array of the decoder are those of the file."""

    described_by = "its metadata"

    def __init__(self, file: GgufFile, decoder: Decoder, wanted: Iterable[str]) -> None:
        """`wanted` are Hugging Face's names of the tensors that the decoder is made of."""
        self._file, self._decoder = file, decoder
        self.location = file.path
        self.files: tuple[str, ...] = (file.path.name,)
        found = {name: stored for name, stored in self._translated(wanted) if stored.name in file.tensors}
        used = {stored.name for stored in found.values()} | {ROPE_DIVISORS}
        own = {name: _Stored(name, None, None) for name in file.tensors if name not in used}
        self._stored = found | own
        self.names = frozenset(self._stored)

    def _translated(self, wanted: Iterable[str]) -> Iterable[tuple[str, _Stored]]:
        kind, d = architecture(self._file), self._decoder
        known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(known[str(self._file.architecture)], d.n_layers)
        heads = {".q_proj": d.n_heads, ".k_proj": d.n_kv_heads} if kind.permuted else {}
        for name in wanted:
            expert = _EXPERT.fullmatch(name)
            module, part = (f"{expert[1]}.{expert[3]}" if expert else name).rsplit(".", 1)
            stored = names.get_name(module)
            turned = next((n for end, n in heads.items() if module.endswith(end)), None)
            if stored is not None:
                yield name, _Stored(f"{stored}.{part}", int(expert[2]) if expert else None, turned)

    def alias(self, name: str, existing: str) -> None:
        """Give a tensor another name as well."""
        self._stored[name] = self._stored[existing]
        self.names |= {name}

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored[name]
        shape = self._file.shape(stored.name)
        return shape[1:] if stored.expert is not None and shape[:1] == (self._decoder.n_experts,) else shape

    def dtype(self, name: str) -> str:
        """Number format that holds the values exactly."""
        return self._file.format(self._stored[name].name)

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the file's pages where values are stored as they are and in order, else a copy."""
        return self.rows(name)[:]

    def rows(self, name: str) -> _Rows:
        """The tensor, of which only the rows that are asked for are dequantised."""
        stored = self._stored[name]
        tensor = self._file.tensors[stored.name]
        data = np.asarray(tensor.data if stored.expert is None else tensor.data[stored.expert])
        order = None if stored.heads is None else _turned_back(len(data), stored.heads)
        return _Rows(data, tensor.tensor_type, order, self.shape(name))

    def path(self, name: str) -> Path:  # noqa: ARG002 (all are in one)
        """File that holds a tensor."""
        return self._file.path


def _turned_back(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Where transformers' rows are: llama.cpp turns 2 j and 2 j + 1 of a head together, it j and j + width / 2."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)
