"""A training that is over, the model's or the control's, and the file that keeps it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pi_compile.sparsification.training import Point, Trained


@dataclass(frozen=True)
class Arm:
    """A training and what came of it: the model, or the control."""

    trained: Trained
    losses_N: np.ndarray[Any, Any]
    """Loss in each window of the held-out text."""
    facts: dict[str, Any]

    def to_json(self) -> str:
        """The text that `read_arm` takes."""
        return json.dumps({**asdict(self), "losses_N": self.losses_N.tolist()})


def read_arm(path: Path) -> Arm:
    """The training that a file keeps."""
    found = json.loads(path.read_text(encoding="utf-8"))
    trained = found["trained"]
    trained["points"] = [Point(**point) for point in trained["points"]]
    return Arm(Trained(**trained), np.array(found["losses_N"]), found["facts"])
