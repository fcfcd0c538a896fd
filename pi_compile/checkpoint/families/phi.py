"""Phi-1 to Phi-2: parallel attention and FFN after one LayerNorm, partly rotated heads, biases everywhere."""

from dataclasses import replace

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama
from pi_compile.checkpoint.families.adapter import linear, plain_ffn, stored, weight_and_bias
from pi_compile.checkpoint.families.fields import biases, usual_decoder
from pi_runtime.artifact.decoder import Decoder


def _decoder(config: Config) -> Decoder:
    found = usual_decoder(
        config,
        "phi",
        names={"rms_norm_eps": "layer_norm_eps"},
        hidden_act="gelu_new",
        norm_eps=1e-5,
        partial=0.5,
        block="parallel",
        shared_norm=True,
        norm="layer",
        ffn="plain",
        **biases(attention=True, ffn=True),
        head_bias=True,
    )
    config.check_derived("rotary_dim", 2 * len(found.rotary_frequencies), "partial_rotary_factor × head_dim")
    return found


_LAYER = {
    **llama.ATTENTION,
    **weight_and_bias("attention/norm", "layers.{n}.input_layernorm"),
    **linear("attention/out", "layers.{n}.self_attn.dense"),
    **plain_ffn("layers.{n}.mlp.fc1", "layers.{n}.mlp.fc2"),
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
