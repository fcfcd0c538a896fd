"""`init` on small checkpoints that have the keys of published configs."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.families import random_checkpoint
from support.hf import edit_json
from support.paths import ROOT

from pi_compile.checkpoint import open_checkpoint
from pi_compile.pipeline.recipe_checkpoint import create_recipe, recipe_checkpoint

CONFIGS = ROOT / "tests" / "compile" / "checkpoint" / "configs"
KEYS = {
    "HuggingFaceTB--SmolLM2-135M": ("llama-relu", ["is_llama_config"]),
    "real-jiakai--SmolLM2-1.7B-TLDR": ("llama-gelu-tied", ["transformers.js_config", "pretraining_tp"]),
    "Fu01978--SmolMoE-4x360M-Instruct": ("mixtral", ["is_llama_config", "transformers.js_config"]),
    "facebook--opt-13b": ("opt", ["output_projection", "prefix", "init_std"]),
    "h2oai--h2ogpt-oasst1-falcon-40b": ("falcon-40b", ["custom_pipelines"]),
    "leafspark--Nemotron-340B-Instruct-hf": ("nemotron", ["layer_norm_eps", "unk_token_id"]),
    "microsoft--phi-1": ("phi", ["attention_bias", "qk_layernorm", "rope_scaling"]),
    "openai-community--gpt2-xl": ("gpt2", ["output_past"]),
    "distilgpt2": ("gpt2", ["_num_labels", "task_specific_params", "id2label"]),
}
"""Published config → a small checkpoint of its family, and keys that it gets from there."""


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_published_configs_need_no_flag(tmp_path: Path, name: str) -> None:
    case, keys = KEYS[name]
    random_checkpoint(tmp_path / "model", case)
    before = open_checkpoint(tmp_path / "model")
    published = json.loads((CONFIGS / f"{name}.json").read_text())
    edit_json(tmp_path / "model" / "config.json", **{key: published[key] for key in keys})
    told: list[str] = []
    recipe = create_recipe(str(tmp_path / "model"), tmp_path / "r.toml", notice=told.append)
    assert recipe.model.ignore_config == []
    assert (recipe_checkpoint(recipe, tmp_path).decoder, told) == (before.decoder, list(before.notices))


def test_ignored_keys_stand_once_in_the_recipe(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "model", "llama-relu")
    edit_json(tmp_path / "model" / "config.json", moon_phase=0.5)
    told: list[str] = []
    recipe = create_recipe(
        str(tmp_path / "model"), tmp_path / "r.toml", ignore_config=["moon_phase"] * 2, notice=told.append
    )
    assert recipe.model.ignore_config == ["moon_phase"]
    assert told == ["config.json: moon_phase = 0.5 is ignored, as asked"]
    assert recipe_checkpoint(recipe, tmp_path).ignored_config == ("moon_phase",)
