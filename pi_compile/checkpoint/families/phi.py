"""Phi-1 to Phi-2: parallel attention and FFN after one LayerNorm, partly rotated heads, biases everywhere."""

from dataclasses import replace

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama
from pi_compile.checkpoint.families.adapter import SourceTensor, stored, weight_and_bias
from pi_runtime.artifact.decoder import Decoder


def _decoder(config: Config) -> Decoder:
    found = llama.llama_like(
        config,
        "phi",
        hidden_act="gelu_new",
        partial=0.5,
        block="parallel",
        shared_norm=True,
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        ffn="plain",
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        head_bias=True,
    )
    config.check_derived("rotary_dim", 2 * len(found.rotary_frequencies), "partial_rotary_factor × head_dim")
    return found


_LAYER = {
    **llama.ATTENTION,
    **weight_and_bias("attention/norm", "layers.{n}.input_layernorm"),
    "attention/out": stored("layers.{n}.self_attn.dense.weight"),
    "attention/out_bias": stored("layers.{n}.self_attn.dense.bias"),
    "ffn/first": stored("layers.{n}.mlp.fc1.weight"),
    "ffn/first_bias": stored("layers.{n}.mlp.fc1.bias"),
    "ffn/rest": (SourceTensor("layers.{n}.mlp.fc2.weight", transposed=True),),
    "ffn/down_bias": stored("layers.{n}.mlp.fc2.bias"),
}

ADAPTER = replace(
    llama.ADAPTER,
    family="phi",
    architectures=("PhiForCausalLM",),
    global_tensors={"embedding": stored("embed_tokens.weight"), **weight_and_bias("final_norm", "final_layernorm")},
    layer_tensors=lambda _: _LAYER,
    read_keys=(llama.KEYS - {"rms_norm_eps"}) | {"layer_norm_eps", "partial_rotary_factor", "rotary_dim"},
    # The first repositories of Phi have GPT-2's names of sizes, and other names of tensors.
    neutral_keys=dict.fromkeys(("qk_layernorm", "n_embd", "n_head", "n_layer"), ()),
    decoder=_decoder,
)
