"""The OPT family: LayerNorm with biases, learned positions, plain FFN.

Only OPT-350M has post-norm blocks without a final norm, and an embedding narrower than the model.
"""

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families.adapter import Adapter, SourceTensor, stored, weight_and_bias
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
    **weight_and_bias("attention/norm", "layers.{n}.self_attn_layer_norm"),
    "attention/qkv": stored(*(f"layers.{{n}}.self_attn.{p}_proj.weight" for p in "qkv")),
    "attention/qkv_bias": stored(*(f"layers.{{n}}.self_attn.{p}_proj.bias" for p in "qkv")),
    "attention/out": stored("layers.{n}.self_attn.out_proj.weight"),
    "attention/out_bias": stored("layers.{n}.self_attn.out_proj.bias"),
    **weight_and_bias("ffn/norm", "layers.{n}.final_layer_norm"),
    "ffn/first": stored("layers.{n}.fc1.weight"),
    "ffn/rest": (SourceTensor("layers.{n}.fc2.weight", transposed=True),),
    "ffn/first_bias": stored("layers.{n}.fc1.bias"),
    "ffn/down_bias": stored("layers.{n}.fc2.bias"),
}

ADAPTER = Adapter(
    family="opt",
    architectures=("OPTForCausalLM", "OPTModel"),
    prefixes=("model.decoder.", "decoder."),
    global_tensors={
        "embedding": stored("embed_tokens.weight"),
        "embedding_in": stored("project_in.weight"),
        "positions": stored("embed_positions.weight"),
        "embedding_out": stored("project_out.weight"),
        **weight_and_bias("final_norm", "final_layer_norm"),
    },
    layer_tensors=lambda _: _LAYER,
    read_keys=frozenset(_KEYS.split()),
    # The first checkpoints say that they have a head; all have one.
    neutral_keys={"output_projection": (True,)},
    ignored_tensors=(r"decoder\.version$",),
    decoder=_decoder,
)
