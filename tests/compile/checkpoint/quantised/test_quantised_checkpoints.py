"""Checkpoints of GPTQ, AWQ and compressed-tensors: read to the last bit, or refused by name."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from support.hf import edit_json, edit_tensors, random_llama
from support.quantised_files import FORMS, quantise
from support.refused_checkpoints import refusal

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.errors import CheckpointError
from pi_compile.evaluation.reference import reference_logits

# Sizes whose last word of zeros is not full, and whose columns four groups divide.
SIZES = {"hidden_size": 40, "intermediate_size": 84, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 8}


def made(folder: Path, name: str, **changes: bool) -> dict[str, torch.Tensor]:
    random_llama(folder, **SIZES)
    return quantise(folder, name, **changes)


def check(checkpoint: Checkpoint, meant: dict[str, torch.Tensor]) -> None:
    """Hold every array of the FFN and of attention against what the tensors mean, in some order of neurons too."""
    layer = "model.layers.1."
    gate, up, down = (meant[f"{layer}mlp.{part}_proj.weight"].numpy() for part in ("gate", "up", "down"))
    rng = np.random.default_rng(1)
    for order in (np.arange(84), rng.permutation(84)):
        assert np.array_equal(checkpoint.values("layers/1/ffn/first", order), gate[order])
        assert np.array_equal(checkpoint.values("layers/1/ffn/rest", order), np.stack([up, down.T], 1)[order])
    q, k, v, out = (meant[f"{layer}self_attn.{part}_proj.weight"].numpy() for part in "qkvo")
    assert np.array_equal(checkpoint.values("layers/1/attention/qkv"), np.concatenate([q, k, v]))
    assert np.array_equal(checkpoint.values("layers/1/attention/out"), out)


@pytest.mark.parametrize("name", FORMS)
def test_values_are_those_that_the_tensors_mean(tmp_path: Path, name: str) -> None:
    meant = made(tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    check(checkpoint, meant)
    method, bits = FORMS[name].config["quant_method"], FORMS[name].bits
    assert checkpoint.formats() == {
        **dict.fromkeys(("attention", "ffn"), f"{method} of {bits} bits"),
        **dict.fromkeys(("embedding", "head"), "f32"),
    }
    assert bits < checkpoint.bits("ffn") < bits + 12  # scales of a few columns each are many
    assert checkpoint.notices[0].startswith("21 layers are quantised (")
    assert any("act-order" in line for line in checkpoint.notices) == FORMS[name].permuted
    assert any("activations are quantised" in line for line in checkpoint.notices) == (name == "int8-zeros")


def test_logits_are_those_of_the_float_model(tmp_path: Path) -> None:
    """The reference of an evaluation reads quantised layers itself: transformers would need another package."""
    meant = made(tmp_path / "q", "gptq-act-order")
    random_llama(tmp_path / "f", **SIZES)
    edit_tensors(tmp_path / "f", **{name.replace(".", "__"): tensor for name, tensor in meant.items()})
    ids = np.arange(3, 20)
    ours, theirs = (reference_logits(open_checkpoint(tmp_path / folder))(ids, len(ids)) for folder in ("q", "f"))
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


def test_biases_that_only_the_quantiser_wrote(tmp_path: Path) -> None:
    meant = made(tmp_path, "gptq", zero_biases=True)
    check(open_checkpoint(tmp_path), meant)
    edit_tensors(tmp_path, model__layers__1__mlp__up_proj__bias=torch.ones(84))
    assert "1 tensors that config.json does not account for" in refusal(tmp_path)


def _with_weights(**changes: object) -> dict[str, object]:
    """The scheme "packed", whose weights are said to be otherwise."""
    group = FORMS["packed"].config["config_groups"]["group_0"]
    changed = {**group, "weights": group["weights"] | changes}
    return {**FORMS["packed"].config, "config_groups": {"group_0": changed}}


UNKNOWN = {
    "another method": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method = 'bitsandbytes'"),
    "no method": ({"bits": 4}, "quant_method = None"),
    "three bits": ({**FORMS["gptq"].config, "bits": 3}, "bits = 3"),
    "bits as a string": ({**FORMS["gptq"].config, "bits": "4"}, "bits = '4'"),
    "another form": ({**FORMS["gptq"].config, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
    "two forms": (
        {**FORMS["gptq"].config, "checkpoint_format": "gptq", "format": "gptq_v2"},
        "format = 'gptq_v2'",
    ),
    "another form by its other name": ({**FORMS["gptq"].config, "format": "gptq_v3"}, "format = 'gptq_v3'"),
    "columns ordered in no known way": ({**FORMS["gptq"].config, "desc_act": "yes"}, "desc_act = 'yes'"),
    "ordered columns of AWQ": ({**FORMS["awq"].config, "desc_act": True}, "desc_act = True"),
    "gemv by its other name": (
        {"quant_method": "awq", "bits": 4, "checkpoint_format": "gemv"},
        "checkpoint_format = 'gemv'",
    ),
    "layers of their own": ({**FORMS["gptq"].config, "dynamic": {"-:.*down.*": {}}}, "dynamic = {"),
    "an unknown key": ({**FORMS["gptq"].config, "rotation": "hadamard"}, "rotation = 'hadamard'"),
    "gemv": ({**FORMS["awq"].config, "version": "gemv"}, "version = 'gemv'"),
    "floats": ({**FORMS["packed"].config, "format": "float-quantized"}, "format = 'float-quantized'"),
    "a transform": ({**FORMS["packed"].config, "transform_config": {"config_groups": {}}}, "transform_config = {"),
    "a cache": ({**FORMS["packed"].config, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme = {"),
    "sparsity": ({**FORMS["packed"].config, "sparsity_config": {"format": "sparse-24"}}, "sparsity_config = {"),
    "no such order": (_with_weights(actorder=["group"]), "actorder = ['group']"),
    "neither symmetric nor not": (_with_weights(symmetric="no"), "symmetric = 'no'"),
    "no groups": ({**FORMS["packed"].config, "config_groups": {}}, "config_groups = {}"),
    "groups of lists": ({**FORMS["packed"].config, "config_groups": {"W4A16": ["Linear"]}}, "W4A16 weights = None"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_scheme_that_is_not_read(tmp_path: Path, case: str) -> None:
    config, found = UNKNOWN[case]
    made(tmp_path, "gptq")
    edit_json(tmp_path / "config.json", quantization_config=config)
    message = refusal(tmp_path)
    assert "config.json: quantization_config would change the function" in message
    assert found in message
    assert "try: use another checkpoint" in message


LAYER = "model.layers.0.mlp.up_proj"
DAMAGED = {
    "a missing part": ("gptq", {"scales": None}, f"{LAYER}.scales is missing"),
    "other zeros": (
        "gptq",
        {"qzeros": torch.zeros(4, 10, dtype=torch.int32)},
        "4 × 11, not int32 (4, 10)",
    ),
    "scales of integers": ("gptq", {"scales": torch.ones(4, 84, dtype=torch.int32)}, "scales of float16 or"),
    "a group too many": ("gptq", {"g_idx": torch.full((40,), 4, dtype=torch.int32)}, "g_idx in 0 … 3"),
    "a negative group": ("gptq", {"g_idx": torch.full((40,), -1, dtype=torch.int32)}, "g_idx in 0 … 3"),
    "empty": ("awq", {"qweight": torch.zeros(0, 11, dtype=torch.int32)}, "qweight of int32"),
    "another shape": ("packed", {"weight_shape": torch.tensor([84, 400])}, "holds no 84 × 400 integers"),
    "a negative shape": ("packed", {"weight_shape": torch.tensor([-1, 40])}, "holds no -1 × 40 integers"),
    "scales that do not divide": ("packed", {"weight_scale": torch.ones(84, 3)}, "not 3 groups of 40 columns"),
    "permuted columns whose groups are missing": ("gptq-act-order", {"g_idx": None}, "g_idx, the group of each column"),
    "permuted columns of which no group is told": (
        "gptq-act-order",
        {"g_idx": torch.zeros(0, dtype=torch.int32)},
        "g_idx, the group of each column",
    ),
    "ordered columns whose groups are missing": ("packed-act-order", {"weight_g_idx": None}, "g_idx, the group of"),
    "zeros that are said to be": ("packed-zeros", {"weight_zero_point": None}, "because symmetric is false"),
    "zeros of int8 that are said to be": ("int8-zeros", {"weight_zero_point": None}, "because symmetric is false"),
    "zeros of floats": ("int8-zeros", {"weight_zero_point": torch.ones(84, 1)}, "weight_zero_point of int8"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_tensors_that_do_not_fit_together(tmp_path: Path, case: str) -> None:
    name, changes, expected = DAMAGED[case]
    made(tmp_path, name)
    remove = [f"{LAYER}.{part}" for part, tensor in changes.items() if tensor is None]
    kept = {f"{LAYER}.{part}".replace(".", "__"): tensor for part, tensor in changes.items() if tensor is not None}
    edit_tensors(tmp_path, *remove, **kept)
    message = refusal(tmp_path)
    assert expected in message
    assert LAYER in message


def test_one_group_needs_no_order(tmp_path: Path) -> None:
    made(tmp_path, "gptq-one-group")
    edit_json(tmp_path / "config.json", quantization_config={**FORMS["gptq-one-group"].config, "desc_act": True})
    before = open_checkpoint(tmp_path).values("layers/0/ffn/first")
    edit_tensors(tmp_path, f"{LAYER.replace('up', 'gate')}.g_idx")
    assert np.array_equal(open_checkpoint(tmp_path).values("layers/0/ffn/first"), before)


TARGETED = {
    "by class": (["Linear"], ["re:.*down_proj"], True),
    "by pattern": (["re:.*up_proj$"], ["Linear"], True),
    "by name": ([LAYER], ["re:.*up_proj$", "Linear"], True),
    "by another pattern": (["re:.*down_proj$"], ["Linear"], False),
    "by another name": (["model.layers.1.mlp.up_proj", "re:.*down_proj"], ["re:.*mlp.up_proj"], False),
}


@pytest.mark.parametrize("case", TARGETED)
def test_which_layers_need_zeros(tmp_path: Path, case: str) -> None:
    """A layer without zero points is refused where the group that it belongs to is not symmetric."""
    asymmetric, symmetric, refused = TARGETED[case]
    made(tmp_path, "packed-zeros")
    group = FORMS["packed-zeros"].config["config_groups"]["group_0"]
    groups = {
        "a": group | {"targets": symmetric, "weights": group["weights"] | {"symmetric": True}},
        "b": group | {"targets": asymmetric},
    }
    scheme = {**FORMS["packed-zeros"].config, "config_groups": groups}
    edit_json(tmp_path / "config.json", quantization_config=scheme)
    open_checkpoint(tmp_path)
    edit_tensors(tmp_path, f"{LAYER}.weight_zero_point")
    if refused:
        assert "because symmetric is false" in refusal(tmp_path)
    else:
        open_checkpoint(tmp_path)


def test_a_scheme_without_quantised_tensors(tmp_path: Path) -> None:
    random_llama(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=dict(FORMS["gptq"].config))
    assert "no layer is quantised, though config.json says that they are" in refusal(tmp_path)


def test_quantised_tensors_without_a_scheme(tmp_path: Path) -> None:
    made(tmp_path, "awq")
    edit_json(tmp_path / "config.json", "quantization_config")
    assert "tensors that config.json calls for are missing" in refusal(tmp_path)


def test_scales_that_are_not_finite(tmp_path: Path) -> None:
    made(tmp_path, "gptq")
    edit_tensors(
        tmp_path, **{f"{LAYER}.scales".replace(".", "__"): torch.full((4, 84), torch.nan, dtype=torch.float16)}
    )
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight"):
        open_checkpoint(tmp_path).check_values()
