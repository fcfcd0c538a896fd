"""GGUF files of architectures that are more than a Llama, as llama.cpp's converter writes them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from support import smallthinker
from support.hf import edit_tensors

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
GLM = {
    "num_hidden_layers": 3,
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 64,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}
SMALLTHINKER = smallthinker.FIELDS | {
    "hidden_size": 64,
    "moe_ffn_hidden_size": 96,
    "num_hidden_layers": 5,
    "sliding_window_size": 4096,
    "rope_layout": [0, 1, 1, 1, 0],
    "sliding_window_layout": [0, 1, 1, 1, 0],
}
MLA = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 64,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "rope_parameters": YARN | {"mscale": 0.9, "mscale_all_dim": 0.9},
}
GEMMA3 = {"num_hidden_layers": 7, "sliding_window": 9, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.5, 1.7, 2.0, 2.2, 2.5, 3.0],
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 40,
    "attention_factor": 1.25,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": ("DeepseekV2", MLA),
    "deepseek-v2-groups": (
        "DeepseekV2",
        MLA | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "q_lora_rank": 64},
    ),
    "deepseek-v3": ("DeepseekV3", MLA | {"n_group": 3, "topk_group": 2}),
    "gemma3": ("Gemma3Text", GEMMA3),
    "gemma3-capped": (
        "Gemma3Text",
        GEMMA3
        | {"final_logit_softcapping": 3.0}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
            }
        },
    ),
    "phi3": ("Phi3", {"head_dim": None, "pad_token_id": 0}),
    "phi3-longrope": (
        "Phi3",
        {"head_dim": None, "pad_token_id": 0, "max_position_embeddings": 80, "original_max_position_embeddings": 40}
        | {"rope_parameters": LONGROPE},
    ),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7, "num_hidden_layers": 3}
        | {"rope_parameters": YARN},
    ),
    "glm4-moe": ("Glm4Moe", GLM),
    "glm4-moe-biases": (
        "Glm4Moe",
        GLM
        | {"attention_bias": True, "use_qk_norm": True, "n_shared_experts": 2, "norm_topk_prob": False}
        | {"first_k_dense_replace": 0},
    ),
    "smallthinker": ("SmallThinker", SMALLTHINKER),
    "smallthinker-softmax": (
        "SmallThinker",
        SMALLTHINKER
        | {"moe_primary_router_apply_softmax": True, "rope_layout": [1] * 5, "sliding_window_layout": [0] * 5},
    ),
}


def rounded_smallthinker(
    folder: Path, fields: dict[str, Any], held: Callable[[str, np.ndarray], np.ndarray]
) -> smallthinker.SmallThinker:
    """Save a random one with values as `held`; returns its definition."""
    smallthinker.random_smallthinker(folder, fields, "5GB", torch.float32)
    tensors = {
        name: torch.from_numpy(held(name, tensor.numpy()))
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    edit_tensors(folder, **{name.replace(".", "__"): tensor for name, tensor in tensors.items()})
    return smallthinker.SmallThinker(fields, tensors)


def told_apart(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One tensor for each of an expert's matrices and biases where gpt-oss joins them; names with an ending for all."""
    found: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        layer, _, part = name.partition("experts.")
        kind = "bias" if part.endswith("_bias") else "weight"
        if part.startswith("gate_up_proj"):
            for e, joined in enumerate(values):
                rows = joined if kind == "bias" else joined.T
                found |= {f"{layer}experts.{e}.{of}_proj.{kind}": rows[n::2] for n, of in enumerate(("gate", "up"))}
        elif part in ("down_proj", "down_proj_bias"):
            found |= {f"{layer}experts.{e}.down_proj.{kind}": matrix.T for e, matrix in enumerate(values)}
        elif name.endswith("e_score_correction_bias"):
            found[name.replace("correction_bias", "correction.bias")] = values
        else:
            found[f"{name}.weight" if name.endswith("sinks") else name] = values
    return {name: np.ascontiguousarray(values) for name, values in found.items()}


def heads_apart(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What makes keys of DeepSeek's latent, turned, and what makes values: a matrix for each head."""
    found: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        if "kv_b_proj" in name:
            whole = values.reshape(config["num_attention_heads"], -1, values.shape[-1])
            keys, made = np.split(whole, [config["qk_nope_head_dim"]], axis=1)
            found |= {name.replace("kv_b", "k_b"): keys.swapaxes(1, 2), name.replace("kv_b", "v_b"): made}
        else:
            found[name] = values
    return {name: np.ascontiguousarray(values) for name, values in found.items()}


def _of_latents(config: Mapping[str, Any]) -> dict[str, Any]:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        "ARCH.attention.head_count_kv": 1,
        "ARCH.attention.q_lora_rank": config["q_lora_rank"],
        "ARCH.attention.kv_lora_rank": rank,
        "ARCH.attention.key_length": rank + rotated,
        "ARCH.attention.value_length": rank,
        "ARCH.attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "ARCH.attention.value_length_mla": config["v_head_dim"],
        "ARCH.rope.dimension_count": rotated,
        "ARCH.rope.scaling.yarn_log_multiplier": 0.1 * config["rope_parameters"]["mscale_all_dim"],
        "ARCH.leading_dense_block_count": config["first_k_dense_replace"],
        "ARCH.expert_count": config["n_routed_experts"],
        "ARCH.expert_shared_count": config["n_shared_experts"],
        "ARCH.expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1,
        "ARCH.expert_weights_scale": float(config["routed_scaling_factor"]),
        "ARCH.expert_weights_norm": config["norm_topk_prob"] or None,
        "ARCH.expert_group_count": config["n_group"],
        "ARCH.expert_group_used_count": config["topk_group"],
    }


def _of_gemma(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "ARCH.attention.sliding_window": config["sliding_window"],
        "ARCH.rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "ARCH.final_logit_softcapping": config["final_logit_softcapping"],
        "ARCH.rope.dimension_count": None,
    }


_MADE = {"gemma3_text": _of_gemma, "deepseek_v2": _of_latents, "deepseek_v3": _of_latents}


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that these architectures have besides the usual ones."""
    if config["model_type"] in _MADE:
        return _MADE[config["model_type"]](config)
    match config["model_type"]:
        case "gpt_oss":
            return {"ARCH.attention.sliding_window": config["sliding_window"], "ARCH.expert_feed_forward_length": 96}
        case "glm4_moe":
            return {
                "ARCH.expert_count": config["n_routed_experts"],
                "ARCH.expert_shared_count": config["n_shared_experts"],
                "ARCH.leading_dense_block_count": config["first_k_dense_replace"],
                "ARCH.expert_gating_func": 2,
                "ARCH.expert_weights_scale": float(config["routed_scaling_factor"]),
                "ARCH.expert_weights_norm": config["norm_topk_prob"],
                "ARCH.expert_group_count": config["n_group"],
                "ARCH.expert_group_used_count": config["topk_group"],
                "ARCH.nextn_predict_layers": 0,
            }
        case "phi3":
            rope = config["rope_parameters"]
            return {
                "ARCH.attention.sliding_window": 0,
                "ARCH.rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
                "ARCH.rope.scaling.attn_factor": rope.get("attention_factor"),
            }
        case "smallthinker":
            return {
                "ARCH.expert_count": config["moe_num_primary_experts"],
                "ARCH.expert_used_count": config["moe_num_active_primary_experts"],
                "ARCH.expert_feed_forward_length": config["moe_ffn_hidden_size"],
                "ARCH.feed_forward_length": config["moe_ffn_hidden_size"],
                "ARCH.expert_gating_func": 1 if config["moe_primary_router_apply_softmax"] else 2,
                "ARCH.attention.sliding_window": config["sliding_window_size"]
                if any(config["sliding_window_layout"])
                else None,
                "ARCH.rope.freq_base": config["rope_theta"],
            }
    return {}
