"""Falcon: parallel attention and FFN; queries, keys and values in one tensor; in the style of 7B or of 40B.

7B has one head of keys and values, and one norm for attention and FFN. 40B (`new_decoder_architecture`) has grouped
queries, and a norm for each of the two, or one for both (`num_ln_in_parallel_attn`). The oldest models have sequential
blocks. H heads, G heads of keys and values, E head width.
"""

from itertools import pairwise

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import rope
from pi_compile.checkpoint.families.adapter import Adapter, FusedRows, SourceTensor, Table, stored, weight_and_bias
from pi_compile.checkpoint.families.fields import activation, kv_heads
from pi_runtime.artifact.decoder import Decoder


def _decoder(config: Config) -> Decoder:
    d_model = config.size("hidden_size", _older(config, "n_embed"))
    n_heads = config.size("num_attention_heads", _older(config, "n_head"))
    if d_model % n_heads:
        raise config.error("hidden_size", d_model, expected=f"a multiple of {n_heads} attention heads")
    if config.flag("alibi", default=False):
        raise config.error("alibi", True, expected="false", remedy="Falcons with ALiBi positions are not supported")
    grouped = _grouped(config)
    parallel, bias = config.flag("parallel_attn", default=True), config.flag("bias", default=False)
    if grouped and not parallel:
        raise config.error("parallel_attn", False, expected="true with new_decoder_architecture")
    norms = config.size("num_ln_in_parallel_attn", 2 if grouped else 1)
    if norms > (2 if grouped else 1):
        raise config.error("num_ln_in_parallel_attn", norms, expected="1, or 2 with new_decoder_architecture")
    d_ff = config.size("ffn_hidden_size", 4 * d_model)
    config.check_derived("ff_factor", d_ff / d_model, "ffn_hidden_size / hidden_size")
    return Decoder(
        family="falcon",
        vocab_size=config.size("vocab_size"),
        d_model=d_model,
        d_embedding=d_model,
        n_layers=config.size("num_hidden_layers", _older(config, "n_layer")),
        n_heads=n_heads,
        n_kv_heads=_kv_heads(config, n_heads, grouped),
        head_dim=d_model // n_heads,
        d_ff=d_ff,
        context_length=config.size("max_position_embeddings", 2048),
        block="parallel" if parallel else "sequential",
        shared_norm=parallel and norms == 1,
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        **rope.rotary(config, d_model // n_heads),
        ffn="plain",
        **activation(config, "activation", "gelu"),
        tied_head=config.flag("tie_word_embeddings", default=True),
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=bias,
    )


def _grouped(config: Config) -> bool:
    """Whether the model has the 40B style; the first configs show it only by a number of heads of keys and values."""
    return config.flag("new_decoder_architecture", default=config.get("n_head_kv") is not None)


def _kv_heads(config: Config, n_heads: int, grouped: bool) -> int:
    if not grouped:
        return 1 if config.flag("multi_query", default=True) else n_heads
    return kv_heads(config, "num_kv_heads", _older(config, "n_head_kv") or n_heads, n_heads)


def _older(config: Config, key: str) -> int | None:
    """The value of a size under the name that the first configs have."""
    return None if config.get(key) is None else config.size(key)


def _layer(d: Decoder) -> Table:
    two_norms = d.block == "parallel" and not d.shared_norm
    table = {
        **weight_and_bias("attention/norm", "h.{n}.ln_attn" if two_norms else "h.{n}.input_layernorm"),
        "attention/qkv": _fused_qkv(d, "h.{n}.self_attention.query_key_value.weight"),
        "attention/qkv_bias": _fused_qkv(d, "h.{n}.self_attention.query_key_value.bias"),
        "attention/out": stored("h.{n}.self_attention.dense.weight"),
        "attention/out_bias": stored("h.{n}.self_attention.dense.bias"),
        "ffn/first": stored("h.{n}.mlp.dense_h_to_4h.weight"),
        "ffn/first_bias": stored("h.{n}.mlp.dense_h_to_4h.bias"),
        "ffn/rest": (SourceTensor("h.{n}.mlp.dense_4h_to_h.weight", transposed=True),),
        "ffn/down_bias": stored("h.{n}.mlp.dense_4h_to_h.bias"),
    }
    return table | weight_and_bias("ffn/norm", "h.{n}.ln_mlp" if two_norms else "h.{n}.post_attention_layernorm")


def _fused_qkv(d: Decoder, name: str) -> tuple[SourceTensor, ...]:
    """Queries, keys and values of a tensor with rows [G, H/G + 2, E]: a group's queries, its keys, its values."""
    queries, width = d.n_heads // d.n_kv_heads * d.head_dim, d.head_dim
    bounds = (0, queries, queries + width, queries + 2 * width)
    return tuple(
        SourceTensor(name, rows=FusedRows(d.n_kv_heads, bounds[-1], start, stop)) for start, stop in pairwise(bounds)
    )


_KEYS = """
    vocab_size hidden_size n_embed num_hidden_layers n_layer num_attention_heads n_head num_kv_heads n_head_kv
    ffn_hidden_size ff_factor max_position_embeddings layer_norm_epsilon activation tie_word_embeddings bias alibi
    multi_query parallel_attn new_decoder_architecture num_ln_in_parallel_attn
"""

ADAPTER = Adapter(
    family="falcon",
    aliases=("RefinedWeb", "RefinedWebModel"),
    architectures=("FalconForCausalLM", "FalconModel", "RWForCausalLM", "RWModel"),
    prefixes=("transformer.", ""),
    global_tensors={"embedding": stored("word_embeddings.weight"), **weight_and_bias("final_norm", "ln_f")},
    layer_tensors=_layer,
    read_keys=frozenset((*_KEYS.split(), *rope.KEYS)),
    neutral_keys={"apply_residual_connection_post_layernorm": ()},
    decoder=_decoder,
)
