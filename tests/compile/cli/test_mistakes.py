"""What users get wrong about model and recipe, beyond one message: what is ignored, and every key of a recipe.

Messages stand in `test_error_wording.py`; refusals of a checkpoint are tested one by one in `test_checkpoint.py`.
"""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.commands import INPUT, USAGE
from support.hf import edit_json

from pi_compile.cli.main import app as pi_compile
from pi_compile.recipe import default_recipe
from pi_runtime import console

Fails = Callable[..., str]

# The model.


def test_a_config_field_nobody_knows(fails: Fails, recipe: Path, model: Path) -> None:
    edit_json(model / "config.json", moon_phase=0.5)
    fails(INPUT, "pack", "--plain", recipe)
    recipe.write_text(recipe.read_text().replace("ignore_config = []", 'ignore_config = ["moon_phase"]'))
    assert console.run(pi_compile, ["pack", "--plain", str(recipe), "-o", str(recipe.with_suffix(".pi"))]) == 0


def test_code_in_a_checkpoint_is_ignored_with_a_notice(
    recipe: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "modeling_mine.py").write_text("raise SystemExit('ran')")
    edit_json(model / "config.json", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    for arguments in (["pack", "--plain", str(recipe), "-o", str(tmp_path / "a.pi")], ["init", str(model)]):
        output = [] if "-o" in arguments else ["-o", str(tmp_path / "again.toml")]
        assert console.run(pi_compile, [*arguments, *output]) == 0
        assert "auto_map is ignored: the checkpoint's own code is never run" in capsys.readouterr().err


# The recipe.


@pytest.mark.parametrize("text", ["[model", "path = ", '{"model": 3}', "\ufeff"], ids=["cut", "empty", "json", "bom"])
def test_not_toml(fails: Fails, recipe: Path, text: str) -> None:
    recipe.write_text(text + recipe.read_text())
    message = fails(INPUT, "pack", "--plain", recipe)
    assert f"{recipe}: not TOML" in message
    assert "line 1" in message


def test_an_artifact_instead_of_a_recipe(fails: Fails, artifact: Path) -> None:
    message = fails(INPUT, "build", artifact)
    assert f"{artifact}: cannot be read as text" in message
    assert "`pi-run` runs an artifact" in message


def test_writing_a_lock_and_comparing_with_it(fails: Fails, recipe: Path) -> None:
    assert "--lock does not go with --locked" in fails(USAGE, "place", recipe, "--lock", "--locked")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("ffn =", "fnn =", "pack.fnn: unknown key; did you mean ffn?"),
        ("[quality]", "[qualities]", "qualities: unknown key; did you mean quality?"),
        ("[pack]", "[pack]\nzzz = 1", "pack.zzz: unknown key; known: embedding, attention, ffn, head, predictor"),
        ("seed = 0\n", "", "train.seed: missing"),
        ("seed = 0", "seed = true", "train.seed: should be a valid integer (found True)"),
        ("batch = 8", 'batch = "8"', "profile.batch: should be a valid integer (found '8')"),
        ("batch = 8", "batch = 0", "profile.batch: should be greater than or equal to 1 (found 0)"),
        (
            'ffn = "keep"',
            'ffn = "q3"',
            "pack.ffn: should be 'keep', 'f32', 'f16', 'bf16', 'q8', 'q4', 'q5', 'q6', 'q4_1', 'q4z', 'q5_1', "
            "'q4_k', 'q5_k', 'q6_k', 'iq4_nl', 'iq4_xs', 'mxfp4' or 'nvfp4' (found 'q3')",
        ),
        ("vram_gib = []", "vram_gib = [8, nan]", "place.vram_gib.1: should be a finite number (found nan)"),
        ("vram_gib = []", "vram_gib = [1e300]", "place.vram_gib.0: should be less than 1048576 (found 1e+300)"),
        ("vram_gib = []", "vram_gib = [-8]", "place.vram_gib.0: should be greater than 0 (found -8)"),
        ("ignore_config = []", 'ignore_config = "x"', "model.ignore_config: should be a valid list (found 'x')"),
    ],
    ids=lambda value: value if ":" in value else "",
)
def test_a_recipe_with_a_wrong_key(fails: Fails, recipe: Path, old: str, new: str, problem: str) -> None:
    text = recipe.read_text()
    assert text.count(old) == 1
    recipe.write_text(text.replace(old, new))
    message = fails(INPUT, "pack", "--plain", recipe)
    assert str(recipe) in message
    assert problem in message
    assert "docs/reference/recipe.md" in message


def test_all_problems_of_a_recipe_are_named_at_once(fails: Fails, recipe: Path) -> None:
    recipe.write_text("")
    message = fails(INPUT, "pack", "--plain", recipe)
    assert all(f"\n    {section}: missing" in message for section in tomllib.loads(default_recipe("m").to_toml()))
