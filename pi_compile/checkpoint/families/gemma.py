"""Gemma 3, as text: norms before and after attention and FFN, and two kinds of layers.

Most layers have a window and angles of their own; every sixth sees all positions. Norms multiply by 1 + weight, the
embedding is scaled by √D, and scores are divided by the root of `query_pre_attn_scalar`, a factor of cosine and sine.
"""

from dataclasses import replace
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama, rope
from pi_compile.checkpoint.families.adapter import SourceTensor, Table
from pi_compile.checkpoint.families.fields import biases, softcap, usual_decoder, with_windows
from pi_runtime.artifact.decoder import Decoder


def _decoder(config: Config) -> Decoder:
    whole = rope.of_kind(config, rope.KINDS[False], "rope_theta")
    bias = biases(attention=config.flag("attention_bias", default=False), ffn=False)
    options: dict[str, Any] = {"context": 131072, "n_kv_heads": 4, "head_width": 256, "theta": 1e6, "tied": True}
    found = usual_decoder(
        whole,
        "gemma3_text",
        names={"hidden_act": "hidden_activation"},
        hidden_act="gelu_pytorch_tanh",
        block="sandwich",
        qk_norm=True,
        logit_softcap=softcap(config, "final_logit_softcapping", 0.0),
        **options,
        **bias,
    )
    every = config.size("sliding_window_pattern", 6)
    local = rope.rotary(rope.of_kind(config, rope.KINDS[True], "rope_local_base_freq"), found.head_dim)
    found = with_windows(config, found, local, [(n + 1) % every != 0 for n in range(found.n_layers)])
    scores = (found.head_dim / config.number("query_pre_attn_scalar", 256.0)) ** 0.25
    scales = {"rotary_scale": found.rotary_scale * scores, "windowed_scale": found.windowed_scale * scores}
    return replace(found, embedding_scale=found.d_model**0.5, **scales)


def _norm(name: str) -> tuple[SourceTensor, ...]:
    return (SourceTensor(f"{name}.weight", addend=1.0),)


_LAYER: Table = {
    **llama.LAYER,
    "attention/norm/weight": _norm("layers.{n}.input_layernorm"),
    "attention/q_norm": _norm("layers.{n}.self_attn.q_norm"),
    "attention/k_norm": _norm("layers.{n}.self_attn.k_norm"),
    "attention/out_norm/weight": _norm("layers.{n}.post_attention_layernorm"),
    "ffn/norm/weight": _norm("layers.{n}.pre_feedforward_layernorm"),
    "ffn/out_norm/weight": _norm("layers.{n}.post_feedforward_layernorm"),
}
_KEYS = """
    attention_bias hidden_activation layer_types sliding_window sliding_window_pattern rope_local_base_freq
    query_pre_attn_scalar final_logit_softcapping
"""
ADAPTER = replace(
    llama.ADAPTER,
    family="gemma3_text",
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
    global_tensors={**llama.ADAPTER.global_tensors, "final_norm/weight": _norm("norm")},
    layer_tensors=lambda _: _LAYER,
    read_keys=llama.KEYS - {"hidden_act"} | {*_KEYS.split()},
    # The pattern under the name that transformers gives it, beside `layer_types`.
    neutral_keys={"_sliding_window_pattern": tuple(range(100)), "cache_implementation": ("hybrid",)},
    decoder=_decoder,
)
