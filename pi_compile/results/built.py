"""The folder of a recipe's results, and what its last build found there."""

from dataclasses import replace
from pathlib import Path

from pi_compile.results.activation_profile import ActivationProfile
from pi_compile.results.predictor_set import PredictorSet

STORE = ".pi-build"
"""Folder beside the recipe that holds every recipe's intermediate results."""


def store_folder(recipe: Path) -> Path:
    """The folder of a recipe's intermediate results."""
    return recipe.resolve().parent / STORE / recipe.stem


def built_activations(recipe: Path) -> ActivationProfile | None:
    """The profile that the last build of a recipe left, with what it trained; None where there is none.

    The checkpoint is not read, so a change of it since then is not seen.
    """
    profile, trained = (_newest(store_folder(recipe), stage) for stage in ("profile", "train"))
    if profile is None:
        return None
    found = ActivationProfile.load(profile)
    if trained is not None:
        found = PredictorSet.load(trained).refine(found)
    return replace(found, source=f"measured by the last build of {recipe.name} on {found.tokens:,} tokens")


def _newest(folder: Path, stage: str) -> Path | None:
    return max(folder.glob(f"{stage}-*.npz"), key=lambda path: path.stat().st_mtime, default=None)
