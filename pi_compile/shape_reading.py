"""Sizes from a `config.json`, for every family that is planned for; weights and function of it are not looked at.

A key that has no bearing on sizes is not read. Where one is missing, the family's default holds, as in transformers.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.json_file import read_json
from pi_compile.shapes import ModelShape

Reader = Callable[[Config], ModelShape]


def read_shape(path: Path) -> ModelShape:
    """The shape that a config.json describes. Raises CheckpointError naming the key in question."""
    return shape_of(Config(path, read_json(path)))


def shape_of(config: Config) -> ModelShape:
    """The shape of a model. Raises CheckpointError naming the key in question."""
    kind = config.get("model_type", _of_architecture(config))
    if not isinstance(kind, str) or kind not in READERS:
        raise config.error("model_type", config.get("model_type"), expected=f"one of {', '.join(sorted(READERS))}")
    shape = READERS[kind](config)
    if shape.n_heads % shape.n_kv_heads:
        raise config.error(
            "num_key_value_heads", shape.n_kv_heads, expected=f"a divisor of {shape.n_heads} attention heads"
        )
    if shape.experts_per_token > shape.n_experts:
        raise config.error(
            "num_experts_per_tok", shape.experts_per_token, expected=f"at most {shape.n_experts} experts"
        )
    return shape


def _of_architecture(config: Config) -> Any:
    """Older configs of some families name their class only."""
    names = config.get("architectures", [])
    return {"MiniCPMForCausalLM": "minicpm"}.get(names[0]) if isinstance(names, list) and names else None


def _head_dim(config: Config, d_model: int, n_heads: int) -> int:
    if config.get("head_dim") is None and d_model % n_heads:
        raise config.error("hidden_size", d_model, expected=f"a multiple of {n_heads} attention heads, or head_dim")
    return config.size("head_dim", d_model // n_heads)


def _llama(config: Config) -> ModelShape:
    """RMSNorm, rope, gated FFN: Llama, and with small differences all the families below that build on it."""
    d_model, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
    bias = config.flag("attention_bias", default=False)
    return ModelShape(
        family=str(config.get("model_type", _of_architecture(config))),
        vocab_size=config.size("vocab_size"),
        d_model=d_model,
        n_layers=config.size("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=config.size("num_key_value_heads", n_heads),
        head_dim=_head_dim(config, d_model, n_heads),
        d_ff=config.size("intermediate_size"),
        context_length=config.size("max_position_embeddings", 2048),
        norm="rms",
        positions="rope",
        ffn="gated",
        activation=_activation(config, "hidden_act", "silu"),
        tied_head=config.flag("tie_word_embeddings", default=False),
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=config.flag("mlp_bias", default=False),
        d_embedding=d_model,
    )


def _qwen2(config: Config) -> ModelShape:
    return replace(_llama(config), qkv_bias=True, out_bias=False)


def _qwen3(config: Config) -> ModelShape:
    return replace(_llama(config), qk_norm=True, head_dim=config.size("head_dim", 128))


def _bamboo(config: Config) -> ModelShape:
    """dReLU: an activation on both halves of the gate, the arrays of Mistral."""
    return replace(_llama(config), activation="drelu")


def _minicpm(config: Config) -> ModelShape:
    return replace(_llama(config), tied_head=config.flag("tie_word_embeddings", default=True))


def _mixtral(config: Config) -> ModelShape:
    experts, per_token = config.size("num_local_experts", 8), config.size("num_experts_per_tok", 2)
    return replace(_llama(config), n_experts=experts, experts_per_token=per_token)


def _turbosparse_mixtral(config: Config) -> ModelShape:
    return replace(_mixtral(config), activation="drelu")


def _nemotron(config: Config) -> ModelShape:
    """Plain FFN with squared ReLU, LayerNorm with a bias."""
    base = _llama(config)
    return replace(base, norm="layer", ffn="plain", activation=_activation(config, "hidden_act", "relu2"))


def _opt(config: Config) -> ModelShape:
    d_model, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
    bias = config.flag("enable_bias", default=True)
    before = config.flag("do_layer_norm_before", default=True)
    return ModelShape(
        family="opt",
        vocab_size=config.size("vocab_size"),
        d_model=d_model,
        n_layers=config.size("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=_head_dim(config, d_model, n_heads),
        d_ff=config.size("ffn_dim"),
        context_length=config.size("max_position_embeddings", 2048),
        norm="layer",
        positions="learned",
        position_offset=2,
        ffn="plain",
        activation=_activation(config, "activation_function", "relu"),
        tied_head=config.flag("tie_word_embeddings", default=True),
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=bias,
        # OPT-350M normalises after each block, and then not once more at the end.
        final_norm=before and not config.flag("_remove_final_layer_norm", default=False),
        d_embedding=config.size("word_embed_proj_dim", d_model),
    )


def _falcon(config: Config) -> ModelShape:
    """Parallel attention. 40B: grouped queries, a norm for each of the two; 7B: one key-value head, one norm."""
    d_model = config.size("hidden_size")
    n_heads = config.size("num_attention_heads", _older(config, "n_head"))
    grouped = config.flag("new_decoder_architecture", default=config.get("n_head_kv") is not None)
    parallel = config.flag("parallel_attn", default=True)
    one = config.flag("multi_query", default=True) and not grouped
    kv = config.size("num_kv_heads", _older(config, "n_head_kv", n_heads)) if grouped else n_heads
    bias = config.flag("bias", default=False)
    two_norms = grouped and config.size("num_ln_in_parallel_attn", 2) == 2
    return ModelShape(
        family="falcon",
        vocab_size=config.size("vocab_size"),
        d_model=d_model,
        n_layers=config.size("num_hidden_layers", _older(config, "n_layer")),
        n_heads=n_heads,
        n_kv_heads=1 if one else kv,
        head_dim=_head_dim(config, d_model, n_heads),
        d_ff=config.size("ffn_hidden_size", 4 * d_model),
        context_length=config.size("max_position_embeddings", 2048),
        norm="layer",
        positions="rope",
        ffn="plain",
        activation=_activation(config, "activation", "gelu"),
        tied_head=config.flag("tie_word_embeddings", default=True),
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=bias,
        shared_norm=parallel and not two_norms,
        d_embedding=d_model,
    )


def _phi(config: Config) -> ModelShape:
    """Attention and FFN side by side behind one norm; biases everywhere, the head included."""
    base = _llama(config)
    return replace(
        base,
        norm="layer",
        ffn="plain",
        activation=_activation(config, "hidden_act", "gelu_new"),
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        shared_norm=True,
        head_bias=True,
    )


def _gpt2(config: Config) -> ModelShape:
    d_model, n_heads = config.size("n_embd"), config.size("n_head")
    return ModelShape(
        family="gpt2",
        vocab_size=config.size("vocab_size"),
        d_model=d_model,
        n_layers=config.size("n_layer"),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=_head_dim(config, d_model, n_heads),
        d_ff=config.size("n_inner", 4 * d_model),
        context_length=config.size("n_positions", 1024),
        norm="layer",
        positions="learned",
        ffn="plain",
        activation=_activation(config, "activation_function", "gelu_new"),
        tied_head=config.flag("tie_word_embeddings", default=True),
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        d_embedding=d_model,
    )


def _older(config: Config, key: str, default: int | None = None) -> int | None:
    """The name that the first Falcon configs have for a size."""
    return default if config.get(key) is None else config.size(key)


def _activation(config: Config, key: str, default: str) -> str:
    value = config.get(key, default)
    if not isinstance(value, str):
        raise config.error(key, value, expected="the name of an activation")
    return value


READERS: dict[str, Reader] = {
    "bamboo": _bamboo,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "llama": _llama,
    "minicpm": _minicpm,
    "mistral": _llama,
    "mixtral": _mixtral,
    "nemotron": _nemotron,
    "opt": _opt,
    "phi": _phi,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "RefinedWeb": _falcon,
    "RefinedWebModel": _falcon,
    "sparsellama": _llama,
    "turbosparsemixtral": _turbosparse_mixtral,
}
"""`model_type` → how its config is read."""
