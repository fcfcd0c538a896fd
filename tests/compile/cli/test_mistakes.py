"""What users get wrong about model and recipe: each with its exit code and a message that says what to do.

Refusals of a checkpoint are tested one by one in `test_checkpoint.py`; here they are met from the command line.
"""

import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from support.commands import INPUT, USAGE
from support.hf import edit_json, edit_tensors, random_llama

from pi_compile.cli.main import app as pi_compile
from pi_compile.recipe import default_recipe
from pi_runtime import console

Fails = Callable[..., str]

# The model.


def test_no_such_model(fails: Fails, tmp_path: Path) -> None:
    message = fails(INPUT, "init", tmp_path / "nothing", "-o", tmp_path / "r.toml")
    assert f"{tmp_path / 'nothing'}: no such folder" in message
    assert "config.json" in message
    assert not (tmp_path / "r.toml").exists()


def test_a_file_instead_of_a_folder(fails: Fails, model: Path, tmp_path: Path) -> None:
    message = fails(INPUT, "init", model / "model.safetensors", "-o", tmp_path / "r.toml")
    assert "is a file" in message
    assert f"try: name the folder: {model}" in message


def test_an_artifact_instead_of_a_checkpoint(fails: Fails, artifact: Path, tmp_path: Path) -> None:
    assert "run it with `pi-run`" in fails(INPUT, "init", artifact, "-o", tmp_path / "r.toml")


def test_a_recipe_whose_model_has_moved(fails: Fails, recipe: Path, model: Path) -> None:
    model.rename(model.with_name("elsewhere"))
    message = fails(INPUT, "pack", "--plain", recipe)
    assert "[model] path = 'model': no such folder" in message
    assert f"no {model}" in message


def test_a_revision_of_a_local_folder(fails: Fails, model: Path, tmp_path: Path) -> None:
    message = fails(INPUT, "init", model, "-o", tmp_path / "r.toml", "--revision", "main")
    assert "drop the revision" in message


@pytest.mark.parametrize("command", ["init", "pack"])
def test_an_unsupported_family(fails: Fails, recipe: Path, model: Path, command: str) -> None:
    edit_json(model / "config.json", model_type="mamba")
    arguments = ["init", model, "-o", recipe, "--force"] if command == "init" else ["pack", "--plain", recipe]
    message = fails(INPUT, *arguments)
    assert f"{model / 'config.json'}: model type 'mamba' is not supported" in message
    assert "llama, mistral" in message


@pytest.mark.parametrize(
    "field",
    [
        {"sliding_window": 8},
        {"rope_parameters": {"rope_type": "longrope", "factor": 4.0, "rope_theta": 10000.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"final_logit_softcapping": 30.0},
        {"quantization_config": {"quant_method": "gptq"}},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_config_field_that_changes_the_function(
    fails: Fails, recipe: Path, model: Path, field: dict[str, Any]
) -> None:
    edit_json(model / "config.json", **field)
    message = fails(INPUT, "pack", "--plain", recipe)
    assert str(model / "config.json") in message
    assert next(iter(field)) in message
    assert "expected: " in message


def test_a_config_field_nobody_knows(fails: Fails, recipe: Path, model: Path) -> None:
    edit_json(model / "config.json", moon_phase=0.5)
    message = fails(INPUT, "pack", "--plain", recipe)
    assert 'write in the recipe: [model] ignore_config = ["moon_phase"]' in message
    recipe.write_text(recipe.read_text().replace("ignore_config = []", 'ignore_config = ["moon_phase"]'))
    assert console.run(pi_compile, ["pack", "--plain", str(recipe), "-o", str(recipe.with_suffix(".pi"))]) == 0


def test_a_config_field_nobody_knows_before_there_is_a_recipe(fails: Fails, model: Path, tmp_path: Path) -> None:
    edit_json(model / "config.json", moon_phase=0.5, tide=1)
    config, recipe = model / "config.json", tmp_path / "new.toml"
    for command in (["init", model, "-o", recipe], ["plan", config, "--machine", "pc-low"]):
        message = fails(INPUT, *command)
        assert "moon_phase, tide are not understood" in message
        assert "add --ignore-config moon_phase --ignore-config tide" in message
        message = fails(USAGE, *command, "--ignore-config", "moonphase")
        assert f"--ignore-config moonphase: {config} has no such key" in message
        assert "such as moon_phase" in message
        assert "hidden_size cannot be ignored" in fails(INPUT, *command, "--ignore-config", "hidden_size")
    assert not recipe.exists()


def test_a_recipe_says_itself_what_is_ignored(fails: Fails, recipe: Path) -> None:
    message = fails(USAGE, "plan", recipe, "--ignore-config", "moon_phase")
    assert "write it in the recipe: [model] ignore_config" in message


def test_code_in_a_checkpoint_is_refused_without_an_adapter(fails: Fails, recipe: Path, model: Path) -> None:
    edit_json(model / "config.json", model_type="mine", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    assert "its own code (auto_map), which is never run" in fails(INPUT, "pack", "--plain", recipe)


def test_code_in_a_checkpoint_is_ignored_with_a_notice(
    recipe: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "modeling_mine.py").write_text("raise SystemExit('ran')")
    edit_json(model / "config.json", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    for arguments in (["pack", "--plain", str(recipe), "-o", str(tmp_path / "a.pi")], ["init", str(model)]):
        output = [] if "-o" in arguments else ["-o", str(tmp_path / "again.toml")]
        assert console.run(pi_compile, [*arguments, *output]) == 0
        assert "auto_map is ignored: the checkpoint's own code is never run" in capsys.readouterr().err


def test_a_pickle_with_code(fails: Fails, recipe: Path, model: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save({"weights": torch.nn.Linear(2, 2)}, model / "pytorch_model.bin")
    message = fails(INPUT, "pack", "--plain", recipe)
    assert f"{model / 'pytorch_model.bin'}: holds more than weights" in message
    assert "safetensors" in message


def test_a_missing_shard(fails: Fails, recipe: Path, model: Path) -> None:
    shutil.rmtree(model)
    random_llama(model, shard="20KB")
    shard = sorted(model.glob("model-*.safetensors"))[1]
    shard.unlink()
    message = fails(INPUT, "pack", "--plain", recipe)
    assert "shards are missing" in message
    assert f"no {shard.name}" in message


def test_half_a_download(fails: Fails, recipe: Path, model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"{weights}: not a whole safetensors file" in fails(INPUT, "pack", "--plain", recipe)


def test_wrong_shapes(fails: Fails, recipe: Path, model: Path) -> None:
    edit_json(model / "config.json", intermediate_size=84)
    message = fails(INPUT, "pack", "--plain", recipe)
    assert "expected: model.layers.0.mlp.gate_proj.weight (84, 48)" in message
    assert "found: model.layers.0.mlp.gate_proj.weight (83, 48)" in message


def test_weights_that_are_no_numbers(fails: Fails, recipe: Path, model: Path, artifact: Path) -> None:
    edit_tensors(model, model__layers__1__mlp__down_proj__weight=torch.full((48, 83), float("nan")))
    before = artifact.read_bytes()
    message = fails(INPUT, "pack", "--plain", recipe, "-o", artifact)
    assert "model.layers.1.mlp.down_proj.weight holds NaN" in message
    assert artifact.read_bytes() == before
    assert not list(artifact.parent.glob(".*.tmp"))


def test_values_too_large_for_the_format(fails: Fails, recipe: Path, model: Path, tmp_path: Path) -> None:
    edit_tensors(model, model__layers__1__self_attn__v_proj__weight=torch.full((10, 48), 70000.0))
    recipe.write_text(recipe.read_text().replace('attention = "keep"', 'attention = "f16"'))
    message = fails(INPUT, "pack", "--plain", recipe, "-o", tmp_path / "a.pi")
    assert "model.layers.1.self_attn.v_proj.weight are too large for f16" in message
    assert "found: 70000" in message
    assert '[pack] attention = "bf16"' in message
    assert not (tmp_path / "a.pi").exists()


def test_no_tokenizer_is_noticed_at_once(fails: Fails, model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    message = fails(INPUT, "init", model, "-o", tmp_path / "r.toml")
    assert f"{model}: no tokenizer" in message
    assert not (tmp_path / "r.toml").exists()


# The recipe.


def test_no_such_recipe(fails: Fails, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "r.toml"
    message = fails(INPUT, "build", path)
    assert f"{path}: no such recipe" in message
    assert f"try: pi-compile init MODEL -o {path}" in message
    assert not path.parent.exists()


def test_a_folder_instead_of_a_recipe(fails: Fails, model: Path) -> None:
    assert f"{model}: cannot be read" in fails(INPUT, "build", model)


@pytest.mark.parametrize("text", ["[model", "path = ", '{"model": 3}', "\ufeff"], ids=["cut", "empty", "json", "bom"])
def test_not_toml(fails: Fails, recipe: Path, text: str) -> None:
    recipe.write_text(text + recipe.read_text())
    message = fails(INPUT, "pack", "--plain", recipe)
    assert f"{recipe}: not TOML" in message
    assert "line 1" in message


def test_an_artifact_instead_of_a_recipe(fails: Fails, artifact: Path) -> None:
    assert f"{artifact}: cannot be read" in fails(INPUT, "build", artifact)


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
        ('ffn = "keep"', 'ffn = "q5"', "pack.ffn: should be 'keep', 'f32', 'f16', 'bf16', 'q8' or 'q4' (found 'q5')"),
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
    assert "docs/recipes.md" in message


def test_a_value_instead_of_a_section(fails: Fails, recipe: Path) -> None:
    recipe.write_text("model = 3\n" + recipe.read_text().split("\n\n", 1)[1])
    assert "model: should be a table [model] (found 3)" in fails(INPUT, "pack", "--plain", recipe)


def test_all_problems_of_a_recipe_are_named_at_once(fails: Fails, recipe: Path) -> None:
    recipe.write_text("")
    message = fails(INPUT, "pack", "--plain", recipe)
    assert all(f"\n    {section}: missing" in message for section in tomllib.loads(default_recipe("m").to_toml()))


def test_init_onto_an_existing_recipe(fails: Fails, recipe: Path, model: Path) -> None:
    before = recipe.read_bytes()
    message = fails(USAGE, "init", model, "-o", recipe)
    assert f"-o {recipe}: exists already" in message
    assert "--force" in message
    assert recipe.read_bytes() == before


def test_text_that_is_not_there(fails: Fails, model: Path, tmp_path: Path) -> None:
    message = fails(USAGE, "init", model, "-o", tmp_path / "r.toml", "--corpus", tmp_path / "book.txt")
    assert f"--corpus {tmp_path / 'book.txt'}: no such file" in message
