"""Bamboo and TurboSparse-Mistral: Mistral with dReLU; the modelling code in their repositories is not needed.

Source: model card of PowerInfer/Bamboo-base-v0_1, `down_proj(act(gate_proj(x)) * act(up_proj(x)))`, act = relu.
TurboSparse-Mistral's checkpoint holds a predictor beside each FFN, `mlp.predictor.{fc1,fc2}.weight`.
"""

from dataclasses import replace

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama, mistral
from pi_runtime.artifact.decoder import Decoder

PREDICTORS = {
    r"\.predictor\.fc[12]\.weight$": "the checkpoint's own predictors are left out: the dense model is packed, and "
    "new predictors are trained"
}


def _decoder(config: Config) -> Decoder:
    config.choice("hidden_act", "relu", {"relu": "drelu"})
    return mistral.decoder(config, "bamboo", activation="drelu")


ADAPTER = replace(
    llama.ADAPTER,
    family="bamboo",
    architectures=("BambooForCausalLM", "BambooModel"),
    read_keys=mistral.KEYS,
    unused_tensors=PREDICTORS,
    decoder=_decoder,
)
