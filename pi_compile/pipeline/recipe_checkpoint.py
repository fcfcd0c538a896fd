"""The checkpoint that a recipe names."""

from dataclasses import replace
from pathlib import Path

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.checkpoint.part_formats import resolve_formats
from pi_compile.errors import CheckpointError, RecipeError
from pi_compile.recipe import OWN_HEAD, Recipe


def recipe_checkpoint(recipe: Recipe, folder: Path) -> Checkpoint:
    """The checkpoint a recipe names; `folder` is the recipe's own."""
    section = recipe.model
    # A recipe pins a hub model by its revision; a folder has none.
    model = section.path if section.revision else folder / Path(section.path).expanduser()
    if not section.revision and not Path(model).exists():
        raise RecipeError(
            f"[model] path = {section.path!r}: no such folder or file",
            expected="a folder or a GGUF file, from the recipe's own on; or a hub name with its revision",
            found=f"no {model}",
            remedy="correct the path; for a hub name `pi-compile init` finds the revision",
        )
    checkpoint = open_checkpoint(
        model, section.revision or None, section.ignore_config, activation=section.activation, in_recipe=True
    )
    # No long stage is to end in `pack` refusing a format.
    resolve_formats(checkpoint.formats(), recipe.pack.model_dump(), tied_head=checkpoint.decoder.tied_head)
    return with_own_head(checkpoint, recipe)


def with_own_head(checkpoint: Checkpoint, recipe: Recipe) -> Checkpoint:
    """The checkpoint with its own layer that drafts tokens, where the recipe wants it."""
    if recipe.guess.head != OWN_HEAD:
        return checkpoint
    if not checkpoint.can_draft:
        raise CheckpointError(
            f"{checkpoint.location}: no layer that drafts tokens is read",
            expected=f'with [guess] head = "{OWN_HEAD}" a layer for multi-token prediction behind the last one',
            found="; ".join(line for line in checkpoint.notices if "draft" in line) or "none",
            remedy="take [guess] out of the recipe, or name the folder of a published EAGLE-3 head",
        )
    return replace(checkpoint, drafts=True)
