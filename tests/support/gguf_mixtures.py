"""GGUF files of mixtures of experts, as llama.cpp's converter writes them: what differs from other families."""

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
CASES: dict[str, tuple[str, dict[str, Any]]] = {
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


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that these architectures have besides the usual ones."""
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
