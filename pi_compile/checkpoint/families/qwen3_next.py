"""Qwen3-Next, and Qwen3.5 and later as text: in most layers the gated delta rule stands in attention's place.

Attention's output is multiplied by the sigmoid of a gate, whose rows stand in `q_proj` behind each head's queries.
Norms multiply by 1 + weight, but for that of the states' sums. A shared expert has a gate. Qwen3-Next stores what the
delta rule reads in two tensors, by heads of keys; later ones in four. A config of Qwen3.5 holds the text's own in
`text_config`. Layers that draft tokens, and what reads pictures, are passed over.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import glm, llama, mixtral, qwen
from pi_compile.checkpoint.families.adapter import FusedRows, SourceTensor, Table, cut_ffn, experts_ffn, stored
from pi_compile.checkpoint.families.fields import DRELU, FATRELU, routed_experts, usual_decoder
from pi_runtime.artifact.decoder import Decoder

KINDS = ("linear_attention", "full_attention")
_SIZES = {
    "state_heads": ("num_value_heads", 32),
    "state_key_heads": ("num_key_heads", 16),
    "state_key_dim": ("key_head_dim", 128),
    "state_value_dim": ("value_head_dim", 128),
    "state_columns": ("conv_kernel_dim", 4),
}
"""The decoder's field → the config's key behind `linear_`, and what stands for a missing one."""
_ACTIVATIONS = ("silu", "swish", DRELU, FATRELU)
"""Of FFNs: transformers computes the convolution of states with the FFNs' own, which for the last two is SiLU still."""
_SECTIONS = ("mrope_section", "mrope_interleaved")
"""Rope parameters by which the angles of pictures differ; those of text are the usual ones."""


def _recurrence(config: Config) -> dict[str, Any]:
    """The decoder's fields, by `layer_types`, else by every how manieth layer has attention."""
    layers, every = config.size("num_hidden_layers"), config.size("full_attention_interval", 4)
    kinds = config.get("layer_types", [KINDS[(n + 1) % every == 0] for n in range(layers)])
    if not (isinstance(kinds, list) and len(kinds) == layers and {*kinds} <= {*KINDS} and KINDS[1] in kinds):
        expected = f"one of {', '.join(KINDS)} for each of {layers} layers, and any with attention"
        raise config.error("layer_types", kinds, expected=expected)
    sizes = {field: config.size(f"linear_{name}", default) for field, (name, default) in _SIZES.items()}
    heads, keys = sizes["state_heads"], sizes["state_key_heads"]
    if heads % keys:
        raise config.error("linear_num_value_heads", heads, expected=f"a multiple of {keys} heads of keys")
    own, act = tuple(n for n, kind in enumerate(kinds) if kind == KINDS[0]), config.get("hidden_act", "silu")
    if own and act not in _ACTIVATIONS:
        raise config.error("hidden_act", act, expected="silu, which the convolution of layers with a state has too")
    return {"recurrence": "gated_delta", "recurrent_layers": own, **sizes} if own else {}


def decoder(config: Config, family: str, **differences: Any) -> Decoder:
    """The decoder that a config describes, whose experts are among the differences."""
    rotary = config.get("rope_parameters", {})
    if isinstance(rotary, dict):
        rotary = {key: value for key, value in rotary.items() if key not in _SECTIONS}
        config = config.with_fields({**config.fields, "rope_parameters": rotary or None})
    options = {"context": 32768, "head_width": 256, "partial": 0.25, "qk_norm": True, "output_gate": True}
    return usual_decoder(config, family, **options | _recurrence(config) | differences)


def mixture(config: Config, family: str, count: int, per_token: int, **differences: Any) -> Decoder:
    """The decoder of a model with experts, of which a token takes the shared ones too."""
    routed: dict[str, Any] = routed_experts(config, count, per_token=per_token)
    of_expert = config.size("moe_intermediate_size", 512)
    together = config.size("shared_expert_intermediate_size", 512)
    if (shared := together // of_expert) * of_expert != together:
        expected = f"a multiple of {of_expert}, the neurons of an expert"
        raise config.error("shared_expert_intermediate_size", together, expected=expected)
    routed |= {name: routed[name] + shared for name in ("n_experts", "experts_per_token")}
    names = {"intermediate_size": "moe_intermediate_size"}
    config = config.with_fields({"moe_intermediate_size": of_expert, **config.fields})
    options = {"names": names, "n_kv_heads": 2, "experts_shared": shared, "shared_gate": True}
    return decoder(config, family, **options | routed | differences)


def _next(config: Config) -> Decoder:
    """Qwen3-Next, some of whose layers may be dense."""
    layers, step = config.size("num_hidden_layers"), config.size("decoder_sparse_step", 1)
    listed = config.get("mlp_only_layers", [])
    if not (isinstance(listed, list) and all(type(n) is int for n in listed)):
        raise config.error("mlp_only_layers", listed, expected=f"numbers of {layers} layers")
    dense = tuple(n for n in range(layers) if n in listed or (n + 1) % step)
    neurons = config.size("intermediate_size", 5632) if dense else 0
    normalised = {"router_normalised": config.flag("norm_topk_prob", default=True)}
    found = mixture(config, "qwen3_next", 512, 10, dense_layers=dense, dense_ff=neurons, **normalised)
    glm.check(config, found)
    return found


def norm(name: str) -> tuple[SourceTensor, ...]:
    """A norm whose weight is one less than its factor."""
    return (SourceTensor(f"{name}.weight", addend=1.0),)


def _mixer(d: Decoder, *, fused: bool = False) -> Table:
    """The arrays of attention, or of what stands in its place, and both norms."""
    norms = {"attention/norm/weight": "input_layernorm", "ffn/norm/weight": "post_attention_layernorm"}
    found = {array: norm(f"layers.{{n}}.{name}") for array, name in norms.items()}
    if not d.recurs:
        block, width = "layers.{n}.self_attn", d.head_dim
        q, gate = (
            SourceTensor(f"{block}.q_proj.weight", rows=FusedRows(d.n_heads, 2 * width, first, first + width))
            for first in (0, width)
        )
        return {
            **found,
            "attention/qkv": (q, *stored(f"{block}.k_proj.weight", f"{block}.v_proj.weight")),
            "attention/gate": (gate,),
            "attention/q_norm": norm(f"{block}.q_norm"),
            "attention/k_norm": norm(f"{block}.k_norm"),
            "attention/out": stored(f"{block}.o_proj.weight"),
        }
    block, shared = "layers.{n}.linear_attn", d.state_heads // d.state_key_heads
    conv = FusedRows(1, d.qkv_width, 0, d.qkv_width, transposed=True)
    found |= {
        "attention/qkv": stored(f"{block}.in_proj_qkv.weight"),
        "attention/gate": stored(f"{block}.in_proj_z.weight"),
        "attention/gates": stored(f"{block}.in_proj_b.weight", f"{block}.in_proj_a.weight"),
        "attention/conv": (SourceTensor(f"{block}.conv1d.weight", rows=conv, stacked=d.qkv_width),),
        "attention/decay": (SourceTensor(f"{block}.A_log", function="exp"),),
        "attention/decay_bias": stored(f"{block}.dt_bias"),
        "attention/state_norm": stored(f"{block}.norm.weight"),
        "attention/out": stored(f"{block}.out_proj.weight"),
    }
    if fused:  # of each head of keys: query, key, values, z; and b, a
        values = shared * d.state_value_dim
        *qkv, z = parts_of_groups(
            f"{block}.in_proj_qkvz.weight", d.state_key_heads, d.state_key_dim, d.state_key_dim, values, values
        )
        gates = parts_of_groups(f"{block}.in_proj_ba.weight", d.state_key_heads, shared, shared)
        found |= {"attention/qkv": tuple(qkv), "attention/gate": (z,), "attention/gates": gates}
    return found


def parts_of_groups(name: str, groups: int, *sizes: int) -> tuple[SourceTensor, ...]:
    """The parts of a tensor in which each group has rows of them all."""
    ends = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    cuts = (FusedRows(groups, ends[-1], first, stop) for first, stop in pairwise(ends))
    return tuple(SourceTensor(name, rows=rows) for rows in cuts)


def _mixture_layer(d: Decoder, *, fused: bool = False, stacked: bool = False) -> Table:
    """A layer with experts, each stored apart, or `stacked` in tensors of all; or a dense one."""
    mlp, parts, found = "layers.{n}.mlp", ("gate_proj", "up_proj", "down_proj"), _mixer(d, fused=fused)
    if d.experts_per_token == d.experts_shared:
        return {**found, **glm.ffn(d)}
    names = [f"{mlp}.shared_expert.{part}.weight" for part in parts]
    always = cut_ffn(names, d.experts_shared * d.d_ff, d.d_ff, d.experts_shared)
    routed = experts_ffn(d.experts_routed, mlp, *parts)
    if stacked:
        routed |= stacked_experts(f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj", d)
    gate = stored(f"{mlp}.shared_expert_gate.weight")
    return {
        **found,
        "ffn/router": routed["ffn/router"] + gate,
        **{name: routed[name] + tensors for name, tensors in always.items()},
    }


def stacked_experts(gate_up: str, down: str, d: Decoder) -> Table:
    """Gate and up of all experts in one tensor [X, 2F, D], down in another [X, D, F]."""
    experts = range(d.experts_routed)

    def part(e: int, low: int) -> SourceTensor:
        rows = FusedRows(1, 2 * d.d_ff, low, low + d.d_ff)
        return SourceTensor(gate_up, rows=rows, stacked=len(experts), item=e)

    downs = (SourceTensor(down, transposed=True, stacked=len(experts), item=e) for e in experts)
    rest = tuple(tensor for e, last in zip(experts, downs, strict=True) for tensor in (part(e, d.d_ff), last))
    return {"ffn/first": tuple(part(e, 0) for e in experts), "ffn/rest": rest}


_KEYS = """
    layer_types full_attention_interval partial_rotary_factor linear_conv_kernel_dim linear_num_key_heads
    linear_num_value_heads linear_key_head_dim linear_value_head_dim
"""
KEYS = llama.KEYS | {*_KEYS.split()}
MOE_KEYS = qwen.MOE_KEYS | mixtral.TRAINING_KEYS | {"moe_intermediate_size", "shared_expert_intermediate_size"}
_DRAFTS = {r"^mtp\.": "mtp.*: the layer that drafts further tokens is left out"}
_PICTURES = {r"^(model\.)?visual\.": "model.visual.*: what reads pictures is left out"}
_PICTURE_KEYS = (
    *("vision_config", "vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
    "language_model_only",
)
_NEUTRAL = {"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",)}

QWEN3_NEXT = replace(
    llama.ADAPTER,
    family="qwen3_next",
    architectures=("Qwen3NextForCausalLM", "Qwen3NextModel"),
    global_tensors={"embedding": stored("embed_tokens.weight"), "final_norm/weight": norm("norm")},
    layer_tensors=lambda d: _mixture_layer(d, fused=True),
    other_layers=(lambda d: _mixture_layer(d, fused=True, stacked=True),),
    read_keys=KEYS | MOE_KEYS | {"decoder_sparse_step", "mlp_only_layers"},
    neutral_keys=_NEUTRAL,
    unused_tensors=_DRAFTS,
    decoder=_next,
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    family="qwen3_5",
    aliases=("qwen3_5_text",),
    architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM", "Qwen3_5TextModel", "Qwen3_5Model"),
    prefixes=("model.language_model.", "model.", "language_model.", ""),
    layer_tensors=lambda d: {**_mixer(d), **{name: llama.LAYER[name] for name in ("ffn/first", "ffn/rest")}},
    other_layers=(),
    read_keys=KEYS | {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"},
    text_key="text_config",
    passed_over=_PICTURE_KEYS,
    neutral_keys=_NEUTRAL | {"mlp_only_layers": ([],), "decoder_sparse_step": (1,)},
    unused_tensors=_DRAFTS | _PICTURES,
    decoder=lambda config: decoder(config, "qwen3_5", n_kv_heads=4),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    family="qwen3_5_moe",
    aliases=("qwen3_5_moe_text",),
    architectures=tuple(name.replace("Qwen3_5", "Qwen3_5Moe") for name in QWEN3_5.architectures),
    layer_tensors=lambda d: _mixture_layer(d, stacked=True),
    other_layers=(_mixture_layer,),
    read_keys=QWEN3_5.read_keys | MOE_KEYS - {"norm_topk_prob"},
    neutral_keys={**QWEN3_5.neutral_keys, "norm_topk_prob": (True,)},
    decoder=lambda config: mixture(config, "qwen3_5_moe", 256, 8, router_normalised=True),
)
