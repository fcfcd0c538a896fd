"""Hidden states between layers, on disk.

They alternate between two files, so that a layer whose run was killed can be run again. Shape letter: D model width.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states (sequences, tokens, D) before each step, in float32; a step is one layer."""

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
