"""OLMo 2, OLMo 3 and OLMoE: Llama with norms of queries and keys as a whole.

OLMo 2 norms the outputs of attention and FFN instead of their inputs. OLMo 3 has a window in three of four layers,
whose angles are not scaled. The weights of OLMoE's experts need not be normalised.
"""

from dataclasses import replace
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama, mixtral, qwen, rope
from pi_compile.checkpoint.families.adapter import stored
from pi_compile.checkpoint.families.fields import biases, routed_experts, usual_decoder, with_windows
from pi_runtime.artifact.decoder import Decoder


def _decoder(config: Config, family: str, **differences: Any) -> Decoder:
    bias = biases(attention=config.flag("attention_bias", default=False), ffn=False)
    return usual_decoder(config, family, norm_eps=1e-5, qk_norm=True, joint_qk_norm=True, **bias, **differences)


def _olmoe(config: Config) -> Decoder:
    return _decoder(config, "olmoe", context=4096, **routed_experts(config, 64, per_token=8))


def _olmo3(config: Config) -> Decoder:
    # As in transformers, a `rope_theta` beside the parameters is that of layers without a window.
    whole, local = (rope.of_kind(config, *of) for of in zip(rope.KINDS, ("rope_theta", ""), strict=True))
    found = _decoder(whole, "olmo3", block="reordered", theta=_THETA)
    angles = rope.rotary(local, found.head_dim, theta=_THETA)
    return with_windows(config, found, angles, [(n + 1) % 4 != 0 for n in range(found.n_layers)])


_THETA = 500000.0
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
OLMO3 = replace(
    OLMO2,
    family="olmo3",
    architectures=("Olmo3ForCausalLM", "Olmo3Model"),
    read_keys=OLMO2.read_keys | {"layer_types", "sliding_window"},
    decoder=_olmo3,
)
OLMOE = replace(
    llama.ADAPTER,
    family="olmoe",
    architectures=("OlmoeForCausalLM", "OlmoeModel"),
    layer_tensors=qwen.moe_layer,
    read_keys=llama.KEYS | qwen.MOE_KEYS | mixtral.TRAINING_KEYS | {"attention_bias"},
    decoder=_olmoe,
)
