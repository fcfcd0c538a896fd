"""GPT-2: LayerNorm, learned positions, plain FFN; weights are stored transposed, queries, keys and values in one."""

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families.adapter import Adapter, linear, plain_ffn, stored, weight_and_bias
from pi_compile.checkpoint.families.fields import biases, usual_decoder
from pi_runtime.artifact.decoder import Decoder


def _decoder(config: Config) -> Decoder:
    if not config.flag("scale_attn_weights", default=True):
        raise config.error("scale_attn_weights", False, expected="true", remedy="unscaled attention is not supported")
    return usual_decoder(
        config,
        "gpt2",
        names=_NAMES,
        context=1024,
        widening=4,
        hidden_act="gelu_new",
        norm_eps=1e-5,
        theta=None,
        tied=True,
        norm="layer",
        ffn="plain",
        **biases(attention=True, ffn=True),
    )


_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
_KEYS = """
    vocab_size n_embd n_head n_layer n_inner n_positions n_ctx layer_norm_epsilon activation_function
    tie_word_embeddings scale_attn_weights reorder_and_upcast_attn
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
"""
_LAYER = {
    **weight_and_bias("attention/norm", "h.{n}.ln_1"),
    **linear("attention/qkv", "h.{n}.attn.c_attn", transposed=True),
    **linear("attention/out", "h.{n}.attn.c_proj", transposed=True),
    **weight_and_bias("ffn/norm", "h.{n}.ln_2"),
    **plain_ffn("h.{n}.mlp.c_fc", "h.{n}.mlp.c_proj", transposed=True),
}

ADAPTER = Adapter(
    family="gpt2",
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    prefixes=("transformer.", ""),
    global_tensors={
        "embedding": stored("wte.weight"),
        "positions": stored("wpe.weight"),
        **weight_and_bias("final_norm", "ln_f"),
    },
    layer_tensors=lambda _: _LAYER,
    read_keys=frozenset(_KEYS.split()),
    # The causal mask, which older versions saved.
    ignored_tensors=(r"\.attn\.(masked_)?bias$",),
    decoder=_decoder,
)
