"""Mistral: Llama's arrays, and a sliding window. Bamboo and TurboSparse-Mistral are Mistrals with dReLU.

Source of dReLU: model card of PowerInfer/Bamboo-base-v0_1, `down_proj(act(gate_proj(x)) * act(up_proj(x)))`, act =
relu. The modelling code in their repositories is not needed. TurboSparse-Mistral's checkpoint holds a predictor beside
each FFN, `mlp.predictor.{fc1,fc2}.weight`.
"""

from dataclasses import replace
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama
from pi_compile.checkpoint.families.fields import usual_decoder, within_window
from pi_runtime.artifact.decoder import Decoder

_CONTEXT = 4096 * 32
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


ADAPTER = replace(
    llama.ADAPTER,
    family="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    read_keys=KEYS,
    decoder=decoder,
)
BAMBOO = replace(
    ADAPTER,
    family="bamboo",
    architectures=("BambooForCausalLM", "BambooModel"),
    unused_tensors=PREDICTORS,
    decoder=lambda config: decoder(config, "bamboo", **drelu(config)),
)
