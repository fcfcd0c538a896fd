"""Config keys that families share, and the decoder that they describe.

A family says by which names it has the usual keys, what it takes for those that are missing, and where its decoder
differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families import rope
from pi_runtime.artifact.decoder import Decoder

_GELU_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate")
ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    **dict.fromkeys(_GELU_TANH, "gelu_tanh"),
}
"""transformers' name of an activation → ours."""
FATRELU = "fatrelu"
"""The activation z where z is above a threshold, `hidden_act_param`, else 0 (ProSparse)."""
DRELU = "drelu"
"""dReLU under its own name, which `sparsify` writes where no published architecture has it."""


def usual_decoder(
    config: Config,
    family: str,
    *,
    names: Mapping[str, str] = MappingProxyType({}),
    context: int = 2048,
    n_kv_heads: int | None = None,
    head_width: int | None = None,
    widening: int | None = None,
    hidden_act: str = "silu",
    norm_eps: float = 1e-6,
    theta: float | None = rope.THETA,
    partial: float | None = None,
    tied: bool = False,
    **differences: Any,
) -> Decoder:
    """A decoder described by Llama's config keys, by these or by other `names`.

    The further arguments are the family's defaults of missing keys: `n_kv_heads` and `widening`, the width of the FFN
    over the model's, have none where they are None. `theta` and `partial` are those of `rope.rotary`; without `theta`
    positions are learned. `differences` are decoder fields that differ from Llama's.
    """
    config = config.renamed(names)
    d_model, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
    # In transformers too, null is not the same as a missing key.
    n_kv_heads = n_heads if n_kv_heads is None or "num_key_value_heads" in config.fields else n_kv_heads
    width = head_dim(config, d_model, n_heads, head_width)
    fields: dict[str, Any] = {
        "family": family,
        "vocab_size": config.size("vocab_size"),
        "d_model": d_model,
        "d_embedding": d_model,
        "n_layers": config.size("num_hidden_layers"),
        "n_heads": n_heads,
        "n_kv_heads": kv_heads(config, "num_key_value_heads", n_kv_heads, n_heads),
        "head_dim": width,
        "d_ff": config.size("intermediate_size", None if widening is None else widening * d_model),
        "context_length": config.size("max_position_embeddings", context),
        "norm": "rms",
        "norm_eps": config.number("rms_norm_eps", norm_eps),
        "ffn": "gated",
        **activation(config, hidden_act),
        "tied_head": config.flag("tie_word_embeddings", default=tied),
        **biases(attention=False, ffn=False),
    }
    positions = {"positions": "learned"} if theta is None else rope.rotary(config, width, theta=theta, partial=partial)
    return Decoder(**(fields | positions | differences))


def biases(*, attention: bool, ffn: bool) -> dict[str, Any]:
    """The decoder's fields that say which linear layers have biases."""
    return {"qkv_bias": attention, "out_bias": attention, "ffn_bias": ffn}


def activation(config: Config, default: str) -> dict[str, Any]:
    """The decoder's fields `activation` and `threshold`."""
    if config.get("hidden_act") == DRELU:
        return {"activation": "drelu"}
    if config.get("hidden_act", default) != FATRELU:
        return {"activation": config.choice("hidden_act", default, ACTIVATIONS)}
    value = config.get("hidden_act_param")
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise config.error(
            "hidden_act_param", value, expected="FATReLU's threshold: one number for all layers, 0 or more"
        )
    return {"activation": "relu", "threshold": float(value)}


def experts(config: Config, key: str, default: int | None = None, *, per_token: int | None = None) -> dict[str, int]:
    """The decoder's fields `n_experts` and `experts_per_token`; defaults of the family where it has them."""
    count, taken = config.size(key, default), config.size("num_experts_per_tok", per_token)
    if taken > count:
        raise config.error("num_experts_per_tok", taken, expected=f"at most {count} experts")
    return {"n_experts": count, "experts_per_token": taken}


def routed_experts(config: Config, default: int | None = None, *, per_token: int | None = None) -> dict[str, Any]:
    """The fields of experts whose weights are normalised where `norm_topk_prob` says so."""
    # Newer versions of transformers write the number of experts under Mixtral's name.
    key = "num_local_experts" if "num_local_experts" in config.fields else "num_experts"
    found = experts(config, key, default, per_token=per_token)
    # Of a single expert, either weight is 1.
    normalised = config.flag("norm_topk_prob", default=False) or found["n_experts"] == 1
    return {**found, "router_normalised": normalised}


def layers_marked(config: Config, key: str, default: list[int]) -> list[int]:
    """A list with 0 or 1 for each layer, or for more than there are."""
    layers = config.size("num_hidden_layers")
    marks = config.get(key, default)
    if not (isinstance(marks, list) and len(marks) >= layers and all(type(m) is int and m in (0, 1) for m in marks)):
        raise config.error(key, marks, expected=f"0 or 1 for each of {layers} layers")
    return marks[:layers]


def windowed_layers(config: Config, default: Sequence[bool]) -> tuple[int, ...]:
    """The layers with a window: by `layer_types`, else by `default`, which has a value for each layer."""
    kinds = config.get("layer_types", [rope.KINDS[has_window] for has_window in default])
    if not (isinstance(kinds, list) and len(kinds) == len(default) and all(kind in rope.KINDS for kind in kinds)):
        raise config.error(
            "layer_types", kinds, expected=f"one of {', '.join(rope.KINDS)} for each of {len(default)} layers"
        )
    return tuple(n for n, kind in enumerate(kinds) if kind == rope.KINDS[True])


def with_windows(
    config: Config, decoder: Decoder, local: Mapping[str, Any], default: Sequence[bool], window: int = 4096
) -> Decoder:
    """A decoder whose layers of `windowed_layers` have the config's window, and `local`, the fields of their angles."""
    windowed = windowed_layers(config, default)
    if not windowed:
        return decoder
    if config.fields.get("sliding_window", window) is None:
        raise config.error("sliding_window", None, expected=f"a window, which {len(windowed)} layers have")
    angles, scale = local["rotary_frequencies"], local["rotary_scale"]
    others = (angles, scale) != (decoder.rotary_frequencies, decoder.rotary_scale)
    return replace(
        decoder,
        window=config.size("sliding_window", window),
        windowed_layers=windowed,
        windowed_frequencies=angles if others else (),
        windowed_scale=scale if scale != decoder.rotary_scale else 0.0,
    )


def softcap(config: Config, key: str, default: float) -> float:
    """The cap of logits, 0 for none, which null says; `default` where there is no such key."""
    return config.number(key, default) if config.fields.get(key, default) is not None else 0.0


def kv_heads(config: Config, key: str, default: int, n_heads: int) -> int:
    """The number of heads of keys and values, a divisor of `n_heads`."""
    found = config.size(key, default)
    if n_heads % found:
        raise config.error(key, found, expected=f"a divisor of {n_heads} attention heads")
    return found


def head_dim(config: Config, d_model: int, n_heads: int, default: int | None = None) -> int:
    """The width of a head: from the config, else the model's width divided by the number of heads."""
    if config.get("head_dim") is None and default is None and d_model % n_heads:
        raise config.error("hidden_size", d_model, expected=f"a multiple of {n_heads} attention heads, or head_dim")
    return config.size("head_dim", default or max(1, d_model // n_heads))


def within_window(config: Config, context: int, default: int | None = None) -> int:
    """The context of a model with a sliding window, cut to the window: up to there attention is full.

    `default` is the family's window where the config has no such key.
    """
    window = config.fields.get("sliding_window", default)
    if window is None:
        return context
    if type(window) is not int or window < 1:
        raise config.error("sliding_window", window, expected="a positive integer, or null for none")
    if window < context:
        config.notices.append(
            f"config.json: sliding_window = {window}: the context is cut from {context} positions to the window, "
            "within which attention is the full one"
        )
    return min(window, context)


def no_window(config: Config, context: int) -> None:
    """Refuse `use_sliding_window` where the window would hide any position."""
    if not config.flag("use_sliding_window", default=False):
        return
    window, full = config.fields.get("sliding_window", 4096), config.get("max_window_layers", 28)
    if window is None or (type(window) is int and window >= context):
        return
    if type(full) is int and full >= config.size("num_hidden_layers"):
        return
    raise config.error(
        "use_sliding_window",
        True,
        expected=f"false, or a window of {context} positions or more",
        remedy="its layers with and without a window are not supported: use a checkpoint without",
    )
