"""`init`: a complete recipe for a checkpoint."""

import os
from collections.abc import Sequence
from pathlib import Path

from pi_compile.checkpoint import open_checkpoint
from pi_compile.recipe import Recipe, default_recipe
from pi_runtime.errors import UsageError


def start_recipe(
    model: str, output: Path, *, revision: str = "", corpus: Sequence[Path] = (), force: bool = False
) -> Recipe:
    """Check that the checkpoint is one we can compile, then write its recipe.

    A folder is written relative to the recipe, so that both can move together. Raises UsageError rather than replace
    a recipe, unless `force`.
    """
    if output.exists() and not force:
        raise UsageError(f"{output}: exists already", remedy="--force, or another -o")
    if not output.parent.is_dir():
        raise UsageError(f"{output}: no such folder {output.parent}")
    open_checkpoint(model, revision or None)
    here = output.resolve().parent
    if Path(model).is_dir():
        model = _relative(Path(model), here)
    missing = [str(path) for path in corpus if not path.exists()]
    if missing:
        raise UsageError(f"--corpus {missing[0]}: no such file or folder")
    text = [_relative(path, here) for path in corpus] or ["python"]
    recipe = default_recipe(model, revision=revision, corpus=text)
    output.write_text(recipe.to_toml(), encoding="utf-8")
    return recipe


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder)).as_posix()
