"""The recipe: complete, strict, the same after a round trip, and documented key by key."""

import json
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from support.paths import ROOT

pytest.importorskip("pydantic")

from pydantic.fields import FieldInfo

from pi_compile.errors import RecipeError
from pi_compile.recipe import Recipe, default_recipe, read_recipe

DEFAULT = default_recipe("../models/some").model_dump()
UNWRITTEN = {"bits": {"tokens": 0}, "quantise": {"tokens": 0}, "guess": {"head": ""}}
"""Tables that may be missing, and are not written where they ask for nothing."""
Row = dict[str, str]


def documented() -> dict[str, dict[str, Row]]:
    """Section → key → row of docs/reference/recipe.md."""
    text = (ROOT / "docs" / "reference" / "recipe.md").read_text(encoding="utf-8")
    sections: dict[str, dict[str, Row]] = {}
    for name, body in re.findall(r"^## \[(\w+)\]\n(.*?)(?=^## |\Z)", text, re.M | re.S):
        rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.+?) \|$", body, re.M)
        values = {key: value for key, value, *_ in rows}
        rows = [(key, re.sub(r"^as `(\w+)`", lambda m: values[m[1]], value), *rest) for key, value, *rest in rows]  # noqa: B023
        sections[name] = {key: {"value": value, "default": default, "why": why} for key, value, default, why in rows}
    return sections


def fields() -> list[tuple[str, str, FieldInfo]]:
    sections = ((name, section.annotation) for name, section in Recipe.model_fields.items())
    return [(name, key, field) for name, section in sections for key, field in section.model_fields.items()]


def literals(annotation: Any) -> list[str]:
    """Strings that a type allows by name."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [name for inner in get_args(annotation) for name in literals(inner)]


def test_every_key_is_documented_in_order() -> None:
    assert {name: list(rows) for name, rows in documented().items()} == {
        name: list(section.annotation.model_fields) for name, section in Recipe.model_fields.items()
    }


@pytest.mark.parametrize(("section", "key", "field"), fields(), ids=lambda value: value if type(value) is str else "")
def test_a_documented_key_is_as_documented(section: str, key: str, field: FieldInfo) -> None:
    row = documented()[section][key]
    if (section, key) != ("model", "path"):
        assert (
            row["default"]
            == f"`{json.dumps(UNWRITTEN.get(section, DEFAULT.get(section, {})).get(key, field.default))}`"
        )
    assert re.findall(r'`"([\w-]+)"`', row["value"]) == list(filter(None, literals(field.annotation)))
    bounds = [b for m in field.metadata for b in (getattr(m, "ge", None), getattr(m, "gt", None)) if b is not None]
    assert all(str(bound) in row["value"] for bound in bounds)


def test_a_recipe_is_read_back_unchanged(tmp_path: Path) -> None:
    recipe = default_recipe('od"d\\näme/modèle', revision="abc", corpus=["a b/*.txt", "python"])
    (tmp_path / "r.toml").write_text(recipe.to_toml(), encoding="utf-8")
    assert read_recipe(tmp_path / "r.toml") == recipe


def test_an_activation_is_written_where_there_is_one(tmp_path: Path) -> None:
    recipe = default_recipe("m.gguf", activation="relu")
    (tmp_path / "r.toml").write_text(recipe.to_toml())
    assert read_recipe(tmp_path / "r.toml") == recipe
    assert recipe.model_dump()["model"]["activation"] == "relu"
    assert "activation" not in default_recipe("m.gguf").model_dump()["model"]


def test_rounding_on_text_is_written_where_it_is_wanted(tmp_path: Path) -> None:
    plain = default_recipe("m")
    assert "quantise" not in plain.model_dump()
    assert "[quantise]" not in plain.to_toml()
    wanted = Recipe.model_validate({**plain.model_dump(), "quantise": {"tokens": 65536}})
    (tmp_path / "r.toml").write_text(wanted.to_toml())
    assert read_recipe(tmp_path / "r.toml") == wanted
    (tmp_path / "r.toml").write_text(f"{plain.to_toml()}\n[quantise]\ntokens = -1\n")
    with pytest.raises(RecipeError, match=r"quantise\.tokens"):
        read_recipe(tmp_path / "r.toml")


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        default_recipe("m").train.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_the_bundled_recipes_are_valid(path: Path) -> None:
    assert read_recipe(path).model.path


def test_few_keys_may_be_missing() -> None:
    missing = [(section, key) for section, key, field in fields() if not field.is_required()]
    bits = [("bits", "file_mib"), ("bits", "perplexity_increase")]
    assert missing == [("model", "activation"), ("quality", "rounding_increase"), *bits]


@pytest.mark.parametrize(
    ("section", "key"), [(section, key) for section, key, field in fields() if field.is_required()]
)
def test_every_other_key_must_be_there(tmp_path: Path, section: str, key: str) -> None:
    path = tmp_path / "r.toml"
    toml = default_recipe("m").to_toml()
    head, _, body = toml.partition(f"[{section}]\n")
    path.write_text(f"{head}[{section}]\n" + re.sub(rf"^{key} = .*\n", "", body, count=1, flags=re.M))
    with pytest.raises(RecipeError, match=rf"{section}\.{key}: missing"):
        read_recipe(path)


@pytest.mark.parametrize(
    ("key", "wrong", "near"),
    [("train.rungs.1", '["dense", "gat"]', "gate"), ("pack.ffn", '"q7"', "q8"), ("place.objective", '"times"', "time")],
)
def test_an_unknown_value_names_the_nearest_known_one(tmp_path: Path, key: str, wrong: str, near: str) -> None:
    path, name = tmp_path / "r.toml", key.split(".")[1]
    path.write_text(re.sub(rf"^{name} = .*$", f"{name} = {wrong}", default_recipe("m").to_toml(), flags=re.M))
    with pytest.raises(RecipeError, match=rf"{re.escape(key)}: should be .*; did you mean {near}\?"):
        read_recipe(path)


def test_numbers_may_be_written_without_a_point(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(default_recipe("m").to_toml().replace("vram_gib = []", "vram_gib = [8, 10.5]"))
    assert read_recipe(path).place.vram_gib == [8.0, 10.5]


def test_the_rounding_that_is_allowed_is_written_where_it_is_not_the_usual(tmp_path: Path) -> None:
    plain = default_recipe("m")
    assert "rounding_increase" not in plain.to_toml()
    other = Recipe.model_validate(
        {**plain.model_dump(), "quality": {**plain.model_dump()["quality"], "rounding_increase": 0.25}}
    )
    (tmp_path / "r.toml").write_text(other.to_toml())
    assert read_recipe(tmp_path / "r.toml").quality.rounding_increase == 0.25
