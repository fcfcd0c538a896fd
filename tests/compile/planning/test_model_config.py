"""Decoders from configs alone: published parameter counts for every family, and what is wrong with a config."""

import json
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
from support.synthetic import small_decoder

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families.registry import decoder_of
from pi_compile.errors import CheckpointError
from pi_compile.planning.model_config import find_planned
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.sizes import PARTS, array_specs, parameters

LLAMA_2_7B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
LLAMA_2_70B = LLAMA_2_7B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
MISTRAL = LLAMA_2_7B | {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8}
MIXTRAL = MISTRAL | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
OPT_125M: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}


def opt(width: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "ffn_dim": 4 * width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return OPT_125M | sizes | {"word_embed_proj_dim": width}


FALCON_40B: dict[str, Any] = {
    "model_type": "falcon",
    "hidden_size": 8192,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "num_hidden_layers": 60,
    "new_decoder_architecture": True,
    "parallel_attn": True,
    "bias": False,
    "vocab_size": 65024,
}
FALCON_7B = FALCON_40B | {
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "num_kv_heads": None,
    "num_hidden_layers": 32,
    "new_decoder_architecture": False,
    "multi_query": True,
}
QWEN: dict[str, Any] = {"model_type": "qwen2", "num_key_value_heads": 4, "vocab_size": 152064}

# Configs as published on the hub, cut to the keys that sizes depend on. The counts: that of the stored tensors, from
# the hub's safetensors metadata or the index's total_size ÷ 2, without a second copy of a tied head.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "llama-2-7b": (LLAMA_2_7B, 6_738_415_616),
    "llama-2-70b": (LLAMA_2_70B, 68_976_648_192),
    "llama-3-8b": (
        LLAMA_2_7B | {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256},
        8_030_261_248,
    ),
    "mistral-7b": (MISTRAL, 7_241_732_096),
    "bamboo-7b": (MISTRAL | {"model_type": "bamboo"}, 7_241_732_096),
    "mixtral-8x7b": (MIXTRAL, 46_702_792_704),
    "qwen2-7b": (
        QWEN | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
        7_615_616_512,
    ),
    "qwen2-0.5b": (
        QWEN
        | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
        | {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
        494_032_768,
    ),
    "qwen3-0.6b": (
        {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
        | {"tie_word_embeddings": True},
        596_049_920,
    ),
    "nemotron-minitron-4b": (
        {"model_type": "nemotron", "hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 32}
        | {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 256000}
        | {"hidden_act": "relu2"},
        4_190_509_056,
    ),
    "falcon-40b": (FALCON_40B, 41_303_293_952),
    "falcon-7b": (FALCON_7B, 6_921_720_704),
    "opt-125m": (OPT_125M, 125_239_296),
    "opt-350m": (opt(1024, 24, 16) | {"word_embed_proj_dim": 512, "do_layer_norm_before": False}, 331_196_416),
    "opt-1.3b": (opt(2048, 24, 32), 1_315_758_080),
    "opt-6.7b": (opt(4096, 32, 32), 6_658_473_984),
    "opt-30b": (opt(7168, 48, 56), 29_974_540_288),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
        124_439_808,
    ),
    "phi-2": (
        {"model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "vocab_size": 51200},
        2_779_683_840,
    ),
}
MINICPM = {
    "architectures": ["MiniCPMForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 3840,
    "num_hidden_layers": 52,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "vocab_size": 73440,
    "hidden_act": "fatrelu",
    "hidden_act_param": 0.03,
    "scale_emb": 12,
}


def shape(fields: dict[str, Any]) -> Decoder:
    return decoder_of(Config(Path("config.json"), fields))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name: str) -> None:
    fields, expected = PUBLISHED[name]
    assert parameters(shape(fields)) == expected


def test_minicpm_is_what_its_paper_counts() -> None:
    """1 247 442 432 parameters outside the embedding (MiniCPM, arXiv:2404.06395, table of models); the head is tied."""
    found = shape(MINICPM)
    assert parameters(found) - 73440 * 1536 == 1_247_442_432
    assert (found.family, found.sparse) == ("minicpm", True)


def test_turbosparse_mixtral_is_its_index_size_with_predictors() -> None:
    """The index of PowerInfer/TurboSparse-Mixtral: 103 592 501 248 bytes of bf16, two predictor matrices per expert."""
    found = shape(MIXTRAL | {"model_type": "turbosparsemixtral", "vocab_size": 57024})
    rank, rest = divmod(103_592_501_248 // 2 - parameters(found), 32 * 8 * (4096 + 14336))
    assert (rank, rest) == (1036, 0)
    specs = array_specs(found, dict.fromkeys(PARTS, "bf16"), [rank] * 32, profiled=False)
    predictors = [prod(spec.shape) for name, spec in specs.items() if "predictor" in name and "bias" not in name]
    assert sum(predictors) == 32 * 8 * rank * (4096 + 14336)


def _fields(d: Decoder) -> dict[str, Any]:
    plain = {"vocab_size": d.vocab_size, "hidden_size": d.d_model, "num_hidden_layers": d.n_layers}
    plain |= {"num_attention_heads": d.n_heads, "max_position_embeddings": d.context_length, "model_type": d.family}
    if d.family == "opt":
        return plain | {"ffn_dim": d.d_ff}
    return plain | {
        "num_key_value_heads": d.n_kv_heads,
        "intermediate_size": d.d_ff,
        "hidden_act": "relu",
        "rms_norm_eps": 1e-5,
    }


@pytest.mark.parametrize(
    ("d", "more"),
    [
        (small_decoder("llama"), {}),
        (small_decoder("llama", tied_head=True, head_dim=16), {"tie_word_embeddings": True, "head_dim": 16}),
        (small_decoder("llama", qkv_bias=True, out_bias=True), {"attention_bias": True}),
        (small_decoder("llama", ffn_bias=True), {"mlp_bias": True}),
        (small_decoder("opt", n_kv_heads=4), {}),
        (small_decoder("opt", n_kv_heads=4, qkv_bias=False, out_bias=False, ffn_bias=False), {"enable_bias": False}),
    ],
)
def test_a_config_gives_the_shape_of_its_decoder(d: Decoder, more: dict[str, Any]) -> None:
    assert shape(_fields(d) | more) == d


def test_experts_side_by_side() -> None:
    one = small_decoder("llama")
    formats = dict.fromkeys(PARTS, "q8")
    many = array_specs(replace(one, n_experts=4, experts_per_token=2), formats, [3, None], profiled=True)
    single = array_specs(one, formats, [3, None], profiled=True)
    assert many.pop("layers/0/ffn/router").shape == many.pop("layers/1/ffn/router").shape == (4, 32)
    assert list(many) == list(single)
    for name, spec in single.items():
        times = 4 if any(f"/{part}" in name for part in ("first", "rest", "order", "counts", "predictor")) else 1
        assert many[name].nbytes == times * spec.nbytes, name


def test_falcons_differ_in_their_norms() -> None:
    forty, seven = (shape(fields) for fields in (FALCON_40B, FALCON_7B))
    assert (forty.n_kv_heads, forty.shared_norm, seven.n_kv_heads, seven.shared_norm) == (8, False, 1, True)
    fields = {
        k: v
        for k, v in FALCON_40B.items()
        if k not in ("num_kv_heads", "num_hidden_layers", "new_decoder_architecture")
    }
    fields |= {"model_type": "RefinedWeb", "n_head_kv": 8, "n_layer": 60}
    assert shape(fields) == forty


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "config.json: model type 'mamba' is not supported"),
        ({"model_type": None}, "expected: one of the families arcee, bamboo, bitnet, deepseek_v2"),
        ({"hidden_size": None}, "config.json: hidden_size"),
        ({"hidden_size": 4095}, "a multiple of 32 attention heads, or head_dim"),
        ({"intermediate_size": "11008"}, "config.json: intermediate_size"),
        ({"num_key_value_heads": 7}, "a divisor of 32 attention heads"),
        ({"tie_word_embeddings": 1}, "config.json: tie_word_embeddings"),
        ({"hidden_act": ["relu"]}, "config.json: hidden_act"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "at most 8 experts"),
    ],
)
def test_a_mistake_names_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        shape(LLAMA_2_7B | change)
    assert message in str(caught.value)


def test_a_file_that_is_no_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        find_planned("config.json", tmp_path)


def test_an_unknown_key_is_refused_until_it_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B | {"unheard_of": 1}))
    with pytest.raises(CheckpointError, match="add ignore_config='unheard_of'"):
        find_planned("config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r'\[model\] ignore_config = \["unheard_of"\]'):
        find_planned("config.json", tmp_path, in_recipe=True)
    assert find_planned("config.json", tmp_path, ["unheard_of"]).decoder.n_kv_heads == 32


def test_a_family_that_is_only_planned_for_may_have_unknown_keys() -> None:
    assert shape(MINICPM | {"unheard_of": 1}) == shape(MINICPM)
    with pytest.raises(CheckpointError, match="quantization would change the function"):
        shape(MINICPM | {"quantization": {"bits": 4}})


@pytest.mark.slow
def test_a_config_is_read_without_torch() -> None:
    adapters = "from pi_compile.checkpoint.families.registry import adapters; adapters()"
    code = f"import sys; {adapters}; print({{'torch', 'numba', 'safetensors'}} & {{*sys.modules}})"
    done = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
