"""Granite and its mixtures of experts: Llama with four multipliers.

With x the residual, e and m the multipliers of embedding and residual, a block computes  x ← x + m f(norm(x))  from
e · embedding on. x / m needs no m: it begins with e / m · embedding, and its norms are those of x with eps / m². A
multiplier of the scores is a factor of both queries and keys, its square root, as YaRN has one; without positions it is
one of the scores. Granite 4 has Mamba-2 in most layers, and a shared MLP beside its experts, or alone.
"""

from dataclasses import replace
from math import inf, sqrt
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama, mamba, mixtral
from pi_compile.checkpoint.families.adapter import (
    FusedRows,
    SourceTensor,
    Table,
    cut_into_experts,
    gated_experts,
    stored,
)
from pi_compile.checkpoint.families.fields import biases, experts, usual_decoder
from pi_compile.checkpoint.families.qwen3_next import stacked_experts
from pi_runtime.artifact.decoder import Decoder

MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")


def multiplied(found: Decoder, config: Config, scores: float = 1.0) -> Decoder:
    """The decoder with a config's multipliers; `scores` is that of the scores where the config has none.

    Null is the usual one, 1 / √head_dim, as in transformers.
    """
    missing = 1 / sqrt(found.head_dim) if "attention_multiplier" in config.fields else scores
    attention = config.number("attention_multiplier", missing)
    embedding, residual, logits = (config.number(key, 1.0) for key in MULTIPLIERS[1:])
    times = attention * sqrt(found.head_dim)
    rotated = found.positions == "rope"
    return replace(
        found,
        norm_eps=found.norm_eps / residual**2,
        embedding_scale=embedding / residual,
        rotary_scale=found.rotary_scale * sqrt(times) if rotated else found.rotary_scale,
        score_scale=found.score_scale if rotated else times,
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


_SIZES = {
    "state_heads": ("mamba_n_heads", 128),
    "state_key_heads": ("mamba_n_groups", 1),
    "state_key_dim": ("mamba_d_state", 256),
    "state_columns": ("mamba_d_conv", 4),
}
"""The decoder's field → the config's key, and what stands for a missing one."""


def _states(config: Config, layers: int) -> dict[str, Any]:
    """The fields of layers with states, of which null is every one."""
    kinds = mamba.kinds(config, "layer_types", config.get("layer_types", [mamba.STATES] * layers), mamba.KINDS)
    sizes = {field: config.size(key, default) for field, (key, default) in _SIZES.items()}
    inner, heads = config.size("mamba_expand", 2) * config.size("hidden_size"), sizes["state_heads"]
    width = config.get("mamba_d_head", "auto")
    width = inner // heads if width == "auto" else width
    if type(width) is not int or width * heads != inner:
        raise config.error("mamba_d_head", width, expected=f"{inner} / {heads} heads")
    limits = config.get("time_step_limit", [0.0, inf])
    least, most = limits if isinstance(limits, list) and len(limits) == 2 else (-1, None)
    if type(least) not in (int, float) or not 0 <= least < inf or most not in (inf, {"__float__": "Infinity"}):
        raise config.error("time_step_limit", limits, expected="a number from 0, and infinity")
    eps = config.number("rms_norm_eps", 1e-6)
    return mamba.recurrence(kinds, **sizes, state_value_dim=width, state_least_step=float(least), state_norm_eps=eps)


def _hybrid(config: Config) -> Decoder:
    layers, shared = config.size("num_hidden_layers"), config.size("shared_intermediate_size", 1024)
    options: dict[str, Any] = {"d_ff": shared}
    if config.size("num_local_experts", 8, least=0):
        of_expert = config.size("intermediate_size", 11008)
        if shared % of_expert:
            expected = f"a multiple of {of_expert}, the neurons of an expert"
            raise config.error("shared_intermediate_size", shared, expected=expected)
        routed = experts(config, "num_local_experts", 8, per_token=2)
        beside = shared // of_expert
        options = {"experts_shared": beside, **{name: count + beside for name, count in routed.items()}}
    if config.get("position_embedding_type") != "rope":
        options |= {"theta": None, "positions": "none"}
    config = config.with_fields({"intermediate_size": 11008, **config.fields})
    found = _decoder(config, "granitemoehybrid", **options, **_states(config, layers))
    mamba.check_groups(config, "mamba_n_groups", found)
    return found


def _hybrid_layer(d: Decoder, *, stacked: bool = False) -> Table:
    """Attention or states, and the shared MLP with experts or without; experts in tensors as Granite's or as newer."""
    mlp, block = "layers.{n}.shared_mlp", "layers.{n}.block_sparse_moe"
    gate, up, down = (
        cut_into_experts(
            f"{mlp}.{name}_linear.weight",
            max(1, d.experts_shared) * d.d_ff,
            d.d_ff,
            max(1, d.experts_shared),
            transposed=name == "output",
            part=part,
            parts=parts,
        )
        for name, part, parts in (("input", 0, 2), ("input", 1, 2), ("output", 0, 1))
    )
    found = {**llama.ATTENTION, **(mamba.mixer(d, "layers.{n}.mamba") if d.recurs else {})}
    always = gated_experts(gate, up, down)
    if d.n_experts == 1:
        return found | always
    names = (f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj")
    older = (f"{block}.input_linear.weight", f"{block}.output_linear.weight")
    routed = stacked_experts(*(names if stacked else older), d)
    router = stored(f"{block}.router.weight" if stacked else f"{block}.router.layer.weight")
    return {**found, "ffn/router": router, **{name: routed[name] + always[name] for name in always}}


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
_KEYS = """
    layer_types layers_block_type shared_intermediate_size position_embedding_type attention_bias mamba_n_heads
    mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size time_step_limit
"""
GRANITEMOEHYBRID = replace(
    ADAPTER,
    family="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM", "GraniteMoeHybridModel"),
    layer_tensors=_hybrid_layer,
    other_layers=(lambda d: _hybrid_layer(d, stacked=True),),
    read_keys=llama.KEYS | mixtral.MOE_KEYS | {*MULTIPLIERS, *_KEYS.split()},
    neutral_keys={"mamba_proj_bias": (False,), "mamba_conv_bias": (True,)},
    decoder=_hybrid,
)
