"""A recipe: one model on one machine, as a complete and strict TOML file.

    [model]
    path = "../models/opt-125m"     # a folder, relative to the recipe, or a hub name
    revision = ""                   # of a hub name: a commit; empty for a folder
    ignore_config = []              # config.json keys known not to change the function

    [pack]                          # number format of each part: keep, f32, f16 or bf16
    embedding = "keep"
    …

Every key must be there and none may be unknown: a recipe says everything that decides its artifact.
"""

import difflib
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pi_compile.errors import RecipeError

WeightFormat = Literal["keep", "f32", "f16", "bf16"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(_Section):
    """Which checkpoint."""

    path: Annotated[str, Field(min_length=1)]
    """A folder, relative to the recipe's own, or a hub name `owner/name`."""
    revision: str
    """Commit of a hub name, so that the recipe means one model; empty for a folder."""
    ignore_config: list[str]
    """Keys of config.json that this project does not know and that do not change the function."""


class PackSection(_Section):
    """Number format of each part of the artifact; `keep` is the checkpoint's own."""

    embedding: WeightFormat
    attention: WeightFormat
    ffn: WeightFormat
    head: WeightFormat
    predictor: WeightFormat


class Recipe(_Section):
    """One model × machine."""

    model: ModelSection
    pack: PackSection

    def to_toml(self) -> str:
        """The recipe as a file that `read_recipe` takes back unchanged."""
        blocks = []
        for name, section in self.model_dump().items():
            # JSON's strings, integers, floats, booleans and arrays are TOML's.
            lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in section.items()]
            blocks.append("\n".join([f"[{name}]", *lines]))
        return "\n\n".join(blocks) + "\n"


def default_recipe(model: str, *, revision: str = "") -> Recipe:
    """What `init` writes: everything kept as the checkpoint has it."""
    keep: dict[str, Any] = dict.fromkeys(PackSection.model_fields, "keep")
    return Recipe(model=ModelSection(path=model, revision=revision, ignore_config=[]), pack=PackSection(**keep))


def read_recipe(path: Path) -> Recipe:
    """Read and check a recipe file. Raises RecipeError naming every problem with its key."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe", remedy=f"pi-compile init MODEL -o {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read", found=error) from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path}: not TOML", found=error) from None
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        problems = "\n    ".join(_problem(dict(e)) for e in error.errors())
        raise RecipeError(f"{path}: invalid recipe", found=f"\n    {problems}") from None


def _problem(error: dict[str, Any]) -> str:
    location = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(error["loc"][-1]), _known_keys(error["loc"][:-1]), n=1, cutoff=0.5)
        return f"{location}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
    if error["type"] == "missing":
        return f"{location}: missing"
    return f"{location}: {error['msg']} (found {error['input']!r})"


def _known_keys(section: tuple[Any, ...]) -> list[str]:
    model: Any = Recipe
    for name in section:
        model = model.model_fields[name].annotation
    return list(model.model_fields)
