"""Small random checkpoints of every family, each with the model that says what they compute."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from torch import nn

from support import smallthinker
from support.hf import edit_json, edit_tensors, randomised, save, write_tokenizer

LLAMA = {
    "vocab_size": 131,
    "hidden_size": 30,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 40,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FALCON = {
    "vocab_size": 131,
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "ffn_hidden_size": 53,
    "max_position_embeddings": 40,
    "eos_token_id": 2,
}
OPT = {
    "vocab_size": 131,
    "hidden_size": 36,
    "ffn_dim": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 37,
}
GPT2 = {"vocab_size": 131, "n_embd": 36, "n_layer": 2, "n_head": 3, "n_positions": 37, "n_inner": 53, "eos_token_id": 2}
PHI3 = {k: v for k, v in LLAMA.items() if k != "head_dim"} | {"hidden_size": 60}
OLMO2 = {k: v for k, v in LLAMA.items() if k != "head_dim"} | {"hidden_size": 60}
OLMOE = OLMO2 | {"num_experts": 5, "num_experts_per_tok": 2}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 3.0,
    "tie_word_embeddings": True,
}
GEMMA3 = LLAMA | {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 7,
    "query_pre_attn_scalar": 17,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA4 = LLAMA | {
    "hidden_size_per_layer_input": 0,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 7,
    "global_head_dim": 20,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 2.0,
}
TWO = {"num_hidden_layers": 2, "layer_types": None}
GEMMA4_OLDER = {
    "layer_types": None,
    "per_layer_config": None,
    "global_head_dim": 20,
    "num_global_key_value_heads": 1,
}
"""Keys of a config that names no layer."""
GEMMA4_MOE = GEMMA4 | {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 29,
}
GEMMA4_E = GEMMA4 | {
    "hidden_size_per_layer_input": 18,
    "vocab_size_per_layer_input": LLAMA["vocab_size"],
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "attention_k_eq_v": False,
    "use_double_wide_mlp": True,
}
GLM = LLAMA | {
    "head_dim": 12,
    "intermediate_size": 123,
    "moe_intermediate_size": 53,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.7,
}
MLA = {k: v for k, v in LLAMA.items() if k != "head_dim"} | {
    "num_key_value_heads": 6,
    "intermediate_size": 123,
    "moe_intermediate_size": 53,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "q_lora_rank": 17,
    "kv_lora_rank": 21,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}
MLA_YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0,
    "mscale": 0.7, "mscale_all_dim": 0.9,
}  # fmt: skip
GLM_LITE = {k: v for k, v in MLA.items() if k != "first_k_dense_replace"} | {"intermediate_size": 200}
GPT_OSS = LLAMA | {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0,
        "truncate": False,
    },
}  # fmt: skip
DELTA = {k: v for k, v in LLAMA.items() if k != "intermediate_size"} | {
    "intermediate_size": 123,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 9,
}
DELTA_EXPERTS = DELTA | {
    "moe_intermediate_size": 53,
    "shared_expert_intermediate_size": 53,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}
NEMOTRON_H = {k: v for k, v in LLAMA.items() if k not in ("intermediate_size", "num_hidden_layers")} | {
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
    "intermediate_size": 53,
    "mamba_num_heads": 6,
    "mamba_head_dim": 7,
    "n_groups": 3,
    "ssm_state_size": 9,
    "time_step_min": 0.4,
}
NEMOTRON_EXPERTS = NEMOTRON_H | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "moe_intermediate_size": 53,
    "moe_shared_expert_intermediate_size": 106,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
}
GRANITE_HYBRID = (
    {k: v for k, v in LLAMA.items() if k != "head_dim"}
    | GRANITE
    | {
        "hidden_size": 36,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_hidden_layers": 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 106,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 7,
    }
)
LFM2 = {k: v for k, v in OLMO2.items() if k != "hidden_act"} | {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": True,
}
LFM2_MOE = {k: v for k, v in LFM2.items() if not k.startswith("block")} | {
    "intermediate_size": 123,
    "moe_intermediate_size": 53,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_dense_layers": 1,
}
FATRELU = {"hidden_act": "fatrelu", "hidden_act_param": 0.2}
MIXTRAL = LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2}
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 500.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0},
}


def relu_twice(model: nn.Module) -> None:
    """dReLU in place of the gate's activation, of plain FFNs and of experts."""
    for module in model.modules():
        if isinstance(module, tf.models.mistral.modeling_mistral.MistralMLP):
            module.forward = _drelu_ffn(module)
        if isinstance(module, tf.models.mixtral.modeling_mixtral.MixtralExperts):
            module.forward = _drelu_experts(module)


def _drelu_ffn(m: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: m.down_proj(m.gate_proj(x).relu() * m.up_proj(x).relu())


def _drelu_experts(m: Any) -> Callable[..., torch.Tensor]:
    def forward(x_TD: torch.Tensor, taken_TK: torch.Tensor, share_TK: torch.Tensor) -> torch.Tensor:
        y_TD = torch.zeros_like(x_TD)
        for token, (experts, shares) in enumerate(zip(taken_TK, share_TK, strict=True)):
            for e, share in zip(experts, shares, strict=True):
                gate, up = (m.gate_up_proj[e] @ x_TD[token]).relu().chunk(2)
                y_TD[token] += share * (m.down_proj[e] @ (gate * up))
        return y_TD

    return forward


def forced_threshold(model: nn.Module) -> None:
    """FATReLU of ProSparse, of plain FFNs and of experts."""
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = nn.Threshold(0.2, 0.0)


@dataclass(frozen=True)
class Case:
    """A family, or a variant of one."""

    model: str
    """Class in transformers; where the checkpoint's own repository ships the code, the class that it was made from."""
    fields: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)
    """Config fields that differ from those of the class it was made from; None for one that is missing."""
    computes: Callable[[nn.Module], None] | None = None
    """Turns the class it was made from into the model."""
    made: Callable[[Path, dict[str, Any], str, torch.dtype], Any] | None = None
    """Saves a random model, and returns its definition, where transformers has no class."""
    predictors: str = ""
    """Name of the modules that have a predictor beside them."""
    not_in_gguf: str = ""
    """The reason why llama.cpp's converter makes no file of it that is held against transformers."""

    @property
    def model_type(self) -> str:
        """Name of its family."""
        of_class = getattr(tf, f"{self.model}Config", None)
        return str(self.own.get("model_type") or (of_class.model_type if of_class else self.model.lower()))

    @property
    def neurons(self) -> str:
        """The key that says how many neurons an FFN has, or an expert's."""
        keys = "moe_intermediate_size", "moe_ffn_hidden_size", "n_inner", "ffn_dim", "ffn_hidden_size"
        return next((key for key in keys if key in self.fields), "intermediate_size")


OWN = {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}
CASES: dict[str, Case] = {
    "llama-relu": Case("Llama", LLAMA | {"hidden_act": "relu"}),
    "llama-gelu-tied": Case("Llama", LLAMA | {"hidden_act": "gelu", "tie_word_embeddings": True}),
    **{f"llama-{kind}": Case("Llama", LLAMA | {"rope_parameters": fields}) for kind, fields in SCALED.items()},
    "mistral": Case("Mistral", LLAMA | {"sliding_window": None}),
    "mistral-window": Case(
        "Mistral",
        LLAMA | {"sliding_window": 19, "hidden_act": "relu"},
        not_in_gguf="the converter leaves out the window",
    ),
    "qwen2": Case(
        "Qwen2",
        {k: v for k, v in LLAMA.items() if k != "head_dim"} | {"num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "qwen3": Case("Qwen3", LLAMA | {"attention_bias": True}),
    "qwen3-moe": Case(
        "Qwen3Moe",
        LLAMA | {"moe_intermediate_size": 53, "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "qwen3-moe-unnormalised": Case(
        "Qwen3Moe",
        LLAMA | {"moe_intermediate_size": 53, "num_experts": 5, "num_experts_per_tok": 2},
        not_in_gguf="the converter leaves out that weights are not normalised",
    ),
    "olmoe": Case("Olmoe", OLMOE),
    "olmoe-normalised": Case(
        "Olmoe",
        OLMOE | {"norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 6},
        not_in_gguf="the converter leaves out that weights are normalised",
    ),
    "olmo2": Case("Olmo2", OLMO2),
    "olmo2-biases": Case("Olmo2", OLMO2 | {"attention_bias": True, "num_key_value_heads": 6, "hidden_act": "relu"}),
    "olmo3": Case("Olmo3", OLMO2 | {"sliding_window": 7}, {"layer_types": None}),
    "olmo3-four": Case("Olmo3", OLMO2 | {"num_hidden_layers": 4, "sliding_window": 7}),
    "olmo3-yarn": Case(
        "Olmo3",
        OLMO2
        | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5, "attention_bias": True}
        | {"rope_parameters": {"full_attention": SCALED["yarn"], "sliding_attention": {"rope_theta": 90.0}}},
        not_in_gguf="llama.cpp has a window in three layers of four",
    ),
    "ministral3": Case(
        "Ministral3",
        LLAMA
        | {"hidden_act": "relu"}
        | {"rope_parameters": SCALED["yarn"] | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "ministral3-tied": Case(
        "Ministral3",
        LLAMA
        | {"tie_word_embeddings": True, "sliding_window": 19}
        | {"rope_parameters": MLA_YARN | {"llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 5}},
        not_in_gguf="llama.cpp takes an mscale of 1, and the converter leaves out the window",
    ),
    "granite-biases": Case(
        "Granite", LLAMA | GRANITE | {"attention_bias": True, "mlp_bias": True, "hidden_act": "relu"}
    ),
    "granite": Case("Granite", LLAMA | GRANITE),
    "granitemoe": Case("GraniteMoe", MIXTRAL | GRANITE),
    "granite-hybrid": Case("GraniteMoeHybrid", GRANITE_HYBRID),
    "granite-hybrid-experts": Case(
        "GraniteMoeHybrid", GRANITE_HYBRID | {"num_local_experts": 5, "num_experts_per_tok": 2}
    ),
    "granite-hybrid-rope": Case(
        "GraniteMoeHybrid",
        GRANITE_HYBRID
        | {"position_embedding_type": "rope", "attention_bias": True, "num_local_experts": 5}
        | {"num_experts_per_tok": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "time_step_limit": [0.3, float("inf")]},
        not_in_gguf="llama.cpp has no biases and no rotation in layers without states",
    ),
    "smollm3-listed": Case(
        "SmolLM3",
        OLMO2 | {"no_rope_layers": [0, 1, 0, 1, 0], "attention_bias": True, "tie_word_embeddings": False},
        not_in_gguf="llama.cpp leaves every fourth layer without rotation",
    ),
    "smollm3": Case("SmolLM3", OLMO2 | {"num_hidden_layers": 4}),
    "nanochat": Case("NanoChat", OLMO2, not_in_gguf="llama.cpp has no such architecture"),
    "nanochat-uncapped": Case(
        "NanoChat",
        OLMO2 | {"final_logit_softcapping": None, "tie_word_embeddings": True},
        not_in_gguf="llama.cpp has no such architecture",
    ),
    "smallthinker": Case("SmallThinker", smallthinker.FIELDS, made=smallthinker.random_smallthinker),
    "smallthinker-softmax-tied": Case(
        "SmallThinker",
        smallthinker.FIELDS | {"moe_primary_router_apply_softmax": True, "tie_word_embeddings": True},
        made=smallthinker.random_smallthinker,
    ),
    "gemma3": Case("Gemma3Text", GEMMA3, {"layer_types": None, "sliding_window_pattern": 2}),
    "gemma3-listed": Case(
        "Gemma3Text",
        GEMMA3 | {"layer_types": ["full_attention", "sliding_attention"], "final_logit_softcapping": 2.0},
        not_in_gguf="llama.cpp has a window in five layers of six",
    ),
    "gemma4": Case(
        "Gemma4Text",
        GEMMA4 | TWO,
        GEMMA4_OLDER,
        not_in_gguf="llama.cpp's converter asks for the kind of each layer",
    ),
    "gemma4-listed": Case("Gemma4Text", GEMMA4),
    "gemma4-own-values": Case(
        "Gemma4Text",
        GEMMA4 | {"attention_k_eq_v": False, "attention_bias": True},
        not_in_gguf="llama.cpp has no biases for Gemma 4",
    ),
    "gemma4-experts": Case("Gemma4Text", GEMMA4_MOE),
    "gemma4-e": Case("Gemma4Text", GEMMA4_E),
    "gemma4-e-narrow": Case(
        "Gemma4Text",
        GEMMA4_E | {"use_double_wide_mlp": False, "attention_k_eq_v": True, "num_kv_shared_layers": 4},
    ),
    "gemma4-e-three": Case(
        "Gemma4Text",
        GEMMA4_E | {"num_kv_shared_layers": 3},
        not_in_gguf="llama.cpp reads the keys of the last two layers that have some, whatever their kinds",
    ),
    "gemma4-unified": Case(
        "Gemma4UnifiedText",
        {key: value for key, value in (GEMMA4 | TWO).items() if "per_layer" not in key},
        GEMMA4_OLDER,
        not_in_gguf="llama.cpp's converter takes the class that reads pictures too, and writes Gemma 4",
    ),
    "glm4-moe": Case("Glm4Moe", GLM),
    "glm4-moe-groups": Case(
        "Glm4Moe",
        GLM
        | {"n_group": 3, "topk_group": 2, "n_shared_experts": 2, "use_qk_norm": True, "attention_bias": True}
        | {"first_k_dense_replace": 0, "num_experts_per_tok": 3},
    ),
    "glm4-moe-unnormalised": Case("Glm4Moe", GLM | {"norm_topk_prob": False, "intermediate_size": 159}),
    "deepseek-v2-groups": Case(
        "DeepseekV2",
        MLA
        | {
            "kv_lora_rank": 22,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "attention_bias": True,
        },
        not_in_gguf="llama.cpp has no biases for DeepSeek",
    ),
    "deepseek-v2": Case("DeepseekV2", MLA | {"kv_lora_rank": 22, "q_lora_rank": None, "rope_parameters": MLA_YARN}),
    "deepseek-v3": Case("DeepseekV3", MLA | {"n_group": 3, "topk_group": 2, "rope_parameters": MLA_YARN}),
    "glm4-moe-lite": Case("Glm4MoeLite", GLM_LITE, {"mlp_layer_types": None, "first_k_dense_replace": 1}),
    "glm4-moe-lite-listed": Case("Glm4MoeLite", GLM_LITE),
    "qwen3-next": Case("Qwen3Next", DELTA_EXPERTS),
    "qwen3-next-dense": Case(
        "Qwen3Next",
        DELTA_EXPERTS
        | {"mlp_only_layers": [1], "norm_topk_prob": False, "shared_expert_intermediate_size": 106}
        | {"tie_word_embeddings": True, "layer_types": ["full_attention", "linear_attention"] * 2},
        not_in_gguf="llama.cpp has experts in every layer",
    ),
    "qwen3.5": Case("Qwen3_5", DELTA),
    "qwen3.5-tied": Case("Qwen3_5", DELTA | {"tie_word_embeddings": True, "linear_conv_kernel_dim": 3}),
    "qwen3.5-fatrelu": Case("Qwen3_5", DELTA, FATRELU, forced_threshold),
    "qwen3.5-moe": Case("Qwen3_5Moe", DELTA_EXPERTS),
    "qwen3.5-moe-fatrelu": Case("Qwen3_5Moe", DELTA_EXPERTS, FATRELU, forced_threshold),
    "lfm2": Case("Lfm2", LFM2),
    "lfm2-untied": Case(
        "Lfm2",
        {k: v for k, v in LFM2.items() if k not in ("layer_types", "block_auto_adjust_ff_dim")}
        | {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8}
        | {"full_attn_idxs": [0, 2], "conv_L_cache": 4, "tie_word_embeddings": False},
    ),
    "lfm2-moe": Case("Lfm2Moe", LFM2_MOE),
    "lfm2-moe-unbiased": Case(
        "Lfm2Moe",
        LFM2_MOE | {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.7},
        not_in_gguf="llama.cpp has a bias for choosing in every such model",
    ),
    "gpt-oss": Case("GptOss", GPT_OSS, {"layer_types": None}),
    "gpt-oss-listed": Case(
        "GptOss",
        GPT_OSS | {"layer_types": ["full_attention", "sliding_attention"], "attention_bias": False},
        not_in_gguf="llama.cpp has a window in every other layer",
    ),
    "arcee-biases": Case("Arcee", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "arcee": Case("Arcee", LLAMA),
    "bitnet": Case(
        "BitNet",
        OLMO2 | {"bos_token_id": 1},
        not_in_gguf="the converter rounds its weights, and BitNet is not read from GGUF",
    ),
    "phi3": Case("Phi3", PHI3),
    "phi3-window": Case("Phi3", PHI3 | {"sliding_window": 19, "num_key_value_heads": 6}),
    "nemotron-biases": Case("Nemotron", LLAMA | {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    "nemotron-h": Case("NemotronH", NEMOTRON_H),
    "nemotron-h-experts": Case("NemotronH", NEMOTRON_EXPERTS),
    "nemotron-h-latents": Case("NemotronH", NEMOTRON_EXPERTS | {"moe_latent_size": 21}),
    "nemotron-h-both": Case(
        "NemotronH",
        NEMOTRON_EXPERTS
        | {"layers_block_type": ["mlp", "moe", "full_attention", "linear_attention", "linear_attention"]}
        | {"intermediate_size": 123, "n_group": 3, "topk_group": 2, "norm_topk_prob": False, "conv_kernel": 3},
        not_in_gguf="llama.cpp has either experts or dense layers",
    ),
    "nemotron": Case("Nemotron", LLAMA | {"head_dim": 12, "partial_rotary_factor": 0.5}),
    "phi": Case("Phi", LLAMA | {"hidden_size": 60, "num_key_value_heads": 6, "partial_rotary_factor": 0.4}),
    "gpt2": Case("GPT2", GPT2),
    "gpt2-relu-wide": Case("GPT2", GPT2 | {"n_inner": None, "activation_function": "relu"}),
    "opt-350m": Case("OPT", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    "opt": Case("OPT", OPT),
    "opt-no-final-norm": Case("OPT", OPT | {"_remove_final_layer_norm": True, "tie_word_embeddings": False}),
    "falcon-40b": Case("Falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 3}),
    "falcon-7b": Case("Falcon", FALCON),
    "falcon-7b-biases": Case(
        "Falcon", FALCON | {"bias": True, "activation": "relu"}, not_in_gguf="llama.cpp has no biases for Falcon"
    ),
    "falcon-11b": Case(
        "Falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}
    ),
    "falcon-sequential": Case(
        "Falcon",
        FALCON | {"parallel_attn": False, "multi_query": False, "bias": True},
        not_in_gguf="the converter and llama.cpp have parallel blocks alone",
    ),
    "mixtral": Case("Mixtral", MIXTRAL),
    # Keys as in profiles/models/PowerInfer/Bamboo-base-v0_1/config.json (its model card has the FFN).
    "bamboo": Case(
        "Mistral",
        LLAMA | {"hidden_act": "relu", "sliding_window": 19, "rope_theta": 10000.0},
        OWN | {"model_type": "bamboo", "architectures": ["BambooForCausalLM"]},
        relu_twice,
    ),
    # The names of the predictors: `mlp.predictor.fc1.weight`, as loaders of TurboSparse-Mistral-Instruct report them.
    "turbosparse-mistral": Case(
        "Mistral",
        LLAMA | {"hidden_act": "relu", "sliding_window": 19},
        OWN | {"model_type": "bamboo", "architectures": ["BambooForCausalLM"]},
        relu_twice,
        predictors="model.layers.{layer}.mlp",
    ),
    # Names as in the published model.safetensors.index.json of PowerInfer/TurboSparse-Mixtral.
    "turbosparse-mixtral": Case(
        "Mixtral",
        MIXTRAL | {"hidden_act": "relu", "output_router_logits": True},
        OWN | {"model_type": "turbosparsemixtral", "architectures": ["TurboSparseMixtralForCausalLM"]},
        relu_twice,
        predictors="model.layers.{layer}.block_sparse_moe.experts.{expert}",
    ),
    # Keys as in profiles/models/SparseLLM/prosparse-llama-2-7b/config.json.
    "prosparse": Case(
        "Llama",
        LLAMA,
        OWN
        | {"model_type": "sparsellama", "architectures": ["SparseLlamaForCausalLM"]}
        | {**FATRELU, "max_length": 40},
        forced_threshold,
    ),
}

FAMILIES = dict(sorted({case.model_type: name for name, case in reversed(CASES.items())}.items()))
"""The first case of each family."""


def random_sizes(name: str, seed: int) -> dict[str, int]:
    """Fields that give a case other sizes."""
    rng, fields = np.random.default_rng(seed), CASES[name].fields
    layers, neurons, kv, group, context = (int(rng.integers(1, most)) for most in (4, 70, 4, 4, 50))
    # Where 0.4 or 0.5 of a head is rotated, that must be even.
    partial = CASES[name].model in ("Nemotron", "Phi", "Glm4Moe")
    heads, width = kv * group, 20 if partial else 2 * int(rng.integers(1, 8))
    match CASES[name].model:
        case "GPT2":
            sizes = {"n_layer": layers, "n_head": heads, "n_embd": heads * width, "n_positions": context}
            return sizes | {"n_inner": neurons}
        case "OPT":
            sizes = {"hidden_size": heads * width, "ffn_dim": neurons}
            sizes |= {key: int(rng.integers(1, 30)) for key in fields if key == "word_embed_proj_dim"}
        case "Falcon":
            sizes = {"hidden_size": heads * width, "ffn_hidden_size": neurons}
            sizes |= {key: kv for key in fields if key == "num_kv_heads"}
        case _:
            own_width = {"head_dim": width} if "head_dim" in fields else {}
            hidden = heads * (int(rng.integers(1, 9)) if own_width else width)
            sizes = {"hidden_size": hidden, "intermediate_size": neurons, "num_key_value_heads": kv, **own_width}
            if fields.get("layer_types"):
                layers = len(fields["layer_types"])
            own = "moe_intermediate_size", "moe_ffn_hidden_size", "shared_expert_intermediate_size"
            sizes |= {key: neurons for key in fields if key in own}
            twice = "moe_shared_expert_intermediate_size", "shared_intermediate_size"
            sizes |= {key: 2 * neurons for key in fields if key in twice}
            if "layers_block_type" in fields:
                layers = len(fields["layers_block_type"])
            if "mamba_n_heads" in fields:
                sizes |= {"mamba_n_heads": 2 * heads, "mamba_d_state": int(rng.integers(1, 20))}
            if "linear_num_key_heads" in fields:
                heads_2 = [int(n) for n in rng.integers(1, 4, 2)]
                sizes |= {"linear_num_key_heads": heads_2[0], "linear_num_value_heads": heads_2[0] * heads_2[1]}
                sizes |= {f"linear_{of}_head_dim": int(rng.integers(1, 20)) for of in ("key", "value")}
                sizes |= {"head_dim": 8 * int(rng.integers(1, 4)), "linear_conv_kernel_dim": int(rng.integers(1, 6))}
                sizes["intermediate_size"] = 2 * neurons + 1
                layers = max(layers, 4)
            if "kv_lora_rank" in fields:
                even = 2 if CASES[name].model == "DeepseekV2" else 1  # there its class asks for it
                lengths = {"kv_lora_rank": even, "v_head_dim": 1, "qk_nope_head_dim": even, "q_lora_rank": 1}
                drawn = {key: times * int(rng.integers(1, 30)) for key, times in lengths.items() if fields[key]}
                sizes |= drawn | {"num_key_value_heads": heads}
            if "n_routed_experts" in fields:
                sizes["intermediate_size"] = 2 * neurons + 1
            if "moe_latent_size" in fields:
                sizes["moe_latent_size"] = int(rng.integers(1, hidden + 1))
    common = {"num_hidden_layers": layers, "num_attention_heads": heads, "max_position_embeddings": context}
    return sizes | common


def random_checkpoint(
    folder: Path,
    name: str,
    *,
    tokenizer: bool = True,
    shard: str = "5GB",
    sizes: dict[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Save a random model of a case; returns the model that computes its logits."""
    case = CASES[name]
    case = replace(case, fields=deepcopy(case.fields) | (sizes or {}))
    if case.made:
        made = case.made(folder, case.fields, shard, dtype)
        if tokenizer:
            write_tokenizer(folder)
        return made
    of_text = "Text" if case.model.startswith("Qwen3_5") else ""
    config = getattr(tf, f"{case.model}{of_text}Config")(**case.fields)
    names = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM", "Gemma4Text": "Gemma4ForCausalLM"}
    names["Gemma4UnifiedText"] = "Gemma4UnifiedForCausalLM"
    model_class = getattr(tf, names.get(case.model, f"{case.model}ForCausalLM"))
    model = randomised(model_class(config))
    # The quick implementation of experts asks for rows of a multiple of 16 bytes.
    model.config._experts_implementation = "eager"
    save(model, folder, shard=shard, dtype=dtype)
    if case.own:
        edit_json(folder / "config.json", *(key for key, value in case.own.items() if value is None), **case.own)
    if case.predictors:
        _add_predictors(folder, case)
    if tokenizer:
        write_tokenizer(folder)
    if case.computes:
        case.computes(model)
    return model


def _add_predictors(folder: Path, case: Case) -> None:
    experts = case.fields.get("num_local_experts", 1)
    names = {
        case.predictors.format(layer=layer, expert=expert)
        for layer in range(case.fields["num_hidden_layers"])
        for expert in range(experts)
    }
    width, neurons = case.fields["hidden_size"], case.fields["intermediate_size"]
    shapes = {"fc1": (7, width), "fc2": (neurons, 7)}
    tensors = {f"{name}.predictor.{fc}.weight": torch.ones(shape) for name in names for fc, shape in shapes.items()}
    edit_tensors(folder, **{name.replace(".", "__"): tensor for name, tensor in tensors.items()})
