"""What training a guess head found: its shape, its weights, and how often it is right."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pi_compile.files import contents, read_arrays, write_arrays
from pi_runtime.artifact.guess_head import GuessHead

Array = npt.NDArray[Any]
_META = "meta"


@dataclass(frozen=True, eq=False)
class GuessWeights:
    """A guess head with its weights, in float32."""

    head: GuessHead
    arrays: Mapping[str, Array]
    """By their names in the artifact, without `guess/`."""
    right: tuple[float, ...] = ()
    """On answers that it was not trained on: the share of first tokens that are right, of second ones, and so on."""
    inputs: str = ""
    """Digest of what it was made from."""

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        meta = {"head": asdict(self.head), "right": self.right, "inputs": self.inputs}
        write_arrays(path, {_META: np.array(json.dumps(meta)), **self.arrays})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote. Raises ProfileError."""
        with contents(path, "a file of a guess head"):
            arrays = read_arrays(path)
            meta = json.loads(str(arrays.pop(_META)))
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in meta["head"].items()}
            return cls(GuessHead(**fields), arrays, tuple(meta["right"]), str(meta["inputs"]))
