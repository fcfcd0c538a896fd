"""Granite and its mixtures of experts: Llama with four multipliers.

With x the residual, e and m the multipliers of embedding and residual, a block computes  x ← x + m f(norm(x))  from
e · embedding on. x / m needs no m: it begins with e / m · embedding, and its norms are those of x with eps / m². A
multiplier of the scores is a factor of both queries and keys, its square root, as YaRN has one.
"""

from dataclasses import replace
from math import sqrt
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama, mixtral
from pi_compile.checkpoint.families.adapter import FusedRows, SourceTensor, Table, stored
from pi_compile.checkpoint.families.fields import biases, experts, usual_decoder
from pi_runtime.artifact.decoder import Decoder

MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")


def multiplied(found: Decoder, config: Config, scores: float = 1.0) -> Decoder:
    """The decoder with a config's multipliers; `scores` is that of the scores where the config has none.

    Null is the usual one, 1 / √head_dim, as in transformers.
    """
    missing = 1 / sqrt(found.head_dim) if "attention_multiplier" in config.fields else scores
    attention = config.number("attention_multiplier", missing)
    embedding, residual, logits = (config.number(key, 1.0) for key in MULTIPLIERS[1:])
    return replace(
        found,
        norm_eps=found.norm_eps / residual**2,
        embedding_scale=embedding / residual,
        rotary_scale=found.rotary_scale * sqrt(attention * sqrt(found.head_dim)),
        logit_scale=1 / logits,
    )


def _decoder(config: Config, family: str = "granite", **differences: Any) -> Decoder:
    bias = config.flag("attention_bias", default=False)
    options = {**biases(attention=bias, ffn=config.flag("mlp_bias", default=False)), **differences}
    return multiplied(usual_decoder(config, family, **options), config)


def _moe_layer(d: Decoder) -> Table:
    """Gate and up of all experts are in one tensor [X, 2F, D], down in another [X, D, F]."""
    block, experts = "layers.{n}.block_sparse_moe", d.n_experts
    gate, up = (
        SourceTensor(
            f"{block}.input_linear.weight", rows=FusedRows(experts, 2 * d.d_ff, low, low + d.d_ff), stacked=experts
        )
        for low in (0, d.d_ff)
    )
    down = SourceTensor(f"{block}.output_linear.weight", transposed=True, stacked=experts)
    return {
        **llama.ATTENTION,
        "ffn/router": stored(f"{block}.router.layer.weight"),
        "ffn/first": (gate,),
        "ffn/rest": (up, down),
    }


ADAPTER = replace(
    llama.ADAPTER,
    family="granite",
    architectures=("GraniteForCausalLM", "GraniteModel"),
    read_keys=llama.ADAPTER.read_keys | {*MULTIPLIERS},
    decoder=_decoder,
)
GRANITEMOE = replace(
    ADAPTER,
    family="granitemoe",
    architectures=("GraniteMoeForCausalLM", "GraniteMoeModel"),
    layer_tensors=_moe_layer,
    read_keys=llama.KEYS | mixtral.MOE_KEYS | {*MULTIPLIERS, "attention_bias"},
    decoder=lambda config: _decoder(config, "granitemoe", **experts(config, "num_local_experts", 8, per_token=2)),
)
