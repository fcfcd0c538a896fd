"""LFM2 and its mixtures: in most layers a short convolution, gated before and behind, stands in attention's place.

Its rows B, C and x stand in `in_proj`, one under the other. Queries and keys are normed. A mixture has dense layers
before the others, and chooses experts by sigmoid and a bias. Configs of the first models tell the FFN's width before
two thirds of it are taken, and rounded up. Source: `modeling_lfm2.py` and `modeling_lfm2_moe.py` of transformers.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import glm, llama
from pi_compile.checkpoint.families.adapter import (
    FusedRows,
    SourceTensor,
    Table,
    cut_ffn,
    experts_ffn,
    linear,
    separate_qkv,
    stored,
)
from pi_compile.checkpoint.families.fields import routed_experts, usual_decoder
from pi_runtime.artifact.decoder import Decoder

KINDS = ("conv", "full_attention")
NAMES = MappingProxyType({"rms_norm_eps": "norm_eps"})


def neurons(config: Config) -> int:
    """Neurons of an FFN, as a config tells them."""
    found = config.size("block_ff_dim", config.size("intermediate_size", 12288))
    if config.flag("block_auto_adjust_ff_dim", default=True):
        found = int(2 * found / 3)
        if config.fields.get("block_ffn_dim_multiplier", 1.0) is not None:
            multiple = config.size("block_multiple_of", 256)
            found = -(-int(config.number("block_ffn_dim_multiplier", 1.0) * found) // multiple) * multiple
    return found


def _recurrence(config: Config) -> dict[str, Any]:
    """The decoder's fields, by `layer_types`, else by the layers of `full_attn_idxs`, or none."""
    layers = config.size("num_hidden_layers")
    listed = config.get("full_attn_idxs", list(range(layers)))
    if not (isinstance(listed, list) and all(type(n) is int for n in listed)):
        raise config.error("full_attn_idxs", listed, expected=f"numbers of {layers} layers")
    kinds = config.get("layer_types", [KINDS[n in listed] for n in range(layers)])
    if not (isinstance(kinds, list) and len(kinds) == layers and all(k in KINDS for k in kinds) and KINDS[1] in kinds):
        expected = f"one of {', '.join(KINDS)} for each of {layers} layers, at least one of them attention"
        raise config.error("layer_types", kinds, expected=expected)
    width, heads = config.size("hidden_size"), config.size("num_attention_heads")
    heads = 1 if width % heads else heads  # which only tell threads what goes together
    columns, own = config.size("conv_L_cache", 3), tuple(n for n, kind in enumerate(kinds) if kind == KINDS[0])
    sizes = {"state_heads": heads, "state_value_dim": width // heads, "state_columns": columns}
    return {"recurrence": "short_conv", "recurrent_layers": own, **sizes} if own else {}


def _usual(config: Config, family: str, names: Mapping[str, str] = NAMES, **differences: Any) -> Decoder:
    ties = {"tie_word_embeddings": "tie_embedding"} if "tie_embedding" in config.fields else {}
    options = {"context": 128000, "n_kv_heads": 8, "norm_eps": 1e-5, "theta": 1e6, "tied": True, "qk_norm": True}
    return usual_decoder(config, family, names={**names, **ties}, **options | _recurrence(config) | differences)


def _decoder(config: Config) -> Decoder:
    config = config.with_fields({**config.fields, "intermediate_size": neurons(config)})
    return _usual(config, "lfm2")


def _mixture(config: Config) -> Decoder:
    """The decoder of a mixture, the first of whose layers are dense."""
    config = config.with_fields({"norm_topk_prob": True, "moe_intermediate_size": 1792, **config.fields})
    count, biased = config.size("num_dense_layers", 2, least=0), config.flag("use_expert_bias", default=True)
    dense = tuple(range(min(count, config.size("num_hidden_layers"))))
    found = _usual(
        config, "lfm2_moe", {**NAMES, "intermediate_size": "moe_intermediate_size"},
        router_score="sigmoid", router_choice_bias=biased, router_scale=config.number("routed_scaling_factor", 1.0),
        dense_layers=dense, dense_ff=config.size("intermediate_size", 7168) if dense else 0,
        **routed_experts(config, 32, per_token=4),
    )  # fmt: skip
    glm.check(config, found)
    return found


def in_proj(name: str, d: Decoder) -> Table:
    """The arrays of a convolution's first matrix: B and C of its rows are factors, x is what it reads."""
    width = d.mixed_width
    parts = {"attention/gate": (0, 2 * width), "attention/qkv": (2 * width, 3 * width)}
    return {array: (SourceTensor(name, rows=FusedRows(1, 3 * width, *ends)),) for array, ends in parts.items()}


def _mixer(d: Decoder) -> Table:
    layer = "layers.{n}"
    norms = {"attention/norm/weight": stored(f"{layer}.operator_norm.weight")}
    norms["ffn/norm/weight"] = stored(f"{layer}.ffn_norm.weight")
    if not d.recurs:
        block = f"{layer}.self_attn"
        heads = {f"attention/{part}_norm": stored(f"{block}.{part}_layernorm.weight") for part in "qk"}
        return {**norms, **heads, **separate_qkv(block), **linear("attention/out", f"{block}.out_proj")}
    conv = FusedRows(1, d.qkv_width, 0, d.qkv_width, transposed=True)
    return {
        **norms,
        **in_proj(f"{layer}.conv.in_proj.weight", d),
        "attention/conv": (SourceTensor(f"{layer}.conv.conv.weight", rows=conv, stacked=d.qkv_width),),
        "attention/out": stored(f"{layer}.conv.out_proj.weight"),
    }


def _layer(d: Decoder) -> Table:
    mlp, parts = "layers.{n}.feed_forward", ("w1", "w3", "w2")
    if d.experts_per_token == d.experts_shared or d.n_experts == 1:
        names = [f"{mlp}.{part}.weight" for part in parts]
        return {**_mixer(d), **cut_ffn(names, d.dense_ff or d.d_ff, d.d_ff, d.n_experts)}
    routed = experts_ffn(d.n_experts, mlp, *parts)
    return {**_mixer(d), **routed, "ffn/router_choice_bias": stored(f"{mlp}.expert_bias")}


_KEYS = """
    block_ff_dim block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of full_attn_idxs layer_types
    conv_L_cache norm_eps tie_embedding
"""
_WITHOUT_EFFECT = """
    block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init conv_dim
    conv_dim_out conv_use_xavier_init num_heads use_pos_enc
"""
"""Keys of the first configs that transformers does not read."""
_MOE_KEYS = """
    moe_intermediate_size num_dense_layers num_experts num_local_experts num_experts_per_tok use_expert_bias
    routed_scaling_factor norm_topk_prob
"""
LFM2 = replace(
    llama.ADAPTER,
    family="lfm2",
    architectures=("Lfm2ForCausalLM", "LFM2ForCausalLM", "Lfm2Model"),
    global_tensors={**llama.ADAPTER.global_tensors, "final_norm/weight": stored("embedding_norm.weight")},
    layer_tensors=_layer,
    read_keys=llama.KEYS - {"hidden_act", "hidden_act_param", "rms_norm_eps"}
    | {*_KEYS.split(), *_WITHOUT_EFFECT.split()},
    neutral_keys={"hidden_act": ("silu",), "conv_bias": (False,)},
    decoder=_decoder,
)
LFM2_MOE = replace(
    LFM2,
    family="lfm2_moe",
    architectures=("Lfm2MoeForCausalLM", "Lfm2MoeModel"),
    read_keys=LFM2.read_keys | {*_MOE_KEYS.split()},
    decoder=_mixture,
)
