"""The OPT family: LayerNorm with biases, learned positions, plain FFN.

Only OPT-350M has post-norm blocks without a final norm, and an embedding narrower than the model.
"""

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families.adapter import Adapter, linear, plain_ffn, separate_qkv, stored, weight_and_bias
from pi_compile.checkpoint.families.fields import biases, usual_decoder
from pi_runtime.artifact.decoder import Decoder

_POSITION_OFFSET = 2
"""Rows of the position table before position 0 (they stood for padding in the training code)."""


def _decoder(config: Config) -> Decoder:
    if not config.flag("layer_norm_elementwise_affine", default=True):
        remedy = "OPT models whose norms have no weights are not supported"
        raise config.error("layer_norm_elementwise_affine", False, expected="true", remedy=remedy)
    bias = config.flag("enable_bias", default=True)
    before = config.flag("do_layer_norm_before", default=True)
    return usual_decoder(
        config,
        "opt",
        names={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        hidden_act="relu",
        theta=None,
        tied=True,
        d_embedding=config.size("word_embed_proj_dim", config.size("hidden_size")),
        block="sequential" if before else "post-norm",
        norm="layer",
        norm_eps=1e-5,
        final_norm=before and not config.flag("_remove_final_layer_norm", default=False),
        position_offset=_POSITION_OFFSET,
        ffn="plain",
        **biases(attention=bias, ffn=bias),
    )


_KEYS = """
    vocab_size hidden_size ffn_dim num_hidden_layers num_attention_heads activation_function
    max_position_embeddings tie_word_embeddings enable_bias do_layer_norm_before _remove_final_layer_norm
    layer_norm_elementwise_affine word_embed_proj_dim
"""
_LAYER = {
    **weight_and_bias("attention/norm", "layers.{n}.self_attn_layer_norm"),
    **separate_qkv("layers.{n}.self_attn"),
    **linear("attention/out", "layers.{n}.self_attn.out_proj"),
    **weight_and_bias("ffn/norm", "layers.{n}.final_layer_norm"),
    **plain_ffn("layers.{n}.fc1", "layers.{n}.fc2"),
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
