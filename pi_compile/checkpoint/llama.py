"""The Llama family: RMSNorm, rotary positions, grouped-query attention, gated FFN with relu or silu."""

import numpy as np

from pi_compile.checkpoint.adapter import Adapter, Piece, of
from pi_compile.checkpoint.config import Config
from pi_compile.errors import CheckpointError
from pi_runtime.artifact.decoder import Decoder

_ACTIVATIONS = {"relu": "relu", "silu": "silu", "swish": "silu"}
_DEFAULT_THETA = 10000.0


def _decoder(config: Config) -> Decoder:
    d_model, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
    n_kv_heads = config.size("num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise config.error("num_key_value_heads", n_kv_heads, expected=f"a divisor of {n_heads} attention heads")
    if config.get("head_dim") is None and d_model % n_heads:
        raise config.error("hidden_size", d_model, expected=f"a multiple of {n_heads} attention heads, or head_dim")
    head_dim = config.size("head_dim", max(1, d_model // n_heads))
    if head_dim % 2:
        raise config.error("head_dim", head_dim, expected="an even width: rotary positions turn its two halves")
    attention_bias = config.flag("attention_bias", default=False)
    return Decoder(
        family=ADAPTER.family,
        vocab_size=config.size("vocab_size"),
        d_model=d_model,
        d_embedding=d_model,
        n_layers=config.size("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        d_ff=config.size("intermediate_size"),
        context_length=config.size("max_position_embeddings", 2048),
        norm="rms",
        norm_eps=config.number("rms_norm_eps", 1e-6),
        positions="rope",
        rotary_frequencies=frequencies(head_dim, _rope_theta(config)),
        ffn="gated",
        activation=config.choice("hidden_act", "silu", _ACTIVATIONS),
        tied_head=config.flag("tie_word_embeddings", default=ADAPTER.tied_by_default),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        ffn_bias=config.flag("mlp_bias", default=False),
    )


def _rope_theta(config: Config) -> float:
    """Base of plain rotary positions, from `rope_parameters` or the older `rope_scaling` and `rope_theta`.

    As in transformers, a `rope_scaling` that is not empty replaces `rope_parameters`, and a base inside them goes
    before the one beside them.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    parameters = config.get(key, {})
    if not isinstance(parameters, dict):
        raise config.error(key, parameters, expected="an object")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise config.error(f"{key}: rope type", kind, expected="default", remedy="no other is supported yet")
    known = {"rope_type", "type", "rope_theta"}
    changing = {k: v for k, v in parameters.items() if k not in known and v is not None}
    if changing.pop("partial_rotary_factor", 1.0) != 1.0 or changing:
        raise config.error(key, parameters, expected="rope_type and rope_theta only")
    theta = parameters.get("rope_theta", config.fields.get("rope_theta", _DEFAULT_THETA))
    if type(theta) not in (int, float) or not 0 < theta < float("inf"):
        raise CheckpointError(f"{config.path}: rope_theta", expected="a positive number", found=repr(theta))
    return float(theta)


def frequencies(rotary_dim: int, theta: float) -> tuple[float, ...]:
    """theta^(−2j / rotary_dim) for j < rotary_dim / 2, in float32 as transformers has it."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return tuple((np.float32(1) / np.float32(theta) ** exponents).tolist())


_READ_KEYS = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    hidden_act max_position_embeddings rms_norm_eps tie_word_embeddings attention_bias mlp_bias
    rope_theta rope_scaling rope_parameters
"""

ADAPTER = Adapter(
    family="llama",
    architectures=("LlamaForCausalLM", "LlamaModel"),
    prefixes=("model.", ""),
    head="lm_head.weight",
    globals={"embedding": of("embed_tokens.weight"), "final_norm/weight": of("norm.weight")},
    layer={
        "attention/norm/weight": of("layers.{n}.input_layernorm.weight"),
        "attention/qkv": of(*(f"layers.{{n}}.self_attn.{p}_proj.weight" for p in "qkv")),
        "attention/qkv_bias": of(*(f"layers.{{n}}.self_attn.{p}_proj.bias" for p in "qkv")),
        "attention/out": of("layers.{n}.self_attn.o_proj.weight"),
        "attention/out_bias": of("layers.{n}.self_attn.o_proj.bias"),
        "ffn/norm/weight": of("layers.{n}.post_attention_layernorm.weight"),
        "ffn/first": of("layers.{n}.mlp.gate_proj.weight"),
        "ffn/rest": (
            Piece("layers.{n}.mlp.up_proj.weight"),
            Piece("layers.{n}.mlp.down_proj.weight", transposed=True),
        ),
        "ffn/first_bias": of("layers.{n}.mlp.gate_proj.bias"),
        "ffn/up_bias": of("layers.{n}.mlp.up_proj.bias"),
        "ffn/down_bias": of("layers.{n}.mlp.down_proj.bias"),
    },
    read_keys=frozenset(_READ_KEYS.split()),
    ignorable=(r"rotary_emb\.inv_freq$",),
    tied_by_default=False,
    decoder=_decoder,
)
