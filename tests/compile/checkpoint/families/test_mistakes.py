"""What is wrong with a checkpoint, family by family: named errors with exit code 3, before any long work."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file
from support.documents import page
from support.families import CASES, FAMILIES, random_checkpoint
from support.hf import edit_json, edit_tensors
from support.refused_checkpoints import refusal

from pi_compile.checkpoint import open_checkpoint
from pi_compile.checkpoint.families import family_names
from pi_compile.checkpoint.gguf.architectures import _POWERINFER, ARCHITECTURES, WITH_WINDOWS, _of
from pi_compile.errors import CheckpointError
from pi_runtime.artifact.features import lacking
from pi_runtime.engine.tools import formats

Copy = Callable[[str], Path]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that no test changes."""
    folders = {family: tmp_path_factory.mktemp("families") / family for family in FAMILIES}
    for family, folder in folders.items():
        random_checkpoint(folder, FAMILIES[family], tokenizer=False)
    return folders


@pytest.fixture
def copy(originals: dict[str, Path], tmp_path: Path) -> Copy:
    return lambda family: Path(shutil.copytree(originals[family], tmp_path / family))


LATER = ("layers/1/attention/qkv", "layers/0/attention/norm/weight")
"""Arrays that are damaged in the second tier of tests alone."""


def of_layer(folder: Path, array: str) -> str:
    """The array, or that of the next layer which has it."""
    shapes = open_checkpoint(folder).array_shapes
    _, n, name = array.split("/", 2)
    return next(own for own in (f"layers/{m}/{name}" for m in range(int(n), 9)) if own in shapes)


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def test_every_family_is_here_and_in_the_docs() -> None:
    assert tuple(FAMILIES) == family_names()
    table = page("reference/models.md").partition("## Families")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", "".join(rows[1:]))) == sorted(FAMILIES)


def test_the_documented_columns_say_where_a_family_runs(originals: dict[str, Path]) -> None:
    """GGUF by the table of architectures, a GPU by the facts that its tier lacks, disk by those that the CPU lacks."""
    text = page("reference/models.md")
    rows = re.findall(r"^\| ((?:`\w+`,? ?)+)\|[^|]*\|([^|]*)\| (yes|no) \|", text.partition("## Families")[2], re.M)
    documented = {family: row[1:] for row in rows for family in re.findall(r"`(\w+)`", row[0])}
    assert documented.keys() == FAMILIES.keys()
    files = {of: {*re.findall(r"`([\w-]+)`", cell)} for of, (cell, _) in documented.items()}
    known = [*ARCHITECTURES.items(), *_POWERINFER.items(), *((n, _of(m)) for n, m in WITH_WINDOWS.items())]
    assert {name for names in files.values() for name in names} == {name for name, _ in known}
    for name, architecture in known:
        assert name in files.get(architecture.family, {name}), (name, architecture.family)
    for family, folder in originals.items():
        decoder = open_checkpoint(folder).decoder
        assert lacking(decoder, "cpu") == []
        assert documented[family][1] == ("no" if lacking(decoder, "gpu") else "yes"), family


def test_the_documented_forms_of_calls_are_all() -> None:
    text = page("reference/models.md").partition("## Chat templates")[2].partition("\n## ")[0]
    found = {one.name for one in vars(formats).values() if isinstance(one, formats.ToolFormat)}
    assert {*re.findall(r"`([\w.-]+)`", text.partition("in the forms of")[2])} == found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_lies_about_layers(copy: Copy, family: str) -> None:
    folder, key = copy(family), "n_layer" if family == "gpt2" else "num_hidden_layers"
    edit_json(folder / "config.json", **{key: 3})
    message = refusal(folder)
    for kinds in ("layer_types", "layers_block_type"):
        if {"linear_attention", "conv"} & {*(config_of(folder).get(kinds) or ())}:  # says what each layer is
            assert kinds in message
            return
    assert "tensors that config.json calls for are missing" in message
    assert ".2." in message
    edit_json(folder / "config.json", **{key: 1})
    message = refusal(folder)
    assert "tensors that config.json does not account for" in message
    assert ".1." in message


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_lies_about_neurons(copy: Copy, family: str) -> None:
    folder = copy(family)
    keys = {CASES[FAMILIES[family]].neurons, "shared_expert_intermediate_size", "shared_intermediate_size"} & {
        *config_of(folder)
    }
    edit_json(folder / "config.json", **dict.fromkeys(keys, 54))
    message = refusal(folder)
    assert "tensors do not have the shape that config.json calls for" in message
    assert "54" in message


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("array", ["attention/qkv", "ffn/rest"])
def test_a_tensor_of_another_shape(copy: Copy, family: str, array: str) -> None:
    folder = copy(family)
    name = open_checkpoint(folder).tensor_names(of_layer(folder, f"layers/1/{array}"))[-1]
    tensor = load_file(folder / "model.safetensors")[name]
    edit_tensors(folder, **{name: tensor[:-1]})
    message = refusal(folder)
    assert "1 tensors do not have the shape" in message
    assert f"{name} {tuple(tensor.shape)}" in message
    edit_tensors(folder, name)
    assert f"no {name}" in refusal(folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "array",
    ["layers/1/ffn/rest", *(pytest.param(name, marks=pytest.mark.more) for name in LATER)],
)
def test_a_weight_that_is_no_number(copy: Copy, family: str, array: str) -> None:
    folder = copy(family)
    if family == "nanochat" and array.endswith("norm/weight"):
        assert open_checkpoint(folder).tensor_names(array) == (), "its norms have no weights"
        return
    array = of_layer(folder, array)
    name = open_checkpoint(folder).tensor_names(array)[-1]
    tensor = load_file(folder / "model.safetensors")[name]
    tensor.view(-1)[[0, tensor.numel() // 2, -1]] = torch.nan  # some of fused rows may be another array's
    edit_tensors(folder, **{name: tensor})
    checkpoint = open_checkpoint(folder)
    for read in (lambda: checkpoint.values(array), checkpoint.check_values):
        with pytest.raises(CheckpointError, match=f"tensor {name} holds NaN") as caught:
            read()
        assert caught.value.exit_code == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_that_nobody_asked_for(copy: Copy, family: str) -> None:
    folder = copy(family)
    edit_tensors(folder, adapter__scale=torch.ones(3))
    assert "adapter.scale" in refusal(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_is_not_there(copy: Copy, family: str) -> None:
    folder = copy(family)
    if open_checkpoint(folder).decoder.tied_head:
        edit_json(folder / "config.json", tie_word_embeddings=False)
    else:
        edit_tensors(folder, "lm_head.weight")
    assert "no lm_head.weight" in refusal(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_embedding_that_is_not_there(copy: Copy, family: str) -> None:
    folder = copy(family)
    name = open_checkpoint(folder).tensor_names("embedding")[0]
    edit_tensors(folder, name)
    assert f"no {name}" in refusal(folder)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"opt", "gpt2", "granitemoehybrid", "nemotron_h"}))
def test_a_rope_type_that_is_not_known(copy: Copy, family: str) -> None:
    folder = copy(family)
    edit_json(folder / "config.json", rope_scaling={"type": "spiral", "factor": 2.0})
    message = refusal(folder)
    assert "config.json: rope_scaling: rope type" in message
    assert "spiral" in message


CHANGING: list[tuple[str, dict[str, Any], str]] = [
    ("bamboo", {"hidden_act": "silu"}, "hidden_act"),
    ("bamboo", {"sliding_window": -3}, "sliding_window"),
    ("falcon", {"alibi": True}, "alibi"),
    ("falcon", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
    ("falcon", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn"),
    ("falcon", {"parallel_attn": False}, "parallel_attn"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("deepseek_v2", {"q_lora_rank": None}, "attention_bias"),
    ("deepseek_v2", {"n_group": 4}, "n_group"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ("falcon", {"num_kv_heads": 4}, "num_kv_heads"),
    ("falcon", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt2", {"n_head": 5}, "n_embd"),
    ("glm4_moe", {"n_group": 4}, "n_group"),
    ("glm4_moe", {"n_group": 3, "num_experts_per_tok": 3}, "n_group"),
    ("glm4_moe", {"topk_group": 2}, "topk_group"),
    ("glm4_moe", {"intermediate_size": 400}, "intermediate_size"),
    ("glm4_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
    ("glm4_moe", {"n_shared_experts": -1}, "n_shared_experts"),
    ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func"),
    ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act"),
    ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types"),
    ("gpt_oss", {"sliding_window": 0}, "sliding_window"),
    ("llama", {"sliding_window": 10}, "sliding_window"),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier"),
    ("granite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("granitemoe", {"num_experts_per_tok": 6}, "num_experts_per_tok"),
    ("mistral", {"sliding_window": "32"}, "sliding_window"),
    ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
    ("mistral", {"attention_bias": True}, "attention_bias"),
    ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
    ("nanochat", {"final_logit_softcapping": -15.0}, "final_logit_softcapping"),
    *((family, {"hidden_act": "relu"}, "hidden_act") for family in ("lfm2", "lfm2_moe")),
    *(("lfm2", {"layer_types": kinds}, "layer_types") for kinds in (["conv"] * 4, ["conv", "linear"] * 2, ["conv"])),
    ("lfm2", {"conv_bias": True}, "conv_bias"),
    ("lfm2", {"conv_L_cache": 0}, "conv_L_cache"),
    ("lfm2_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ("lfm2_moe", {"intermediate_size": 999}, "intermediate_size"),
    ("nanochat", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters"),
    ("nemotron", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor"),
    ("nemotron", {"hidden_act": "laplace"}, "hidden_act"),
    *(
        ("nemotron_h", {"moe_latent_size": size, "layers_block_type": ["mamba", kind, "moe", "attention"]}, key)
        for size, kind, key in (
            (999, "moe", "moe_latent_size"),
            (0, "moe", "moe_latent_size"),
            (8, "mlp", "moe_latent_"),
        )
    ),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
    ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16}, "use_sliding_window"),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 16}, "use_sliding_window"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
    ("smollm3", {"no_rope_layers": [1, 2]}, "no_rope_layers"),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 16}, "sliding_window"),
    *((family, {"hidden_act": "relu"}, "hidden_act") for family in ("qwen3_next", "qwen3_5", "qwen3_5_moe")),
    ("sparsellama", {"hidden_act_param": [0.1, 0.2]}, "hidden_act_param"),
    ("sparsellama", {"hidden_act_param": None}, "hidden_act_param"),
    ("sparsellama", {"hidden_act": "shiftrelu"}, "hidden_act"),
    ("turbosparsemixtral", {"hidden_act": "silu"}, "hidden_act"),
    ("turbosparsemixtral", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
]


@pytest.mark.parametrize(("family", "fields", "key"), CHANGING, ids=[f"{f}-{k}" for f, _, k in CHANGING])
def test_a_field_that_would_change_the_function(copy: Copy, family: str, fields: dict[str, Any], key: str) -> None:
    folder = copy(family)
    edit_json(folder / "config.json", **fields)
    assert f"config.json: {key}" in refusal(folder)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 16}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 40}),
        ("qwen3", {"use_sliding_window": False, "sliding_window": 16}),
        ("smollm3", {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 28}),
        ("olmoe", {"router_aux_loss_coef": 0.5, "output_router_logits": True}),
        ("gpt2", {"n_ctx": 37, "reorder_and_upcast_attn": True, "summary_type": "mean"}),
        ("mixtral", {"router_jitter_noise": 0.1, "sliding_window": None}),
        ("sparsellama", {"pretraining_tp": 2}),
    ],
)
def test_a_field_that_changes_nothing(copy: Copy, family: str, fields: dict[str, Any]) -> None:
    folder = copy(family)
    before = open_checkpoint(folder).decoder
    edit_json(folder / "config.json", **fields)
    assert open_checkpoint(folder).decoder == before


def test_layers_that_draft_tokens_are_left_out(copy: Copy) -> None:
    folder = copy("glm4_moe")
    before = open_checkpoint(folder)
    edit_tensors(folder, model__layers__2__mlp__gate__weight=torch.ones(6, 30))
    assert "layers.2.mlp.gate.weight" in refusal(folder)
    edit_tensors(folder, model__layers__2__eh_proj__weight=torch.ones(30, 60))
    after = open_checkpoint(folder)
    assert after.decoder == before.decoder
    *others, left_out = after.notices
    assert tuple(others) == before.notices
    assert left_out.startswith("layers behind the last, which draft further tokens, are left out: model.layers.2.")


def test_minicpm_is_planned_for_but_not_read(copy: Copy) -> None:
    folder = copy("llama")
    edit_json(folder / "config.json", "model_type", architectures=["MiniCPMForCausalLM"], scale_emb=12, scale_depth=1.4)
    message = refusal(folder)
    assert "a minicpm model can be planned for, but not read" in message
    assert "scale_depth" in message


def test_no_long_work_ends_at_a_bad_weight(fails: Callable[..., str], model: Path, recipe: Path) -> None:
    head = load_file(model / "model.safetensors")["lm_head.weight"]
    head[-1, -1] = -torch.inf
    edit_tensors(model, lm_head__weight=head)
    message = fails(3, "profile", recipe)
    assert "tensor lm_head.weight holds NaN or infinity" in message
    assert list(recipe.parent.glob(".pi-build/**/states-*")) == []
    assert list(recipe.parent.glob(".pi-build/**/*-shard-*")) == []
