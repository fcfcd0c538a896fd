"""gpt-oss: experts with clamped SwiGLU and biases, sinks of attention, and a window in every other layer.

Gate and up of an expert are the even and the odd rows of one matrix. Matrices of 16 bits are stored transposed, those
in MXFP4 are not.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama, mixtral
from pi_compile.checkpoint.families.adapter import FusedRows, SourceTensor, Table, gated_experts, stored
from pi_compile.checkpoint.families.fields import biases, experts, usual_decoder, windowed_layers
from pi_runtime.artifact.decoder import CLAMP, SWIGLU_SLOPE, Decoder

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What stands for missing rope parameters."""


def _decoder(config: Config) -> Decoder:
    if config.get("rope_parameters") is None and not config.get("rope_scaling"):
        config = config.with_fields({**config.fields, "rope_parameters": _YARN})
    windowed = windowed_layers(config, [n % 2 == 0 for n in range(config.size("num_hidden_layers"))])
    window = 0 if config.fields.get("sliding_window", 128) is None else config.size("sliding_window", 128)
    routed: dict[str, Any] = experts(config, "num_local_experts", 128, per_token=4)
    attention = config.flag("attention_bias", default=True)
    return usual_decoder(
        config,
        "gpt_oss",
        context=131072,
        n_kv_heads=8,
        head_width=64,
        norm_eps=1e-5,
        theta=150000.0,
        activation="clamped_swiglu",
        attention_sinks=True,
        window=window if windowed else 0,
        windowed_layers=windowed if window else (),
        router_bias=True,
        expert_bias=True,
        **biases(attention=attention, ffn=True),
        **routed,
    )


def _layer(d: Decoder, *, transposed: bool = True) -> Table:
    block, count = "layers.{n}.mlp.experts", d.n_experts
    even, odd = (FusedRows(d.d_ff, 2, start, start + 1) for start in (0, 1))
    gates, ups = (
        tuple(SourceTensor(f"{block}.gate_up_proj", transposed, rows, stacked=count, item=e) for e in range(count))
        for rows in (even, odd)
    )
    downs = (SourceTensor(f"{block}.down_proj", not transposed, stacked=count, item=e) for e in range(count))
    first_bias, up_bias = (
        (SourceTensor(f"{block}.gate_up_proj_bias", rows=replace(rows, groups=count * d.d_ff), stacked=count),)
        for rows in (even, odd)
    )
    return {
        **llama.ATTENTION,
        "attention/sinks": stored("layers.{n}.self_attn.sinks"),
        "ffn/router": stored("layers.{n}.mlp.router.weight"),
        "ffn/router_bias": stored("layers.{n}.mlp.router.bias"),
        **gated_experts(gates, ups, tuple(downs)),
        "ffn/first_bias": first_bias,
        "ffn/up_bias": up_bias,
        "ffn/expert_bias": stored(f"{block}.down_proj_bias"),
    }


_KEYS = """
    attention_bias num_local_experts num_experts_per_tok experts_per_token sliding_window layer_types
    initial_context_length
"""
ADAPTER = replace(
    llama.ADAPTER,
    family="gpt_oss",
    architectures=("GptOssForCausalLM", "GptOssModel"),
    layer_tensors=_layer,
    quantised={"mxfp4": partial(_layer, transposed=False)},
    read_keys=llama.KEYS - {"hidden_act", "hidden_act_param"} | {*_KEYS.split()} | mixtral.TRAINING_KEYS,
    neutral_keys={"hidden_act": ("silu",), "swiglu_limit": (CLAMP,), "swiglu_alpha": (SWIGLU_SLOPE,)},
    decoder=_decoder,
)
