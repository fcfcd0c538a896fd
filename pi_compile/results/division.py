"""The formats among which a budget of bytes or of perplexity was divided."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np

from pi_compile.files import contents, read_arrays, write_arrays
from pi_runtime.artifact.formats import WEIGHT_FORMATS

_META = "meta"


@dataclass(frozen=True)
class Division:
    """The chosen formats."""

    formats: Mapping[str, str]
    """Of each part, and of matrices that have other formats than their part."""
    nbytes: int
    """Most bytes of the artifact without predictors."""
    divergence: float
    """What all formats cost together, in nats a token, as far as the errors of single matrices tell."""
    inputs: str = ""
    """Digest of what it was made from."""

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        write_arrays(path, {_META: np.array(json.dumps(asdict(self)))})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote. Raises ProfileError."""
        with contents(path, "a file of formats"):
            found = cls(**json.loads(str(read_arrays(path)[_META])))
            if not set(found.formats.values()) <= set(WEIGHT_FORMATS):
                raise ValueError(sorted(set(found.formats.values())))
            return cls(dict(found.formats), int(found.nbytes), float(found.divergence), str(found.inputs))
