"""Mistral: Llama's arrays, and a sliding window."""

from dataclasses import replace
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import llama
from pi_compile.checkpoint.families.fields import within_window
from pi_runtime.artifact.decoder import Decoder

CONTEXT = 4096 * 32
KEYS = llama.KEYS | {"sliding_window"}


def decoder(config: Config, family: str = "mistral", *, window: int | None = 4096, **differences: Any) -> Decoder:
    """A decoder with Mistral's config keys; `window` is the default of configs without one."""
    found = llama.llama_like(config, family, context=CONTEXT, n_kv_heads=8, **differences)
    return replace(found, context_length=within_window(config, found.context_length, window))


ADAPTER = replace(
    llama.ADAPTER,
    family="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    read_keys=KEYS,
    decoder=decoder,
)
