"""Gemma 4, as text: heads of two sizes, and in one size of the model an FFN beside experts.

E2B and E4B have an embedding of each layer, and last layers that read the keys and values of others.

Most layers have a window, and heads and angles of their own; every sixth, and the last, sees all positions, with wider
heads, of which a part is rotated. There values may be keys before their norm. Scores are not divided: the root of a
head's width is a factor of cosine and sine. The embedding is scaled by √D, and each layer ends with a factor.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import gemma, llama, rope
from pi_compile.checkpoint.families.adapter import SourceTensor, Table, cut_ffn, stored
from pi_compile.checkpoint.families.fields import (
    biases,
    experts,
    kv_heads,
    softcap,
    usual_decoder,
    windowed_layers,
    with_windows,
)
from pi_compile.checkpoint.families.qwen3_next import stacked_experts
from pi_runtime.artifact.decoder import Decoder

_ROPE = {
    rope.KINDS[False]: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    rope.KINDS[True]: {"rope_type": "default", "rope_theta": 1e4},
}
"""What stands for missing angles."""
_OF_EXPERTS = {
    "hidden_act": "hidden_activation",
    "intermediate_size": "moe_intermediate_size",
    "num_experts_per_tok": "top_k_experts",
}
_HEADS = {"head_dim", "num_key_value_heads"}


def _decoder(
    config: Config, family: str = "gemma4_text", per_layer: int = 256, context: int = 131072, window: int = 512
) -> Decoder:
    config, width = _completed(config), config.size("head_dim", 256)
    groups = kv_heads(config, "num_key_value_heads", 4, config.size("num_attention_heads"))
    whole = _of_full_layers(config, width, groups)
    mixture = config.flag("enable_moe_block", default=False)
    found = usual_decoder(
        rope.of_kind(whole, rope.KINDS[False], "rope_theta"),
        family,
        names={"hidden_act": "hidden_activation"},
        context=context,
        tied=True,
        hidden_act="gelu_pytorch_tanh",
        block="sandwich",
        block_scale=True,
        qk_norm=True,
        v_norm=True,
        keys_as_values=config.flag("attention_k_eq_v", default=False),
        logit_softcap=softcap(config, "final_logit_softcapping", 0.0),
        **biases(attention=config.flag("attention_bias", default=False), ffn=False),
        **(_experts(config) if mixture else {}),
        layer_embedding=_layer_embedding(config, per_layer),
    )
    found = replace(found, **_shared_keys(config, found))
    found = replace(found, embedding_scale=found.d_model**0.5, rotary_scale=found.rotary_scale * found.head_dim**0.25)
    local = rope.rotary(rope.of_kind(config, rope.KINDS[True], "rope_theta"), width)
    local["rotary_scale"] *= width**0.25
    found = with_windows(config, found, local, [False] * found.n_layers, window)
    own: dict[str, Any] = {"windowed_head_dim": width, "windowed_kv_heads": groups} if found.windowed_layers else {}
    usual = {"windowed_head_dim": found.head_dim, "windowed_kv_heads": found.n_kv_heads}
    return replace(found, **{name: value for name, value in own.items() if value != usual[name]})


def _layer_embedding(config: Config, usual: int) -> int:
    """The numbers of each layer's own embedding, which must be one of the same tokens."""
    width = config.size("hidden_size_per_layer_input", usual, least=0)
    if width and (found := config.size("vocab_size_per_layer_input", 262144)) != config.size("vocab_size"):
        raise config.error("vocab_size_per_layer_input", found, expected=f"{config.size('vocab_size')}, as vocab_size")
    return width


def _shared_keys(config: Config, d: Decoder) -> dict[str, Any]:
    """The fields of last layers that read the keys of others, and whose FFN may have twice as many neurons."""
    shared = config.size("num_kv_shared_layers", 0, least=0)
    twice = shared > 0 and config.flag("use_double_wide_mlp", default=False)
    wide = {"d_ff": 2 * d.d_ff, "narrow_ff": d.d_ff} if twice else {}
    return {"shared_key_layers": tuple(range(d.n_layers))[max(0, d.n_layers - shared) :], **wide}


def _completed(config: Config) -> Config:
    """The config with a kind for each layer, the last of which has no window, and with angles of both kinds."""
    layers = config.size("num_hidden_layers")
    kinds = config.get("layer_types", [rope.KINDS[(n + 1) % 6 != 0] for n in range(layers)])
    if isinstance(kinds, list) and len(kinds) == layers:
        kinds = [*kinds[:-1], rope.KINDS[False]]
    angles = config.get("rope_parameters", {})
    angles = {**_ROPE, **angles} if isinstance(angles, dict) else angles
    return config.with_fields({**config.fields, "layer_types": kinds, "rope_parameters": angles})


def _of_full_layers(config: Config, width: int, groups: int) -> Config:
    """The config with the heads of layers without a window, which newer versions of transformers list by layer."""
    layers = range(config.size("num_hidden_layers"))
    windowed = windowed_layers(config, [False] * len(layers))
    full = [str(n) for n in layers if n not in windowed]
    listed = config.get("per_layer_config", {})
    if listed:
        by_layer = {key.lstrip("0") or "0": value for key, value in listed.items()} if isinstance(listed, dict) else {}
        own: Any = by_layer.get(full[-1])
        if not isinstance(own, dict) or not {*own} <= _HEADS or by_layer != dict.fromkeys(full, own):
            expected = f"the same {' and '.join(sorted(_HEADS))} for each of the layers {', '.join(full)} alone"
            raise config.error("per_layer_config", listed, expected=expected)
    elif "per_layer_config" in config.fields:
        own = {}
    else:
        own = {"head_dim": config.size("global_head_dim", 512)}
        if config.flag("attention_k_eq_v", default=False):
            own["num_key_value_heads"] = config.get("num_global_key_value_heads", groups)
    return config.with_fields({**config.fields, "head_dim": width, "num_key_value_heads": groups, **own})


def _experts(config: Config) -> dict[str, Any]:
    """The fields of experts, and of the FFN beside them."""
    renamed = config.renamed(_OF_EXPERTS)
    found: dict[str, Any] = experts(renamed, "num_experts")
    if found["n_experts"] == 1:
        raise config.error("num_experts", 1, expected="several")
    own = {"d_ff": renamed.size("intermediate_size"), "beside_ff": config.size("intermediate_size")}
    return {**found, **own, "router_norm": True, "expert_scale": True}


def _layer(d: Decoder) -> Table:
    block, attention = "layers.{n}", "layers.{n}.self_attn"
    parts: Sequence[str] = "q" if d.shares_keys else "qk" if d.keys_as_values else "qkv"
    mlp = [f"{block}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    found = {
        **llama.LAYER,
        "attention/qkv": stored(*(f"{attention}.{part}_proj.weight" for part in parts)),
        "attention/qkv_bias": stored(*(f"{attention}.{part}_proj.bias" for part in parts)),
        "attention/v_norm": (),
        "attention/out_norm/weight": stored(f"{block}.post_attention_layernorm.weight"),
        "ffn/norm/weight": stored(f"{block}.pre_feedforward_layernorm.weight"),
        "ffn/out_norm/weight": stored(f"{block}.post_feedforward_layernorm.weight"),
        "ffn/embedding_gate": stored(f"{block}.per_layer_input_gate.weight"),
        "ffn/embedding_out": stored(f"{block}.per_layer_projection.weight"),
        "ffn/embedding_norm/weight": stored(f"{block}.post_per_layer_input_norm.weight"),
        "ffn/block_scale": stored(f"{block}.layer_scalar"),
        **(cut_ffn(mlp, d.whole_ff, d.d_ff, 1) if d.whole_ff < d.d_ff else {}),
    }
    return {**found, **_mixture(d, found)} if d.n_experts > 1 else found


def _mixture(d: Decoder, dense: Table) -> Table:
    """What a layer with experts has, where a dense one has these arrays."""
    block = "layers.{n}"
    return {
        **stacked_experts(f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj", d),
        "ffn/router": stored(f"{block}.router.proj.weight"),
        "ffn/router_norm": (SourceTensor(f"{block}.router.scale", factor=d.d_model**-0.5),),
        "ffn/expert_scale": stored(f"{block}.router.per_expert_scale"),
        "ffn/norm/weight": stored(f"{block}.pre_feedforward_layernorm_2.weight"),
        "ffn/experts_out_norm": stored(f"{block}.post_feedforward_layernorm_2.weight"),
        "ffn/beside_norm": dense["ffn/norm/weight"],
        "ffn/beside_out_norm": stored(f"{block}.post_feedforward_layernorm_1.weight"),
        "ffn/beside_first": dense["ffn/first"],
        "ffn/beside_up": dense["ffn/rest"][:1],
        "ffn/beside_down": stored(f"{block}.mlp.down_proj.weight"),
    }


_EMBEDDING = {
    "layer_embedding": stored("embed_tokens_per_layer.weight"),
    "layer_embedding_in": stored("per_layer_model_projection.weight"),
    "layer_embedding_norm": stored("per_layer_projection_norm.weight"),
}
_KEYS = """
    attention_bias hidden_activation layer_types sliding_window final_logit_softcapping attention_k_eq_v
    global_head_dim num_global_key_value_heads per_layer_config hidden_size_per_layer_input num_kv_shared_layers
    enable_moe_block num_experts top_k_experts moe_intermediate_size vocab_size_per_layer_input use_double_wide_mlp
"""
_PICTURES = "what reads pictures and sounds is left out"
_PICTURE_KEYS = """
    vision_config audio_config audio_token_id boa_token_id boi_token_id eoa_token_id eoa_token_index eoi_token_id
    image_token_id video_token_id vision_soft_tokens_per_image
"""
GEMMA4 = replace(
    gemma.ADAPTER,
    family="gemma4_text",
    aliases=("gemma4",),
    architectures=("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4TextModel", "Gemma4Model"),
    prefixes=("model.language_model.", "model.", "language_model.", ""),
    global_tensors={**llama.ADAPTER.global_tensors, **_EMBEDDING},
    layer_tensors=_layer,
    text_key="text_config",
    passed_over=_PICTURE_KEYS.split(),
    read_keys=llama.KEYS - {"hidden_act", "rope_theta"} | {*_KEYS.split()},
    neutral_keys={"use_bidirectional_attention": ("vision",)},
    unused_tensors={
        r"^(model\.)?(vision_tower|vision_embedder|embed_vision)\.": f"model.embed_vision.*: {_PICTURES}",
        r"^(model\.)?(audio_tower|embed_audio)\.": f"model.embed_audio.*: {_PICTURES}",
    },
    decoder=_decoder,
)
GEMMA4_UNIFIED = replace(
    GEMMA4,
    family="gemma4_unified_text",
    aliases=("gemma4_unified",),
    architectures=tuple(name.replace("Gemma4", "Gemma4Unified") for name in GEMMA4.architectures),
    decoder=lambda config: _decoder(config, "gemma4_unified_text", 0, 262144, 1024),
)
