"""Weights in memory as an artifact stores them, for calling kernels on them directly."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.sizes import PARTS, array_specs
from pi_runtime.kernels import table
from pi_runtime.kernels.buffers import Buffers, buffers

F32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
WEIGHT_FORMATS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Matrix:
    """A matrix in a number format; `values` is what its bytes mean."""

    fmt: int
    stored: npt.NDArray[Any]
    values: F32

    @property
    def address(self) -> int:
        return int(self.stored.ctypes.data)

    @property
    def stride(self) -> int:
        return self.stored.strides[0]


def store(fmt: str, values: npt.ArrayLike) -> Matrix:
    values = np.asarray(values, np.float32)
    stored = FORMATS[fmt].encode(values)
    return Matrix(FORMATS[fmt].code, stored, np.ascontiguousarray(FORMATS[fmt].decode(stored, values.shape[-1])))


@dataclass(frozen=True)
class Layer:
    """One layer's FFN: values by their short names, and the row of addresses that kernels take."""

    decoder: Decoder
    shape: table.Shape
    values: Mapping[str, F32]
    row: Ints
    buffers: Buffers
    kept: tuple[Matrix, ...]
    """What the addresses point to."""

    def on(self, rung: int) -> Ints:
        """The row of addresses, with another rung."""
        row = self.row.copy()
        row[table.RUNG] = rung
        return row


def ffn_layer(decoder: Decoder, fmt: str, rank: int, seed: int, **given: F32) -> Layer:
    """Random weights of one layer of `decoder`; `given` replaces some, `__` standing for a slash."""
    decoder = replace(decoder, n_layers=1)
    formats = dict.fromkeys(PARTS, fmt)
    rng = np.random.default_rng(seed)
    matrices = {}
    for name, spec in array_specs(decoder, formats, [rank], False).items():
        local = name.removeprefix("layers/0/")
        if local.startswith(("ffn/", "predictor/")):
            values = rng.standard_normal(spec.shape, np.float32) / np.float32(np.sqrt(spec.shape[-1]))
            matrices[local] = store(spec.format, given.get(local.replace("/", "__"), values))
    row = [matrices[name].address if name in matrices else 0 for name in table._COLUMNS]
    shape = table.shape_of(decoder, formats)
    return Layer(
        decoder,
        shape,
        {name: m.values for name, m in matrices.items()},
        np.array([*row, table.PREDICTED, rank], np.int64),
        buffers(shape, 1, rank),
        tuple(matrices.values()),
    )
