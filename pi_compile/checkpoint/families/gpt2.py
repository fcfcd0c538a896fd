"""GPT-2: LayerNorm, learned positions, plain FFN; weights are stored transposed, queries, keys and values in one."""

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families.adapter import Adapter, SourceTensor, stored, weight_and_bias
from pi_compile.checkpoint.families.fields import activation
from pi_runtime.artifact.decoder import Decoder


def _decoder(config: Config) -> Decoder:
    d_model, n_heads = config.size("n_embd"), config.size("n_head")
    if d_model % n_heads:
        raise config.error("n_embd", d_model, expected=f"a multiple of {n_heads} attention heads")
    if not config.flag("scale_attn_weights", default=True):
        raise config.error("scale_attn_weights", False, expected="true", remedy="unscaled attention is not supported")
    return Decoder(
        family="gpt2",
        vocab_size=config.size("vocab_size"),
        d_model=d_model,
        d_embedding=d_model,
        n_layers=config.size("n_layer"),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=d_model // n_heads,
        d_ff=config.size("n_inner", 4 * d_model),
        context_length=config.size("n_positions", 1024),
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        positions="learned",
        ffn="plain",
        **activation(config, "activation_function", "gelu_new"),
        tied_head=config.flag("tie_word_embeddings", default=True),
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
    )


_KEYS = """
    vocab_size n_embd n_head n_layer n_inner n_positions n_ctx layer_norm_epsilon activation_function
    tie_word_embeddings scale_attn_weights reorder_and_upcast_attn
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
"""
_LAYER = {
    **weight_and_bias("attention/norm", "h.{n}.ln_1"),
    "attention/qkv": (SourceTensor("h.{n}.attn.c_attn.weight", transposed=True),),
    "attention/qkv_bias": stored("h.{n}.attn.c_attn.bias"),
    "attention/out": (SourceTensor("h.{n}.attn.c_proj.weight", transposed=True),),
    "attention/out_bias": stored("h.{n}.attn.c_proj.bias"),
    **weight_and_bias("ffn/norm", "h.{n}.ln_2"),
    "ffn/first": (SourceTensor("h.{n}.mlp.c_fc.weight", transposed=True),),
    "ffn/first_bias": stored("h.{n}.mlp.c_fc.bias"),
    "ffn/rest": stored("h.{n}.mlp.c_proj.weight"),
    "ffn/down_bias": stored("h.{n}.mlp.c_proj.bias"),
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
    neutral_keys={"scale_attn_by_inverse_layer_idx": ()},
    # The causal mask, which older versions saved.
    ignored_tensors=(r"\.attn\.(masked_)?bias$",),
    decoder=_decoder,
)
