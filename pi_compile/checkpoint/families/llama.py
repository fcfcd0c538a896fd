"""Llama, and its kin with the same tensors: RMSNorm, rotary positions, grouped-query attention, gated FFN.

SparseLlama is ProSparse's, with FATReLU as activation; the modelling code in their repositories is not needed. Arcee's
FFN is plain, with squared ReLU. SmolLM3 rotates only some layers. MiniCPM scales embedding, residual and logits, so it
can be planned for, not read.
"""

from dataclasses import replace
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import rope
from pi_compile.checkpoint.families.adapter import Adapter, SourceTensor, linear, plain_ffn, separate_qkv, stored
from pi_compile.checkpoint.families.fields import biases, layers_marked, usual_decoder
from pi_runtime.artifact.decoder import Decoder


def _decoder(config: Config, family: str = "llama", **options: Any) -> Decoder:
    attention, ffn = config.flag("attention_bias", default=False), config.flag("mlp_bias", default=False)
    return usual_decoder(config, family, **biases(attention=attention, ffn=ffn), **options)


def _smollm3(config: Config) -> Decoder:
    """Llama without rotation in some layers: by `no_rope_layers`, which has 0 for those, else in every n-th."""
    every, layers = config.size("no_rope_layer_interval", 4), config.size("num_hidden_layers")
    rotated = layers_marked(config, "no_rope_layers", [int((n + 1) % every != 0) for n in range(layers)])
    unrotated = tuple(n for n in range(layers) if not rotated[n])
    return _decoder(config, "smollm3", context=32768, n_kv_heads=4, theta=2e6, tied=True, unrotated_layers=unrotated)


def _arcee(config: Config) -> Decoder:
    return _decoder(config, "arcee", context=4096, norm_eps=1e-5, hidden_act="relu2", ffn="plain")


_KEYS = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    hidden_act hidden_act_param max_position_embeddings rms_norm_eps tie_word_embeddings
"""
KEYS = frozenset((*_KEYS.split(), *rope.KEYS))
"""Config keys that `usual_decoder` reads."""
ATTENTION = {
    "attention/norm/weight": stored("layers.{n}.input_layernorm.weight"),
    **separate_qkv("layers.{n}.self_attn"),
    **linear("attention/out", "layers.{n}.self_attn.o_proj"),
    "attention/q_norm": stored("layers.{n}.self_attn.q_norm.weight"),
    "attention/k_norm": stored("layers.{n}.self_attn.k_norm.weight"),
    "ffn/norm/weight": stored("layers.{n}.post_attention_layernorm.weight"),
}
LAYER = {
    **ATTENTION,
    **linear("ffn/first", "layers.{n}.mlp.gate_proj"),
    "ffn/rest": (
        SourceTensor("layers.{n}.mlp.up_proj.weight"),
        SourceTensor("layers.{n}.mlp.down_proj.weight", transposed=True),
    ),
    "ffn/up_bias": stored("layers.{n}.mlp.up_proj.bias"),
    "ffn/down_bias": stored("layers.{n}.mlp.down_proj.bias"),
}

ADAPTER = Adapter(
    family="llama",
    architectures=("LlamaForCausalLM", "LlamaModel"),
    global_tensors={"embedding": stored("embed_tokens.weight"), "final_norm/weight": stored("norm.weight")},
    layer_tensors=lambda _: LAYER,
    read_keys=KEYS | {"attention_bias", "mlp_bias"},
    ignored_tensors=(r"rotary_emb\.inv_freq$",),
    decoder=_decoder,
)
SMOLLM3 = replace(
    ADAPTER,
    family="smollm3",
    architectures=("SmolLM3ForCausalLM", "SmolLM3Model"),
    read_keys=ADAPTER.read_keys | {"no_rope_layers", "no_rope_layer_interval", "max_window_layers"},
    decoder=_smollm3,
)
_ARCEE_LAYER = {**ATTENTION, **plain_ffn("layers.{n}.mlp.up_proj", "layers.{n}.mlp.down_proj")}
ARCEE = replace(
    ADAPTER,
    family="arcee",
    architectures=("ArceeForCausalLM", "ArceeModel"),
    layer_tensors=lambda _: _ARCEE_LAYER,
    decoder=_arcee,
)
SPARSELLAMA = replace(
    ADAPTER,
    family="sparsellama",
    architectures=("SparseLlamaForCausalLM", "SparseLlamaModel"),
    decoder=lambda config: _decoder(config, "sparsellama"),
)
MINICPM = replace(
    ADAPTER,
    family="minicpm",
    architectures=("MiniCPMForCausalLM", "MiniCPMModel"),
    plan_only="its scale_emb, scale_depth and dim_model_base scale embedding, residual and logits",
    decoder=lambda config: usual_decoder(config, "minicpm", tied=True),
)
