"""GLM 4.5 and later: experts chosen by sigmoid and a bias, a shared one, and dense layers before the others.

The shared experts, one FFN, stand behind the others as experts that every token takes. So does the FFN of a dense
layer, cut into experts; the experts before these are zeros. The layer behind the last drafts tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama
from pi_compile.checkpoint.families.adapter import Table, cut_ffn, draft_layer, experts_ffn, stored
from pi_compile.checkpoint.families.fields import biases, experts, usual_decoder
from pi_runtime.artifact.decoder import Decoder

_PARTS = ("gate_proj", "up_proj", "down_proj")
_NAMES = {"intermediate_size": "moe_intermediate_size", "num_local_experts": "n_routed_experts"}


def names(config: Config) -> dict[str, str]:
    """The keys of experts under Mixtral's names, which newer versions of transformers write for some of them."""
    return {ours: name for ours, name in _NAMES.items() if ours not in config.fields or ours == "intermediate_size"}


@dataclass(frozen=True, kw_only=True)
class Routed:
    """What a family takes for missing keys of its experts."""

    count: int = 128
    per_token: int | None = 8
    """None where the key must be there."""
    shared: int = 1
    scale: float = 1.0
    dense_ff: int = 10944


def routed(config: Config, dense: Sequence[int], missing: Routed) -> dict[str, Any]:
    """The fields of experts and dense layers."""
    found: dict[str, Any] = experts(
        config.renamed(names(config)), "num_local_experts", missing.count, per_token=missing.per_token
    )
    shared = config.size("n_shared_experts", missing.shared, least=0)
    return {
        "router_scale": config.number("routed_scaling_factor", missing.scale),
        "experts_shared": shared,
        "dense_layers": tuple(dense),
        "dense_ff": config.size("intermediate_size", missing.dense_ff) if dense else 0,
        **{name: number + shared for name, number in found.items()},
    }


def by_sigmoid(config: Config, groups: int = 1, taken: int = 1) -> dict[str, Any]:
    """The fields of a router by sigmoid, with a bias for choosing."""
    return {
        "router_score": "sigmoid",
        "router_normalised": config.flag("norm_topk_prob", default=True),
        "router_choice_bias": True,
        "router_groups": config.size("n_group", groups),
        "router_groups_taken": config.size("topk_group", taken),
    }


def first_layers(config: Config, default: int) -> Sequence[int]:
    """The dense layers, which stand before the others."""
    return range(min(config.size("first_k_dense_replace", default, least=0), config.size("num_hidden_layers")))


def _decoder(config: Config) -> Decoder:
    found = usual_decoder(
        config,
        "glm4_moe",
        names=names(config),
        context=131072,
        n_kv_heads=8,
        norm_eps=1e-5,
        partial=0.5,
        qk_norm=config.flag("use_qk_norm", default=False),
        **routed(config, first_layers(config, 1), Routed()),
        **by_sigmoid(config),
        **biases(attention=False, ffn=False) | {"qkv_bias": config.flag("attention_bias", default=False)},
    )
    check(config, found)
    return found


def check(config: Config, d: Decoder) -> None:
    """Raise CheckpointError for dense layers or groups of experts that do not fit."""
    if d.dense_experts > d.n_experts:
        most = d.n_experts * d.d_ff
        remedy = "its dense layers are cut into experts, of which they have no more than the other layers"
        raise config.error("intermediate_size", d.dense_ff, expected=f"at most {most}", remedy=remedy)
    groups, taken = d.router_groups, d.experts_per_token - d.experts_shared
    size = d.experts_routed // groups
    fits = size * groups == d.experts_routed and size >= d.router_group_top and taken <= size * d.router_groups_taken
    if groups > 1 and not fits:
        raise config.error("n_group", groups, expected=f"groups of {d.experts_routed} experts, enough for {taken}")
    if d.router_groups_taken > groups:
        raise config.error("topk_group", d.router_groups_taken, expected=f"at most {groups} groups")


def _names(block: str) -> list[str]:
    return [f"{block}.{part}.weight" for part in _PARTS]


def _layer(d: Decoder) -> Table:
    return {**llama.ATTENTION, **ffn(d)}


def ffn(d: Decoder) -> Table:
    """The arrays of a layer's experts, or of its dense FFN."""
    mlp = "layers.{n}.mlp"
    if d.experts_per_token == d.experts_shared:
        return cut_ffn(_names(mlp), d.dense_ff, d.d_ff, d.n_experts)
    routed = experts_ffn(d.experts_routed, mlp, *_PARTS)
    always = cut_ffn(_names(f"{mlp}.shared_experts"), d.experts_shared * d.d_ff, d.d_ff, d.experts_shared)
    return {
        "ffn/router": routed["ffn/router"],
        "ffn/router_choice_bias": stored(f"{mlp}.gate.e_score_correction_bias"),
        **{name: routed[name] + tensors for name, tensors in always.items()},
    }


_KEYS = """
    attention_bias moe_intermediate_size n_routed_experts num_local_experts
    num_experts_per_tok n_shared_experts norm_topk_prob routed_scaling_factor n_group topk_group first_k_dense_replace
    num_nextn_predict_layers num_mtp_layers
"""
KEYS = llama.KEYS | {*_KEYS.split()}
"""Config keys that are read here."""
ADAPTER = replace(
    llama.ADAPTER,
    family="glm4_moe",
    architectures=("Glm4MoeForCausalLM", "Glm4MoeModel"),
    layer_tensors=_layer,
    read_keys=KEYS | {"use_qk_norm", "partial_rotary_factor"},
    draft_layer=draft_layer("layers.{n}", "shared_head.norm", "shared_head.head"),
    decoder=_decoder,
)
