"""The OPT family: LayerNorm with biases, learned positions, plain FFN.

OPT-350M alone normalises after each half of a block, not at the end, and has a narrower embedding.
"""

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families.adapter import Adapter, Piece, both, of
from pi_compile.checkpoint.families.fields import activation
from pi_runtime.artifact.decoder import Decoder

_POSITION_OFFSET = 2
"""Rows of the position table before position 0 (they stood for padding in the training code)."""
_NORM_EPS = 1e-5


def _decoder(config: Config) -> Decoder:
    if not config.flag("layer_norm_elementwise_affine", default=True):
        remedy = "OPT models whose norms have no weights are not supported"
        raise config.error("layer_norm_elementwise_affine", False, expected="true", remedy=remedy)
    d_model, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
    if d_model % n_heads:
        raise config.error("hidden_size", d_model, expected=f"a multiple of {n_heads} attention heads")
    bias = config.flag("enable_bias", default=True)
    before = config.flag("do_layer_norm_before", default=True)
    return Decoder(
        family="opt",
        vocab_size=config.size("vocab_size"),
        d_model=d_model,
        d_embedding=config.size("word_embed_proj_dim", d_model),
        n_layers=config.size("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=d_model // n_heads,
        d_ff=config.size("ffn_dim"),
        context_length=config.size("max_position_embeddings", 2048),
        block="sequential" if before else "post-norm",
        norm="layer",
        norm_eps=_NORM_EPS,
        final_norm=before and not config.flag("_remove_final_layer_norm", default=False),
        positions="learned",
        position_offset=_POSITION_OFFSET,
        ffn="plain",
        **activation(config, "activation_function", "relu"),
        tied_head=config.flag("tie_word_embeddings", default=True),
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=bias,
    )


_KEYS = """
    vocab_size hidden_size ffn_dim num_hidden_layers num_attention_heads activation_function
    max_position_embeddings tie_word_embeddings enable_bias do_layer_norm_before _remove_final_layer_norm
    layer_norm_elementwise_affine word_embed_proj_dim
"""
_LAYER = {
    **both("attention/norm", "layers.{n}.self_attn_layer_norm"),
    "attention/qkv": of(*(f"layers.{{n}}.self_attn.{p}_proj.weight" for p in "qkv")),
    "attention/qkv_bias": of(*(f"layers.{{n}}.self_attn.{p}_proj.bias" for p in "qkv")),
    "attention/out": of("layers.{n}.self_attn.out_proj.weight"),
    "attention/out_bias": of("layers.{n}.self_attn.out_proj.bias"),
    **both("ffn/norm", "layers.{n}.final_layer_norm"),
    "ffn/first": of("layers.{n}.fc1.weight"),
    "ffn/rest": (Piece("layers.{n}.fc2.weight", transposed=True),),
    "ffn/first_bias": of("layers.{n}.fc1.bias"),
    "ffn/down_bias": of("layers.{n}.fc2.bias"),
}

ADAPTER = Adapter(
    family="opt",
    architectures=("OPTForCausalLM", "OPTModel"),
    prefixes=("model.decoder.", "decoder."),
    globals={
        "embedding": of("embed_tokens.weight"),
        "embedding_in": of("project_in.weight"),
        "positions": of("embed_positions.weight"),
        "embedding_out": of("project_out.weight"),
        **both("final_norm", "final_layer_norm"),
    },
    layer=lambda _: _LAYER,
    read_keys=frozenset(_KEYS.split()),
    # The first checkpoints say that they have a head; all have one.
    neutral_keys={"output_projection": (True,)},
    ignorable=(r"decoder\.version$",),
    decoder=_decoder,
)
