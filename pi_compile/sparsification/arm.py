"""A training that is over, the model's or the control's, the file that keeps it, and what is said of both."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pi_compile.evaluation.intervals import increase_interval
from pi_compile.sparsification.evaluation import Evaluation
from pi_compile.sparsification.recipe import SparsifyRecipe
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


def run_record(recipe: SparsifyRecipe, base: Evaluation, model: Arm, control: Arm | None) -> dict[str, Any]:
    """What came of a run, as the folder's record says it."""
    against = base.losses_N if control is None else control.losses_N
    interval = increase_interval(model.losses_N, against)
    facts, trained = model.facts, model.trained
    return {
        "activation": recipe.target.activation,
        "perplexity": {
            "base": base.perplexity,
            "model": facts["perplexity"],
            "control": None if control is None else control.facts["perplexity"],
        },
        "perplexity_increase": float(np.expm1(model.losses_N.mean() - against.mean())),
        "interval": None if interval is None else list(interval),
        **{name: value for name, value in facts.items() if name != "perplexity"},
        **{name: getattr(trained, name) for name in ("steps", "ended", "schedule", "tokens", "seconds")},
    }
