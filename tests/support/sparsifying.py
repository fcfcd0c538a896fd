"""Small trainings for tests: text, a recipe of few steps, and a subprocess that carries one out."""

from pathlib import Path
from typing import Any

from pi_compile.sparsification.recipe import SparsifyRecipe, default_sparsify_recipe
from support.small_project import prose

WORDS = 60_000


def write_text(path: Path) -> None:
    """Write words of which no passage occurs twice."""
    path.write_text(prose(0, WORDS))


def small_recipe(model: str = "model", text: tuple[str, ...] = ("text.txt",), **changes: Any) -> SparsifyRecipe:
    """A recipe of eight steps of 8 sequences of 32 tokens; `changes` are keys of sections, or whole stages."""
    data = default_sparsify_recipe(model, activation="relu", corpus=text).model_dump()
    data["corpus"] |= {"tune_tokens": 128, "report_tokens": 128}
    data["train"] |= {"window": 32, "batch": 8, "micro_batch": 4, "warmup_steps": 2, "learning_rate": 2e-3}
    data["stages"] = [
        {"steps": 4, "penalty": 0.0, "curve": "constant"},
        {"steps": 4, "penalty": 0.1, "curve": "sine"},
    ]
    data["run"] |= {"every": 4, "control": False}
    for section, values in changes.items():
        data[section] = values if isinstance(values, list) else data[section] | values
    return SparsifyRecipe.model_validate(data)
