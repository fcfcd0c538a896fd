"""Falcon: parallel attention and FFN; queries, keys and values in one tensor; in the style of 7B or of 40B.

7B has one head of keys and values, and one norm for attention and FFN. 40B (`new_decoder_architecture`) has grouped
queries, and a norm for each of the two, or one for both (`num_ln_in_parallel_attn`). The oldest models have sequential
blocks. Shape letters: H heads, G heads of keys and values, E head width.
"""

from dataclasses import replace
from itertools import pairwise

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import rope
from pi_compile.checkpoint.families.adapter import (
    Adapter,
    FusedRows,
    SourceTensor,
    Table,
    linear,
    plain_ffn,
    stored,
    weight_and_bias,
)
from pi_compile.checkpoint.families.fields import biases, kv_heads, usual_decoder
from pi_runtime.artifact.decoder import Decoder

_NAMES = {
    "intermediate_size": "ffn_hidden_size",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation",
}
_OLDER = {
    "hidden_size": "n_embed",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "num_kv_heads": "n_head_kv",
}
"""Names that keys have in the first configs."""


def _decoder(config: Config) -> Decoder:
    if config.flag("alibi", default=False):
        raise config.error("alibi", True, expected="false", remedy="Falcons with ALiBi positions are not supported")
    # The first configs show the 40B style only by a number of heads of keys and values.
    grouped = config.flag("new_decoder_architecture", default=config.get("n_head_kv") is not None)
    parallel, bias = config.flag("parallel_attn", default=True), config.flag("bias", default=False)
    if grouped and not parallel:
        raise config.error("parallel_attn", False, expected="true with new_decoder_architecture")
    norms = config.size("num_ln_in_parallel_attn", 2 if grouped else 1)
    if norms > (2 if grouped else 1):
        raise config.error("num_ln_in_parallel_attn", norms, expected="1, or 2 with new_decoder_architecture")
    older = {key: old for key, old in _OLDER.items() if config.get(key) is None and config.get(old) is not None}
    found = usual_decoder(
        config,
        "falcon",
        names=_NAMES | older,
        widening=4,
        hidden_act="gelu",
        norm_eps=1e-5,
        tied=True,
        block="parallel" if parallel else "sequential",
        shared_norm=parallel and norms == 1,
        norm="layer",
        ffn="plain",
        **biases(attention=bias, ffn=bias),
    )
    config.check_derived("ff_factor", found.d_ff / found.d_model, "ffn_hidden_size / hidden_size")
    return replace(found, n_kv_heads=_kv_heads(config.renamed(older), found.n_heads, grouped))


def _kv_heads(config: Config, n_heads: int, grouped: bool) -> int:
    if grouped:
        return kv_heads(config, "num_kv_heads", n_heads, n_heads)
    return 1 if config.flag("multi_query", default=True) else n_heads


def _layer(d: Decoder) -> Table:
    two_norms = d.block == "parallel" and not d.shared_norm
    return {
        **weight_and_bias("attention/norm", "h.{n}.ln_attn" if two_norms else "h.{n}.input_layernorm"),
        "attention/qkv": _fused_qkv(d, "h.{n}.self_attention.query_key_value.weight"),
        "attention/qkv_bias": _fused_qkv(d, "h.{n}.self_attention.query_key_value.bias"),
        **linear("attention/out", "h.{n}.self_attention.dense"),
        **weight_and_bias("ffn/norm", "h.{n}.ln_mlp" if two_norms else "h.{n}.post_attention_layernorm"),
        **plain_ffn("h.{n}.mlp.dense_h_to_4h", "h.{n}.mlp.dense_4h_to_h"),
    }


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
    decoder=_decoder,
)
