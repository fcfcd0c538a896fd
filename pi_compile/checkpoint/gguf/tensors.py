"""Tensors of a GGUF file under Hugging Face's names; quantised values are dequantised when they are read."""

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
class _StoredTensor:
    """Where the values of a tensor are in the file."""

    name: str
    expert: int | None
    """Its index in a tensor of all experts; None for a tensor of its own."""
    permuted_heads: int | None
    """Number of heads whose rows are stored in the order in which llama.cpp rotates them; None for other tensors."""


@dataclass(frozen=True, eq=False)
class _GgufRows:
    """Rows of a tensor as they are stored, and the order in which they are wanted."""

    data: npt.NDArray[Any]
    tensor_type: Type
    order: npt.NDArray[np.int64] | None
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: slice | torch.Tensor, /) -> torch.Tensor:
        wanted = index if isinstance(index, slice) else index.numpy()
        data = self.data[wanted if self.order is None else self.order[wanted]]
        if self.tensor_type == Type.BF16:
            return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
        stored = self.tensor_type in (Type.F32, Type.F16)
        return torch.from_numpy(data if stored else gguf.dequantize(data, self.tensor_type))


class GgufTensors:
    """Tensors of a GGUF file; those that the decoder does not use keep the file's names."""

    described_by = "its metadata"

    def __init__(self, file: GgufFile, decoder: Decoder, wanted: Iterable[str]) -> None:
        """`wanted` has Hugging Face's names of the tensors that the decoder is made of."""
        self._file, self._decoder = file, decoder
        self.location = file.path
        self.files: tuple[str, ...] = (file.path.name,)
        found = {name: stored for name, stored in self._translated(wanted) if stored.name in file.tensors}
        used = {stored.name for stored in found.values()} | {ROPE_DIVISORS}
        unused = {name: _StoredTensor(name, None, None) for name in file.tensors if name not in used}
        self._stored = found | unused
        self.names = frozenset(self._stored)

    def _translated(self, wanted: Iterable[str]) -> Iterable[tuple[str, _StoredTensor]]:
        d = self._decoder
        known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(known[str(self._file.architecture)], d.n_layers)
        heads = {".q_proj": d.n_heads, ".k_proj": d.n_kv_heads} if architecture(self._file).permuted else {}
        for name in wanted:
            expert = _EXPERT.fullmatch(name)
            module, part = (f"{expert[1]}.{expert[3]}" if expert else name).rsplit(".", 1)
            stored = names.get_name(module)
            permuted = next((n for end, n in heads.items() if module.endswith(end)), None)
            if stored is not None:
                yield name, _StoredTensor(f"{stored}.{part}", int(expert[2]) if expert else None, permuted)

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
        """A view of the file's pages where the values are stored in order and not quantised, else a copy."""
        return self.rows(name)[:]

    def rows(self, name: str) -> _GgufRows:
        """The rows of the tensor; only those that are read are dequantised."""
        stored = self._stored[name]
        tensor = self._file.tensors[stored.name]
        data = np.asarray(tensor.data if stored.expert is None else tensor.data[stored.expert])
        order = None if stored.permuted_heads is None else _unpermuted_rows(len(data), stored.permuted_heads)
        return _GgufRows(data, tensor.tensor_type, order, self.shape(name))

    def path(self, name: str) -> Path:  # noqa: ARG002 (there is one file)
        """File that holds a tensor."""
        return self._file.path


def _unpermuted_rows(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """The place in the file of each row that transformers has.

    llama.cpp rotates columns 2 j and 2 j + 1 of a head together, transformers j and j + width / 2.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)
