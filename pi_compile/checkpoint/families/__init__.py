"""The families of models: an adapter for each, and the registry.

A package adds a family with an entry point in the group `pi_compile.families`. It finds here what an adapter needs.
"""

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families.adapter import (
    Adapter,
    FusedRows,
    SourceTensor,
    linear,
    plain_ffn,
    separate_qkv,
    stored,
    weight_and_bias,
)
from pi_compile.checkpoint.families.fields import biases, usual_decoder
from pi_compile.checkpoint.families.registry import adapters, decoder_of, family_names, find_adapter

__all__ = [
    "Adapter",
    "Config",
    "FusedRows",
    "SourceTensor",
    "adapters",
    "biases",
    "decoder_of",
    "family_names",
    "find_adapter",
    "linear",
    "plain_ffn",
    "separate_qkv",
    "stored",
    "usual_decoder",
    "weight_and_bias",
]
