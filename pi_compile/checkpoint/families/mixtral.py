"""Mixtral and TurboSparse-Mixtral: Mistral with a router and experts, the latter with dReLU.

Routing weights are a softmax over all experts, of which the largest are kept and normalised: the same as a softmax
over those experts. The modelling code in TurboSparse's repository is not needed. Beside each expert it has a
predictor, `experts.E.predictor.{fc1,fc2}.weight` (index of PowerInfer/TurboSparse-Mixtral).
"""

from dataclasses import replace
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama, mistral
from pi_compile.checkpoint.families.adapter import Table, experts_ffn
from pi_compile.checkpoint.families.fields import experts
from pi_runtime.artifact.decoder import Decoder

_THETA = 1e6


def _decoder(config: Config, family: str = "mixtral", **differences: Any) -> Decoder:
    routed = experts(config, "num_local_experts", 8, per_token=2)
    return mistral.decoder(config, family, window=None, theta=_THETA, norm_eps=1e-5, **routed, **differences)


def _layer(d: Decoder) -> Table:
    return {**llama.ATTENTION, **experts_ffn(d.n_experts, "layers.{n}.block_sparse_moe", gate="w1", up="w3", down="w2")}


TRAINING_KEYS = {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}
"""Keys of a router that do not change the function."""

MOE_KEYS = {"num_local_experts", "num_experts_per_tok", *TRAINING_KEYS}

ADAPTER = replace(
    llama.ADAPTER,
    family="mixtral",
    architectures=("MixtralForCausalLM", "MixtralModel"),
    layer_tensors=_layer,
    read_keys=mistral.KEYS | MOE_KEYS,
    decoder=_decoder,
)
TURBOSPARSE = replace(
    ADAPTER,
    family="turbosparsemixtral",
    architectures=("TurboSparseMixtralForCausalLM", "TurboSparseMixtralModel"),
    unused_tensors=mistral.PREDICTORS,
    decoder=lambda config: _decoder(config, "turbosparsemixtral", **mistral.drelu(config)),
)
