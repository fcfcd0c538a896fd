"""Qwen2 and Qwen3: Llama's arrays, with biases on queries, keys and values (2), or norms on queries and keys (3)."""

from dataclasses import replace

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama
from pi_compile.checkpoint.families.fields import no_window
from pi_runtime.artifact.decoder import Decoder

_CONTEXT = 32768
_KEYS = llama.KEYS | {"use_sliding_window", "sliding_window", "max_window_layers"}


def _qwen2(config: Config) -> Decoder:
    found = llama.llama_like(config, "qwen2", context=_CONTEXT, n_kv_heads=32, qkv_bias=True)
    no_window(config, found.context_length)
    return found


def _qwen3(config: Config) -> Decoder:
    bias = config.flag("attention_bias", default=False)
    found = llama.llama_like(
        config,
        "qwen3",
        context=_CONTEXT,
        n_kv_heads=32,
        head_width=128,
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
    )
    no_window(config, found.context_length)
    return found


QWEN2 = replace(
    llama.ADAPTER,
    family="qwen2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    read_keys=_KEYS,
    decoder=_qwen2,
)
QWEN3 = replace(
    QWEN2,
    family="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    read_keys=_KEYS | {"attention_bias"},
    decoder=_qwen3,
)
