"""Hidden states between layers, on disk, in two files that take turns: a layer that is killed can be run again."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states (sequences, tokens, D) before each of a number of steps, float32."""

    folder: Path
    name: str
    shape: tuple[int, ...]

    def before(self, step: int) -> Floats:
        """The memory-mapped states that step `step` reads and step `step − 1` writes."""
        path = self.folder / f"{self.name}-{step % 2}.npy"
        if not path.exists():
            # Created whole under another name: a kill in between leaves no file that looks finished.
            temporary = path.with_suffix(".partial")
            np.lib.format.open_memmap(temporary, "w+", np.float32, self.shape).flush()
            temporary.replace(path)
        states: Floats = np.lib.format.open_memmap(path, "r+")
        return states
