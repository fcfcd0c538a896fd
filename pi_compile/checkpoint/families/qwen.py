"""Qwen2 and Qwen3: Llama's arrays, with biases on queries, keys and values (2), or norms on queries and keys (3).

Published mixtures of experts normalise the weights of the experts that a token goes to (`norm_topk_prob`), which is a
softmax over those.
"""

from dataclasses import replace
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama, mixtral
from pi_compile.checkpoint.families.adapter import Table, experts_ffn
from pi_compile.checkpoint.families.fields import biases, no_window, routed_experts, usual_decoder, within_window
from pi_runtime.artifact.decoder import Decoder

_CONTEXT = 32768
_KEYS = llama.KEYS | {"use_sliding_window", "sliding_window", "max_window_layers"}


def _decoder(config: Config, family: str, **options: Any) -> Decoder:
    found = usual_decoder(config, family, context=_CONTEXT, n_kv_heads=32, **options)
    no_window(config, found.context_length)
    return found


def _qwen3(config: Config) -> Decoder:
    bias = config.flag("attention_bias", default=False)
    return _decoder(config, "qwen3", head_width=128, qk_norm=True, **biases(attention=bias, ffn=False))


def _qwen3_moe(config: Config) -> Decoder:
    names, bias = {"intermediate_size": "moe_intermediate_size"}, config.flag("attention_bias", default=False)
    options = {"names": names, "qk_norm": True, **biases(attention=bias, ffn=False), **routed_experts(config)}
    found = usual_decoder(config, "qwen3_moe", context=_CONTEXT, n_kv_heads=4, **options)
    if not config.flag("use_sliding_window", default=False):
        return found
    return replace(found, context_length=within_window(config, found.context_length, 4096))  # every layer's


def moe_layer(d: Decoder) -> Table:
    """Llama's attention, and a router and experts at the place of its FFN."""
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    return {**llama.ATTENTION, **experts_ffn(d.n_experts, "layers.{n}.mlp", **names)}


MOE_KEYS = {"num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob"}

QWEN2 = replace(
    llama.ADAPTER,
    family="qwen2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    read_keys=_KEYS,
    decoder=lambda config: _decoder(config, "qwen2", qkv_bias=True),
)
QWEN3 = replace(
    QWEN2,
    family="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    read_keys=_KEYS | {"attention_bias"},
    decoder=_qwen3,
)
QWEN3_MOE = replace(
    QWEN3,
    family="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    layer_tensors=moe_layer,
    read_keys=QWEN3.read_keys | MOE_KEYS | {"moe_intermediate_size"} | mixtral.TRAINING_KEYS,
    # Dense layers among the others, and an expert that every token takes.
    neutral_keys={"mlp_only_layers": ([],), "decoder_sparse_step": (1,), "shared_expert_intermediate_size": (0,)}
    | {"use_qk_norm": (True,)},
    decoder=_qwen3_moe,
)
