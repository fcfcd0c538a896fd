"""A small random SmallThinker, named as published, and its definition in NumPy: transformers has no class of it.

By the published modelling code: the router reads the residual that enters the layer, and the experts with the largest
values share the output by the sigmoids of these over their sum, or by a softmax.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from huggingface_hub import save_torch_state_dict

FIELDS: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 30,
    "moe_ffn_hidden_size": 21,
    "moe_num_primary_experts": 5,
    "moe_num_active_primary_experts": 2,
    "num_hidden_layers": 2,
    "rope_layout": [0, 1, 1],
    "sliding_window_layout": [0, 1, 1],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 40,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "moe_primary_router_apply_softmax": False,
    "sliding_window_size": 7,
    "eos_token_id": 2,
}


class SmallThinker:
    """The model with these config fields and tensors."""

    def __init__(self, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.fields = fields
        self.w = {name: tensor.to(torch.float64).numpy() for name, tensor in tensors.items()}

    def __call__(self, input_ids: torch.Tensor) -> SimpleNamespace:
        (ids,) = input_ids.numpy()
        c, x_TD = self.fields, self.w["model.embed_tokens.weight"][ids]
        for n in range(c["num_hidden_layers"]):
            at, rotated, windowed = (
                f"model.layers.{n}.",
                *(c[key][n] for key in ("rope_layout", "sliding_window_layout")),
            )
            router_TX = x_TD @ self.w[f"{at}block_sparse_moe.primary_router.weight"].T
            window = c["sliding_window_size"] if windowed else len(ids)
            x_TD = x_TD + self.attention(at, self.norm(f"{at}input_layernorm", x_TD), rotated, window)
            x_TD = x_TD + self.experts(at, self.norm(f"{at}post_attention_layernorm", x_TD), router_TX)
        head = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
        logits_TV = self.norm("model.norm", x_TD) @ self.w[head].T
        return SimpleNamespace(logits=torch.from_numpy(logits_TV[None].astype(np.float32)))

    def norm(self, name: str, x_TD: np.ndarray) -> np.ndarray:
        scale = np.sqrt((x_TD**2).mean(-1, keepdims=True) + self.fields["rms_norm_eps"])
        return x_TD / scale * self.w[f"{name}.weight"]

    def attention(self, at: str, x_TD: np.ndarray, rotated: int, window: int) -> np.ndarray:
        width, tokens = self.fields["head_dim"], np.arange(len(x_TD))
        q, k, v = ((x_TD @ self.w[f"{at}self_attn.{p}_proj.weight"].T).reshape(len(x_TD), -1, width) for p in "qkv")
        if rotated:
            angle = np.outer(tokens, self.fields["rope_theta"] ** (-np.arange(0, width, 2) / width))[:, None]
            q, k = (self.rotate(h, np.cos(angle), np.sin(angle)) for h in (q, k))
        k, v = (np.repeat(h, q.shape[1] // h.shape[1], 1) for h in (k, v))
        score_HTS = np.einsum("the,she->hts", q, k) / np.sqrt(width)
        behind_TS = tokens[:, None] - tokens
        score_HTS[:, (behind_TS < 0) | (behind_TS >= window)] = -np.inf
        mixed = np.einsum("hts,she->the", softmax(score_HTS), v)
        return mixed.reshape(len(x_TD), -1) @ self.w[f"{at}self_attn.o_proj.weight"].T

    @staticmethod
    def rotate(x_THE: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        a, b = np.split(x_THE, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def experts(self, at: str, x_TD: np.ndarray, router_TX: np.ndarray) -> np.ndarray:
        y_TD = np.zeros_like(x_TD)
        for t, value_X in enumerate(router_TX):
            taken_K = np.argsort(-value_X, kind="stable")[: self.fields["moe_num_active_primary_experts"]]
            share_K = 1 / (1 + np.exp(-value_X[taken_K]))
            share_K /= share_K.sum()
            if self.fields["moe_primary_router_apply_softmax"]:
                share_K = softmax(value_X[taken_K])
            for e, share in zip(taken_K, share_K, strict=True):
                gate, up, down = (
                    self.w[f"{at}block_sparse_moe.experts.{e}.{part}.weight"] for part in ("gate", "up", "down")
                )
                y_TD[t] += share * (down @ (np.maximum(gate @ x_TD[t], 0) * (up @ x_TD[t])))
        return y_TD


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(p / p.sum(-1, keepdims=True))


def random_smallthinker(folder: Path, fields: dict[str, Any], shard: str, dtype: torch.dtype) -> SmallThinker:
    """Save one and its config.json; returns the definition with the values as they are saved."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.2 + (1.0 if name.endswith("norm.weight") else 0)).to(dtype)
        for name, shape in _shapes(fields).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(tensors, folder, max_shard_size=shard)
    own = {"architectures": ["SmallThinkerForCausalLM"], "moe_enable_early_router": True, "model_type": "smallthinker"}
    (folder / "config.json").write_text(json.dumps(fields | own))
    return SmallThinker(fields, tensors)


def _shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, neurons, experts = c["hidden_size"], c["moe_ffn_hidden_size"], c["moe_num_primary_experts"]
    heads, kv = (c[f"num_{of}_heads"] * c["head_dim"] for of in ("attention", "key_value"))
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (heads, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, heads),
        "block_sparse_moe.primary_router": (experts, width),
    }
    for e in range(experts):
        expert = {"gate": (neurons, width), "up": (neurons, width), "down": (width, neurons)}
        layer |= {f"block_sparse_moe.experts.{e}.{part}": shape for part, shape in expert.items()}
    ends = {"model.embed_tokens": (c["vocab_size"], width), "model.norm": (width,)}
    if not c["tie_word_embeddings"]:
        ends["lm_head"] = (c["vocab_size"], width)
    layers = {f"model.layers.{n}.{name}": shape for n in range(c["num_hidden_layers"]) for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in {**ends, **layers}.items()}
