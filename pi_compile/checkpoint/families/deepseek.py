"""DeepSeek V2 and V3, and GLM-4.7-Flash: keys and values of all heads are made of one latent, which the cache holds.

`kv_b_proj` is stored as attention reads it: head by head what makes keys, turned, and what makes values. Rotated rows
are interleaved in a checkpoint, and stand in halves here. Experts are those of GLM 4.5; V2 chooses them by a softmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import glm, llama, rope
from pi_compile.checkpoint.families.adapter import FusedRows, SourceTensor, Table, stored
from pi_compile.checkpoint.families.fields import biases, usual_decoder
from pi_runtime.artifact.decoder import Decoder

_V2 = glm.Routed(count=64, per_token=None, shared=2, dense_ff=11008)
_V3 = glm.Routed(count=256, scale=2.5, dense_ff=18432)
_LITE = glm.Routed(count=64, per_token=4, scale=1.8, dense_ff=10240)
_ATTENTION = "layers.{n}.self_attn"


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What a family takes for missing keys of its attention."""

    query_rank: int = 1536
    plain: int = 128
    value_dim: int = 128


def _decoder(config: Config, family: str, missing: _Sizes = _Sizes(), **differences: Any) -> Decoder:
    has_rank = config.fields.get("q_lora_rank", missing.query_rank) is not None
    query_rank = config.size("q_lora_rank", missing.query_rank) if has_rank else 0
    bias = config.flag("attention_bias", default=False)
    if bias and not query_rank:
        raise config.error("attention_bias", bias, expected="false where q_lora_rank is null")
    if not config.flag("rope_interleave", default=True):
        raise config.error("rope_interleave", False, expected="true: rotated rows are interleaved")
    found = usual_decoder(
        config,
        family,
        names=glm.names(config) | {"head_dim": "qk_rope_head_dim"},
        head_width=64,
        **biases(attention=bias, ffn=False),
        **differences,
    )
    if found.n_kv_heads != found.n_heads:
        raise config.error("num_key_value_heads", found.n_kv_heads, expected=f"{found.n_heads}, as many as heads")
    config.check_derived("head_dim", found.head_dim, "qk_rope_head_dim")
    found = replace(
        found,
        n_kv_heads=1,
        head_dim=config.size("qk_nope_head_dim", missing.plain) + found.head_dim,
        latent_rank=config.size("kv_lora_rank", 512),
        query_rank=query_rank,
        value_dim=config.size("v_head_dim", missing.value_dim),
        score_scale=rope.score_scale(config),
    )
    glm.check(config, found)
    return found


def _v2(config: Config) -> Decoder:
    has_groups = config.choice("topk_method", "greedy", {"greedy": "", "group_limited_greedy": "groups"})
    groups = {"router_groups": "n_group", "router_groups_taken": "topk_group"} if has_groups else {}
    sizes: dict[str, Any] = {ours: config.size(theirs) for ours, theirs in groups.items()}
    return _decoder(
        config,
        "deepseek_v2",
        router_normalised=False,
        router_group_top=1 if sizes.get("router_groups", 1) > 1 else 2,
        **sizes,
        **glm.routed(config, glm.first_layers(config, 0), _V2),
    )


def _v3(config: Config) -> Decoder:
    options = glm.by_sigmoid(config, 8, 4) | glm.routed(config, glm.first_layers(config, 3), _V3)
    return _decoder(config, "deepseek_v3", context=4096, n_kv_heads=128, **options)


def _glm_lite(config: Config) -> Decoder:
    options = glm.by_sigmoid(config) | glm.routed(config, _dense_layers(config), _LITE)
    sizes = _Sizes(query_rank=768, plain=192, value_dim=256)
    return _decoder(config, "glm4_moe_lite", sizes, context=202752, n_kv_heads=20, norm_eps=1e-5, **options)


def _dense_layers(config: Config) -> Sequence[int]:
    kinds, layers = config.get("mlp_layer_types"), config.size("num_hidden_layers")
    if kinds is None:
        return glm.first_layers(config, 1)
    if not (isinstance(kinds, list) and len(kinds) == layers and all(kind in ("dense", "sparse") for kind in kinds)):
        raise config.error("mlp_layer_types", kinds, expected=f"dense or sparse for each of {layers} layers")
    return [n for n, kind in enumerate(kinds) if kind == "dense"]


def _in_halves(name: str, groups: int, size: int, plain: int) -> tuple[SourceTensor, ...]:
    """The rows of each group that are not rotated, then the first halves of the others, then the second ones."""
    cuts = (0, plain, 1), (plain, size, 2), (plain + 1, size, 2)
    return tuple(SourceTensor(name, rows=FusedRows(groups, size, *cut)) for cut in cuts)


def layer_tensors(d: Decoder) -> Table:
    """The tensors of a layer."""
    heads, rank, plain = d.n_heads, d.latent_rank, d.head_dim - d.rotary_dim
    found: dict[str, tuple[SourceTensor, ...]] = {}
    for array, part in (("attention/qkv", "weight"), ("attention/qkv_bias", "bias")):
        if d.query_rank:
            rows = FusedRows(1, d.query_rank, 0, d.query_rank)
            queries: tuple[SourceTensor, ...] = (SourceTensor(f"{_ATTENTION}.q_a_proj.{part}", rows=rows),)
        else:
            queries = _in_halves(f"{_ATTENTION}.q_proj.{part}", heads, d.head_dim, plain)
        found[array] = queries + _in_halves(f"{_ATTENTION}.kv_a_proj_with_mqa.{part}", 1, d.cached_width, rank)
    both = f"{_ATTENTION}.kv_b_proj.weight"
    size = plain + d.value_dim
    return {
        **{name: tensors for name, tensors in llama.ATTENTION.items() if "qkv" not in name},
        **found,
        "attention/q_norm": stored(f"{_ATTENTION}.q_a_layernorm.weight"),
        "attention/q_up": _in_halves(f"{_ATTENTION}.q_b_proj.weight", heads, d.head_dim, plain),
        "attention/k_norm": stored(f"{_ATTENTION}.kv_a_layernorm.weight"),
        "attention/k_up": (SourceTensor(both, rows=FusedRows(heads, size, 0, plain, transposed=True)),),
        "attention/v_up": (SourceTensor(both, rows=FusedRows(heads, size, plain, size)),),
        **glm.ffn(d),
    }


_KEYS = """
    qk_rope_head_dim qk_nope_head_dim v_head_dim kv_lora_rank q_lora_rank qk_head_dim
    rope_interleave aux_loss_alpha seq_aux ep_size topk_method
"""
DEEPSEEK_V3 = replace(
    glm.ADAPTER,
    family="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM", "DeepseekV3Model"),
    layer_tensors=layer_tensors,
    read_keys=(glm.KEYS | {*_KEYS.split()}) - {"topk_method"},
    neutral_keys={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    decoder=_v3,
)
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    family="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM", "DeepseekV2Model"),
    read_keys=(glm.KEYS | {*_KEYS.split()}) - {"norm_topk_prob"},
    neutral_keys={"scoring_func": ("softmax",), "moe_layer_freq": (1,), "norm_topk_prob": (False,)},
    decoder=_v2,
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    family="glm4_moe_lite",
    architectures=("Glm4MoeLiteForCausalLM", "Glm4MoeLiteModel"),
    read_keys=DEEPSEEK_V3.read_keys | {"mlp_layer_types"},
    decoder=_glm_lite,
)
