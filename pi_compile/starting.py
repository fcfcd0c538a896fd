"""`init`: a complete recipe for a checkpoint."""

import os
from pathlib import Path

from pi_compile.checkpoint import open_checkpoint
from pi_compile.recipe import Recipe, default_recipe
from pi_runtime.errors import UsageError


def start_recipe(model: str, output: Path, *, revision: str = "", force: bool = False) -> Recipe:
    """Check that the checkpoint is one we can compile, then write its recipe.

    A folder is written relative to the recipe, so that both can move together. Raises UsageError rather than replace
    a recipe, unless `force`.
    """
    if output.exists() and not force:
        raise UsageError(f"{output}: exists already", remedy="--force, or another -o")
    if not output.parent.is_dir():
        raise UsageError(f"{output}: no such folder {output.parent}")
    open_checkpoint(model, revision or None)
    folder = Path(model)
    if folder.is_dir():
        model = Path(os.path.relpath(folder.resolve(), output.resolve().parent)).as_posix()
    recipe = default_recipe(model, revision=revision)
    output.write_text(recipe.to_toml(), encoding="utf-8")
    return recipe
