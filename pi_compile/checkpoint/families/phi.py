"""Phi-1 to Phi-2: parallel attention and FFN after one LayerNorm, partly rotated heads, biases everywhere.

Phi-3 and Phi-4 are Llamas whose queries, keys and values, and whose gate and up, are stored in one tensor each.
"""

from dataclasses import replace

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama
from pi_compile.checkpoint.families.adapter import (
    FusedRows,
    SourceTensor,
    Table,
    linear,
    plain_ffn,
    stored,
    weight_and_bias,
)
from pi_compile.checkpoint.families.fields import biases, usual_decoder, within_window
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


def _phi3(config: Config) -> Decoder:
    if config.get("original_max_position_embeddings") is None:  # which counts before the one in the rope parameters
        config = config.with_fields({**config.fields, "original_max_position_embeddings": 4096})
    found = usual_decoder(config, "phi3", context=4096, norm_eps=1e-5, partial=1.0)
    return replace(found, context_length=within_window(config, found.context_length))


def _phi3_layer(d: Decoder) -> Table:
    gate, up = (FusedRows(1, 2 * d.d_ff, start, start + d.d_ff) for start in (0, d.d_ff))
    fused = "layers.{n}.mlp.gate_up_proj.weight"
    return {
        **llama.ATTENTION,
        "attention/qkv": stored("layers.{n}.self_attn.qkv_proj.weight"),
        "ffn/first": (SourceTensor(fused, rows=gate),),
        "ffn/rest": (
            SourceTensor(fused, rows=up),
            SourceTensor("layers.{n}.mlp.down_proj.weight", transposed=True),
        ),
    }


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
    neutral_keys=dict.fromkeys(("n_embd", "n_head", "n_layer"), ()),
    decoder=_decoder,
)
PHI3 = replace(
    llama.ADAPTER,
    family="phi3",
    architectures=("Phi3ForCausalLM", "Phi3Model"),
    layer_tensors=_phi3_layer,
    read_keys=llama.KEYS | {"sliding_window", "partial_rotary_factor", "original_max_position_embeddings"},
    decoder=_phi3,
)
