"""The architectures of GGUF files: what llama.cpp computes for each, as a decoder, and the tensors it is made of.

Tensor names are the same in all architectures. Sources: the files of `src/models` in llama.cpp, which name the tensors
and compute the function; its `convert_hf_to_gguf.py`, which fuses, permutes and transposes them; and `llama.cpp` in
PowerInfer for its own files. Where a file has a tensor that may be missing, such as a bias, the decoder has it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from types import MappingProxyType
from typing import Any

import numpy as np

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import granite, llama, rope
from pi_compile.checkpoint.families.adapter import (
    Adapter,
    SourceTensor,
    Table,
    draft_layer,
    linear,
    stored,
    weight_and_bias,
)
from pi_compile.checkpoint.families.fields import ACTIVATIONS as HF_ACTIVATIONS
from pi_compile.checkpoint.families.fields import head_dim, usual_decoder
from pi_compile.checkpoint.gguf.file import GgufFile
from pi_compile.checkpoint.gguf.of_families import (
    MULTIPLIERS,
    OF_FAMILIES,
    WITH_WINDOWS,
    OfFamily,
    family_layer,
    rope_divisors,
)
from pi_compile.errors import CheckpointError
from pi_runtime.artifact.decoder import ACTIVATIONS, GATED_ACTIVATIONS, Decoder


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A value of `general.architecture`."""

    family: str
    differences: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """The decoder's fields that differ from Llama's."""
    permuted: bool = False
    """Whether rows of queries and keys are stored in the order that llama.cpp rotates them in."""
    rotary: bool = True
    partly_rotated: bool = False
    """Whether less than a whole head may be rotated."""
    unrotated_every: int = 0
    """Every so many layers one is not rotated; 0 for none."""
    multiplied: bool = False
    """Whether it has Granite's multipliers."""
    of_family: OfFamily | None = None
    """What it is where Llama's decoder with differences would not say it."""

    @property
    def norm_key(self) -> str:
        """The metadata key of the norms' epsilon."""
        if self.of_family:
            return self.of_family.norm_key
        return f"attention.layer_norm{'' if self.differences.get('norm') == 'layer' else '_rms'}_epsilon"


def _of(m: OfFamily) -> Architecture:
    return Architecture(family=m.adapter.family, of_family=m, partly_rotated=m.partly_rotated, permuted=m.permuted)


# llama.cpp has one GELU, the usual approximation, for Falcon too.
_JOINT = {"qk_norm": True, "joint_qk_norm": True}
_PLAIN = {"norm": "layer", "ffn": "plain", "activation": "gelu_tanh"}
ARCHITECTURES = {
    "llama": Architecture(family="llama", permuted=True),
    "arcee": Architecture(family="arcee", permuted=True, differences={"ffn": "plain", "activation": "relu2"}),
    "falcon": Architecture(family="falcon", differences={**_PLAIN, "block": "parallel"}),
    "gpt2": Architecture(family="gpt2", differences=_PLAIN, rotary=False),
    "granite": Architecture(family="granite", permuted=True, multiplied=True),
    "granitemoe": Architecture(family="granitemoe", permuted=True, multiplied=True),
    "nemotron": Architecture(family="nemotron", differences={**_PLAIN, "activation": "relu2"}, partly_rotated=True),
    "olmo2": Architecture(family="olmo2", differences={**_JOINT, "block": "reordered"}),
    "olmoe": Architecture(family="olmoe", differences={**_JOINT, "router_normalised": False}),
    "phi2": Architecture(family="phi", differences={**_PLAIN, "block": "parallel"}, partly_rotated=True),
    "qwen2": Architecture(family="qwen2"),
    "qwen3": Architecture(family="qwen3", differences={"qk_norm": True}),
    "qwen3moe": Architecture(family="qwen3_moe", differences={"qk_norm": True}),
    "smollm3": Architecture(family="smollm3", permuted=True, unrotated_every=4),
    **{name: _of(m) for name, m in OF_FAMILIES.items()},
}
"""The architectures of llama.cpp that are read."""
_POWERINFER = {
    "llama": replace(ARCHITECTURES["llama"], differences={"activation": "relu"}),
    "bamboo": Architecture(family="bamboo", permuted=True, differences={"activation": "drelu"}),
    "falcon": replace(
        ARCHITECTURES["falcon"], differences={**ARCHITECTURES["falcon"].differences, "activation": "relu"}
    ),
}
"""Those of PowerInfer, which computes ReLU where llama.cpp computes SiLU or GELU."""
EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
ACTIVATION_KEY = "hidden_activation"
"""The metadata key that names an activation; llama.cpp reads it for other architectures only."""
ROPE_DIVISORS = "rope_freqs.weight"
"""The tensor by which the angles of Llama 3.1 and later are divided."""
_PREDICTORS = {
    r"\.fc[12]\.weight$": "the file's own predictors are left out: the dense model is packed, and new predictors are "
    "trained"
}


def architecture(file: GgufFile) -> Architecture:
    """The architecture of a file. Raises CheckpointError for one that is not supported."""
    known = _POWERINFER if file.of_powerinfer else ARCHITECTURES
    if not isinstance(file.architecture, str) or file.architecture not in known:
        raise CheckpointError(
            f"{file.path}: architecture {file.architecture!r} is not supported in GGUF"
            + (" of PowerInfer" if file.of_powerinfer else ""),
            expected=f"one of {', '.join(known)}",
            remedy="more families are read from a Hugging Face checkpoint, in safetensors",
        )
    found = known[file.architecture]
    if file.architecture in WITH_WINDOWS and file.metadata.get(f"{file.architecture}.attention.sliding_window"):
        return _of(WITH_WINDOWS[file.architecture])
    experts = found.family == "llama" and file.metadata.get("llama.expert_count")
    return replace(found, family="mixtral") if experts else found


def gguf_adapter(file: GgufFile, activation: str) -> Adapter:
    """The adapter of a file's tensors; `activation` replaces the architecture's where it is not empty.

    Raises CheckpointError for an architecture that is not supported.
    """
    found = architecture(file)
    return Adapter(
        family=found.family,
        architectures=(),
        prefixes=("",),
        global_tensors={
            "embedding": stored("token_embd.weight"),
            "positions": stored("position_embd.weight"),
            "layer_embedding": stored("per_layer_token_embd.weight"),
            "layer_embedding_in": stored("per_layer_model_proj.weight"),
            "layer_embedding_norm": stored("per_layer_proj_norm.weight"),
            **weight_and_bias("final_norm", found.of_family.final_norm if found.of_family else "output_norm"),
        },
        layer_tensors=lambda decoder: _layer(decoder, found, file),
        head="output",
        read_keys=llama.KEYS
        | frozenset((*EXPERTS.values(), *MULTIPLIERS.values()))
        | (found.of_family.adapter.read_keys if found.of_family else frozenset()),
        draft_layer=draft_layer("blk.{n}.nextn", "shared_head_norm", "shared_head_head") if found.of_family else {},
        unused_tensors=_PREDICTORS if file.of_powerinfer else {},
        decoder=lambda config: _decoder(config, found, file, activation),
    )


def apply_rope_divisors(decoder: Decoder, file: GgufFile) -> Decoder:
    """The decoder with its angles divided as the file says, if it does. Raises CheckpointError for bad divisors."""
    if ROPE_DIVISORS not in file.tensors:
        return decoder
    divisors = rope_divisors(file, ROPE_DIVISORS, len(decoder.rotary_frequencies))
    frequencies_J = np.array(decoder.rotary_frequencies, np.float32) / np.array(divisors, np.float32)
    return replace(decoder, rotary_frequencies=tuple(frequencies_J.tolist()))


def _decoder(config: Config, found: Architecture, file: GgufFile, activation: str) -> Decoder:
    decoder = _of_family(config, found.of_family, file) if found.of_family else _of_llama(config, found, file)
    decoder = _with_activation(decoder, config, file, activation)
    if decoder.experts_per_token > decoder.n_experts:
        expected = f"at most {decoder.n_experts} experts"
        raise config.error("num_experts_per_tok", decoder.experts_per_token, expected=expected)
    return decoder


def _of_family(config: Config, of_family: OfFamily, file: GgufFile) -> Decoder:
    """The decoder that the family's own config keys describe, rotated as far as the file says."""
    decoder = of_family.adapter.decoder(config)
    config.notices += of_family.notices
    if not of_family.partly_rotated:
        return decoder
    rotated = file.metadata.get(f"{file.architecture}.rope.dimension_count", decoder.head_dim)
    angles = rope.rotary(config, rotated)
    context = min(decoder.context_length, angles.pop("context_length", decoder.context_length))
    return replace(decoder, **angles, context_length=context)


def _of_llama(config: Config, found: Architecture, file: GgufFile) -> Decoder:
    def has(name: str) -> bool:
        return f"blk.0.{name}" in file.tensors

    differences: dict[str, Any] = {
        "qkv_bias": has("attn_q.bias") or has("attn_qkv.bias"),
        "out_bias": has("attn_output.bias"),
        "ffn_bias": has("ffn_up.bias"),
        "head_bias": "output.bias" in file.tensors,
        "shared_norm": found.differences.get("block") == "parallel" and not has("attn_norm_2.weight"),
        "n_experts": config.size("num_local_experts", 1),
        "experts_per_token": config.size("num_experts_per_tok", 1),
        **found.differences,
    }
    if found.rotary:
        width = head_dim(config, config.size("hidden_size"), config.size("num_attention_heads"))
        rotated = file.metadata.get(f"{file.architecture}.rope.dimension_count", width)
        differences |= rope.rotary(config, rotated)
    if found.unrotated_every:
        layers = range(config.size("num_hidden_layers"))
        differences["unrotated_layers"] = tuple(layers[found.unrotated_every - 1 :: found.unrotated_every])
    decoder = usual_decoder(config, found.family, theta=None, **differences)
    if found.multiplied:
        decoder = granite.multiplied(decoder, config, scores=1 / sqrt(decoder.head_dim))
    return decoder


def _with_activation(decoder: Decoder, config: Config, file: GgufFile, declared: str) -> Decoder:
    """The decoder with the activation that the user declares or the file names; it has the architecture's so far."""
    key = f"{file.architecture}.{ACTIVATION_KEY}"
    named = file.metadata.get(key)
    usual, engine = decoder.activation, "PowerInfer" if file.of_powerinfer else "llama.cpp"
    if not declared and named is None:
        config.notices.append(
            f"a GGUF file does not say its activation: {usual} is taken, as {engine} takes it; for a model that was "
            "made with another: pi-compile init --activation NAME, or [model] activation"
        )
        return decoder
    activation = declared or HF_ACTIVATIONS.get(str(named), str(named))
    allowed = [name for name in ACTIVATIONS if name not in GATED_ACTIVATIONS or decoder.ffn == "gated"]
    if activation not in allowed:
        raise CheckpointError(
            f"{file.path}: activation {activation!r}, {'as declared' if declared else f'by {key}'}",
            expected=f"one of {', '.join(allowed)}",
        )
    source = "as declared" if declared else f"by its key {key}"
    config.notices.append(f"activation {activation} is taken, {source}; {engine} takes {usual} for this file")
    return replace(decoder, activation=activation)


def _layer(d: Decoder, found: Architecture, file: GgufFile) -> Table:
    attention_norm, ffn_norm = _norms(d)
    if found.of_family:
        ffn_norm = found.of_family.ffn_norm
    first = "ffn_gate" if d.ffn == "gated" else "ffn_up"
    experts = [f".{e}" for e in range(d.experts_routed)] if d.n_experts > 1 else [""]
    table = {
        **weight_and_bias("attention/norm", f"blk.{{n}}.{attention_norm}"),
        "attention/qkv": stored(*(f"blk.{{n}}.attn_{part}.weight" for part in "qkv")),
        "attention/qkv_bias": stored(*(f"blk.{{n}}.attn_{part}.bias" for part in "qkv")),
        **linear("attention/out", "blk.{n}.attn_output"),
        "attention/q_norm": stored("blk.{n}.attn_q_norm.weight"),
        "attention/k_norm": stored("blk.{n}.attn_k_norm.weight"),
        **weight_and_bias("ffn/norm", f"blk.{{n}}.{ffn_norm}"),
        "ffn/router": stored("blk.{n}.ffn_gate_inp.weight"),
        "ffn/first": stored(*(f"blk.{{n}}.{first}{e}.weight" for e in experts)),
        "ffn/first_bias": stored(f"blk.{{n}}.{first}.bias"),
        "ffn/rest": tuple(tensor for e in experts for tensor in _rest(d, file, e)),
        "ffn/up_bias": stored("blk.{n}.ffn_up.bias"),
        "ffn/down_bias": stored("blk.{n}.ffn_down.bias"),
    }
    if found.of_family is None:
        return table
    return family_layer(d, {**table, **found.of_family.attention(d, file.tensors.keys())})


def _norms(d: Decoder) -> tuple[str, str]:
    """Names of the norms of attention and FFN."""
    if d.block == "reordered":
        return "post_attention_norm", "post_ffw_norm"
    # Of two norms before both (Falcon 40B), attn_norm is the FFN's.
    return ("attn_norm_2", "attn_norm") if d.block == "parallel" and not d.shared_norm else ("attn_norm", "ffn_norm")


def _rest(d: Decoder, file: GgufFile, expert: str) -> tuple[SourceTensor, ...]:
    """The tensors that `ffn/rest` is made of; PowerInfer stores down transposed, a row for each neuron."""
    up = stored(f"blk.{{n}}.ffn_up{expert}.weight") if d.ffn == "gated" else ()
    turned = "blk.0.ffn_down_t.weight" in file.tensors
    down = "blk.{n}.ffn_down_t.weight" if turned else f"blk.{{n}}.ffn_down{expert}.weight"
    return (*up, SourceTensor(down, transposed=not turned))
