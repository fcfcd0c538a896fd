"""config.json is read strictly: keys that might change the function are refused, others are let through."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.hf import edit_json, random_llama
from support.refused_checkpoints import refusal

from pi_compile.checkpoint import open_checkpoint
from pi_runtime.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_llama(tmp_path / "model", tokenizer=False)
    return tmp_path / "model"


CHANGING = {
    "sliding_window": 32,
    "attention_multiplier": 0.5,
    "partial_rotary_factor": 0.5,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "quantization_config": {"quant_method": "bitsandbytes"},
    "quantization": {"group_size": 64, "bits": 4},
    "num_experts": 8,
    "num_local_experts": 8,
    "is_causal": False,
    "use_bidirectional_attention": True,
    "rope_interleaved": True,
}


@pytest.mark.parametrize("key", CHANGING)
def test_a_key_that_changes_the_function(folder: Path, key: str) -> None:
    edit_json(folder / "config.json", **{key: CHANGING[key]})
    message = refusal(folder)
    assert f"{key} would change the function" in message
    assert str(CHANGING[key]) in message or "quant_method = 'bitsandbytes'" in message
    for in_recipe in (False, True):
        assert f"{key} would change" in refusal(folder, ignore_config=[key], in_recipe=in_recipe)


NEUTRAL = {
    "sliding_window": 64,
    "attention_multiplier": 1.0,
    "final_logit_softcapping": None,
    "quantization_config": None,
    "unheard_of": None,
    "rope_interleaved": False,
    "is_causal": True,
    "pretraining_tp": 2,
    "layer_types": ["full_attention"] * 3,
    "torch_dtype": "float16",
    "is_llama_config": True,
    "transformers.js_config": {"dtype": "q4"},
    "num_experts": 1,
}


@pytest.mark.parametrize("key", NEUTRAL)
def test_a_key_that_changes_nothing(folder: Path, key: str) -> None:
    edit_json(folder / "config.json", **{key: NEUTRAL[key]})
    assert open_checkpoint(folder).notices == ()


@pytest.mark.parametrize("key", ["is_causal", "unheard_of"])
def test_null_and_false_pass_only_where_they_are_known_to_be_neutral(folder: Path, key: str) -> None:
    """A mask that is not causal where the key is null is transformers' rule."""
    edit_json(folder / "config.json", **{key: None if key == "is_causal" else False})
    assert f"{key} would change the function" in refusal(folder) or f"{key} is not understood" in refusal(folder)


def test_keys_that_a_rope_type_does_not_have_are_told(folder: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attn_factor": 0.9}
    edit_json(folder / "config.json", rope_scaling=scaling)
    (notice,) = open_checkpoint(folder).notices
    assert "rope_scaling: attn_factor = 0.9 has no effect on the rope type yarn" in notice
    edit_json(folder / "config.json", rope_scaling={"rope_type": "linear", "type": "yarn", "factor": 4.0})
    assert "rope_scaling: type" in refusal(folder)


def test_unknown_keys_are_all_named_with_the_way_out(folder: Path) -> None:
    edit_json(folder / "config.json", secret_scale=2.0, other_trick="yes")
    message = refusal(folder)
    assert "other_trick, secret_scale are not understood" in message
    assert "add ignore_config='other_trick' ignore_config='secret_scale'" in message
    assert '[model] ignore_config = ["other_trick", "secret_scale"]' in refusal(folder, in_recipe=True)
    checkpoint = open_checkpoint(folder, ignore_config=["secret_scale", "other_trick", "dtype", "architectures"])
    assert checkpoint.notices[1] == "config.json: secret_scale = 2.0 is ignored, as asked"
    assert checkpoint.ignored_config == ("other_trick", "secret_scale")


def test_a_key_that_is_read_cannot_be_ignored(folder: Path) -> None:
    message = refusal(folder, ignore_config=["hidden_act"])
    assert "hidden_act cannot be ignored" in message
    assert "take it out of ignore_config" in message
    assert "take it out of [model] ignore_config" in refusal(folder, ignore_config=["hidden_act"], in_recipe=True)


def test_a_flag_names_keys_that_are_there(folder: Path) -> None:
    edit_json(folder / "config.json", secret_scale=2.0)
    with pytest.raises(UsageError) as caught:
        open_checkpoint(folder, ignore_config=["secretscale"])
    assert f"ignore_config='secretscale': {folder / 'config.json'} has no such key" in str(caught.value)
    assert "such as secret_scale" in str(caught.value)
    assert open_checkpoint(folder, ignore_config=["secret_scale", "was_there_once"], in_recipe=True)


WRONG_FIELDS = {
    "hidden_act": ("quick_gelu", "one of relu, relu2, silu"),
    "hidden_size": (-4, "a positive integer"),
    "num_hidden_layers": ("3", "a positive integer"),
    "num_key_value_heads": (2, "a divisor of 3"),
    "head_dim": (9, "an even number of rotated columns"),
    "rms_norm_eps": (0, "a positive number"),
    "mlp_bias": ("no", "true or false"),
    "rope_parameters": ({"rope_type": "llama3", "factor": 8.0}, "rope_parameters: low_freq_factor"),
    "rope_scaling": ({"type": "linear", "factor": -2.0}, "a positive number"),
    "rope_theta": ("big", "a positive number"),
}


@pytest.mark.parametrize("key", WRONG_FIELDS)
def test_a_field_with_a_value_that_cannot_be(folder: Path, key: str) -> None:
    value, expected = WRONG_FIELDS[key]
    edit_json(folder / "config.json", *({"rope_parameters"} if key == "rope_theta" else ()), **{key: value})
    message = refusal(folder)
    assert key in message
    assert expected in message


def test_more_layers_than_tensors_are_refused_at_once(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=10**7)
    assert "too few tensors for its layers" in refusal(folder)


def test_a_missing_field(folder: Path) -> None:
    edit_json(folder / "config.json", "hidden_size")
    assert "no such key" in refusal(folder)
