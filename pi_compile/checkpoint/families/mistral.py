"""Mistral: Llama's arrays, and a sliding window. Bamboo and TurboSparse-Mistral are Mistrals with dReLU.

Queries of Ministral 3 are times 1 + β ln(1 + ⌊position / L⌋), L the context before YaRN extended it.

Source of dReLU: model card of PowerInfer/Bamboo-base-v0_1, `down_proj(act(gate_proj(x)) * act(up_proj(x)))`, act =
relu. The modelling code in their repositories is not needed. TurboSparse-Mistral's checkpoint holds a predictor beside
each FFN, `mlp.predictor.{fc1,fc2}.weight`.
"""

from dataclasses import replace
from math import inf
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama
from pi_compile.checkpoint.families.fields import usual_decoder, within_window
from pi_runtime.artifact.decoder import Decoder

_CONTEXT = 4096 * 32
BETA = "llama_4_scaling_beta"
"""The rope parameter that says how queries grow."""
KEYS = llama.KEYS | {"sliding_window"}
PREDICTORS = {
    r"\.predictor\.fc[12]\.weight$": "the checkpoint's own predictors are left out: the dense model is packed, and "
    "new predictors are trained"
}
"""Unused tensors of the checkpoints with dReLU; see `Adapter.unused_tensors`."""


def decoder(config: Config, family: str = "mistral", *, window: int | None = 4096, **differences: Any) -> Decoder:
    """A decoder with Mistral's config keys; `window` is the default of configs without one."""
    found = usual_decoder(config, family, context=_CONTEXT, n_kv_heads=8, **differences)
    return replace(found, context_length=within_window(config, found.context_length, window))


def drelu(config: Config) -> dict[str, Any]:
    """The decoder field `activation` of a model with dReLU, whose config has the activation of each factor."""
    return {"activation": config.choice("hidden_act", "relu", {"relu": "drelu"})}


def _ministral3(config: Config) -> Decoder:
    usual = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
    usual |= {"mscale": 1.0, "mscale_all_dim": 1.0, BETA: 0.1}
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key, usual)
    # transformers passes over the context that stands among these too.
    others = (BETA, "max_position_embeddings")
    angles = {k: v for k, v in given.items() if k not in others} if isinstance(given, dict) else given
    options: dict[str, Any] = {"context": 262144, "n_kv_heads": 8, "head_width": 128, "norm_eps": 1e-5}
    found = usual_decoder(config.with_fields({**config.fields, key: angles}), "ministral3", **options)
    beta, length = given.get(BETA), given.get("original_max_position_embeddings")
    if type(beta) not in (int, float) or not 0 <= beta < inf:
        raise config.error(f"{key}: {BETA}", beta, expected="a number from 0 on")
    if type(length) is not int or not 0 < length < 2**31:
        raise config.error(f"{key}: original_max_position_embeddings", length, expected="a positive integer")
    context = within_window(config, found.context_length, None)
    growth: dict[str, Any] = {"query_growth": float(beta), "query_period": length} if beta else {}
    return replace(found, context_length=context, **growth)


ADAPTER = replace(
    llama.ADAPTER,
    family="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    read_keys=KEYS,
    decoder=decoder,
)
MINISTRAL3 = replace(
    ADAPTER,
    family="ministral3",
    architectures=("Ministral3ForCausalLM", "Ministral3Model"),
    decoder=_ministral3,
)
BAMBOO = replace(
    ADAPTER,
    family="bamboo",
    architectures=("BambooForCausalLM", "BambooModel"),
    unused_tensors=PREDICTORS,
    decoder=lambda config: decoder(config, "bamboo", **drelu(config)),
)
