"""Mixtral and TurboSparse-Mixtral: Mistral with a router and experts, the latter with dReLU.

Routing weights are a softmax over all experts, of which the largest are kept and normalised: the same as a softmax
over those experts. The modelling code in TurboSparse's repository is not needed. Beside each expert it has a
predictor, `experts.E.predictor.{fc1,fc2}.weight` (index of PowerInfer/TurboSparse-Mixtral).
"""

from dataclasses import replace
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama, mistral
from pi_compile.checkpoint.families.adapter import SourceTensor, Table, stored
from pi_runtime.artifact.decoder import Decoder

_THETA = 1e6
_EXPERT = "layers.{n}.block_sparse_moe.experts."


def _decoder(config: Config, family: str = "mixtral", **differences: Any) -> Decoder:
    experts, per_token = config.size("num_local_experts", 8), config.size("num_experts_per_tok", 2)
    if per_token > experts:
        raise config.error("num_experts_per_tok", per_token, expected=f"at most {experts} experts")
    return mistral.decoder(
        config, family, window=None, theta=_THETA, n_experts=experts, experts_per_token=per_token, **differences
    )


def _layer(d: Decoder) -> Table:
    """Expert by expert: w1 is the gate, w3 up, w2 down."""
    names = [f"{_EXPERT}{e}" for e in range(d.n_experts)]
    rest = [(SourceTensor(f"{name}.w3.weight"), SourceTensor(f"{name}.w2.weight", transposed=True)) for name in names]
    return {
        **llama.ATTENTION,
        "ffn/router": stored("layers.{n}.block_sparse_moe.gate.weight"),
        "ffn/first": stored(*(f"{name}.w1.weight" for name in names)),
        "ffn/rest": tuple(tensor for pair in rest for tensor in pair),
    }


_TRAINING_KEYS = {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}

ADAPTER = replace(
    llama.ADAPTER,
    family="mixtral",
    architectures=("MixtralForCausalLM", "MixtralModel"),
    layer_tensors=_layer,
    read_keys=mistral.KEYS | {"num_local_experts", "num_experts_per_tok", *_TRAINING_KEYS},
    decoder=_decoder,
)
TURBOSPARSE = replace(
    ADAPTER,
    family="turbosparsemixtral",
    architectures=("TurboSparseMixtralForCausalLM", "TurboSparseMixtralModel"),
    unused_tensors=mistral.PREDICTORS,
    decoder=lambda config: _decoder(config, "turbosparsemixtral", **mistral.drelu(config)),
)
