"""The Llama family: RMSNorm, rotary positions, grouped-query attention, gated FFN; others are built on it."""

from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import rope
from pi_compile.checkpoint.families.adapter import Adapter, SourceTensor, stored
from pi_compile.checkpoint.families.fields import activation, head_dim, kv_heads
from pi_runtime.artifact.decoder import Decoder


def llama_like(
    config: Config,
    family: str,
    *,
    context: int = 2048,
    n_kv_heads: int | None = None,
    head_width: int | None = None,
    hidden_act: str = "silu",
    theta: float = rope.THETA,
    partial: float | None = None,
    tied: bool = False,
    **differences: Any,
) -> Decoder:
    """A decoder with Llama's config keys.

    The arguments are the family's defaults of missing keys (see `rope.rotary`); `differences` are decoder fields that
    differ from Llama's.
    """
    d_model, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
    # In transformers too, null is not the same as a missing key.
    n_kv_heads = n_heads if n_kv_heads is None or "num_key_value_heads" in config.fields else n_kv_heads
    width = head_dim(config, d_model, n_heads, head_width)
    fields: dict[str, Any] = {
        "family": family,
        "vocab_size": config.size("vocab_size"),
        "d_model": d_model,
        "d_embedding": d_model,
        "n_layers": config.size("num_hidden_layers"),
        "n_heads": n_heads,
        "n_kv_heads": kv_heads(config, "num_key_value_heads", n_kv_heads, n_heads),
        "head_dim": width,
        "d_ff": config.size("intermediate_size"),
        "context_length": config.size("max_position_embeddings", context),
        "norm": "rms",
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        **rope.rotary(config, width, theta=theta, partial=partial),
        "ffn": "gated",
        **activation(config, "hidden_act", hidden_act),
        "tied_head": config.flag("tie_word_embeddings", default=tied),
        "qkv_bias": False,
        "out_bias": False,
        "ffn_bias": False,
    }
    return Decoder(**(fields | differences))


def decoder(config: Config, family: str = "llama") -> Decoder:
    """The decoder of Llama itself, which may have biases."""
    bias = config.flag("attention_bias", default=False)
    return llama_like(config, family, qkv_bias=bias, out_bias=bias, ffn_bias=config.flag("mlp_bias", default=False))


_KEYS = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    hidden_act hidden_act_param max_position_embeddings rms_norm_eps tie_word_embeddings
"""
KEYS = frozenset((*_KEYS.split(), *rope.KEYS))
"""Config keys that `llama_like` reads."""
GLOBALS = {"embedding": stored("embed_tokens.weight"), "final_norm/weight": stored("norm.weight")}
ATTENTION = {
    "attention/norm/weight": stored("layers.{n}.input_layernorm.weight"),
    "attention/qkv": stored(*(f"layers.{{n}}.self_attn.{p}_proj.weight" for p in "qkv")),
    "attention/qkv_bias": stored(*(f"layers.{{n}}.self_attn.{p}_proj.bias" for p in "qkv")),
    "attention/out": stored("layers.{n}.self_attn.o_proj.weight"),
    "attention/out_bias": stored("layers.{n}.self_attn.o_proj.bias"),
    "attention/q_norm": stored("layers.{n}.self_attn.q_norm.weight"),
    "attention/k_norm": stored("layers.{n}.self_attn.k_norm.weight"),
    "ffn/norm/weight": stored("layers.{n}.post_attention_layernorm.weight"),
}
LAYER = {
    **ATTENTION,
    "ffn/first": stored("layers.{n}.mlp.gate_proj.weight"),
    "ffn/rest": (
        SourceTensor("layers.{n}.mlp.up_proj.weight"),
        SourceTensor("layers.{n}.mlp.down_proj.weight", transposed=True),
    ),
    "ffn/first_bias": stored("layers.{n}.mlp.gate_proj.bias"),
    "ffn/up_bias": stored("layers.{n}.mlp.up_proj.bias"),
    "ffn/down_bias": stored("layers.{n}.mlp.down_proj.bias"),
}
BUFFERS = (r"rotary_emb\.inv_freq$",)

ADAPTER = Adapter(
    family="llama",
    architectures=("LlamaForCausalLM", "LlamaModel"),
    global_tensors=GLOBALS,
    layer_tensors=lambda _: LAYER,
    read_keys=KEYS | {"attention_bias", "mlp_bias"},
    ignored_tensors=BUFFERS,
    decoder=decoder,
)
