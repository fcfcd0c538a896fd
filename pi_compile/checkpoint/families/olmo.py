"""OLMo 2 and OLMoE: Llama with norms of queries and keys as a whole.

OLMo 2 norms the outputs of attention and FFN instead of their inputs. The weights of OLMoE's experts need not be
normalised.
"""

from dataclasses import replace
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama, mixtral, qwen
from pi_compile.checkpoint.families.adapter import stored
from pi_compile.checkpoint.families.fields import biases, routed_experts, usual_decoder
from pi_runtime.artifact.decoder import Decoder


def _decoder(config: Config, family: str, **differences: Any) -> Decoder:
    bias = biases(attention=config.flag("attention_bias", default=False), ffn=False)
    return usual_decoder(config, family, norm_eps=1e-5, qk_norm=True, joint_qk_norm=True, **bias, **differences)


def _olmoe(config: Config) -> Decoder:
    return _decoder(config, "olmoe", context=4096, **routed_experts(config, 64, per_token=8))


_LAYER = {
    **llama.LAYER,
    "attention/norm/weight": stored("layers.{n}.post_attention_layernorm.weight"),
    "ffn/norm/weight": stored("layers.{n}.post_feedforward_layernorm.weight"),
}

OLMO2 = replace(
    llama.ADAPTER,
    family="olmo2",
    architectures=("Olmo2ForCausalLM", "Olmo2Model"),
    layer_tensors=lambda _: _LAYER,
    read_keys=llama.KEYS | {"attention_bias"},
    decoder=lambda config: _decoder(config, "olmo2", block="reordered"),
)
OLMOE = replace(
    llama.ADAPTER,
    family="olmoe",
    architectures=("OlmoeForCausalLM", "OlmoeModel"),
    layer_tensors=qwen.moe_layer,
    read_keys=llama.KEYS | qwen.MOE_KEYS | mixtral.TRAINING_KEYS | {"attention_bias"},
    decoder=_olmoe,
)
