"""Qwen2 and Qwen3: Llama's arrays, with biases on queries, keys and values (2), or norms on queries and keys (3)."""

from dataclasses import replace
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama
from pi_compile.checkpoint.families.fields import biases, no_window, usual_decoder
from pi_runtime.artifact.decoder import Decoder

_CONTEXT = 32768
_KEYS = llama.KEYS | {"use_sliding_window", "sliding_window", "max_window_layers"}


def _decoder(config: Config, family: str, **options: Any) -> Decoder:
    found = usual_decoder(config, family, context=_CONTEXT, n_kv_heads=32, **options)
    no_window(config, found.context_length)
    return found


def _qwen3(config: Config) -> Decoder:
    bias = config.flag("attention_bias", default=False)
    return _decoder(config, "qwen3", head_width=128, qk_norm=True, **biases(attention=bias, ffn=False))


QWEN2 = replace(
    llama.ADAPTER,
    family="qwen2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    read_keys=_KEYS,
    decoder=lambda config: _decoder(config, "qwen2", qkv_bias=True),
)
QWEN3 = replace(
    QWEN2,
    family="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    read_keys=_KEYS | {"attention_bias"},
    decoder=_qwen3,
)
