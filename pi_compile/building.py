"""From a recipe file to an artifact: joins recipe, checkpoint and packing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.packing import PackSpec, pack
from pi_compile.recipe import Recipe, read_recipe
from pi_runtime.console import Progress


def recipe_checkpoint(recipe: Recipe, folder: Path) -> Checkpoint:
    """The checkpoint a recipe names; `folder` is the recipe's own."""
    section = recipe.model
    # A recipe pins a hub model by its revision; a folder has none.
    model = section.path if section.revision else folder / section.path
    return open_checkpoint(model, section.revision or None, section.ignore_config)


def pack_recipe(
    path: Path, output: Path | None, *, progress: Progress, notice: Callable[[str], None]
) -> dict[str, Any]:
    """Pack the checkpoint of the recipe at `path`; returns what to report."""
    recipe = read_recipe(path)
    checkpoint = recipe_checkpoint(recipe, path.resolve().parent)
    for line in checkpoint.notices:
        notice(line)
    spec = PackSpec(formats=recipe.pack.model_dump())
    result = pack(checkpoint, spec, output or Path(path.stem + ".pi"), recipe=recipe.model_dump(), progress=progress)
    return {"artifact": str(result.path), "bytes": result.nbytes, "sha256": result.sha256}
