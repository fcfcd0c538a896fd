"""A model with text and a recipe, small enough that a build takes a second or two."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from pi_compile.recipe import Recipe, default_recipe
from support import hf

WORDS = [*"abcdefghij", "the", "quick", "brown", "fox", "neurons", "fire"]


def prose(seed: int, words: int) -> str:
    """Words that say nothing twice, so that nothing of it counts as held out."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def small_recipe(**changes: dict[str, object]) -> Recipe:
    data = default_recipe("model", corpus=["text"]).model_dump()
    data["corpus"] |= {"report": ["held-out.txt"], "fit_tokens": 3000, "tune_tokens": 200, "report_tokens": 200}
    data["profile"] |= {"window": 32, "batch": 4, "cofiring_tokens": 256}
    data["train"] |= {"tokens": 512, "steps": 4}
    data["place"] |= {"machine": "stand-in"}
    for section, values in changes.items():
        data[section] = data.get(section, {}) | values
    return Recipe.model_validate(data)


def small_project(folder: Path) -> Path:
    """A folder with a model, text and `small.toml`."""
    hf.random_llama(folder / "model", intermediate_size=192, num_hidden_layers=2)
    (folder / "text").mkdir()
    for n in range(3):
        (folder / "text" / f"{n}.txt").write_text(prose(n, 1500))
    (folder / "held-out.txt").write_text(prose(9, 1500))
    (folder / "small.toml").write_text(small_recipe().to_toml())
    return folder


def no_progress(_title: str, _unit: str = "bytes") -> AbstractContextManager[Callable[[int, int], None]]:
    """A bar that shows nothing."""
    return nullcontext(lambda _done, _total: None)
