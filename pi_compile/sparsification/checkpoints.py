"""Checkpoints of a training: whole folders, each with everything that the next step depends on.

`step-N/` has what accelerate saves (weights, optimiser, generators of every process) and `state.json` (all that is no
tensor). It is written under a hidden name and renamed when every process is done, so one that is there is whole.

The last checkpoints of a finished run stay in `FOLDER.checkpoint`; another run may go on from them.
"""

import json
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.constants import RNG_STATE_NAME

from pi_compile.errors import TrainingError
from pi_compile.files import library_writes, write_text
from pi_compile.sparsification.recipe import SparsifyRecipe
from pi_runtime.errors import InputError, UsageError, size

STATE = "state.json"
_NAME = re.compile(r"step-(\d+)")
KEPT = 2
"""Newest checkpoints that are kept: should the last one turn out damaged, there is another."""


class Checkpoints:
    """The checkpoints in one folder."""

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        self.folder, self._accelerator = folder, accelerator

    def path(self, step: int) -> Path:
        """The folder of the checkpoint after so many steps."""
        return self.folder / f"step-{step:08}"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order."""
        if not self.folder.is_dir():
            return []
        return sorted(int(found[1]) for path in self.folder.iterdir() if (found := _NAME.fullmatch(path.name)))

    def save(self, step: int, state: dict[str, Any], keep: Collection[int] = ()) -> None:
        """Save the prepared model and optimiser with a state; then remove older ones but those to `keep`."""
        hidden = self.folder / f".step-{step:08}.tmp"
        if self._accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            for stale in self.folder.glob(".step-*.tmp"):
                shutil.rmtree(stale)
        self._accelerator.wait_for_everyone()
        # It warns of tied weights, which are stored once and are tied again when they are loaded.
        logging.getLogger("accelerate").setLevel(logging.ERROR)
        with library_writes(hidden):
            self._accelerator.save_state(str(hidden))
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            (hidden / STATE).write_text(json.dumps(state), encoding="utf-8")
            for path in (*hidden.rglob("*"), hidden):
                _sync(path)
            if self.path(step).exists():
                shutil.rmtree(self.path(step))
            hidden.rename(self.path(step))
            _sync(self.folder)
            for older in self.steps()[:-KEPT]:
                if older not in keep:
                    shutil.rmtree(self.path(older))
        self._accelerator.wait_for_everyone()

    def begin_with(self, checkpoint: Path) -> None:
        """Have another training's checkpoint as the first one, unless there are some: no file of it is ever changed."""
        if self._accelerator.is_main_process and not self.steps():
            hidden = self.folder / f".{checkpoint.name}.tmp"
            shutil.rmtree(hidden, ignore_errors=True)
            shutil.copytree(checkpoint, hidden, copy_function=_link)
            hidden.rename(self.folder / checkpoint.name)
        self._accelerator.wait_for_everyone()

    def keep_only(self, step: int) -> None:
        """Remove all but one."""
        for other in self.steps():
            if other != step:
                shutil.rmtree(self.path(other))

    def load(self, step: int) -> dict[str, Any]:
        """Load the prepared model and optimiser; return the state. Raises TrainingError for a damaged checkpoint."""
        path = self.path(step)
        try:
            state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
            _check_generators(path)
            self._accelerator.load_state(str(path))
        except (MemoryError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:  # the classes of safetensors, pickle and zipfile are bare Exceptions
            raise TrainingError(
                f"{path}: not a whole checkpoint",
                found=str(error) or type(error).__name__,
                remedy="remove it; the training goes on from the checkpoint before",
            ) from None
        return state


def _check_generators(folder: Path) -> None:
    """Raise ValueError or BadZipFile where a file of generators is not whole: accelerate would go on without it."""
    paths = list(folder.glob(f"{RNG_STATE_NAME}_*.pkl"))
    if not paths:
        raise ValueError("no state of the generators")
    for path in paths:
        with zipfile.ZipFile(path) as stored:
            if (damaged := stored.testzip()) is not None:
                raise ValueError(f"{path.name}: {damaged} is damaged")


def _link(source: str, target: str) -> None:
    """A file under a second name, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _sync(path: Path) -> None:
    """Bring a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
