"""Nemotron: LayerNorm that multiplies by 1 + weight, partly rotated heads, plain FFN with squared ReLU."""

from dataclasses import replace

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama
from pi_compile.checkpoint.families.adapter import SourceTensor, Table, stored
from pi_runtime.artifact.decoder import Decoder


def _decoder(config: Config) -> Decoder:
    bias = config.flag("attention_bias", default=False)
    found = llama.llama_like(
        config,
        "nemotron",
        context=4096,
        hidden_act="relu2",
        partial=0.5,
        norm="layer",
        norm_eps=config.number("norm_eps", 1e-5),
        ffn="plain",
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=config.flag("mlp_bias", default=False),
    )
    config.check_derived("kv_channels", found.head_dim, "head_dim, or hidden_size / num_attention_heads")
    config.check_derived("layer_norm_eps", found.norm_eps, "norm_eps, or its default")
    return found


def _norm(array: str, name: str) -> Table:
    return {f"{array}/weight": (SourceTensor(f"{name}.weight", addend=1.0),), f"{array}/bias": stored(f"{name}.bias")}


_LAYER = {
    **llama.ATTENTION,
    **_norm("attention/norm", "layers.{n}.input_layernorm"),
    **_norm("ffn/norm", "layers.{n}.post_attention_layernorm"),
    "ffn/first": stored("layers.{n}.mlp.up_proj.weight"),
    "ffn/rest": (SourceTensor("layers.{n}.mlp.down_proj.weight", transposed=True),),
    "ffn/first_bias": stored("layers.{n}.mlp.up_proj.bias"),
    "ffn/down_bias": stored("layers.{n}.mlp.down_proj.bias"),
}
_KEYS = "norm_eps layer_norm_eps partial_rotary_factor attention_bias mlp_bias kv_channels"

ADAPTER = replace(
    llama.ADAPTER,
    family="nemotron",
    architectures=("NemotronForCausalLM", "NemotronModel"),
    global_tensors={"embedding": stored("embed_tokens.weight"), **_norm("final_norm", "norm")},
    layer_tensors=lambda _: _LAYER,
    read_keys=(llama.KEYS - {"rms_norm_eps"}) | frozenset(_KEYS.split()),
    decoder=_decoder,
)
