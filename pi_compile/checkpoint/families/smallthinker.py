"""SmallThinker: experts with ReLU, sparse by nature, whose router reads what enters the layer.

By its modelling code and by llama.cpp's `smallthinker`: the router takes the experts with the largest values, and gives
them the values' sigmoids over their sum, or the softmax of these values. Some layers are not rotated, and some have a
window. Its configs have no `model_type` in older versions, and no activation.
"""

from dataclasses import replace
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama
from pi_compile.checkpoint.families.adapter import Table, experts_ffn, stored
from pi_compile.checkpoint.families.fields import experts, layers_marked, usual_decoder
from pi_runtime.artifact.decoder import Decoder

NAMES = {
    "intermediate_size": "moe_ffn_hidden_size",
    "num_local_experts": "moe_num_primary_experts",
    "num_experts_per_tok": "moe_num_active_primary_experts",
}


def _decoder(config: Config) -> Decoder:
    routed = experts(config.renamed(NAMES), "num_local_experts")
    softmax = config.flag("moe_primary_router_apply_softmax", default=False)
    layers = config.size("num_hidden_layers")
    rotated = layers_marked(config, "rope_layout", [1] * layers)
    windowed = layers_marked(config, "sliding_window_layout", [0] * layers)
    options: dict[str, Any] = {} if softmax or routed["n_experts"] == 1 else {"router_score": "sigmoid"}
    return usual_decoder(
        config,
        "smallthinker",
        names=NAMES,
        hidden_act="relu",
        theta=1e6,
        tied=True,
        router_early=routed["n_experts"] > 1,
        unrotated_layers=tuple(n for n, mark in enumerate(rotated) if not mark),
        window=config.size("sliding_window_size", 4096) if any(windowed) else 0,
        windowed_layers=tuple(n for n, mark in enumerate(windowed) if mark),
        **routed,
        **options,
    )


def _layer(d: Decoder) -> Table:
    block = "layers.{n}.block_sparse_moe"
    router = {"ffn/router": stored(f"{block}.primary_router.weight")}
    return {**llama.ATTENTION, **experts_ffn(d.n_experts, block, gate="gate", up="up", down="down"), **router}


_KEYS = "moe_primary_router_apply_softmax rope_layout sliding_window_layout sliding_window_size"
ADAPTER = replace(
    llama.ADAPTER,
    family="smallthinker",
    architectures=("SmallThinkerForCausalLM", "SmallThinkerModel"),
    layer_tensors=_layer,
    read_keys=llama.KEYS | {*NAMES.values(), *_KEYS.split()},
    neutral_keys={
        "moe_enable_early_router": (True,),
        "moe_num_secondary_experts": (0,),
        "moe_secondary_expert_size": (0,),
        "moe_shared_primary_experts": (0,),
    },
    decoder=_decoder,
)
