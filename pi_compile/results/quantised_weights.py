"""What quantising found: matrices in their stored form, rows in the checkpoint's order; and what `divide` chose."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pi_compile.files import check_arrays, contents, read_arrays, write_array_stream, write_arrays
from pi_runtime.artifact.formats import WEIGHT_FORMATS

Array = npt.NDArray[Any]
Stored = tuple[Array, Array]
"""Stored integers of a matrix, and its stored scales."""
_META = "meta"


class QuantisedWeights(Mapping[str, Stored]):
    """Matrices by their names in the artifact, each read when it is asked for: together they are the model."""

    def __init__(self, names: tuple[str, ...], read: Callable[[str], Stored], inputs: str) -> None:
        self._names, self._read = names, read
        self.inputs = inputs
        """Digest of what they were made from."""

    def __getitem__(self, name: str) -> Stored:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def in_memory(self) -> Self:
        """The same, with all matrices read: for one whose files will be gone."""
        found = dict(self)
        return type(self)(self._names, found.__getitem__, self.inputs)

    def save(self, path: Path) -> None:
        """Write the file whole or not at all, with one matrix in memory."""

        def arrays() -> Iterator[tuple[str, Array]]:
            yield _META, np.array(json.dumps({"inputs": self.inputs, "names": self._names}))
            for name in self._names:
                yield from zip(_entries(name), self._read(name), strict=True)

        write_array_stream(path, arrays())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote; matrices are read when they are needed. Raises ProfileError."""
        with contents(path, "a file of quantised weights"):
            check_arrays(path)
            meta = json.loads(str(read_arrays(path, names=[_META])[_META]))
            return cls(tuple(map(str, meta["names"])), lambda name: read_stored(path, name), str(meta["inputs"]))


def read_stored(path: Path, name: str) -> Stored:
    """One matrix of a file. Raises KeyError where it is not there."""
    integers, scales = _entries(name)
    stored = read_arrays(path, names=[integers, scales])
    return stored[integers], stored[scales]


def stored_entries(name: str, stored: Stored) -> dict[str, Array]:
    """A matrix as arrays of a file."""
    return dict(zip(_entries(name), stored, strict=True))


def _entries(name: str) -> tuple[str, str]:
    return f"{name}/integers", f"{name}/scales"


@dataclass(frozen=True)
class Division:
    """The chosen formats."""

    formats: Mapping[str, str]
    """Of each part, and of matrices that have other formats than their part."""
    nbytes: int
    """Most bytes of the artifact without predictors."""
    divergence: float
    """What all formats cost together, in nats a token, as far as the errors of single matrices tell."""
    importance: Mapping[str, Array]
    """What a plain error of each column (k, D) of a matrix costs, relative to their mean. It weighs rounding."""
    inputs: str = ""
    """Digest of what it was made from."""

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        told = {**vars(self), "formats": dict(self.formats)}
        arrays = told.pop("importance")
        write_arrays(path, {_META: np.array(json.dumps(told)), **arrays})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote. Raises ProfileError."""
        with contents(path, "a file of formats"):
            arrays = dict(read_arrays(path))
            found = cls(**json.loads(str(arrays.pop(_META))), importance=arrays)
            if not set(found.formats.values()) <= set(WEIGHT_FORMATS):
                raise ValueError(sorted(set(found.formats.values())))
            return found
