"""Nemotron: LayerNorm that multiplies by 1 + weight, partly rotated heads, plain FFN with squared ReLU."""

from dataclasses import replace

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama
from pi_compile.checkpoint.families.adapter import SourceTensor, Table, plain_ffn, stored
from pi_compile.checkpoint.families.fields import biases, usual_decoder
from pi_runtime.artifact.decoder import Decoder


def _decoder(config: Config) -> Decoder:
    bias = config.flag("attention_bias", default=False)
    found = usual_decoder(
        config,
        "nemotron",
        names={"rms_norm_eps": "norm_eps"},
        context=4096,
        hidden_act="relu2",
        norm_eps=1e-5,
        partial=0.5,
        norm="layer",
        ffn="plain",
        **biases(attention=bias, ffn=config.flag("mlp_bias", default=False)),
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
    **plain_ffn("layers.{n}.mlp.up_proj", "layers.{n}.mlp.down_proj"),
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
