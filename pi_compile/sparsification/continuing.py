"""The last checkpoints of a finished run, which stay in `FOLDER.checkpoint`, and a run that goes on from them."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi_compile.files import write_text
from pi_compile.sparsification.recipe import SparsifyRecipe
from pi_runtime.console import size
from pi_runtime.errors import InputError, UsageError

MODEL, CONTROL = "model", "control"
IDENTITY = "run.json"
"""The file that says what a run is, of a folder of work and of one with checkpoints."""


def kept_of(output: Path) -> Path:
    """Where the last checkpoints of the run stay that wrote a folder."""
    return output.with_name(output.name + ".checkpoint")


@dataclass(frozen=True)
class Start:
    """A finished run to go on from."""

    recipe: SparsifyRecipe
    """With the steps that are to come."""
    folder: Path
    """The folder that the recipe's paths are relative to."""
    kept: Path
    after: int
    """Steps that are done."""
    steps: int
    """Steps that are to come."""
    inputs: dict[str, Any]
    """What the finished run was made from: `model` and `sources`, hashes, and its `digest`."""

    def checkpoint(self, arm: str) -> Path:
        """The last checkpoint of the model, or of the control."""
        return self.kept / arm / f"step-{self.after:08}"


def keep(work: Path, output: Path, steps: int, folder: Path) -> str:
    """Bring the last checkpoints of a run of so many steps to where they stay; return a line for the user.

    `folder` is the one that paths of its recipe are relative to. What was killed on the way is done again.
    """
    collected, kept = work / "kept", kept_of(output)
    for arm in (MODEL, CONTROL):
        if (work / arm).exists():
            collected.mkdir(exist_ok=True)
            (work / arm).rename(collected / arm)
    if collected.exists():
        facts = json.loads((work / IDENTITY).read_text(encoding="utf-8"))
        write_text(collected / IDENTITY, json.dumps({**facts, "folder": str(folder), "steps": steps}, indent=1))
        for path in (work / f"{MODEL}.json", work / f"{CONTROL}.json"):
            if path.exists():
                shutil.copyfile(path, collected / path.name)
        shutil.rmtree(kept, ignore_errors=True)
        collected.rename(kept)
    nbytes = sum(path.stat().st_size for path in kept.rglob("*") if path.is_file())
    return f"{kept}: {size(nbytes)}, which pi-compile sparsify --resume {output} goes on from; else remove it"


def start_from(finished: Path, steps: int) -> Start:
    """So many steps more of the run that wrote a folder. Raises UsageError or InputError without its checkpoints."""
    kept = kept_of(finished)
    try:
        found = json.loads((kept / IDENTITY).read_text(encoding="utf-8"))
        recipe, after = SparsifyRecipe.model_validate(found["recipe"]), int(found["steps"])
        start = Start(recipe.with_steps(after + steps), Path(found["folder"]), kept, after, steps, found)
    except FileNotFoundError:
        raise UsageError(
            f"{finished}: nothing to go on from",
            expected=f"{kept}, where a finished run keeps its last checkpoints",
            remedy="make the folder anew with more steps in the recipe",
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{kept / IDENTITY}: damaged", found=error, remedy="make the folder anew") from None
    if not start.checkpoint("model").is_dir():
        raise InputError(f"{start.checkpoint('model')}: no such checkpoint", remedy="make the folder anew")
    return start
