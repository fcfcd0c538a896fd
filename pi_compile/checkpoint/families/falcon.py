"""Falcon: attention and FFN side by side, queries, keys and values in one tensor; 7B style or 40B style.

7B: one head of keys and values, one norm for both halves of a block. 40B (`new_decoder_architecture`): grouped
queries, a norm for each half, or one (`num_ln_in_parallel_attn`). The oldest ones are sequential. H heads, G of keys
and values, E head width.
"""

from itertools import pairwise

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import rope
from pi_compile.checkpoint.families.adapter import Adapter, Piece, Rows, Table, both, of
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
    """Whether it is of the 40B style; the first configs of that style only name their heads of keys and values."""
    return config.flag("new_decoder_architecture", default=config.get("n_head_kv") is not None)


def _kv_heads(config: Config, n_heads: int, grouped: bool) -> int:
    if not grouped:
        return 1 if config.flag("multi_query", default=True) else n_heads
    return kv_heads(config, "num_kv_heads", _older(config, "n_head_kv") or n_heads, n_heads)


def _older(config: Config, key: str) -> int | None:
    """The name that the first configs have for a size."""
    return None if config.get(key) is None else config.size(key)


def _layer(d: Decoder) -> Table:
    two = d.block == "parallel" and not d.shared_norm
    table = {
        **both("attention/norm", "h.{n}.ln_attn" if two else "h.{n}.input_layernorm"),
        "attention/qkv": _heads(d, "h.{n}.self_attention.query_key_value.weight"),
        "attention/qkv_bias": _heads(d, "h.{n}.self_attention.query_key_value.bias"),
        "attention/out": of("h.{n}.self_attention.dense.weight"),
        "attention/out_bias": of("h.{n}.self_attention.dense.bias"),
        "ffn/first": of("h.{n}.mlp.dense_h_to_4h.weight"),
        "ffn/first_bias": of("h.{n}.mlp.dense_h_to_4h.bias"),
        "ffn/rest": (Piece("h.{n}.mlp.dense_4h_to_h.weight", transposed=True),),
        "ffn/down_bias": of("h.{n}.mlp.dense_4h_to_h.bias"),
    }
    return table | both("ffn/norm", "h.{n}.ln_mlp" if two else "h.{n}.post_attention_layernorm")


def _heads(d: Decoder, name: str) -> tuple[Piece, ...]:
    """[G, H/G + 2, E] rows: for each head of keys and values the queries that share it, its keys, its values."""
    queries, one = d.n_heads // d.n_kv_heads * d.head_dim, d.head_dim
    bounds = (0, queries, queries + one, queries + 2 * one)
    return tuple(Piece(name, rows=Rows(d.n_kv_heads, bounds[-1], start, stop)) for start, stop in pairwise(bounds))


_KEYS = """
    vocab_size hidden_size n_embed num_hidden_layers n_layer num_attention_heads n_head num_kv_heads n_head_kv
    ffn_hidden_size ff_factor max_position_embeddings layer_norm_epsilon activation tie_word_embeddings bias alibi
    multi_query parallel_attn new_decoder_architecture num_ln_in_parallel_attn
"""

ADAPTER = Adapter(
    family="falcon",
    older=("RefinedWeb", "RefinedWebModel"),
    architectures=("FalconForCausalLM", "FalconModel", "RWForCausalLM", "RWModel"),
    prefixes=("transformer.", ""),
    globals={"embedding": of("word_embeddings.weight"), **both("final_norm", "ln_f")},
    layer=_layer,
    read_keys=frozenset((*_KEYS.split(), *rope.KEYS)),
    neutral_keys={"apply_residual_connection_post_layernorm": ()},
    decoder=_decoder,
)
