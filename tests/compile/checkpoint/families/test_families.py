"""Every array of an opened checkpoint is the state dict's tensor, transformed as documented."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from support.families import CASES, random_checkpoint
from support.hf import edit_json, edit_tensors, random_llama, random_opt

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.checkpoint import checkpoint as module

LLAMA_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"dtype": torch.float16},
    "bf16-sharded": {"dtype": torch.bfloat16, "shard": "20KB"},
    "tied": {"tie_word_embeddings": True},
    "tied-sharded": {"tie_word_embeddings": True, "shard": "20KB"},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "silu-mha": {"hidden_act": "silu", "num_key_value_heads": 3},
    "bin": {"pickled": True},
    "bin-tied-sharded": {"pickled": True, "tie_word_embeddings": True, "shard": "20KB"},
}
OPT_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied-fp16": {"tie_word_embeddings": False, "dtype": torch.float16},
    "no-bias-bf16": {"enable_bias": False, "dtype": torch.bfloat16},
    "sharded": {"shard": "20KB"},
    "bin": {"pickled": True},
}


def expected_llama(state: dict[str, Any], n: int) -> dict[str, Any]:
    layer = {k.removeprefix(f"model.layers.{n}."): v for k, v in state.items() if f"layers.{n}." in k}
    expected = {
        "attention/norm/weight": layer["input_layernorm.weight"],
        "attention/qkv": torch.cat([layer[f"self_attn.{p}_proj.weight"] for p in "qkv"]),
        "attention/out": layer["self_attn.o_proj.weight"],
        "ffn/norm/weight": layer["post_attention_layernorm.weight"],
        "ffn/first": layer["mlp.gate_proj.weight"],
        "ffn/rest": torch.stack([layer["mlp.up_proj.weight"], layer["mlp.down_proj.weight"].T], 1),
    }
    if "self_attn.q_proj.bias" in layer:
        expected["attention/qkv_bias"] = torch.cat([layer[f"self_attn.{p}_proj.bias"] for p in "qkv"])
        expected["attention/out_bias"] = layer["self_attn.o_proj.bias"]
        for array, name in (("first", "gate"), ("up", "up"), ("down", "down")):
            expected[f"ffn/{array}_bias"] = layer[f"mlp.{name}_proj.bias"]
    return expected


def expected_opt(state: dict[str, Any], n: int) -> dict[str, Any]:
    layer = {k.removeprefix(f"model.decoder.layers.{n}."): v for k, v in state.items() if f"layers.{n}." in k}
    expected = {
        "attention/qkv": torch.cat([layer[f"self_attn.{p}_proj.weight"] for p in "qkv"]),
        "attention/out": layer["self_attn.out_proj.weight"],
        "ffn/first": layer["fc1.weight"],
        "ffn/rest": layer["fc2.weight"].T[:, None],
    }
    for array, name in (("attention/norm", "self_attn_layer_norm"), ("ffn/norm", "final_layer_norm")):
        expected |= {f"{array}/{part}": layer[f"{name}.{part}"] for part in ("weight", "bias")}
    if "fc1.bias" in layer:
        expected["attention/qkv_bias"] = torch.cat([layer[f"self_attn.{p}_proj.bias"] for p in "qkv"])
        expected["attention/out_bias"] = layer["self_attn.out_proj.bias"]
        expected["ffn/first_bias"], expected["ffn/down_bias"] = layer["fc1.bias"], layer["fc2.bias"]
    return expected


def check_equal(values: Any, tensor: Any) -> None:
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, tensor.detach().float().numpy())


def check_layers(checkpoint: Checkpoint, state: dict[str, Any], expected_of: Any) -> None:
    for n in range(checkpoint.decoder.n_layers):
        values, expected = checkpoint.layer_values(n), expected_of(state, n)
        assert values.keys() == expected.keys()
        for name, tensor in expected.items():
            check_equal(values[name], tensor)


@pytest.mark.parametrize("case", LLAMA_CASES)
def test_llama_arrays(tmp_path: Path, case: str) -> None:
    state = random_llama(tmp_path, **LLAMA_CASES[case]).state_dict()
    checkpoint = open_checkpoint(tmp_path)
    check_layers(checkpoint, state, expected_llama)
    check_equal(checkpoint.values("embedding"), state["model.embed_tokens.weight"])
    check_equal(checkpoint.values("final_norm/weight"), state["model.norm.weight"])
    assert checkpoint.decoder.tied_head == LLAMA_CASES[case].get("tie_word_embeddings", False)
    if not checkpoint.decoder.tied_head:
        check_equal(checkpoint.values("head"), state["lm_head.weight"])


@pytest.mark.parametrize("case", OPT_CASES)
def test_opt_arrays(tmp_path: Path, case: str) -> None:
    state = random_opt(tmp_path, **OPT_CASES[case]).state_dict()
    checkpoint = open_checkpoint(tmp_path)
    check_layers(checkpoint, state, expected_opt)
    check_equal(checkpoint.values("embedding"), state["model.decoder.embed_tokens.weight"])
    check_equal(checkpoint.values("positions"), state["model.decoder.embed_positions.weight"])
    assert checkpoint.values("positions").shape == (61 + 2, 36)
    for part in ("weight", "bias"):
        check_equal(checkpoint.values(f"final_norm/{part}"), state[f"model.decoder.final_layer_norm.{part}"])
    assert checkpoint.decoder.tied_head == OPT_CASES[case].get("tie_word_embeddings", True)


@pytest.mark.parametrize("block_bytes", [1, 1000, 5000])
def test_blocks_are_bounded_and_join_to_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    random_llama(tmp_path, mlp_bias=True, tokenizer=False)
    checkpoint = open_checkpoint(tmp_path)
    whole = {name: checkpoint.values(name) for name in checkpoint.array_shapes}
    monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    for name, expected in whole.items():
        blocks = list(checkpoint.blocks(name))
        row = expected.nbytes // len(expected)
        assert all(block.nbytes <= max(block_bytes, row) for block in blocks)
        np.testing.assert_array_equal(np.concatenate(blocks), expected)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_reordered_neurons_are_the_same_neurons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    if family == "llama":
        random_llama(tmp_path, mlp_bias=True, tokenizer=False)
    else:
        random_opt(tmp_path, tokenizer=False)
    monkeypatch.setattr(module, "BLOCK_BYTES", 3000)
    checkpoint = open_checkpoint(tmp_path)
    order = np.random.default_rng(0).permutation(checkpoint.decoder.d_ff)
    plain, moved = checkpoint.layer_values(1), checkpoint.layer_values(1, order)
    for name, values in plain.items():
        per_neuron = name in module.NEURON_ARRAYS
        np.testing.assert_array_equal(moved[name], values[order] if per_neuron else values)


def test_decoder_of_a_llama(tmp_path: Path) -> None:
    random_llama(tmp_path, tokenizer=False, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    d = open_checkpoint(tmp_path).decoder
    assert (d.family, d.norm, d.positions, d.ffn, d.activation) == ("llama", "rms", "rope", "gated", "relu")
    assert (d.n_heads, d.n_kv_heads, d.head_dim, d.d_ff, d.context_length) == (3, 1, 10, 83, 64)
    assert (d.rotary_frequencies[1], d.norm_eps) == (pytest.approx(5e5**-0.2, rel=1e-6), 1e-6)


def test_heads_without_head_dim_split_the_width(tmp_path: Path) -> None:
    random_llama(tmp_path, tokenizer=False, head_dim=16, num_key_value_heads=3)
    edit_json(tmp_path / "config.json", "head_dim", "num_key_value_heads")
    decoder = open_checkpoint(tmp_path).decoder
    assert (decoder.head_dim, decoder.n_kv_heads) == (16, 3)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_bare_model_is_read_too(tmp_path: Path, family: str) -> None:
    make = random_llama if family == "llama" else random_opt
    model = make(tmp_path, tokenizer=False, tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.prefix == ("" if family == "llama" else "decoder.")
    check_layers(checkpoint, model.state_dict(), expected_llama if family == "llama" else expected_opt)


def test_a_stored_copy_of_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    model = random_llama(tmp_path, tokenizer=False, tie_word_embeddings=True)
    edit_tensors(tmp_path, lm_head__weight=model.state_dict()["lm_head.weight"])
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.decoder.tied_head
    assert checkpoint.notices == ()


def test_a_stored_head_that_differs_is_used_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    random_llama(tmp_path, tokenizer=False, tie_word_embeddings=True)
    edit_tensors(tmp_path, lm_head__weight=torch.full((131, 48), 0.5))
    checkpoint = open_checkpoint(tmp_path)
    assert not checkpoint.decoder.tied_head
    assert "differs" in checkpoint.notices[0]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    check_equal(checkpoint.values("head"), theirs["lm_head.weight"])
    check_equal(checkpoint.values("embedding"), theirs["model.embed_tokens.weight"])


def test_a_head_stored_in_place_of_the_tied_embedding(tmp_path: Path) -> None:
    model = random_llama(tmp_path, tokenizer=False, tie_word_embeddings=True)
    head = model.state_dict()["lm_head.weight"]
    edit_tensors(tmp_path, "model.embed_tokens.weight", lm_head__weight=head)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.decoder.tied_head
    check_equal(checkpoint.values("embedding"), head)


def test_buffers_of_older_versions_are_ignored(tmp_path: Path) -> None:
    random_llama(tmp_path, tokenizer=False)
    edit_tensors(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(5))
    open_checkpoint(tmp_path)


FALCON_OLDER = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_kv_heads": "n_head_kv"}


def test_the_first_falcons(tmp_path: Path) -> None:
    """Keys of tiiuae/falcon-40b's first config: other names, and no word of the new architecture."""
    random_checkpoint(tmp_path, "falcon-40b", tokenizer=False)
    now = open_checkpoint(tmp_path)
    older = {FALCON_OLDER[key]: value for key, value in CASES["falcon-40b"].fields.items() if key in FALCON_OLDER}
    gone = (*FALCON_OLDER, "new_decoder_architecture", "num_ln_in_parallel_attn")
    own = {"model_type": "RefinedWeb", "architectures": ["RWForCausalLM"]}
    edit_json(tmp_path / "config.json", *gone, **older, **own)
    then = open_checkpoint(tmp_path)
    assert then.decoder == now.decoder
    np.testing.assert_array_equal(then.values("layers/1/attention/qkv"), now.values("layers/1/attention/qkv"))


def test_the_first_gpt2(tmp_path: Path) -> None:
    """openai-community/gpt2: the bare model's names, and the causal mask among the weights."""
    model = random_checkpoint(tmp_path, "gpt2", tokenizer=False)
    model.transformer.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["GPT2LMHeadModel"], n_ctx=37)
    edit_tensors(tmp_path, h__0__attn__bias=torch.ones(1, 1, 37, 37))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.decoder.tied_head
    check_equal(checkpoint.values("layers/0/attention/qkv"), model.state_dict()["transformer.h.0.attn.c_attn.weight"].T)


def test_experts_are_stored_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = random_checkpoint(tmp_path, "mixtral", tokenizer=False).model.layers[1].mlp.experts
    checkpoint = open_checkpoint(tmp_path)
    first = experts.gate_up_proj[:, :53].flatten(0, 1)
    rest = torch.stack([experts.gate_up_proj[:, 53:], experts.down_proj.transpose(1, 2)], 2).flatten(0, 1)
    rng = np.random.default_rng(0)
    order = np.concatenate([53 * e + rng.permutation(53) for e in range(5)])
    monkeypatch.setattr(module, "BLOCK_BYTES", 3000)
    for array, expected in (("first", first), ("rest", rest)):
        check_equal(checkpoint.values(f"layers/1/ffn/{array}"), expected)
        check_equal(checkpoint.values(f"layers/1/ffn/{array}", order), expected[order])


NOTICES = {
    "bamboo": ["auto_map is ignored", "sliding_window = 19: the context is cut from 40 positions to the window"],
    "turbosparse-mistral": [
        "auto_map is ignored",
        "sliding_window = 19",
        "the checkpoint's own predictors are left out",
    ],
    "turbosparse-mixtral": ["auto_map is ignored", "own predictors are left out"],
    "prosparse": ["auto_map is ignored"],
    "mistral-window": ["sliding_window = 19"],
    "mistral": [],
    "opt-350m": [],
}


@pytest.mark.parametrize("case", NOTICES)
def test_what_the_user_is_told(tmp_path: Path, case: str) -> None:
    random_checkpoint(tmp_path, case, tokenizer=False)
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.notices) == len(NOTICES[case])
    for found, expected in zip(checkpoint.notices, NOTICES[case], strict=True):
        assert expected in found
    windowed = any("sliding_window" in notice for notice in NOTICES[case])
    assert (checkpoint.decoder.context_length == 19) == windowed
