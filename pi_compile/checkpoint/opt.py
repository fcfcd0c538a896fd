"""The OPT family: LayerNorm with biases before each block, learned positions, plain FFN with relu."""

from pi_compile.checkpoint.adapter import Adapter, Piece, of
from pi_compile.checkpoint.config import Config
from pi_runtime.artifact.decoder import Decoder

_POSITION_OFFSET = 2
"""Rows of the position table before position 0 (they stood for padding in the training code)."""
_NORM_EPS = 1e-5


def _decoder(config: Config) -> Decoder:
    _refuse_post_norm(config)
    d_model, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
    if d_model % n_heads:
        raise config.error("hidden_size", d_model, expected=f"a multiple of {n_heads} attention heads")
    bias = config.flag("enable_bias", default=True)
    return Decoder(
        family=ADAPTER.family,
        vocab_size=config.size("vocab_size"),
        d_model=d_model,
        d_embedding=d_model,
        n_layers=config.size("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=d_model // n_heads,
        d_ff=config.size("ffn_dim"),
        context_length=config.size("max_position_embeddings", 2048),
        norm="layer",
        norm_eps=_NORM_EPS,
        positions="learned",
        position_offset=_POSITION_OFFSET,
        ffn="plain",
        activation=config.choice("activation_function", "relu", {"relu": "relu"}),
        tied_head=config.flag("tie_word_embeddings", default=ADAPTER.tied_by_default),
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=bias,
    )


def _refuse_post_norm(config: Config) -> None:
    """OPT-350M normalises after each block and projects its embedding: another function, not supported yet."""
    remedy = "OPT models of this kind (such as OPT-350M) are not supported yet; the others are"
    if not config.flag("do_layer_norm_before", default=True):
        raise config.error("do_layer_norm_before", False, expected="true", remedy=remedy)
    if config.flag("_remove_final_layer_norm", default=False):
        raise config.error("_remove_final_layer_norm", True, expected="false", remedy=remedy)
    if not config.flag("layer_norm_elementwise_affine", default=True):
        raise config.error("layer_norm_elementwise_affine", False, expected="true", remedy=remedy)
    width = config.size("word_embed_proj_dim", config.size("hidden_size"))
    if width != config.size("hidden_size"):
        raise config.error("word_embed_proj_dim", width, expected=config.size("hidden_size"), remedy=remedy)


def _norm(array: str, name: str) -> dict[str, tuple[Piece, ...]]:
    return {f"{array}/{part}": of(f"{name}.{part}") for part in ("weight", "bias")}


_READ_KEYS = """
    vocab_size hidden_size ffn_dim num_hidden_layers num_attention_heads activation_function
    max_position_embeddings tie_word_embeddings enable_bias do_layer_norm_before _remove_final_layer_norm
    layer_norm_elementwise_affine word_embed_proj_dim
"""

ADAPTER = Adapter(
    family="opt",
    architectures=("OPTForCausalLM", "OPTModel"),
    prefixes=("model.decoder.", "decoder."),
    head="lm_head.weight",
    globals={
        "embedding": of("embed_tokens.weight"),
        "positions": of("embed_positions.weight"),
        **_norm("final_norm", "final_layer_norm"),
    },
    layer={
        **_norm("attention/norm", "layers.{n}.self_attn_layer_norm"),
        "attention/qkv": of(*(f"layers.{{n}}.self_attn.{p}_proj.weight" for p in "qkv")),
        "attention/qkv_bias": of(*(f"layers.{{n}}.self_attn.{p}_proj.bias" for p in "qkv")),
        "attention/out": of("layers.{n}.self_attn.out_proj.weight"),
        "attention/out_bias": of("layers.{n}.self_attn.out_proj.bias"),
        **_norm("ffn/norm", "layers.{n}.final_layer_norm"),
        "ffn/first": of("layers.{n}.fc1.weight"),
        "ffn/rest": (Piece("layers.{n}.fc2.weight", transposed=True),),
        "ffn/first_bias": of("layers.{n}.fc1.bias"),
        "ffn/down_bias": of("layers.{n}.fc2.bias"),
    },
    read_keys=frozenset(_READ_KEYS.split()),
    ignorable=(r"decoder\.version$",),
    tied_by_default=True,
    decoder=_decoder,
)
